"""LlamaGen (arXiv 2406.06525), by transformers' Llama and Janus VQ classes.

It reads the folder that ``llamagen_convert`` writes: config.json, model.safetensors (the decoder),
condition.safetensors (what embeds classes or captions) and vq/ (the picture tokenizer).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import JanusVQVAE, LlamaConfig, LlamaForCausalLM

from csd_policy.models.llamagen_prompts import CaptionCondition, ClassCondition
from csd_policy.models.published import read_weights
from csd_policy.models.transformer import (
    PromptState,
    TransformerModel,
    load_checkpoint,
    pad_right,
    to_pictures,
)

FILES = ("config.json", "model.safetensors", "condition.safetensors", "vq/config.json",
         "vq/model.safetensors")  # fmt: skip


class GridRotary(nn.Module):
    """Rotary angles of a raster: the first half of the pairs turns by row, the second by column.

    The prompt's positions have cos = sin = 0, as in the release, so queries and keys are 0 there.

    Args:
        prompt: positions before the first code.
        side: codes per row and per column.
        head_dim: a multiple of 4.
    """

    def __init__(self, prompt: int, side: int, head_dim: int) -> None:
        super().__init__()
        half = head_dim // 2
        rates = 1.0 / (10000 ** (torch.arange(0, half, 2).float() / half))
        angles = torch.outer(torch.arange(side).float(), rates)  # [side, head_dim / 4]
        rows, columns = angles[:, None].expand(-1, side, -1), angles.expand(side, -1, -1)
        grid = torch.cat([rows, columns, rows, columns], dim=-1).flatten(0, 1)  # [N, head_dim]
        self.table: Tensor
        table = F.pad(torch.stack([grid.cos(), grid.sin()]), (0, 0, prompt, 0))
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[R, W, head_dim]`` in the dtype of ``x``; later positions clamp."""
        cos, sin = self.table[:, position_ids.clamp(max=self.table.shape[1] - 1)].to(x.dtype)
        return cos, sin


class LlamaGen(TransformerModel):
    """Draws 256, 384 or 512 pixels a side, as 16, 24 or 32 codes a side, from classes or captions.

    Args:
        source: folder of ``llamagen_convert``, or hub id of such a one.
        options: of ``from_pretrained``, for the decoder.

    Raises:
        ValueError: files or weights are missing or do not fit; see ``CaptionCondition``.
    """

    def __init__(
        self, source: str, device: torch.device, dtype: torch.dtype, **options: Any
    ) -> None:
        folder = Path(source) if Path(source).is_dir() else Path(snapshot_download(source))
        if missing := [name for name in FILES if not (folder / name).is_file()]:
            raise ValueError(f"{source} lacks {', '.join(missing)}")
        layout = json.loads((folder / "config.json").read_text())
        if absent := {"grid", "network", "t5"} - set(layout):
            raise ValueError(f"config.json of {source} lacks {', '.join(sorted(absent))}")
        config = LlamaConfig(**layout["network"])
        network = load_checkpoint(LlamaForCausalLM, str(folder), dtype, config=config, **options)
        self._network = network if "device_map" in options else network.to(device)
        self._vq = load_checkpoint(JanusVQVAE, str(folder / "vq"), torch.float32).to(device)
        loaded = read_weights(folder / "condition.safetensors")
        weights = {name: weight.to(device, dtype) for name, weight in loaded.items()}
        self._condition: ClassCondition | CaptionCondition
        if "uncond_embedding" in weights:
            self._condition = CaptionCondition(weights, folder, str(layout["t5"]))
        else:
            self._condition = ClassCondition(weights, folder)
        self.defaults = self._condition.defaults
        self.example_prompts = self._condition.example_prompts
        self.name, self.dtype = source, dtype
        self.grid = (int(layout["grid"][0]), int(layout["grid"][1]))
        self.codebook = F.normalize(self._vq.quantize.embedding.weight, dim=-1)
        self.num_codes = config.vocab_size
        if len(self.codebook) != self.num_codes:
            raise ValueError(
                f"vq of {source} has {len(self.codebook)} codes, expected {self.num_codes}"
            )
        self.code_of_slot = torch.arange(self.grid[0] * self.grid[1], device=device)
        self.backbone = self._network.model
        head_dim = config.hidden_size // config.num_attention_heads
        rotary = GridRotary(self._condition.tokens, self.grid[0], head_dim)
        self.backbone.rotary_emb = rotary.to(device)

    def check_prompts(self, prompts: Sequence[str]) -> None:
        for prompt in prompts:
            self._condition.check(prompt)

    def prefill(self, prompts: Sequence[str], guided: bool, window: int) -> PromptState:
        inputs, lengths = pad_right(self._condition.rows(prompts, guided))
        # the first code is at the same position in every row: the release pads on the left
        return self.start(inputs, lengths, window, shift=self._condition.tokens - lengths)

    def embed_codes(self, codes: Tensor) -> Tensor:
        embeddings: Tensor = self.backbone.get_input_embeddings()(codes)
        return embeddings

    def head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._network.lm_head(hidden)
        return logits

    @torch.inference_mode()
    def decode(self, tokens: Tensor) -> list[Image.Image]:
        self.check_codes(tokens)
        parts = [self._vq.decode(part) for part in tokens.to(self.device).split(16)]
        return to_pictures(torch.cat(parts).permute(0, 2, 3, 1))
