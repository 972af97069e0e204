"""Random numbers, guided and filtered laws, and draws: all on the device, all batched.

Random numbers are counter-based: a number depends on (seed of the image, purpose, position,
counter) and on nothing else: not on the batch, the device, or what was drawn before.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from csd_policy.types import DecodeConfig

_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15, the increment of SplitMix64
_MIX_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
_MIX_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB


class Purpose(IntEnum):
    """What a random number is for; numbers of different purposes are independent."""

    ACCEPT = 0  # the uniform that a draft's acceptance probability is compared with
    RESIDUAL = 1  # the redraw after a rejection
    TARGET = 2  # draw from a position's own law: bonus, W=1, Gumbel redraw, exact match
    FRESH = 3  # first draft of a position that no pass has seen
    REDRAW = 4  # independent redraw of an unverified position (counter: the row's pass)
    COUPLE_ACCEPT = 5  # whether tail coupling keeps a draft (counter: the row's pass)
    COUPLE_REDRAW = 6  # the redraw where it does not (counter: the row's pass)
    PREVIEW = 7  # the seed of a preview of the picture
    ALTERNATIVE = 8  # another draw from a draft's law, for risk maps


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix64(x: Tensor) -> Tensor:
    """The output function of SplitMix64 (Steele et al., OOPSLA 2014) on int64, any shape."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def fold(key: Tensor, value: Tensor | int) -> Tensor:
    """A new int64 key from ``key`` and an integer; the two broadcast."""
    if isinstance(value, int):  # the product wraps around, as it does on the device
        step = (value + 1) * _GOLDEN
        return mix64(key + ((step + 2**63) % 2**64 - 2**63))
    return mix64(key + (value + 1) * _GOLDEN)


def to_uniform(bits: Tensor) -> Tensor:
    """fp32 numbers strictly inside (0, 1) from int64 bits; fine near 0, at most 1 - 2^-24."""
    u = _shift_right(bits, 32).float() * 2.0**-32 + 2.0**-33
    return u.clamp(max=1 - 2.0**-24)


@dataclass(frozen=True)
class Noise:
    """The random numbers of a batch of images.

    Args:
        seeds: int64 ``[B]``, one per image.
        size: how many numbers a vector holds, the codebook size V.
    """

    seeds: Tensor
    size: int

    def _key(self, purpose: Purpose, position: Tensor, counter: Tensor | int) -> Tensor:
        key = fold(mix64(self.seeds), int(purpose))
        key = key.view(-1, *(1,) * (position.ndim - 1))
        return fold(fold(key, position), counter)

    def derived(self) -> "Noise":
        """Random numbers of other pictures, one for each seed, that this one never uses."""
        return Noise(_shift_right(fold(mix64(self.seeds), int(Purpose.PREVIEW)), 1), self.size)

    def uniform(self, purpose: Purpose, position: Tensor, counter: Tensor | int = 0) -> Tensor:
        """One fp32 number in (0, 1) per ``position``, int64 ``[B, ...]``; same shape out."""
        return to_uniform(self._key(purpose, position, counter))

    def exponential(self, purpose: Purpose, position: Tensor, counter: Tensor | int = 0) -> Tensor:
        """V standard exponential numbers per position, fp32 ``[B, ..., V]``, all above 0.

        ``-log`` of them is the Gumbel vector ``G`` of the position.
        """
        key = self._key(purpose, position, counter)
        element = torch.arange(self.size, device=key.device)
        return -torch.log1p(-to_uniform(fold(key[..., None], element)))

    def token(self, purpose: Purpose, position: Tensor) -> Tensor:
        """A uniform token in [0, V) per position, int64, shape of ``position``."""
        high = _shift_right(self._key(purpose, position, 0), 33)
        return (high * self.size) >> 31


def take(x: Tensor, index: Tensor, dim: int = 1) -> Tensor:
    """``x`` at ``index`` along ``dim``; ``index`` has the axes of ``x`` up to or before ``dim``.

    ``[B, W, V]`` at int64 ``[B]`` gives ``[B, V]``, at ``[B, L]`` gives ``[B, L, V]``.
    """
    whole = index if index.ndim > dim else index.unsqueeze(-1)
    where = whole.view(*whole.shape, *(1,) * (x.ndim - whole.ndim))
    picked = x.gather(dim, where.expand(*whole.shape, *x.shape[whole.ndim :]))
    return picked if index.ndim > dim else picked.squeeze(dim)


def draw(weights: Tensor, exponential: Tensor) -> Tensor:
    """Sample from the last axis by exponential races: ``argmax(log w + G)``.

    Args:
        weights: ``[..., V]`` non-negative, not all zero, need not sum to 1.
        exponential: ``[..., V]`` standard exponential numbers.

    Returns:
        int64 ``[...]``; never a token of weight 0.
    """
    return (weights / exponential).argmax(-1)


def first_argmax(values: Tensor) -> Tensor:
    """The lowest index of the maximum over the last axis, int64 (``argmax`` leaves ties open)."""
    index = torch.arange(values.shape[-1], device=values.device)
    best = values == values.amax(-1, keepdim=True)
    return torch.where(best, index, values.shape[-1] - 1).amin(-1)


def guide(logits: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance ``u + scale * (c - u)`` (Ho & Salimans 2022) in at least fp32.

    Args:
        logits: ``[B, ..., V]`` if ``scale`` is 1, else conditional rows, then unconditional ones,
            ``[2B, ..., V]``. Scale 0 is the unconditional law.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if scale == 1.0:
        return logits
    cond, uncond = logits.chunk(2)
    return uncond + scale * (cond - uncond)


def target_law(logits: Tensor, config: "DecodeConfig") -> Tensor:
    """The target's law q by the settings of a resolved config; see ``guide`` and ``law``."""
    assert config.guidance_scale is not None and config.temperature is not None
    assert config.top_k is not None and config.top_p is not None
    guided = guide(logits, config.guidance_scale)
    return law(guided, config.temperature, config.top_k, config.top_p)


def law(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Probabilities after temperature, top-k and top-p, in this order, over the last axis.

    Args:
        logits: ``[..., V]``, fp32 or fp64.
        temperature: 0 or more; 0 puts all mass on the argmax (the lowest id of a tie).
        top_k: keep the k largest logits and ties of the k-th; 0 keeps all.
        top_p: keep the smallest set of largest probabilities that sums to at least this; 1 keeps
            all.

    Returns:
        ``[..., V]``, each row sums to 1; NaN in a row whose logits hold NaN or +inf, or are all
        -inf.
    """
    if temperature == 0:
        broken = (logits - logits.amax(-1, keepdim=True)).isnan().any(-1, keepdim=True)
        one_hot = torch.zeros_like(logits).scatter_(-1, first_argmax(logits)[..., None], 1.0)
        return one_hot.masked_fill(broken, torch.nan)
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature
    if 0 < top_k < logits.shape[-1]:
        kth = scaled.topk(top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < kth, -torch.inf)
    q = scaled.softmax(-1)
    if top_p < 1:
        ordered = q.sort(dim=-1, descending=True)
        before = ordered.values.cumsum(-1) - ordered.values
        kept = ordered.values.masked_fill(before >= top_p, 0.0)
        q = torch.zeros_like(q).scatter_(-1, ordered.indices, kept)
        q = q / q.sum(-1, keepdim=True)
    return q
