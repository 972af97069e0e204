"""The key/value cache of transformers models: static, with a write position per row.

All contact with transformers' cache classes is here. A token's key and value go to the place that
``slots`` names, so rows advance at their own pace and roll-back is writing there again: a stale entry
lies at or after the next window's first slot, which no query sees before it is overwritten.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin


class RaggedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values, ``[R, heads, length, head_dim]``, allocated once."""

    is_compileable = True

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.slots: Tensor | None = None

    def lazy_initialization(self, keys: Tensor, values: Tensor) -> None:
        shape = (*keys.shape[:2], self.length)
        # zeros, not empty: a NaN in a masked place would still reach the output
        self.keys = keys.new_zeros(*shape, keys.shape[-1])
        self.values = values.new_zeros(*shape, values.shape[-1])
        self.is_initialized = True

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Write ``[R, heads, W, head_dim]`` at the slots; all keys and values so far."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        assert self.slots is not None
        index = self.slots[:, None, :, None]
        self.keys.scatter_(2, index.expand_as(keys), keys)
        self.values.scatter_(2, index.expand_as(values), values)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length, 0

    def get_seq_length(self) -> int:
        return 0  # positions and masks are always given

    def get_max_length(self) -> int:
        return self.length


class RaggedCache(Cache):  # type: ignore[misc]
    """A cache of ``length`` places per row for a model of ``config``."""

    def __init__(self, config: PretrainedConfig, length: int) -> None:
        layers = config.get_text_config(decoder=True).num_hidden_layers
        super().__init__(layers=[RaggedLayer(length) for _ in range(layers)])
        self.length = length

    def at(self, slots: Tensor) -> dict[str, Any]:
        """Arguments of a forward pass whose tokens lie at ``slots``, int64 ``[R, W]``."""
        for layer in self.layers:
            layer.slots = slots
        places = torch.arange(self.length, device=slots.device)
        mask = (places <= slots[..., None])[:, None]  # [R, 1, W, length]: see what is not later
        return {"cache": self, "use_cache": True, "attention_mask": mask, "position_ids": slots}
