"""The key/value cache of transformers models: static, with a write position per row.

All contact with transformers' cache classes is here. A token's key and value go to the place that
``slots`` names, so rows advance at their own pace and roll-back is writing there again: a stale
entry lies at or after the next window's first slot, which no query sees before it is overwritten.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin


class RaggedLayer(CacheLayerMixin):
    """One layer's keys and values, ``[R, heads, length, head_dim]``, allocated once."""

    is_compileable = True

    def __init__(self, length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = length
        self.slots: Tensor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        shape = (*key_states.shape[:2], self.length)
        # zeros, not empty: a NaN in a masked place would still reach the output
        self.keys = key_states.new_zeros(*shape, key_states.shape[-1])
        self.values = value_states.new_zeros(*shape, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write ``[R, heads, W, head_dim]`` at the slots; all keys and values so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        index = self.slots.to(key_states.device)[:, None, :, None]  # layers on several cards
        self.keys.scatter_(2, index.expand_as(key_states), key_states)
        self.values.scatter_(2, index.expand_as(value_states), value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length, 0

    def get_seq_length(self) -> int:
        return 0  # positions and masks are always given

    def get_max_length(self) -> int:
        return self.length


class RaggedCache(Cache):
    """A cache of ``length`` places per row for a model of ``config``."""

    def __init__(self, config: PretrainedConfig, length: int) -> None:
        layers = config.get_text_config(decoder=True).num_hidden_layers
        self._ragged = [RaggedLayer(length) for _ in range(layers)]
        super().__init__(layers=list(self._ragged))
        self.length = length

    def at(self, slots: Tensor, shift: Tensor | int = 0) -> dict[str, Any]:
        """Arguments of a forward pass whose tokens lie at ``slots``, int64 ``[R, W]``.

        ``shift``, int64 ``[R, 1]``, is added to them for the positions.
        """
        for layer in self._ragged:
            layer.slots = slots
        places = torch.arange(self.length, device=slots.device)
        mask = (places <= slots[..., None])[:, None]  # [R, 1, W, length]: see what is not later
        positions = slots + shift
        return {"cache": self, "use_cache": True, "attention_mask": mask, "position_ids": positions}
