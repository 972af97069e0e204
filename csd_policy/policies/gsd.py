"""Grouped speculative decoding (arXiv 2508.07747)."""

import copy
from typing import Literal, Self, get_args

import torch
from torch import Tensor

from csd_policy.candidates import Candidates
from csd_policy.models.base import ImageTokenModel
from csd_policy.policies.base import AcceptancePolicy, check_range
from csd_policy.policies.codebook import bound_to, codebook_of, on_support

Residual = Literal["published", "optimal"]


class GSD(AcceptancePolicy):
    """Accept by the probability of a group of alike tokens around the candidate.

    b(x) = min(1, q(C)/p(C)). C holds x and, in the order of target probability, the ``group // 2``
    tokens on each side of it, without those whose code is further than ``d_threshold`` from that of
    x or whose target probability differs from q(x) by more than ``p_threshold``. Grouped
    speculative decoding, arXiv 2508.07747, section 4 (the paper's rule: the released code has a
    fixed slice, squared distances and a fallback at the ends). Here a group ends where the target's
    support ends, and tokens of equal probability are in the order of their ids.

    The group's ratio can be below the token's own, so that the rule can veto. Where it rejects more
    than the exact rule does, the published residual max(0, q - p) overfills tokens: seldom, and
    counted in its spent TV.

    Args:
        group: tokens in a group, 1 or more; 3 to 50 in the paper. An even number gives a group of
            one more.
        p_threshold: largest difference of target probabilities, in [0, 1].
        d_threshold: largest Euclidean distance of codes, 0 or more; None does not look at codes.
        residual_rule: ``published``, max(0, q - p), or ``optimal``, max(0, q - p b).

    Example:
        >>> GSD(group=10)
        GSD(group=10, p_threshold=0.15, d_threshold=0.5, residual_rule='published')
    """

    may_veto, costly = True, True
    exact_at = {"group": 1}
    strength = "group"

    def __init__(
        self,
        group: int = 3,
        p_threshold: float = 0.15,
        d_threshold: float | None = 0.5,
        residual_rule: Residual = "published",
    ) -> None:
        check_range("group", group, 1)
        check_range("p_threshold", p_threshold, 0, 1)
        if d_threshold is not None:
            check_range("d_threshold", d_threshold, 0)
        if residual_rule not in get_args(Residual):
            raise ValueError(
                f"residual_rule is {residual_rule!r}, expected one of {get_args(Residual)}"
            )
        self.group, self.p_threshold, self.d_threshold = group, p_threshold, d_threshold
        self.residual_rule = residual_rule
        self._codes: Tensor | None = None

    def bind(self, model: ImageTokenModel) -> Self:
        bound = copy.copy(self)
        if self.d_threshold is not None:
            bound._codes = codebook_of(model, self)
        return bound

    def accept_prob(self, c: Candidates) -> Tensor:
        size, width = c.q_all.shape[-1], 1
        if self.d_threshold is not None:
            width = bound_to(self._codes, self, size).shape[1]
        if c.every_token:
            return on_support(self._groups, c, width)
        order = c.q_all.sort(dim=-1, descending=True, stable=True).indices
        rank = (order == c.tokens).int().argmax(-1, keepdim=True)
        half = self.group // 2
        place = rank + torch.arange(-half, half + 1, device=rank.device)
        members = order.gather(-1, place.clamp(0, size - 1))
        q, p = c.q_all.gather(-1, members), c.p_all.gather(-1, members)
        near = self._alike(c.q, q, c.tokens, members) & (place >= 0) & (place < size)
        group_q, group_p = (torch.where(near, x, 0.0).sum(-1, keepdim=True) for x in (q, p))
        return torch.where(group_q > 0, group_q / group_p, 0.0)

    def _groups(self, p: Tensor, q: Tensor, kept: Tensor) -> Tensor:
        """q(C)/p(C) of the tokens ``kept``, ``[n, m]``."""
        q, order = q[:, kept].sort(dim=-1, descending=True, stable=True)
        p, ids = p[:, kept].gather(-1, order), kept[order]
        group_q, group_p = q.clone(), p.clone()
        for step in range(1, min(self.group // 2, q.shape[-1] - 1) + 1):
            above, below = slice(None, -step), slice(step, None)
            near = self._alike(q[:, above], q[:, below], ids[:, above], ids[:, below])
            for mass, of in ((group_q, q), (group_p, p)):
                mass[:, above] += torch.where(near, of[:, below], 0.0)
                mass[:, below] += torch.where(near, of[:, above], 0.0)
        ratio = torch.where(group_q > 0, group_q / group_p, 0.0)
        return torch.empty_like(ratio).scatter_(-1, order, ratio)

    def _alike(self, q: Tensor, q_other: Tensor, token: Tensor, other: Tensor) -> Tensor:
        """Whether two tokens, ids ``token`` and ``other``, may share a group."""
        near = ((q - q_other).abs() <= self.p_threshold) & (q_other > 0)
        if self._codes is not None and self.d_threshold is not None:
            apart = torch.linalg.vector_norm(self._codes[token] - self._codes[other], dim=-1)
            near &= apart <= self.d_threshold
        return near

    def residual(self, c: Candidates) -> Tensor:
        if self.residual_rule == "optimal":
            return super().residual(c)
        return (c.q_all - c.p_all).clamp(min=0)
