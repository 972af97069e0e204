"""Emu3-Gen 8B (arXiv 2409.18869), by transformers' Emu3 classes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    Emu3ForCausalLM,
    Emu3ForConditionalGeneration,
    Emu3Processor,
    PretrainedConfig,
)
from transformers.models.emu3.modeling_emu3 import Emu3ImageVocabularyMapping

from csd_policy.models.emu3_release import (
    MODEL_TYPE,
    load_language_model,
    load_release_processor,
    load_vision_tokenizer,
)
from csd_policy.models.transformer import (
    PromptState,
    TransformerModel,
    load_checkpoint,
    load_processor,
    pad_right,
)
from csd_policy.types import SamplingDefaults

POSITIVE = " masterpiece, film grained, best quality."
NEGATIVE = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, "
    "cropped, worst quality, low quality, normal quality, jpeg artifacts, signature, watermark, "
    "username, blurry."
)
VOCAB_SIZE = 184622  # of the release, the default of its config.json
TOKENS = ("bos_token", "eos_token", "image_token", "boi_token", "eoi_token", "eof_token",
          "image_wrapper_token")  # fmt: skip


class Emu3(TransformerModel):
    """Draws 720x720 pixels as 90x90 codes of a codebook of 32768, or other shapes.

    Behind ``<|image start|>{rows}*{columns}<|image token|>`` come the rows of codes, each with an
    end of line, and the ends of frame, image and text, all of them forced. The token of a code is
    ``<|visual token N|>`` with the code as its number. The unconditional prompt is the negative
    one, laid out like the others. Texts and their defaults are those of the release.

    Args:
        source: folder, or hub id such as ``Emu3-community/Emu3-Gen-hf``, with the processor's
            files; its model_type is ``emu3``, or ``emu3_text_model`` for a language model alone,
            or ``Emu3`` for one with the files of BAAI, such as ``BAAI/Emu3-Gen``.
        ratio: WIDTH:HEIGHT of the picture, two whole numbers.
        image_area: pixels of the picture, rounded to whole codes of 8x8.
        positive: what is put behind each prompt, as it is.
        negative: what the picture shall not be.
        vq: folder or hub id of the vision tokenizer that goes with a language model alone, such as
            ``BAAI/Emu3-VisionTokenizer``; without it such a model draws codes, and no pictures.
        options: of ``from_pretrained``.

    Raises:
        ValueError: no grid has this ratio and area, weights are missing or do not fit, or the
            vocabulary lacks a code, the end of line, or a special token.
    """

    defaults = SamplingDefaults(guidance_scale=3.0, top_k=2048)
    example_prompts = (
        "a portrait of young girl.",
        "a dog running under the rain.",
        "a red bus in front of a lake.",
    )

    def __init__(
        self,
        source: str,
        device: torch.device,
        dtype: torch.dtype,
        ratio: str = "1:1",
        image_area: int = 518400,
        positive: str = POSITIVE,
        negative: str = NEGATIVE,
        vq: str | None = None,
        **options: Any,
    ) -> None:
        config = PretrainedConfig.get_config_dict(source)[0]
        kind = config.get("model_type")
        vocab_size = config.get("text_config", config).get("vocab_size", VOCAB_SIZE)
        if kind == MODEL_TYPE:
            self._processor = load_release_processor(source, vocab_size)
        else:
            self._processor = load_processor(Emu3Processor, source, TOKENS, vocab_size)
        self.grid = _grid(self._processor, ratio, image_area)
        self._layout = {"ratio": ratio, "image_area": image_area}
        self._positive, self._negative = positive, negative
        self.name, self.dtype = source, dtype
        if kind == "emu3":
            if vq is not None:
                raise ValueError(f"vq is {vq!r}, expected None: {source} has one of its own")
            model = load_checkpoint(Emu3ForConditionalGeneration, source, dtype, **options)
            self.backbone, self._vq = model.model.text_model, model.model.vqmodel
            mapping = model.vocabulary_mapping
        else:
            model = (load_language_model(source, dtype, **options) if kind == MODEL_TYPE
                     else load_checkpoint(Emu3ForCausalLM, source, dtype, **options))  # fmt: skip
            self.backbone = model.model
            self._vq = None if vq is None else load_vision_tokenizer(vq, dtype).to(device)
            mapping = Emu3ImageVocabularyMapping(self._processor.tokenizer.get_vocab())
        if "device_map" not in options:
            model.to(device)
        self.codebook = None if self._vq is None else self._vq.quantize.embedding.weight
        words = _words_of_codes(source, mapping, self.codebook)
        self._word_of_code, self.num_codes = words.to(device), len(words)
        self._image_rows = model.lm_head.weight[words].to(device)
        tokenizer = self._processor.tokenizer
        ends = [tokenizer.eof_token_id, tokenizer.eoi_token_id, tokenizer.eos_token_id]
        self._lay_out(mapping.eol_token_id, ends, device)

    def _lay_out(self, eol: int, ends: Sequence[int], device: torch.device) -> None:
        """Set the slots: rows of codes and ``eol``, then ``ends``, all by vocabulary id."""
        rows, columns = self.grid
        lines = torch.full((rows, columns + 1), -1)
        lines[:, -1] = eol
        self.forced = torch.cat([lines.flatten(), torch.tensor(ends)]).to(device)
        is_code = self.forced < 0
        self.code_of_slot = torch.where(is_code, is_code.cumsum(0) - 1, -1)

    def prefill(self, prompts: Sequence[str], guided: bool, window: int) -> PromptState:
        texts = [prompt + self._positive for prompt in prompts]
        if guided:
            texts += [self._negative] * len(prompts)
        batch = self._processor(text=texts, return_for_image_generation=True, **self._layout)
        words, lengths = pad_right([torch.tensor(row) for row in batch["input_ids"]])
        embeddings = self.backbone.get_input_embeddings()(words.to(self.device))
        return self.start(embeddings, lengths.to(self.device), window)

    def embed_codes(self, codes: Tensor) -> Tensor:
        embeddings: Tensor = self.backbone.get_input_embeddings()(self._word_of_code[codes])
        return embeddings

    def head(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self._image_rows)

    def check_pictures(self) -> None:
        if self._vq is None:
            raise ValueError(
                f"{self.name} holds a language model alone, expected load_model(..., vq=SOURCE) "
                "with the folder or hub id of its VQ to decode pictures"
            )

    @torch.inference_mode()
    def decode(self, tokens: Tensor) -> list[Any]:
        self.check_codes(tokens)
        self.check_pictures()
        assert self._vq is not None
        codes = tokens.to(self.device).reshape(-1, 1, *self.grid)  # one at a time, for memory
        pixels = [self._vq.decode(code)[0].float().cpu() for code in codes]
        batch = self._processor.postprocess(pixels, return_tensors="PIL.Image.Image")
        return list(batch["pixel_values"])


def _grid(processor: Emu3Processor, ratio: str, image_area: int) -> tuple[int, int]:
    """Rows and columns of codes, as the processor counts them."""
    try:
        size = processor.calculate_generate_size(ratio, image_area, processor.downsample_ratio)
    except (AttributeError, TypeError, ValueError, ZeroDivisionError):
        size = (0, 0)
    rows, columns = size
    if rows < 1 or columns < 1:
        raise ValueError(
            f"ratio is {ratio!r} and image_area {image_area!r}, expected WIDTH:HEIGHT in whole "
            "numbers, such as '1:1' or '16:9', and enough pixels for a code in each row and column"
        )
    return rows, columns


def _words_of_codes(
    source: str, mapping: Emu3ImageVocabularyMapping, codebook: Tensor | None
) -> Tensor:
    """Vocabulary id of each code, int64 ``[V]``."""
    found = mapping.img2bpe  # vocabulary ids by code
    size = len(found) if codebook is None else len(codebook)
    if not found or sorted(found) != list(range(size)) or mapping.eol_token_id is None:
        raise ValueError(
            f"the vocabulary of {source} has {len(found)} visual tokens and the end of line "
            f"{mapping.eol_token_id}, expected one for each of {size} codes, and an id"
        )
    words: Tensor = mapping.img2bpe_mapping_tensor.long()
    return words
