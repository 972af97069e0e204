"""What relaxation did to pictures: the counterfactual cost of the tokens that it let through."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from csd_policy.counterfactual import replacement_costs
from csd_policy.models.base import ImageTokenModel
from csd_policy.study.measure import choose
from csd_policy.types import DecodeResult


class Damage(NamedTuple):
    """Of B pictures, on the CPU.

    Attributes:
        relaxed: tokens accepted where the exact rule, with the same number, would have rejected,
            int64 ``[B]``.
        whole, around: summed LPIPS over these tokens, fp64 ``[B]``, 0 or more: over the whole
            picture, and around each code; an unbiased estimate where not all were measured.
    """

    relaxed: Tensor
    whole: Tensor
    around: Tensor


def measure_damage(
    model: ImageTokenModel, result: DecodeResult, metric: Any, most: int = 16
) -> Damage:
    """Sum over the relaxed tokens of what each changed in its picture.

    A picture that differs from the exact one of its seed is not damaged: exact decoding differs
    from seed to seed too. What a relaxation did is this: it kept a draft where the exact rule would
    have put another token. Each of these other tokens is put in the place of the one that was kept,
    everything else equal, and the cost is the LPIPS of the two pictures.

    Args:
        model: that drew the pictures.
        result: of ``JacobiDecoder.generate(..., others=True)``.
        metric: spatial LPIPS on the model's device, see ``csd_policy.risk.lpips.load_lpips``.
        most: relaxed tokens of a picture that are measured, 1 or more, drawn evenly by its seed.

    Raises:
        ValueError: ``most`` is below 1, or ``result`` has no ``others``.
    """
    if most < 1:
        raise ValueError(f"most is {most}, expected 1 or more")
    if "correction" not in result.others:
        raise ValueError("the result has no others, expected one of generate(..., others=True)")
    relaxed = result.trace.relaxed
    position = choose(relaxed, result.seeds, most)
    taken = position >= 0
    picture, place = taken.nonzero()[:, 0], position[taken]
    kept, instead = (c[picture, place] for c in (result.tokens, result.others["correction"]))
    costs = replacement_costs(model, metric, result.tokens[picture], place, (kept, instead))
    count = relaxed.sum(1)
    scale = count.double() / taken.sum(1).clamp(min=1)
    sums = torch.zeros(2, len(count), dtype=torch.float64)
    sums.index_add_(1, picture, torch.stack([costs.whole, costs.around]).double())
    return Damage(count, *(sums * scale))
