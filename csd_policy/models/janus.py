"""Janus-Pro 1B and 7B (arXiv 2501.17811), by transformers' Janus classes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import JanusForConditionalGeneration, JanusProcessor, PretrainedConfig

from csd_policy.models.janus_release import MODEL_TYPE, ReleasePrompts, load_release
from csd_policy.models.transformer import (
    PromptState,
    TransformerModel,
    load_checkpoint,
    load_processor,
    pad_right,
    to_pictures,
)
from csd_policy.types import SamplingDefaults


class ProcessorPrompts:
    """Token ids of prompts, by the processor of transformers."""

    def __init__(self, source: str, vocab_size: int) -> None:
        tokens = ("pad_token", "boi_token", "eoi_token", "image_token")
        self._processor = load_processor(JanusProcessor, source, tokens, vocab_size)
        self.pad: int = self._processor.tokenizer.pad_token_id

    def ids(self, prompt: str) -> Tensor:
        """Token ids, int64 ``[P]``; the last one begins the image."""
        text = prompt
        if self._processor.chat_template is not None:
            content: Any = [{"type": "text", "text": prompt}]
            text = self._processor.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True
            )
        batch = self._processor(text=[text], generation_mode="image", return_tensors="pt")
        ids: Tensor = batch["input_ids"][0]
        return ids


class Janus(TransformerModel):
    """Draws 384x384 pixels as 24x24 codes of a codebook of 16384.

    The unconditional prompt is the conditional one with every token but the first and the last
    replaced by the padding token, which is attended to, as in the release.

    Args:
        source: folder, or hub id such as ``deepseek-community/Janus-Pro-1B``, or
            ``deepseek-ai/Janus-Pro-1B`` with the release's own names and files.
        options: of ``from_pretrained``.

    Raises:
        ValueError: weights or tokens are missing or do not fit.
    """

    defaults = SamplingDefaults(guidance_scale=5.0)
    example_prompts = (
        "A photo of a red bus in front of a lake",
        "A close-up high-contrast photo of Sydney Opera House sitting next to Eiffel tower",
        "A cute corgi with sunglasses on a beach",
    )

    def __init__(
        self, source: str, device: torch.device, dtype: torch.dtype, **options: Any
    ) -> None:
        released = PretrainedConfig.get_config_dict(source)[0].get("model_type") == MODEL_TYPE
        cls = JanusForConditionalGeneration
        model = (load_release(source, dtype, **options) if released
                 else load_checkpoint(cls, source, dtype, **options))  # fmt: skip
        self._model = model if "device_map" in options else model.to(device)
        vocab_size = model.config.text_config.vocab_size
        self._prompts: ReleasePrompts | ProcessorPrompts
        self._prompts = (ReleasePrompts if released else ProcessorPrompts)(source, vocab_size)
        config = model.config
        side = config.vision_config.image_size // config.vision_config.patch_size
        self.name, self.dtype, self.grid = source, dtype, (side, side)
        self.backbone = model.model.language_model
        self.codebook = model.model.vqmodel.quantize.embedding.weight
        self.num_codes = len(self.codebook)
        self.code_of_slot = torch.arange(side * side, device=device)

    def prefill(self, prompts: Sequence[str], guided: bool, window: int) -> PromptState:
        rows = [self._prompts.ids(prompt).to(self.device) for prompt in prompts]
        if guided:
            for ids in rows[: len(prompts)]:
                blank = torch.full_like(ids, self._prompts.pad)
                blank[0], blank[-1] = ids[0], ids[-1]
                rows.append(blank)
        ids, lengths = pad_right(rows)
        # positions as transformers counts them, with padding on the left
        return self.start(self._words(ids), lengths, window, shift=ids.shape[1] - lengths)

    def _words(self, ids: Tensor) -> Tensor:
        embeddings: Tensor = self.backbone.get_input_embeddings()(ids)
        return embeddings

    def embed_codes(self, codes: Tensor) -> Tensor:
        embeddings: Tensor = self._model.prepare_embeddings_for_image_generation(codes)
        return embeddings

    def head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._model.model.generation_head(hidden)
        return logits.to(hidden.device)  # with several cards

    @torch.inference_mode()
    def decode(self, tokens: Tensor) -> list[Any]:
        self.check_codes(tokens)
        return to_pictures(self._model.decode_image_tokens(tokens.to(self.device)))
