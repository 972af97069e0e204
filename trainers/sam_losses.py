"""Losses of masks, as those of Segment Anything (Kirillov et al. 2023, arXiv 2304.02643)."""

import torch
from torch import Tensor
from torch.nn import functional as F


def focal_loss(logits: Tensor, truth: Tensor, alpha: float = 0.25, gamma: float = 2.0) -> Tensor:
    """Mean over the picture (Lin et al. 2017, arXiv 1708.02002), of logits ``[..., H, W]``."""
    plain = F.binary_cross_entropy_with_logits(logits, truth, reduction="none")
    wrong = -torch.expm1(-plain)  # 1 - probability of the truth
    weight = alpha * truth + (1 - alpha) * (1 - truth)
    return (weight * wrong**gamma * plain).mean((-2, -1))


def dice_loss(logits: Tensor, truth: Tensor) -> Tensor:
    """1 - dice, of logits ``[..., H, W]``."""
    share = logits.sigmoid()
    both, all_ = (share * truth).sum((-2, -1)), share.sum((-2, -1)) + truth.sum((-2, -1))
    return 1 - (2 * both + 1) / (all_ + 1)


def intersection_over_union(found: Tensor, truth: Tensor) -> Tensor:
    """Of masks, bool ``[..., H, W]``; 0 where both are empty."""
    both = (found & truth).sum((-2, -1))
    return both / (found | truth).sum((-2, -1)).clamp(min=1)
