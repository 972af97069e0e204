"""The contract suite on every policy of the package, and on policies that break it."""

import inspect
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from csd_policy import policies
from csd_policy.candidates import Candidates
from csd_policy.policies import CSD, AcceptancePolicy, EntropyOnly, Exact, TVGate
from csd_policy.testing import check_policy, make_candidates

CLASSES = [
    cls
    for _, cls in inspect.getmembers(policies, inspect.isclass)
    if issubclass(cls, AcceptancePolicy) and not inspect.isabstract(cls)
]
VARIANTS = [cls() for cls in CLASSES] + [
    CSD(lam=3.0, delta=1.0),
    CSD(normalize_entropy=True, delta=0.8),
    EntropyOnly(lam=1.0),
    TVGate(delta=1.0),
]


@pytest.mark.parametrize("policy", VARIANTS, ids=repr)
def test_contract(policy: AcceptancePolicy) -> None:
    check_policy(policy)


def laws(seed: int, size: int = 6, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(2, 1, 3, size, generator=generator, dtype=torch.float64)
    p, q = logits.softmax(-1)
    return p, q


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.1, 4.0), st.floats(0, 3), st.floats(0, 1))
def test_speed_and_spent_tv_lie_on_one_line(
    seed: int, scale: float, lam: float, delta: float
) -> None:
    """P_rej + TV(out, q) = TV(p, q) for every b at or above the exact rule (CSD, Theorem 3.2)."""
    p, q = laws(seed, scale=scale)
    c = make_candidates(p, q).whole()
    for policy in (CSD(lam, delta), EntropyOnly(lam), TVGate(delta), Exact()):
        b = policy.acceptance(c)
        rejected = 1 - (p * b).sum(-1)
        assert torch.allclose(rejected + policy.spent_tv(c, b), c.tv[..., 0], atol=1e-9)


def test_formulas_by_hand() -> None:
    p = torch.tensor([[[0.5, 0.3, 0.2]]], dtype=torch.float64)
    q = torch.tensor([[[0.25, 0.5, 0.25]]], dtype=torch.float64)
    c = make_candidates(p, q)  # drafted: token 0; tv 0.25, H = 1.0397 nats
    h = 1.0397207708399179
    assert float(c.tv) == pytest.approx(0.25) and float(c.entropy) == pytest.approx(h)
    assert float(Exact().acceptance(c)) == pytest.approx(0.5)
    assert float(CSD(lam=0.2, delta=0.3).acceptance(c)) == pytest.approx(0.5 + 0.2 * h)
    assert float(CSD(lam=0.2, delta=0.25).acceptance(c)) == pytest.approx(
        0.5
    )  # tv < delta, strictly
    normalized = CSD(lam=0.2, delta=0.3, normalize_entropy=True).acceptance(c)
    assert float(normalized) == pytest.approx(0.5 + 0.2 * h / 1.0986122886681098)
    assert float(EntropyOnly(lam=0.1).acceptance(c)) == pytest.approx(0.5 + 0.1 * h)
    assert float(TVGate(delta=0.3).acceptance(c)) == 1.0
    whole = c.whole()
    gate = TVGate(delta=0.3)
    assert float(gate.spent_tv(whole, gate.acceptance(whole))) == pytest.approx(0.25)


@pytest.mark.parametrize("cls", [CSD, TVGate, EntropyOnly])
def test_acceptance_grows_with_strength(cls: type[AcceptancePolicy]) -> None:
    p, q = laws(1)
    c = make_candidates(p, q).whole()
    assert cls.strength is not None
    values = [cls(**{cls.strength: s}).acceptance(c) for s in (0.0, 0.2, 0.5, 1.0)]
    assert all((b >= a).all() for a, b in itertools.pairwise(values))
    assert (values[-1] > values[0]).any()


