"""The shipped model: a LLaMA prior over caption words and image codes, and its VQ tokenizer."""

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as hf_logging

from csd_policy.models.transformer import PromptState, TransformerModel, misfits
from csd_policy.models.vq import VQAutoencoder
from csd_policy.types import SamplingDefaults

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
         "image_model.json", "vq.safetensors", "vq_config.json")  # fmt: skip
MOST_WORDS = 16  # captions in training have at most 9


class EmojiScenes(TransformerModel):
    """Draws emoji scenes of 96x96 pixels from captions of a closed vocabulary.

    Captions: ``[two|three|four] NAME(S) on TONE plain|photo`` or
    ``NAME left of|above NAME on TONE plain|photo``.

    Args:
        folder: config.json, model.safetensors, tokenizer files, vq.safetensors, vq_config.json,
            image_model.json.

    Raises:
        ValueError: weights are missing or do not fit.
    """

    example_prompts = (
        "two cats on blue plain",
        "hamster left of banana on blue plain",
        "three taxis on green photo",
        "rocket on black plain",
        "penguin above pizza on pink plain",
        "butterfly on green photo",
    )

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        if missing := [name for name in FILES if not (folder / name).is_file()]:
            raise ValueError(f"{folder} lacks {', '.join(missing)}")
        layout = json.loads((folder / "image_model.json").read_text())
        self.name = str(folder) if folder.parent.name != "weights" else folder.name
        self.grid = (int(layout["grid"][0]), int(layout["grid"][1]))
        self.num_codes = int(layout["num_codes"])
        self.defaults = SamplingDefaults(guidance_scale=float(layout["guidance_scale"]))
        self.dtype = dtype
        self._first = int(layout["first_image_token"])
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        self._prior = _load_prior(folder, dtype)
        self._prior.to(device)  # type: ignore[arg-type]  # transformers' stub of Module.to
        self._vq = VQAutoencoder.from_folder(folder).to(device)
        self.codebook = self._vq.codebook
        self.code_of_slot = torch.arange(self.grid[0] * self.grid[1], device=device)
        self.backbone = self._prior.model
        self._words = [w for w in self._tokenizer.get_vocab() if not w.startswith("<")]

    def check_prompts(self, prompts: Sequence[str]) -> None:
        normalize = self._tokenizer.backend_tokenizer.normalizer.normalize_str
        known = set(self._words)
        for prompt in prompts:
            words = normalize(prompt).split()
            if not 0 < len(words) <= MOST_WORDS:
                raise ValueError(
                    f"prompt {prompt!r} has {len(words)} words, expected 1 to {MOST_WORDS}"
                )
            for word in words:
                if word not in known:
                    near = difflib.get_close_matches(word, self._words, n=5, cutoff=0.5)
                    hint = f"near words: {', '.join(near)}" if near else "no word is near"
                    raise ValueError(
                        f"prompt {prompt!r}: {self.name} does not know {word!r}; {hint} "
                        f"(its {len(known)} words: docs/model.md)"
                    )

    def prefill(self, prompts: Sequence[str], guided: bool, window: int) -> PromptState:
        texts = [*prompts, *([""] * len(prompts) if guided else [])]
        batch = self._tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        lengths = batch["attention_mask"].to(self.device).sum(1)
        words = self.backbone.get_input_embeddings()(batch["input_ids"].to(self.device))
        return self.start(words, lengths, window)

    def embed_codes(self, codes: Tensor) -> Tensor:
        embeddings: Tensor = self.backbone.get_input_embeddings()(codes + self._first)
        return embeddings

    def head(self, hidden: Tensor) -> Tensor:
        weight = self._prior.lm_head.weight[self._first : self._first + self.num_codes]
        return F.linear(hidden, weight)

    @torch.inference_mode()
    def encode(self, pictures: Sequence[Image.Image]) -> Tensor:
        side = self._vq.config.image_size
        ids = []
        for start in range(0, len(pictures), 32):
            part = [np.array(picture.convert("RGB")) for picture in pictures[start : start + 32]]
            if wrong := [array.shape for array in part if array.shape != (side, side, 3)]:
                raise ValueError(
                    f"a picture has {wrong[0][1]}x{wrong[0][0]} pixels, expected {side}x{side}"
                )
            pixels = torch.from_numpy(np.stack(part)).to(self.device).permute(0, 3, 1, 2)
            ids.append(self._vq.encode(pixels.float() / 127.5 - 1))
        return torch.cat(ids)

    @torch.inference_mode()
    def decode(self, tokens: Tensor) -> list[Image.Image]:
        self.check_codes(tokens)
        pictures = []
        for part in tokens.to(self.device).split(32):
            pixels = ((self._vq.decode(part) + 1) * 127.5).round().clamp(0, 255)
            array = pixels.to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
            pictures += [Image.fromarray(picture) for picture in array]
        return pictures


def _check_config(folder: Path) -> None:
    """Compare config.json with the weights, before a network of other sizes is built."""
    config = json.loads((folder / "config.json").read_text())
    with safe_open(folder / "model.safetensors", "pt") as weights:
        name = "model.embed_tokens.weight"
        shape = weights.get_slice(name).get_shape() if name in set(weights.keys()) else None
    found = [config.get("vocab_size"), config.get("hidden_size")]
    if config.get("model_type") != "llama" or found != shape:
        raise ValueError(
            f"{folder / 'config.json'} describes a {config.get('model_type')} with vocab_size and "
            f"hidden_size {found}, expected a llama with those of model.safetensors, {shape}"
        )


def _load_prior(folder: Path, dtype: torch.dtype) -> LlamaForCausalLM:
    _check_config(folder)
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    loaded: Any = LlamaForCausalLM.from_pretrained(
        folder, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
    )
    if shown:
        hf_logging.enable_progress_bar()
    model: LlamaForCausalLM
    model, info = loaded
    if wrong := misfits(info):
        raise ValueError(f"{folder / 'model.safetensors'} does not fit config.json: {wrong}")
    model.eval().requires_grad_(False)
    return model
