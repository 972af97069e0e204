"""What adapters of transformers' classes share: prompts, cache, forced tokens, loading."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoTokenizer

from csd_policy.cache import RaggedCache
from csd_policy.models.base import ImageTokenModel
from csd_policy.models.published import listed, weight_files


@dataclass(frozen=True)
class PromptState:
    """The cache and where each of R rows (conditional ones first) stands in it.

    Attributes:
        cache: keys and values.
        last: place of the last prompt token, which is slot -1, int64 ``[R]``.
        shift: what is added to a place for its position, int64 ``[R, 1]``.
        end: embedding of the last prompt token, ``[R, D]``.
    """

    cache: RaggedCache
    last: Tensor
    shift: Tensor
    end: Tensor


class TransformerModel(ImageTokenModel):
    """An ``ImageTokenModel`` whose network is a decoder of transformers.

    An adapter sets the attributes of ``ImageTokenModel`` and these, and writes ``prefill`` (by
    ``start``), ``embed_codes``, ``head`` and ``decode``.

    Attributes:
        backbone: the decoder without a head.
        forced: vocabulary id of each slot, int64 ``[S]``, -1 where it holds a code; None if all do.
    """

    backbone: Any  # a PreTrainedModel
    forced: Tensor | None = None

    def embed_codes(self, codes: Tensor) -> Tensor:
        """Input embeddings ``[..., D]`` of codebook ids."""
        raise NotImplementedError

    def check_prompts(self, prompts: Sequence[str]) -> None:
        for prompt in prompts:
            if not prompt.strip():
                raise ValueError(f"prompt is {prompt!r}, expected a text")

    def _check_length(self, tokens: int) -> None:
        """ValueError if a prompt of ``tokens`` leaves no room for a picture, which alone has it."""
        slots = len(self.code_of_slot)
        most = getattr(self.backbone.config, "max_position_embeddings", None)
        if most is not None and slots < most < tokens + slots:
            raise ValueError(
                f"a prompt has {tokens} tokens, expected at most {most - slots}: {self.name} has "
                f"max_position_embeddings {most}, and a picture takes {slots}"
            )

    def start(
        self, inputs: Tensor, lengths: Tensor, window: int, shift: Tensor | None = None
    ) -> PromptState:
        """Run the prompts up to their last tokens.

        Args:
            inputs: embeddings of the prompts, padded on the right, ``[R, P, D]``.
            lengths: of the prompts, int64 ``[R]``, 1 or more.
            window: largest number of slots of a later pass.
            shift: position of each row's first token, int64 ``[R]``; default 0.
        """
        rows, width, _ = inputs.shape
        self._check_length(int(lengths.max()))
        length = width + len(self.code_of_slot) + window
        cache = RaggedCache(self.backbone.config, length)
        moved = torch.zeros_like(lengths) if shift is None else shift
        end = inputs[torch.arange(rows, device=inputs.device), lengths - 1]
        state = PromptState(cache, lengths - 1, moved[:, None], end)
        if width > 1:  # what lies at or behind a row's last token is overwritten before it is seen
            places = torch.arange(width - 1, device=inputs.device).expand(rows, -1)
            self.backbone(inputs_embeds=inputs[:, :-1], **cache.at(places, state.shift))
        return state

    def embed(self, state: PromptState, codes: Tensor, slots: Tensor) -> Tensor:
        if self.forced is None:
            return self.embed_codes(codes)
        forced = self.forced[slots.clamp(0, len(self.forced) - 1)]
        tokens: Tensor = self.backbone.get_input_embeddings()(forced.clamp(min=0))
        return torch.where(forced[..., None] >= 0, tokens, self.embed_codes(codes))

    def forward(self, state: PromptState, embeddings: Tensor, slots: Tensor) -> Tensor:
        branches = len(state.last) // len(slots)
        slots = slots.repeat(branches, 1)
        inputs = embeddings.repeat(branches, 1, 1)
        inputs = torch.where(slots[..., None] < 0, state.end[:, None], inputs)
        places = state.last[:, None] + 1 + slots
        output = self.backbone(inputs_embeds=inputs, **state.cache.at(places, state.shift))
        hidden: Tensor = output.last_hidden_state.to(inputs.device)  # with several cards
        return hidden


def pad_right(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Rows ``[P_i, ...]`` as one tensor ``[R, P, ...]``, padded with 0, and their lengths."""
    lengths = torch.tensor([len(row) for row in rows], device=rows[0].device)
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True), lengths


