"""A model with pictures for tests: a table of logits, and tokens drawn as flat colours."""

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from csd_policy.testing import TableModel, random_table


class FlatModel(TableModel):
    """Draws each token as a grey square; reads every prompt without digits."""

    def __init__(
        self, rows: int = 4, columns: int = 4, size: int = 8, row_ends: bool = False
    ) -> None:
        shared = random_table(0, 1, size, 1.0)  # laws that resemble each other, for some acceptance
        logits, uncond = (shared + random_table(seed, rows * columns, size, 0.7) for seed in (1, 2))
        super().__init__(logits, uncond, grid=(rows, columns), row_ends=row_ends)
        self.name = "flat"

    def check_prompts(self, prompts: Sequence[str]) -> None:
        for prompt in prompts:
            if any(letter.isdigit() for letter in prompt):
                raise ValueError(f"prompt is {prompt!r}, expected no digits")

    def decode(self, tokens: Tensor) -> list[Image.Image]:
        levels = (tokens * (255 // (self.num_codes - 1))).view(-1, *self.grid).to(torch.uint8)
        pictures = [Image.fromarray(level.numpy(), "L") for level in levels]
        return [p.resize((48, 48), Image.Resampling.NEAREST).convert("RGB") for p in pictures]


DRIVER = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]
import csd_policy.compare, csd_policy.generate
from csd_policy.cli import main
from flat_model import FlatModel

csd_policy.compare.load_model = csd_policy.generate.load_model = lambda *_: FlatModel()
"""  # the head of a script that runs the command line on FlatModel
