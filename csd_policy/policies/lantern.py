"""LANTERN's relaxation by near codes (arXiv 2410.03355, 2502.06352)."""

import copy
from typing import Self

import torch
from torch import Tensor

from csd_policy.candidates import Candidates
from csd_policy.models.base import ImageTokenModel
from csd_policy.policies.base import AcceptancePolicy, check_range
from csd_policy.policies.codebook import bound_to, codebook_of, on_support
from csd_policy.risk.codebook import nearest_rows, table_of


class LANTERN(AcceptancePolicy):
    """Count the probability of the nearest codes as the token's own, up to a bound.

    b(x) = min(1, (q(x) + m(x)) / p(x)), with m(x) the target's mass on the codes nearest to that of
    x, nearest first, as long as it stays within ``delta``. LANTERN, arXiv 2410.03355, equation 4
    and its TV bound; ``multiplicative`` bounds it by (delta - 1) q(x), LANTERN++ (arXiv
    2502.06352). There with a trained drafter; here a rule on Jacobi drafts, with the residual that
    fits it (the released code zeroes the neighbours in two contradicting ways). As published,
    nearness is the Euclidean distance of the codebook's vectors; ``table`` puts a measured
    perceptual distance in its place.

    Args:
        k: neighbours looked at, 0 or more; 1000 in LANTERN, 5 to 10 in LANTERN++.
        delta: the bound, in [0, 1]; 0.1 in LANTERN. With ``multiplicative`` 1 or more; 5 to 20 in
            LANTERN++.
        multiplicative: whether ``delta`` is a factor of q(x).
        table: which codes are near: a file of ``csd-policy study codebook``; None is the codebook
            itself.

    Example:
        >>> LANTERN()
        LANTERN(k=1000, delta=0.1, multiplicative=False, table=None)
    """

    costly = True
    exact_at = {"k": 0}
    strength = "delta"

    def __init__(
        self,
        k: int = 1000,
        delta: float = 0.1,
        multiplicative: bool = False,
        table: str | None = None,
    ) -> None:
        check_range("k", k, 0)
        if multiplicative:
            check_range("delta", delta, 1)
        else:
            check_range("delta", delta, 0, 1)
        if table is not None and not (isinstance(table, str) and table):
            raise ValueError(f"table is {table!r}, expected a file or None")
        self.k, self.delta, self.multiplicative, self.table = k, delta, multiplicative, table
        self._neighbours: Tensor | None = None

    def bind(self, model: ImageTokenModel) -> Self:
        codes, bound = codebook_of(model, self), copy.copy(self)
        nearest = min(self.k, len(codes) - 1)
        near = codes if self.table is None else table_of(self.table, model).vectors
        bound._neighbours = nearest_rows(near, nearest)
        return bound

    def accept_prob(self, c: Candidates) -> Tensor:
        neighbours = bound_to(self._neighbours, self, c.q_all.shape[-1])
        if neighbours.shape[1] == 0:
            return c.ratio
        if c.every_token:
            mass = on_support(
                lambda _, q, kept: self._within(q[:, neighbours[kept]], q[:, kept]),
                c,
                neighbours.shape[1],
            )
        else:
            near = c.q_all.gather(-1, neighbours[c.drafted])
            mass = self._within(near, c.q[..., 0])[..., None]
        return torch.where(c.q > 0, (c.q + mass) / c.p, 0.0)

    best_residual = True

    def residual(self, c: Candidates) -> Tensor:
        """The default ``max(0, q - p b)``, which is ``max(0, q - p)`` for every relaxation."""
        return (c.q_all - c.p_all).clamp(min=0)

    def _within(self, mass: Tensor, q: Tensor) -> Tensor:
        """Sum of the leading part of ``mass`` ``[..., k]`` that stays within the bound."""
        bound = (self.delta - 1) * q if self.multiplicative else torch.full_like(q, self.delta)
        total = mass.cumsum(-1)
        return torch.where(total <= bound[..., None], total, 0.0).amax(-1)