def to_pictures(pixels: Tensor) -> list[Image.Image]:
    """PIL pictures of float pixels in [-1, 1], ``[B, H, W, 3]``."""
    array = ((pixels.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).cpu().numpy()
    return [Image.fromarray(picture) for picture in array]


def misfits(info: Mapping[str, Any]) -> str:
    """What is wrong with which weights, from transformers' ``output_loading_info``."""
    wrong = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
    return "; ".join(f"{k} {listed(n)}" for k, n in wrong.items() if "error" not in k)


def load_checkpoint(
    cls: Any,
    source: str,
    dtype: torch.dtype,
    state: Mapping[str, Tensor] | None = None,
    optional: str | None = None,
    **options: Any,
) -> Any:
    """``cls.from_pretrained`` with every weight in place, in evaluation mode.

    Args:
        cls: class of the network.
        source: folder, or id on the Hugging Face hub.
        state: weights by the names of ``cls``, in the place of those in ``source``; ``options``
            has a ``config`` then.
        optional: beginning of the names of weights that may be missing; they are then random.
        options: of ``from_pretrained``: ``attn_implementation``, ``device_map``,
            ``quantization_config``, ...

    Raises:
        ValueError: files or weights are missing, are left over, or have another shape.
        OSError: the hub has no such checkpoint; the text is that of transformers.
    """
    if state is None:
        weight_files(source)  # else transformers may ask a service to convert a pickled file
    try:
        model, info = cls.from_pretrained(
            source if state is None else None, dtype=dtype, use_safetensors=True, state_dict=state,
            output_loading_info=True, ignore_mismatched_sizes=True, **options,
        )  # fmt: skip
    except (SafetensorError, KeyError) as error:  # KeyError: a field of the index
        raise ValueError(f"a file with weights of {source} is broken: {error!r}") from error
    if optional is not None:
        info["missing_keys"] = [n for n in info["missing_keys"] if not n.startswith(optional)]
    if wrong := misfits(info):
        raise ValueError(f"the weights of {source} do not fit {cls.__name__}: {wrong}")
    return model.eval().requires_grad_(False)


def load_processor(cls: Any, source: str, tokens: Sequence[str], vocab_size: int) -> Any:
    """The processor of a checkpoint, with a tokenizer that has special tokens.

    Args:
        cls: class of the processor.
        source: folder, or id on the Hugging Face hub.
        tokens: fields of tokenizer_config.json, such as ``pad_token``.
        vocab_size: of the network; ids of the tokens are below it.

    Raises:
        ValueError: a field is missing, or its token has no such id.
    """
    try:
        processor = cls.from_pretrained(source)
        tokenizer = processor.tokenizer
    except AttributeError:  # it asks for some of the tokens itself
        tokenizer = AutoTokenizer.from_pretrained(source)
        if all(getattr(tokenizer, token, None) for token in tokens):
            raise
    for token in tokens:
        name = getattr(tokenizer, token, None)
        if not name:
            raise ValueError(f"tokenizer_config.json of {source} lacks {token}")
        number = tokenizer.convert_tokens_to_ids(name)
        if not 0 <= number < vocab_size:
            raise ValueError(
                f"{token} of {source} is {name!r} with id {number}, expected one below "
                f"vocab_size {vocab_size}"
            )
    return processor
