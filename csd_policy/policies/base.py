"""The acceptance policy: the one interface that this project is about."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from csd_policy.candidates import Candidates
from csd_policy.parameters import Parametrized
from csd_policy.risk import RiskMap

if TYPE_CHECKING:
    from csd_policy.models.base import ImageTokenModel


class AcceptancePolicy(Parametrized, ABC):
    """Decides with which probability a drafted token is accepted.

    Subclass it, take hyper-parameters as keyword arguments with defaults, store them unchanged
    under the same name, and write ``accept_prob``. A policy is arithmetic: no randomness, no state
    between calls, no host synchronisation. ``csd_policy.testing.check_policy`` checks the contract.
    A wrapper sets the attributes below for itself, from those of the policies inside.

    Class attributes:
        exact: claims that the committed tokens follow the target's law.
        may_veto: its acceptance can fall below the exact rule's.
        needs: what it reads beyond the two laws, a subset of {"risk", "hidden", "noise"}.
        exact_at: settings at which it must equal ``Exact`` decision by decision.
        strength: the name of its tunable, None if it has none.
        risk: the risk map that the loop computes for it, if it needs one.
        costly: slow for all tokens at once: asked only where drafts were verified (a host read).
    """

    exact: bool = False
    may_veto: bool = False
    needs: frozenset[str] = frozenset()
    exact_at: ClassVar[Mapping[str, Any] | None] = None
    strength: ClassVar[str | None] = None
    risk: RiskMap | None = None
    costly: bool = False

    @abstractmethod
    def accept_prob(self, c: Candidates) -> Tensor:
        """Acceptance probability b of each candidate, ``[B, L, K]``; the loop clamps it."""

    def residual(self, c: Candidates) -> Tensor:
        """Unnormalised law of the token drawn after a rejection, ``[B, L, V]``, non-negative.

        Default: ``max(0, q - p b)``, the TV-optimal residual of any b (CSD, arXiv 2606.27829,
        Theorem 3.1 for b at or above the exact rule).
        """
        whole = c.whole()
        return (whole.q - whole.p * self.acceptance(whole)).clamp(min=0)

    def acceptance(self, c: Candidates) -> Tensor:
        """``accept_prob`` as the loop applies it, ``[B, L, K]`` in [0, 1], and 0 where q = 0."""
        b = self.accept_prob(c)
        if not (isinstance(b, Tensor) and b.shape == c.q.shape and b.is_floating_point()):
            found = f"{b.dtype} {list(b.shape)}" if isinstance(b, Tensor) else repr(b)
            raise ValueError(
                f"accept_prob of {self!r} gives {found}, expected {c.q.dtype} {list(c.q.shape)}"
            )
        b = b.clamp(0, 1)
        return torch.where(c.q > 0, b, 0.0)

    def spent_tv(self, c: Candidates, b: Tensor) -> Tensor:
        """TV of the committed token's law and q, ``[B, L]`` in [0, 1].

        Args:
            c: with every token as a candidate.
            b: ``acceptance(c)``, ``[B, L, V]``.
        """
        if self.best_residual:
            return (c.p * b - c.q).clamp(min=0).sum(-1)
        return (c.p * b + self.redrawn(c, b) - c.q).abs().sum(-1) / 2

    @property
    def best_residual(self) -> bool:
        """Whether the residual is the default one, the TV-optimal."""
        return type(self).residual is AcceptancePolicy.residual

    def redrawn(self, c: Candidates, b: Tensor) -> Tensor:
        """Mass that each token receives from redraws, ``P_rej * res``, ``[B, L, V]``; K = V."""
        residual = self.residual(c)
        mass = residual.sum(-1, keepdim=True)
        law = torch.where(mass > 0, residual / mass, c.q)
        return (1 - (c.p * b).sum(-1, keepdim=True)).clamp(min=0) * law

    def bind(self, model: "ImageTokenModel") -> Self:
        """A copy that holds what the policy needs of ``model``, on its device."""
        bound = copy.copy(self)
        if self.risk is not None:
            bound.risk = self.risk.bind(model)
        return bound


def check_range(name: str, value: float, low: float, high: float = float("inf")) -> None:
    """Raise ValueError unless ``low <= value <= high`` and ``value`` is finite."""
    if not (low <= value <= high and abs(value) != float("inf")):
        bound = f"at least {low:g}" if high == float("inf") else f"in [{low:g}, {high:g}]"
        raise ValueError(f"{name} is {value!r}, expected a finite number {bound}")
