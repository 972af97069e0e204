"""Prompts of LlamaGen: classes or captions, as input embeddings."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer, T5EncoderModel

from csd_policy.types import SamplingDefaults

SIGNS = re.compile(r"[#®•©™&@·º½¾¿¡§~()\[\]{}|\\/*]+")


class ClassCondition:
    """Prompts that are class numbers, or names in labels.txt: a line per class, comma-separated.

    Args:
        weights: ``embedding_table.weight [classes + 1, D]``; the last row is no class.
        folder: where labels.txt may lie.
    """

    tokens = 1
    defaults = SamplingDefaults(guidance_scale=4.0, top_k=2000)
    example_prompts = ("207", "360", "387", "974", "88", "979", "417", "279")

    def __init__(self, weights: dict[str, Tensor], folder: Path) -> None:
        self._table = weights["embedding_table.weight"]
        self._labels: dict[str, int] = {}
        if (folder / "labels.txt").is_file():
            for number, line in enumerate((folder / "labels.txt").read_text().splitlines()):
                for name in (line, *line.split(",")):
                    self._labels.setdefault(name.strip().lower(), number)

    def check(self, prompt: str) -> int:
        """The class of a prompt; ValueError if there is none."""
        text, classes = prompt.strip().lower(), len(self._table) - 1
        number = int(text) if re.fullmatch(r"-?\d+", text) else self._labels.get(text)
        if number is None or not 0 <= number < classes:
            near = difflib.get_close_matches(text, self._labels, n=5)
            hint = f"; near names: {', '.join(near)}" if near else ""
            names = " or a name of labels.txt" if self._labels else ""
            raise ValueError(
                f"prompt {prompt!r} is no class, expected a number in [0, {classes}){names}{hint}"
            )
        return number

    def rows(self, prompts: Sequence[str], guided: bool) -> list[Tensor]:
        """Embeddings ``[1, D]`` of each prompt, then the unconditional ones."""
        numbers = [self.check(prompt) for prompt in prompts]
        blank = [len(self._table) - 1] * len(prompts) if guided else []
        return [self._table[number, None] for number in (*numbers, *blank)]


class CaptionCondition:
    """Prompts that are captions, read by a T5 encoder; longer ones are cut.

    Captions are put in lower case and lose signs such as ``#`` and brackets, as in the release; its
    removal of web addresses and file names is left out. The unconditional prompt is the end of a
    learned one: the release hides as much of its front as it pads the caption.

    Args:
        weights: ``cap_proj.fc1.weight [D, C]``, ``cap_proj.fc2.weight [D, D]`` and
            ``uncond_embedding [tokens, C]``; C is the width of the encoder.
        folder: what ``t5`` may be relative to.
        t5: folder or hub id of the encoder and its tokenizer.

    Raises:
        ValueError: the encoder cannot be loaded, or has another width.
    """

    defaults = SamplingDefaults(guidance_scale=7.5, top_k=1000)
    example_prompts = (
        "A blue Porsche 356 parked in front of a yellow brick wall.",
        "A map of the United States made out of sushi.",
        "A photo of an astronaut riding a horse in the forest.",
    )

    def __init__(self, weights: dict[str, Tensor], folder: Path, t5: str) -> None:
        self._blank = weights["uncond_embedding"]
        self._fc1, self._fc2 = weights["cap_proj.fc1.weight"], weights["cap_proj.fc2.weight"]
        self.tokens = len(self._blank)
        source = str(folder / t5) if (folder / t5).is_dir() else t5
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(source)
            loaded: Any = T5EncoderModel.from_pretrained(
                source,
                dtype=self._blank.dtype,
                use_safetensors=True,
                output_loading_info=True,
            )
        except (OSError, ValueError) as error:
            raise ValueError(f"no T5 encoder {t5!r}, which {folder} names: {error}") from error
        encoder, info = loaded  # what is left over is the decoder
        width = self._blank.shape[1]
        if info["missing_keys"] or encoder.config.d_model != width:
            raise ValueError(
                f"{t5!r} is a {encoder.config.model_type} of width {encoder.config.d_model} that "
                f"lacks {sorted(info['missing_keys'])}, expected a T5 encoder of width {width}"
            )
        self._encoder = encoder.eval().requires_grad_(False).to(self._blank.device)

    def check(self, prompt: str) -> None:
        """Every text is a caption."""

    def rows(self, prompts: Sequence[str], guided: bool) -> list[Tensor]:
        """Embeddings ``[P_i, D]`` of each prompt, then the unconditional ones."""
        texts = [" ".join(SIGNS.sub(" ", prompt.lower()).split()) for prompt in prompts]
        batch = self._tokenizer(
            texts, padding=True, padding_side="right", truncation=True, max_length=self.tokens,
            return_tensors="pt",
        ).to(self._blank.device)  # fmt: skip
        ids, mask = batch["input_ids"], batch["attention_mask"]
        features = self._encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        lengths = mask.sum(1).tolist()
        rows = [feature[:n] for feature, n in zip(features, lengths, strict=True)]
        rows += [self._blank[self.tokens - n :] for n in lengths] if guided else []
        return [F.linear(F.gelu(F.linear(row, self._fc1), approximate="tanh"), self._fc2)
                for row in rows]  # fmt: skip
