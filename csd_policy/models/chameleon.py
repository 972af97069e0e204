"""Lumina-mGPT 1.0 and 2.0 (arXiv 2408.02657, 2507.17801) and Anole (arXiv 2407.06135).

All three by transformers' Chameleon.

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

from csd_policy.models.chameleon_layout import find_layout
from csd_policy.models.chameleon_vq import (
    CODEBOOK,
    VQGAN,
    PixelDecoder,
    load_language_model,
    load_pixel_decoder,
)
from csd_policy.models.movqgan import MOVQGAN, MoVQDecoder, load_movqgan
from csd_policy.models.published import stored_weights
from csd_policy.models.transformer import PromptState, TransformerModel, pad_right, to_pictures


class Chameleon(TransformerModel):
    """Draws with Lumina-mGPT or Anole.

    By codes of 16x16 pixels from a codebook of 8192, or of 8x8 pixels from 16384 (Lumina-mGPT 2.0).
    All begin with ``bos, text, separator``. Written after the code of the releases; no published
    checkpoint was loaded. Of Lumina-mGPT 2.0 and MoVQGAN no file was seen either: names and vocab
    ids are those in the code that reads them.

    Args:
        source: folder, or hub id such as ``Alpha-VLLM/Lumina-mGPT-7B-768``.
        layout: ``lumina``, ``lumina2`` or ``anole``; see ``find_layout`` for the default.
        size: of Lumina's pictures, default ``768x768``; should suit the checkpoint's resolution.
        vqgan: file with the weights of the pixel decoder, in ``source`` or by path. Default there:
            vqgan.safetensors or vqgan.ckpt, else ``model.vqmodel.decoder.*``; of Lumina-mGPT 2.0
            movqgan_270M.safetensors or movqgan_270M.ckpt; else pictures cannot be decoded.
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
        if vqgan is not None:  # before the weights are read
            vqgan = next((p for p in (Path(vqgan), Path(source, vqgan)) if p.is_file()), vqgan)
            if not Path(vqgan).is_file():
                names = " or ".join((*VQGAN, *MOVQGAN))
                raise ValueError(f"vqgan is {str(vqgan)!r}, expected a file such as {names}")
        config: Any = ChameleonConfig.from_pretrained(source)
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
        written = find_layout(config, source, layout, size, self._tokenizer)
        self._layout, self.defaults, self.grid = written, written.defaults, written.grid
        ids = [written.begin, written.separator, *written.opening, *written.forced]
        if (largest := max(*ids, *(written.codes or ())[-1:])) >= config.vocab_size:
            raise ValueError(
                f"{source}: vocab id {largest} of the tokenizer or of the release is not below "
                f"vocab_size {config.vocab_size}"
            )
        if not any(name.startswith("IMGIMG") for name in config.vocabulary_map or {}):
            config.vocabulary_map = self._tokenizer.get_vocab()
        if written.codes is None:
            count = config.vq_config.num_embeddings
            vocab_ids = _vocab_id_of_code(config.vocabulary_map, count, config.vocab_size)
        else:
            vocab_ids = torch.tensor(written.codes)
        self.num_codes = len(vocab_ids)

        stored = stored_weights(source)
        model = load_language_model(source, config, stored, dtype, **options)
        if written.codes is not None:
            del model.model.vqmodel  # random: the checkpoint has none, its VQGAN is another
        if "device_map" not in options:
            model.to(device)
        self._pixels: PixelDecoder | MoVQDecoder | None
        if written.codes is None:
            self._pixels = load_pixel_decoder(source, vqgan, stored, config.vq_config)
        else:
            self._pixels = load_movqgan(source, vqgan, self.num_codes)
        if self._pixels is not None:
            self._pixels.to(device)
        self.name, self.dtype, self.backbone = source, dtype, model.model
        self.codebook = self._pixels.embedding.weight if self._pixels else None
        if written.codes is None and CODEBOOK in stored:
            self.codebook = model.model.vqmodel.quantize.embedding.weight
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
        written = self._layout
        return [written.begin, *words, written.separator, *written.opening]

    def embed_codes(self, codes: Tensor) -> Tensor:
        embeddings: Tensor = self.backbone.get_input_embeddings()(self._vocab_id_of_code[codes])
        return embeddings

    def head(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self._head)

    def check_pictures(self) -> None:
        if self._pixels is None:
            names, release = (
                (VQGAN, "Chameleon") if self._layout.codes is None else (MOVQGAN, "MoVQGAN")
            )
            raise ValueError(
                f"{self.name} has no pixel decoder, expected {' or '.join(names)} of the release "
                f"of {release} in its folder, or the path of that file as the option vqgan"
            )

    @torch.inference_mode()
    def decode(self, tokens: Tensor) -> list[Image.Image]:
        self.check_codes(tokens)
        self.check_pictures()
        assert self._pixels is not None
        pictures = []
        for codes in tokens.to(self.device).view(-1, *self.grid).split(1):  # for memory
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
