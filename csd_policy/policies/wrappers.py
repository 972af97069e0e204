"""Policies made of other policies."""

import copy
from typing import Any, Self

import torch
from torch import Tensor

from csd_policy.candidates import Candidates
from csd_policy.models.base import ImageTokenModel
from csd_policy.policies.base import AcceptancePolicy, check_range
from csd_policy.policies.csd import CSD
from csd_policy.policies.exact import Exact
from csd_policy.risk import RiskMap


class _Wrapper(AcceptancePolicy):
    """Shared by the wrappers: ``parts`` names the arguments that are policies."""

    parts: tuple[str, ...] = ()

    def _adopt(self) -> None:
        """Take over what the inner policies are and need; ValueError if one cannot be wrapped."""
        inner = [getattr(self, name) for name in self.parts]
        for name, policy in zip(self.parts, inner, strict=True):
            if not isinstance(policy, AcceptancePolicy):
                raise ValueError(f"{name} is {policy!r}, expected an AcceptancePolicy")
            if "noise" in policy.needs:
                raise ValueError(
                    f"{name} is {policy!r}, which compares with the target's own draw: its law "
                    "holds only by itself, expected a policy that does not need noise"
                )
        self.exact = all(policy.exact for policy in inner)
        self.may_veto = any(policy.may_veto for policy in inner)
        self.costly = any(policy.costly for policy in inner)
        self.needs = frozenset().union(*(policy.needs for policy in inner))
        maps = [policy.risk for policy in (self, *inner) if policy.risk is not None]
        if any(repr(other) != repr(maps[0]) for other in maps):
            raise ValueError(f"{self!r} holds {len(maps)} risk maps, expected at most one")
        self.risk = maps[0] if maps else None
        # an acceptance that depends on the drafted token by way of the map keeps no law
        self.exact &= self.risk is None or self.risk.source != "drafts"

    def bind(self, model: ImageTokenModel) -> Self:
        bound, inner = copy.copy(self), [getattr(self, name).bind(model) for name in self.parts]
        for name, policy in zip(self.parts, inner, strict=True):
            setattr(bound, name, policy)
        maps = [policy.risk for policy in inner if policy.risk is not None]
        if maps:  # bound already, and only once: it may hold a network
            bound.risk = maps[0]
        elif self.risk is not None:
            bound.risk = self.risk.bind(model)
        return bound


class Veto(_Wrapper):
    """Never accept a token that the target likes much less than the draft did.

    b(x) = b_inner(x) where q(x)/p(x) >= min_ratio, else 0, with the residual max(0, q - p b).
    Around an exact rule it is stricter and stays exact, because the residual makes up for the veto;
    around a relaxed one it takes back the boldest acceptances. The residual extends that of CSD
    (arXiv 2606.27829, Theorem 3.1) to rules below the exact one.

    Args:
        inner: the policy to restrain.
        min_ratio: smallest q/p that may be accepted, 0 or more.

    Example:
        >>> Veto()
        Veto(inner=Exact(), min_ratio=0.5)
    """

    parts = ("inner",)

    def __init__(self, inner: AcceptancePolicy = Exact(), min_ratio: float = 0.5) -> None:  # noqa: B008
        check_range("min_ratio", min_ratio, 0)
        self.inner, self.min_ratio = inner, min_ratio
        self._adopt()
        self.may_veto = True

    def accept_prob(self, c: Candidates) -> Tensor:
        return torch.where(c.ratio >= self.min_ratio, self.inner.acceptance(c), 0.0)


class _Mixture(_Wrapper):
    """Uses the second of two rules with a probability that the position decides.

    The committed token's law is then the same mixture of their two laws.
    """

    def _rules(self) -> tuple[AcceptancePolicy, AcceptancePolicy]:
        raise NotImplementedError

    def _weight_of(self, c: Candidates) -> Tensor | float:
        """Weight of the second rule, ``[B, L, 1]`` in [0, 1]."""
        raise NotImplementedError

    @property
    def best_residual(self) -> bool:
        return all(rule.best_residual for rule in self._rules())

    def accept_prob(self, c: Candidates) -> Tensor:
        first, second = self._rules()
        return torch.lerp(first.acceptance(c), second.acceptance(c), self._weight_of(c))

    def residual(self, c: Candidates) -> Tensor:
        if self.best_residual:
            return super().residual(c)
        whole = c.whole()
        first, second = (rule.redrawn(whole, rule.acceptance(whole)) for rule in self._rules())
        return torch.lerp(first, second, self._weight_of(c))


class Blend(_Mixture):
    """Mix two policies: b(x) = (1 - weight) b_first(x) + weight b_second(x).

    If one of them has a residual of its own, the redraws are mixed likewise, so that the committed
    token's law is the mixture of theirs. With ``Exact`` this spends a share of what a relaxation
    does (on the line of CSD, arXiv 2606.27829, Theorem 3.2).

    Args:
        first, second: the two policies.
        weight: of the second one, in [0, 1].

    Example:
        >>> Blend(weight=0.25)
        Blend(first=Exact(), second=CSD(lam=0.5, delta=0.35, normalize_entropy=False, gate='tv'), \
weight=0.25)
    """

    parts = ("first", "second")
    strength = "weight"

    def __init__(
        self,
        first: AcceptancePolicy = Exact(),  # noqa: B008
        second: AcceptancePolicy = CSD(),  # noqa: B008
        weight: float = 0.5,
    ) -> None:
        check_range("weight", weight, 0, 1)
        self.first, self.second, self.weight = first, second, weight
        self._adopt()

    def _rules(self) -> tuple[AcceptancePolicy, AcceptancePolicy]:
        return self.first, self.second

    def _weight_of(self, c: Candidates) -> Tensor | float:
        return self.weight


class RiskGated(_Mixture):
    """Relax as another policy does where the risk is low, and be exact where it is high.

    b(x) = (1 - w) b_inner(x) + w min(1, q(x)/p(x)) with w = min(1, strength * risk). At strength 1,
    a position of risk 0 is judged by the inner policy and one of risk 1 by the exact rule. CSD
    (arXiv 2606.27829) guesses from the entropy where an error is not seen; a map can look.

    Args:
        inner: the policy to use where the risk is 0.
        risk: the map, see ``csd_policy.risk``. None can be decoded with only inside a policy that
            has one.
        strength: factor of the risk, 0 or more; 0 ignores it.

    Example:
        >>> RiskGated(inner=Exact(), strength=0.5)
        RiskGated(inner=Exact(), risk=None, strength=0.5)
    """

    parts = ("inner",)
    strength = "strength"

    def __init__(
        self,
        inner: AcceptancePolicy = CSD(),  # noqa: B008
        risk: RiskMap | None = None,
        strength: float = 1.0,
    ) -> None:
        check_range("strength", strength, 0)
        if not (risk is None or isinstance(risk, RiskMap)):
            raise ValueError(f"risk is {risk!r}, expected a RiskMap")
        self.inner, self.risk = inner, risk
        # the class says which argument is tuned, the object holds its value
        self.strength = strength  # type: ignore[assignment, misc]
        self._adopt()
        self.needs = self.needs | {"risk"}

    def _rules(self) -> tuple[AcceptancePolicy, AcceptancePolicy]:
        return self.inner, Exact()

    def _weight_of(self, c: Candidates) -> Tensor | float:
        if c.risk is None:
            raise ValueError(f"{self!r} needs a risk map, which nothing provides")
        factor: Any = self.strength
        weight: Tensor = (factor * c.risk).clamp(max=1)
        return weight