def test_normalized_entropy_of_a_certain_target_is_zero() -> None:
    q = torch.tensor([[[0.0, 1.0, 0.0]]])
    p = torch.tensor([[[0.2, 0.8, 0.0]]])
    b = CSD(lam=9.0, delta=1.0, normalize_entropy=True).acceptance(make_candidates(p, q).whole())
    assert b.tolist() == [[[0.0, 1.0, 0.0]]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CSD(lam=-1), "lam is -1"),
        (lambda: CSD(delta=1.5), r"delta is 1.5.*\[0, 1\]"),
        (lambda: CSD(delta=float("nan")), "delta is nan"),
        (lambda: EntropyOnly(lam=float("inf")), "lam is inf"),
        (lambda: TVGate(delta=-0.1), "delta is -0.1"),
    ],
)
def test_wrong_parameters_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# Policies that break the contract; the suite must say so.


class WrongShape(AcceptancePolicy):
    def accept_prob(self, c: Candidates) -> Tensor:
        return c.tv


class Stateful(AcceptancePolicy):
    def __init__(self) -> None:
        self.calls = 0

    def accept_prob(self, c: Candidates) -> Tensor:
        self.calls += 1
        return c.ratio


class InPlace(AcceptancePolicy):
    def accept_prob(self, c: Candidates) -> Tensor:
        c.q_all.mul_(0.99)
        return c.ratio


class Random(AcceptancePolicy):
    def accept_prob(self, c: Candidates) -> Tensor:
        return c.ratio + torch.rand(())


class DraftedOnly(AcceptancePolicy):
    def accept_prob(self, c: Candidates) -> Tensor:
        return c.ratio if c.every_token else c.ratio + 0.5


class SilentVeto(AcceptancePolicy):
    def accept_prob(self, c: Candidates) -> Tensor:
        return c.ratio.clamp(max=1) / 2


class FalselyExact(AcceptancePolicy):
    exact = True

    def accept_prob(self, c: Candidates) -> Tensor:
        return c.ratio + 0.2


class NeverExact(AcceptancePolicy):
    exact_at = {"eps": 0.0}

    def __init__(self, eps: float = 0.1) -> None:
        self.eps = eps

    def accept_prob(self, c: Candidates) -> Tensor:
        return c.ratio + 0.3


class OverBatch(AcceptancePolicy):
    def accept_prob(self, c: Candidates) -> Tensor:
        return c.ratio + c.entropy.mean()


class Renamed(AcceptancePolicy):
    def __init__(self, eps: float = 0.1) -> None:
        self.eps = 2 * eps

    def accept_prob(self, c: Candidates) -> Tensor:
        return c.ratio + self.eps


class OutsideSupport(AcceptancePolicy):
    def accept_prob(self, c: Candidates) -> Tensor:
        return c.ratio

    def residual(self, c: Candidates) -> Tensor:
        return torch.ones_like(c.q_all)


class GivesNan(AcceptancePolicy):
    def accept_prob(self, c: Candidates) -> Tensor:
        return c.q / c.p


class Misnamed(Exact):
    strength = "lam"


class MisnamedExact(Exact):
    exact_at = {"lam": 0.0}


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Misnamed(), "names {'lam'}, no argument"),
        (MisnamedExact(), "names {'lam'}, no argument"),
        (WrongShape(), "shape"),
        (Stateful(), "changed the policy"),
        (InPlace(), "changed"),
        (Random(), "differ"),
        (DraftedOnly(), "K = 1 and V differ"),
        (SilentVeto(), "below the exact rule"),
        (FalselyExact(), "declared exact"),
        (NeverExact(), "does not decide as Exact"),
        (OverBatch(), "depends on others"),
        (Renamed(), "makes"),
        (OutsideSupport(), "outside the target's support"),
        (GivesNan(), "NaN"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, AcceptancePolicy) else "",
)
def test_contract_catches(policy: AcceptancePolicy, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_policy(policy)


def test_an_abstract_policy_cannot_be_made() -> None:
    with pytest.raises(TypeError):
        AcceptancePolicy()  # type: ignore[abstract]
