"""Lumina-mGPT 1.0 (arXiv 2408.02657) and Anole (arXiv 2407.06135), by transformers' Chameleon.

Numbers of two kinds never share a name: *codes* count the codebook, *vocab ids* the vocabulary.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from transformers import ChameleonConfig, PreTrainedTokenizerFast
from transformers.models.chameleon.modeling_chameleon import ChameleonImageVocabularyMapping

from csd_policy.models.chameleon_layout import BEGIN, SEPARATOR, find_layout, vocab_id
from csd_policy.models.chameleon_vq import (
    CODEBOOK,
    VQGAN,
    load_language_model,
    load_pixel_decoder,
)
from csd_policy.models.published import stored_weights
from csd_policy.models.transformer import PromptState, TransformerModel, pad_right, to_pictures


class Chameleon(TransformerModel):
    """Draws with Lumina-mGPT 1.0 or Anole, by codes of a codebook of 8192, 16 pixels a code.

    Both begin with ``bos, text, separator``. Written after the code of the releases; no published
    checkpoint was loaded.

    Args:
        source: folder, or hub id such as ``Alpha-VLLM/Lumina-mGPT-7B-768``.
        layout: ``lumina`` or ``anole``; see ``find_layout`` for the default.
        size: of Lumina's pictures, default ``768x768``; should suit the checkpoint's resolution.
        vqgan: file with the weights of the pixel decoder. Default: vqgan.safetensors or vqgan.ckpt
            in ``source``, else ``model.vqmodel.decoder.*``, else pictures cannot be decoded.
        options: of ``from_pretrained``.

    Raises:
        ValueError: an option is out of range, or weights are missing, pickled, or do not fit.
    """

    example_prompts = (
        "Image of a dog playing water, and a waterfall is in the background.",
        "Image of a bustling downtown street in Tokyo at night, with neon signs.",
        "Image of a quiet European village with cobblestone streets and colorful houses.",
    )

    def __init__(
        self,
        source: str,
        device: torch.device,
        dtype: torch.dtype,
        layout: str | None = None,
        size: str | None = None,
        vqgan: str | Path | None = None,
        **options: Any,
    ) -> None:
        config: Any = ChameleonConfig.from_pretrained(source)
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        written = find_layout(config, source, layout, size, vocabulary)
        self._separator = vocab_id(vocabulary, *SEPARATOR)
        self._begin = vocab_id(vocabulary, *BEGIN)
        self._layout, self.defaults, self.grid = written, written.defaults, written.grid
        largest = max(self._begin, self._separator, *written.opening, *written.forced)
        if largest >= config.vocab_size:
            raise ValueError(
                f"{source}: the tokenizer lacks names of special tokens, and the vocab id "
                f"{largest} of the releases is not below vocab_size {config.vocab_size}"
            )
        if not any(name.startswith("IMGIMG") for name in config.vocabulary_map or {}):
            config.vocabulary_map = vocabulary
        self.num_codes = config.vq_config.num_embeddings
        vocab_ids = _vocab_id_of_code(config.vocabulary_map, self.num_codes, config.vocab_size)

        stored = stored_weights(source)
        model = load_language_model(source, config, stored, dtype, **options)
        if "device_map" not in options:
            model.to(device)
        self._pixels = load_pixel_decoder(source, vqgan, stored, config.vq_config)
        if self._pixels is not None:
            self._pixels.to(device)
        self.name, self.dtype, self.backbone = source, dtype, model.model
        self.codebook = model.model.vqmodel.quantize.embedding.weight
        if CODEBOOK not in stored:
            self.codebook = self._pixels.embedding.weight if self._pixels else None
        self._vocab_id_of_code = vocab_ids.to(device)
        self._head = model.lm_head.weight[vocab_ids.to(model.lm_head.weight.device)].to(device)
        slots = torch.tensor(written.forced, device=device)
        self.forced = slots
        self.code_of_slot = torch.where(slots < 0, (slots < 0).cumsum(0) - 1, -1)

    def prefill(self, prompts: Sequence[str], guided: bool, window: int) -> PromptState:
        rows = [self._prompt_vocab_ids(prompt) for prompt in prompts]
        rows += [self._layout.blank] * (len(prompts) if guided else 0)
        vocab_ids, lengths = pad_right([torch.tensor(row, device=self.device) for row in rows])
        return self.start(self.backbone.get_input_embeddings()(vocab_ids), lengths, window)

    def _prompt_vocab_ids(self, prompt: str) -> list[int]:
        text = self._layout.template.format(prompt)
        words = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return [self._begin, *words, self._separator, *self._layout.opening]

    def embed_codes(self, codes: Tensor) -> Tensor:
        embeddings: Tensor = self.backbone.get_input_embeddings()(self._vocab_id_of_code[codes])
        return embeddings

    def head(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self._head)

    @torch.inference_mode()
    def decode(self, tokens: Tensor) -> list[Image.Image]:
        self.check_codes(tokens)
        if self._pixels is None:
            raise ValueError(
                f"{self.name} has no pixel decoder, expected {' or '.join(VQGAN)} of Chameleon's "
                "release in its folder, or the path of that file as the option vqgan"
            )
        pictures = []
        for codes in tokens.to(self.device).view(-1, *self.grid).split(4):
            pictures += to_pictures(self._pixels(codes))
        return pictures


def _vocab_id_of_code(names: Mapping[str, int], count: int, vocab_size: int) -> Tensor:
    """Vocab ids of the codes, int64 ``[V]``, from the names ``IMGIMG...Z`` (digits A to J)."""
    mapping = ChameleonImageVocabularyMapping(names)
    if sorted(mapping.img2bpe) != list(range(count)) or max(mapping.bpe2img) >= vocab_size:
        raise ValueError(
            f"the vocabulary names {len(mapping.img2bpe)} codes as IMGIMG...Z, expected each of "
            f"the {count} of the codebook, with vocab ids below {vocab_size}"
        )
    vocab_ids: Tensor = mapping.img2bpe_mapping_tensor.long()
    return vocab_ids
