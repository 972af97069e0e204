"""What another code at one place would have cost in the picture (LPIPS of the two pictures)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from csd_policy.models.base import ImageTokenModel
from csd_policy.risk.lpips import Features
from csd_policy.risk.perceptual import to_pixels


@dataclass(frozen=True)
class Costs:
    """LPIPS of two pictures that differ in one code, 0 or more, fp32 ``[M]`` on the CPU.

    ``whole`` is the mean over the picture, ``around`` that over the code's place and its neighbours
    in the grid.
    """

    whole: Tensor
    around: Tensor


@torch.inference_mode()
def replacement_costs(
    model: ImageTokenModel,
    metric: Any,
    tokens: Tensor,
    position: Tensor,
    codes: tuple[Tensor, Tensor],
    batch_size: int = 16,
    reach: int = 1,
) -> Costs:
    """How much the picture changes to the eye when one of its codes is another one.

    Everything else is equal; in the pair, either code stands in the same picture. Equal pictures of
    a batch are decoded once, so that pairs of few codes at one place cost little.

    Args:
        metric: spatial LPIPS on the model's device, see ``csd_policy.risk.lpips.load_lpips``.
        tokens: the pictures' codes, int64 ``[M, N]``.
        position: code number in each picture, int64 ``[M]``, in [0, N).
        codes: the two codes to compare there, int64 ``[M]`` each.
        batch_size: pairs measured at once, 1 or more.
        reach: places around the code that count as its neighbours, 0 or more.

    Raises:
        ValueError: a position or a code outside the model's.
    """
    low, high = (int(position.min()), int(position.max())) if len(position) else (0, 0)
    if low < 0 or high >= tokens.shape[1]:
        raise ValueError(f"positions are in [{low}, {high}], expected [0, {tokens.shape[1]})")
    if len(position) == 0:
        return Costs(*torch.zeros(2, 0))
    whole, around = [], []
    for part in torch.arange(len(position)).split(batch_size):
        place = position[part, None].to(model.device)
        pair = [
            tokens[part].to(model.device).scatter(1, place, code[part, None].to(model.device))
            for code in codes
        ]
        pictures, number = torch.unique(torch.cat(pair), dim=0, return_inverse=True)
        features = Features.of(metric, to_pixels(model, pictures))
        one, other = (features[rows] for rows in number.chunk(2))
        seen = one.distance(metric, other)
        by_code = F.adaptive_avg_pool2d(seen, model.grid).clamp(min=0)
        near = F.avg_pool2d(by_code, 2 * reach + 1, 1, reach, count_include_pad=False)
        whole.append(by_code.flatten(1).mean(1).cpu())
        around.append(near.flatten(1).gather(1, place)[:, 0].cpu())
    return Costs(torch.cat(whole), torch.cat(around))
