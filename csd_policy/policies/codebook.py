"""Rules that count the probability of similar codes as the token's own."""

import copy
from collections.abc import Callable
from typing import Literal, Self, get_args

import torch
from torch import Tensor

from csd_policy.candidates import Candidates
from csd_policy.models.base import ImageTokenModel
from csd_policy.policies.base import AcceptancePolicy, check_range

CHUNK = 2**24  # elements of the largest intermediate tensor
_BLOCK = 1024  # codes whose distances to all others are held at once
Residual = Literal["published", "optimal"]


def _in_chunks(
    rule: Callable[[Tensor, Tensor], Tensor], p: Tensor, q: Tensor, per_position: int
) -> Tensor:
    """``rule`` over positions ``[n, V]`` at a time; ``p``, ``q`` and the result ``[B, L, V]``."""
    rows = max(1, CHUNK // per_position)
    flat_p, flat_q = p.flatten(0, 1), q.flatten(0, 1)
    parts = [rule(a, b) for a, b in zip(flat_p.split(rows), flat_q.split(rows), strict=True)]
    return torch.cat(parts).view_as(q)


def _codebook_of(model: ImageTokenModel, policy: AcceptancePolicy) -> Tensor:
    if model.codebook is None:
        raise ValueError(f"{policy!r} needs a codebook, and model {model.name} has none")
    return model.codebook.float()


def _bound(value: Tensor | None, policy: AcceptancePolicy, size: int) -> Tensor:
    """What ``bind`` put there, for a codebook of ``size`` entries."""
    if value is None:
        raise ValueError(f"{policy!r} is not bound to a model, expected policy.bind(model)")
    if len(value) != size:
        raise ValueError(f"{policy!r} is bound to {len(value)} codes, expected {size}")
    return value


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

    may_veto = True
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
            bound._codes = _codebook_of(model, self)
        return bound

    def accept_prob(self, c: Candidates) -> Tensor:
        size, width = c.q_all.shape[-1], 1
        if self.d_threshold is not None:
            width = _bound(self._codes, self, size).shape[1]
        b = _in_chunks(self._grouped, c.p_all, c.q_all, size * width)
        return b.gather(-1, c.tokens)

    def _grouped(self, p: Tensor, q: Tensor) -> Tensor:
        """q(C)/p(C) of every token, ``[n, V]``."""
        q, order = q.sort(dim=-1, descending=True, stable=True)
        p = p.gather(-1, order)
        codes = None if self._codes is None else self._codes[order]
        group_q, group_p = q.clone(), p.clone()
        for offset in range(1, min(self.group // 2, q.shape[-1] - 1) + 1):
            near = (q[:, :-offset] - q[:, offset:] <= self.p_threshold) & (q[:, offset:] > 0)
            if codes is not None:
                gap = torch.linalg.vector_norm(codes[:, :-offset] - codes[:, offset:], dim=-1)
                near &= gap <= self.d_threshold
            for mass, of in ((group_q, q), (group_p, p)):
                mass[:, :-offset] += torch.where(near, of[:, offset:], 0.0)
                mass[:, offset:] += torch.where(near, of[:, :-offset], 0.0)
        ratio = torch.where(group_q > 0, group_q / group_p, 0.0)
        return torch.empty_like(ratio).scatter_(-1, order, ratio)

    def residual(self, c: Candidates) -> Tensor:
        if self.residual_rule == "optimal":
            return super().residual(c)
        return (c.q_all - c.p_all).clamp(min=0)


class LANTERN(AcceptancePolicy):
    """Count the probability of the nearest codes as the token's own, up to a bound.

    b(x) = min(1, (q(x) + m(x)) / p(x)), with m(x) the target's mass on the codes nearest to that of
    x, nearest first, as long as it stays within ``delta``. LANTERN, arXiv 2410.03355, equation 4
    and its TV bound; ``multiplicative`` bounds it by (delta - 1) q(x), LANTERN++ (arXiv
    2502.06352). There with a trained drafter; here a rule on Jacobi drafts, with the residual that
    fits it (the released code zeroes the neighbours in two contradicting ways).

    Args:
        k: neighbours looked at, 0 or more; 1000 in LANTERN, 5 to 10 in LANTERN++.
        delta: the bound, in [0, 1]; 0.1 in LANTERN. With ``multiplicative`` 1 or more; 5 to 20 in
            LANTERN++.
        multiplicative: whether ``delta`` is a factor of q(x).

    Example:
        >>> LANTERN()
        LANTERN(k=1000, delta=0.1, multiplicative=False)
    """

    exact_at = {"k": 0}
    strength = "delta"

    def __init__(self, k: int = 1000, delta: float = 0.1, multiplicative: bool = False) -> None:
        check_range("k", k, 0)
        if multiplicative:
            check_range("delta", delta, 1)
        else:
            check_range("delta", delta, 0, 1)
        self.k, self.delta, self.multiplicative = k, delta, multiplicative
        self._neighbours: Tensor | None = None

    def bind(self, model: ImageTokenModel) -> Self:
        codes, bound = _codebook_of(model, self), copy.copy(self)
        nearest = min(self.k, len(codes) - 1)
        rows = []
        for i, part in enumerate(codes.split(_BLOCK)):
            distance = torch.cdist(part, codes)
            own = _BLOCK * i + torch.arange(len(part), device=codes.device)
            distance.scatter_(1, own[:, None], -1.0)  # the code itself comes first
            order = distance.sort(dim=-1, stable=True).indices
            rows.append(order[:, 1 : nearest + 1].contiguous())
        bound._neighbours = torch.cat(rows)
        return bound

    def accept_prob(self, c: Candidates) -> Tensor:
        neighbours = _bound(self._neighbours, self, c.q_all.shape[-1])
        if neighbours.shape[1] == 0:
            return c.ratio
        if not c.every_token:
            q = c.q_all.flatten(0, 1)
            mass = q.gather(-1, neighbours[c.drafted.flatten()])
            return self._ratio(c.p, c.q, self._within(mass, c.q.flatten()).view_as(c.q))
        mass = _in_chunks(
            lambda _, q: self._within(q[:, neighbours], q), c.p_all, c.q_all, neighbours.numel()
        )
        return self._ratio(c.p, c.q, mass)

    best_residual = True

    def residual(self, c: Candidates) -> Tensor:
        """The default ``max(0, q - p b)``, which is ``max(0, q - p)`` for every relaxation."""
        return (c.q_all - c.p_all).clamp(min=0)

    def _within(self, mass: Tensor, q: Tensor) -> Tensor:
        """Sum of the leading part of ``mass`` ``[..., k]`` that stays within the bound."""
        bound = (self.delta - 1) * q if self.multiplicative else torch.full_like(q, self.delta)
        total = mass.cumsum(-1)
        return torch.where(total <= bound[..., None], total, 0.0).amax(-1)

    def _ratio(self, p: Tensor, q: Tensor, mass: Tensor) -> Tensor:
        return torch.where(q > 0, (q + mass) / p, 0.0)
