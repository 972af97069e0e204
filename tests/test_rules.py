"""What the rules claim: theorems with random laws, and each formula written a second time."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from torch import Tensor

from csd_policy import policies
from csd_policy.arguments import class_names
from csd_policy.candidates import Candidates
from csd_policy.decoder import JacobiDecoder
from csd_policy.drafts import Gumbel, Independent, MaximalCoupling
from csd_policy.policies import (
    CSD,
    GSD,
    LANTERN,
    AcceptancePolicy,
    Addition,
    Amplify,
    Blend,
    CoolSD,
    EntropyAware,
    EntropyOnly,
    Exact,
    ExactMatch,
    JacobiMatch,
    KLGate,
    RiskGated,
    TVGate,
    Veto,
)
from csd_policy.risk import FixedRisk
from csd_policy.testing import TableModel, make_candidates, random_table
from csd_policy.types import DecodeConfig

CODES = torch.tensor([[0.0, 0.0], [0.3, 0.0], [0.0, 0.4], [1.0, 1.0], [1.1, 1.0], [3.0, 0.0]])
MODEL = TableModel(random_table(0, size=6), codebook=CODES)


def laws(seed: int, size: int = 6, scale: float = 2.0, drafts: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(2, 1, drafts, size, generator=generator, dtype=torch.float64)
    p, q = logits.softmax(-1)
    return p, q


def whole(p: Tensor, q: Tensor, **fields: Any) -> Candidates:
    return make_candidates(p, q, **fields).whole()


# Theorems


class Given(AcceptancePolicy):
    """Accepts with a given probability per token."""

    may_veto = True

    def __init__(self, b: Tensor | None = None) -> None:
        self.b = b

    def accept_prob(self, c: Candidates) -> Tensor:
        assert self.b is not None
        return self.b


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 6), st.floats(0.1, 4.0))
def test_no_residual_is_better_than_the_default(seed: int, size: int, scale: float) -> None:
    """Against a linear program over all laws of the redraw: minimise TV(p b + P_rej res, q)."""
    p, q = laws(seed, size, scale, drafts=1)
    b = torch.rand(1, 1, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    c, policy = whole(p, q), Given(b)
    kept = (p * b).numpy()[0, 0]
    gap, rejected = q.numpy()[0, 0] - kept, 1 - kept.sum()
    # variables: res, then t >= |rejected * res - gap|; minimise sum(t) / 2
    eye, zero = np.eye(size), np.zeros(size)
    program = linprog(
        np.concatenate([zero, zero + 0.5]),
        A_ub=np.block([[rejected * eye, -eye], [-rejected * eye, -eye]]),
        b_ub=np.concatenate([gap, -gap]),
        A_eq=np.concatenate([zero + 1, zero])[None],
        b_eq=[1],
    )
    assert program.success
    assert float(policy.spent_tv(c, b)) == pytest.approx(program.fun, abs=1e-9)
    out = p * b + policy.redrawn(c, b)
    assert float((out - q).abs().sum() / 2) == pytest.approx(program.fun, abs=1e-9)


RELAXATIONS: dict[str, Callable[[float], AcceptancePolicy]] = {
    "Addition": Addition,
    "Amplify": lambda s: Amplify(1 + 4 * s),
    "CSD": lambda s: CSD(lam=1.0, delta=s),
    "CSD kl": lambda s: CSD(lam=1.0, delta=3 * s, gate="kl"),
    "CSD reverse kl": lambda s: CSD(lam=1.0, delta=3 * s, gate="reverse_kl"),
    "CSD normalised": lambda s: CSD(lam=s, delta=0.9, normalize_entropy=True),
    "EntropyOnly": EntropyOnly,
    "TVGate": TVGate,
    "KLGate": lambda s: KLGate(3 * s),
    "KLGate reverse": lambda s: KLGate(3 * s, reverse=True),
    "LANTERN": lambda s: LANTERN(k=5, delta=s),
    "LANTERN++": lambda s: LANTERN(k=5, delta=1 + 9 * s, multiplicative=True),
    "Blend": lambda s: Blend(Exact(), Addition(0.5), s),
}
VETOES: dict[str, Callable[[float], AcceptancePolicy]] = {
    "CoolSD": lambda s: CoolSD(0.1 + 3 * s),
    "EntropyAware": lambda s: EntropyAware(0.5 + 10 * s),
}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.1, 4.0), st.floats(0, 1))
def test_speed_and_spent_tv_lie_on_one_line(seed: int, scale: float, strength: float) -> None:
    """P_rej + TV(out, q) = TV(p, q) for every b at or above the exact rule (CSD, Theorem 3.2)."""
    p, q = laws(seed, scale=scale)
    c = whole(p, q)
    for make in (*RELAXATIONS.values(), lambda _: Exact()):
        policy = make(strength).bind(MODEL)
        b = policy.acceptance(c)
        assert not policy.may_veto and (b >= Exact().acceptance(c) - 1e-9).all()
        rejected = 1 - (p * b).sum(-1)
        assert torch.allclose(rejected + policy.spent_tv(c, b), c.tv[..., 0], atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.1, 4.0), st.floats(0, 2))
def test_a_veto_costs_passes_and_nothing_else(seed: int, scale: float, least: float) -> None:
    p, q = laws(seed, scale=scale)
    c = whole(p, q)
    for policy in (Veto(min_ratio=least), JacobiMatch(), Blend(JacobiMatch(), Exact(), 0.3)):
        b = policy.acceptance(c)
        assert policy.exact and (b <= Exact().acceptance(c) + 1e-12).all()
        assert torch.allclose(p * b + policy.redrawn(c, b), q, atol=1e-12)
        assert float(policy.spent_tv(c, b).max()) < 1e-12


@pytest.mark.parametrize("name", [*RELAXATIONS, *VETOES])
def test_acceptance_grows_with_strength(name: str) -> None:
    make = (RELAXATIONS | VETOES)[name]
    c = whole(*laws(1))
    values = [make(s).bind(MODEL).acceptance(c) for s in (0.0, 0.2, 0.5, 1.0)]
    assert all((b >= a - 1e-12).all() for a, b in itertools.pairwise(values))
    assert (values[-1] > values[0]).any()


def test_every_policy_with_a_strength_is_named_above() -> None:
    """Without GSD, whose larger groups can lower an acceptance; RiskGated has its own test."""
    known = {type(make(0.5)) for make in (RELAXATIONS | VETOES).values()} | {GSD, RiskGated}
    found = {getattr(policies, name) for name in class_names("csd_policy.policies")}
    assert {cls for cls in found if cls.strength is not None} == known


# Formulas, written again for one token at a time


def scalar_ratio(p: Tensor, q: Tensor, x: int) -> float:
    return float(q[x] / p[x])


def scalar_entropy(q: Tensor) -> float:
    return -sum(float(v) * math.log(float(v)) for v in q)


def scalar_kl(p: Tensor, q: Tensor) -> float:
    return sum(float(a) * math.log(float(a) / float(b)) for a, b in zip(p, q, strict=True))


def scalar_gsd(p: Tensor, q: Tensor, x: int, group: int, p_max: float, d_max: float) -> float:
    order = sorted(range(len(q)), key=lambda token: (-float(q[token]), token))
    place = order.index(x)
    near = order[max(0, place - group // 2) : place + group // 2 + 1]
    members = [
        y
        for y in near
        if abs(float(q[y] - q[x])) <= p_max and math.dist(CODES[x], CODES[y]) <= d_max
    ]
    return sum(float(q[y]) for y in members) / sum(float(p[y]) for y in members)


def scalar_lantern(p: Tensor, q: Tensor, x: int, k: int, bound: float) -> float:
    others = sorted(
        (y for y in range(len(q)) if y != x), key=lambda y: math.dist(CODES[x], CODES[y])
    )
    mass = 0.0
    for y in others[:k]:
        if mass + float(q[y]) > bound:
            break
        mass += float(q[y])
    return (float(q[x]) + mass) / float(p[x])


def scalar_entropy_aware(p: Tensor, q: Tensor, x: int, scale: float, spread: float) -> float:
    """Share of uniform numbers whose stretched threshold lies below q/p."""
    u = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    h = scalar_entropy(q)
    threshold = h / scale * (0.5 + (1 - h / spread) * (u - 0.5))
    return float((threshold < scalar_ratio(p, q, x)).double().mean())


FORMULAS: list[tuple[AcceptancePolicy, Callable[[Tensor, Tensor, int], float]]] = [
    (Exact(), scalar_ratio),
    (JacobiMatch(), lambda p, q, x: float(q[x])),
    (Addition(0.2), lambda p, q, x: scalar_ratio(p, q, x) + 0.2),
    (Amplify(2.0), lambda p, q, x: scalar_ratio(p, q, x) * 2),
    (CoolSD(1.5, 0.7, 0.1), lambda p, q, x: scalar_ratio(p, q, x) * 1.5 * math.exp(-0.1)),
    (EntropyOnly(0.1), lambda p, q, x: scalar_ratio(p, q, x) + 0.1 * scalar_entropy(q)),
    (
        CSD(lam=0.2, delta=1.5, gate="kl"),
        lambda p, q, x: (
            scalar_ratio(p, q, x) + (0.2 * scalar_entropy(q) if scalar_kl(p, q) < 1.5 else 0)
        ),
    ),
    (
        CSD(lam=0.2, delta=1.5, gate="reverse_kl"),
        lambda p, q, x: (
            scalar_ratio(p, q, x) + (0.2 * scalar_entropy(q) if scalar_kl(q, p) < 1.5 else 0)
        ),
    ),
    (
        KLGate(1.5, reverse=True),
        lambda p, q, x: 1.0 if scalar_kl(q, p) < 1.5 else scalar_ratio(p, q, x),
    ),
    (EntropyAware(2.0, 5.0), lambda p, q, x: scalar_entropy_aware(p, q, x, 2.0, 5.0)),
    (GSD(3, 0.3, 1.5), lambda p, q, x: scalar_gsd(p, q, x, 3, 0.3, 1.5)),
    (GSD(5, 0.1, 1.2), lambda p, q, x: scalar_gsd(p, q, x, 5, 0.1, 1.2)),
    (GSD(50, 1.0, None), lambda p, q, x: scalar_gsd(p, q, x, 50, 1.0, math.inf)),
    (LANTERN(3, 0.2), lambda p, q, x: scalar_lantern(p, q, x, 3, 0.2)),
    (LANTERN(1000, 0.5), lambda p, q, x: scalar_lantern(p, q, x, 5, 0.5)),
    (
        LANTERN(4, 3.0, multiplicative=True),
        lambda p, q, x: scalar_lantern(p, q, x, 4, 2 * float(q[x])),
    ),
    (
        Veto(Addition(0.2), 0.6),
        lambda p, q, x: scalar_ratio(p, q, x) + 0.2 if scalar_ratio(p, q, x) >= 0.6 else 0.0,
    ),
]


@pytest.mark.parametrize(("policy", "formula"), FORMULAS, ids=repr)
def test_formula(policy: AcceptancePolicy, formula: Callable[[Tensor, Tensor, int], float]) -> None:
    bound = policy.bind(MODEL)
    for seed in range(12):
        p, q = laws(seed, scale=1.0, drafts=1)
        b = bound.acceptance(whole(p, q))[0, 0]
        for x in range(6):
            expected = min(1.0, max(0.0, formula(p[0, 0], q[0, 0], x)))
            assert float(b[x]) == pytest.approx(expected, abs=2e-5), (seed, x)


def test_cool_sd_tightens_along_the_window() -> None:
    p, q = laws(0, drafts=1)
    c = whole(p.expand(-1, 4, -1), q.expand(-1, 4, -1))
    b = CoolSD(1.2, nu=0.5).acceptance(c)[0]
    for i in range(4):
        expected = (1.2 * math.exp(-0.5 * i) * q / p)[0, 0].clamp(max=1)
        assert torch.allclose(b[i], expected)


def test_a_group_ends_where_the_support_ends() -> None:
    """Tokens of target probability 0 are in no order, so that they belong to no group."""
    q = torch.tensor([[[0.6, 0.4, 0.0, 0.0, 0.0, 0.0]]])
    p = torch.tensor([[[0.2, 0.3, 0.1, 0.1, 0.1, 0.2]]])
    b = GSD(group=5, p_threshold=1.0, d_threshold=None).accept_prob(whole(p, q))
    assert b[0, 0].tolist() == pytest.approx([2.0, 2.0, 0.0, 0.0, 0.0, 0.0])


def test_group_of_one_is_exact_and_both_residuals_are_charged() -> None:
    p, q = laws(3, drafts=2000)
    c = whole(p, q)
    assert torch.allclose(GSD(1).bind(MODEL).acceptance(c), Exact().acceptance(c))
    spent = []
    for rule in ("published", "optimal"):
        policy = GSD(3, 1.0, None, residual_rule=rule)  # type: ignore[arg-type]
        b = policy.acceptance(c)
        out = p * b + policy.redrawn(c, b)
        assert torch.allclose(policy.spent_tv(c, b), (out - q).abs().sum(-1) / 2)
        spent.append(policy.spent_tv(c, b))
    assert (spent[0] >= spent[1] - 1e-12).all() and (spent[0] > spent[1] + 1e-6).any()


def test_risk_chooses_between_inner_and_exact() -> None:
    p, q = laws(5)
    risk = torch.tensor([[[0.0], [1.0], [0.5]]], dtype=torch.float64)
    c = whole(p, q, risk=risk)
    for inner in (CSD(delta=1.0), GSD(5, 1.0, None)):
        policy = RiskGated(inner)
        b, b_inner, b_exact = (r.acceptance(c) for r in (policy, inner, Exact()))
        assert b[:, 0].equal(b_inner[:, 0]) and b[:, 1].equal(b_exact[:, 1])
        assert torch.allclose(b[:, 2], (b_inner + b_exact)[:, 2] / 2)
        out = p * b + policy.redrawn(c, b)
        out_inner = p * b_inner + inner.redrawn(c, b_inner)
        assert torch.allclose(out[:, 0], out_inner[:, 0]) and torch.allclose(out[:, 1], q[:, 1])
        assert torch.allclose(out[:, 2], (out_inner + q)[:, 2] / 2)
    gentle = RiskGated(CSD(delta=1.0), strength=0.0).acceptance(c)
    assert gentle.equal(CSD(delta=1.0).acceptance(c))


# What the loop makes of them


RISK = FixedRisk([[0.0, 1.0], [0.5, 0.0]])
RELAXED: list[AcceptancePolicy] = [
    *(make(0.6) for make in (RELAXATIONS | VETOES).values()),
    GSD(5, 1.0, None),
    GSD(5, 1.0, 1.2, residual_rule="optimal"),
    Veto(Addition(0.4), 0.3),
    RiskGated(CSD(delta=0.9), RISK, strength=0.5),
]


def grid_model() -> TableModel:
    tables = random_table(2, 12, 6), random_table(3, 12, 6)
    return TableModel(*tables, grid=(3, 4), codebook=CODES)


@pytest.mark.parametrize("draft", [Independent(), MaximalCoupling()], ids=repr)
@pytest.mark.parametrize("policy", RELAXED, ids=repr)
def test_budget_is_a_hard_bound(policy: AcceptancePolicy, draft: Any) -> None:
    prompts, seeds = [""] * 100, list(range(100))
    for budget in (0.0, 0.3):
        config = DecodeConfig(window=6, tv_budget=budget)
        result = JacobiDecoder(grid_model(), policy, draft, config).generate(prompts, seeds)
        assert max(result.stats.spent_tv) <= budget + 1e-6
        if budget == 0 and not policy.may_veto:
            exact = JacobiDecoder(grid_model(), Exact(), draft, DecodeConfig(window=6))
            assert result.tokens.equal(exact.generate(prompts, seeds).tokens)


@pytest.mark.parametrize("policy", [Addition(0.3), CSD(delta=0.8), LANTERN(3, 0.3)], ids=repr)
def test_estimated_spent_tv_has_the_mean_of_the_exact_one(policy: AcceptancePolicy) -> None:
    runs = 5_000
    exact, estimate = (
        JacobiDecoder(grid_model(), policy, Gumbel(), DecodeConfig(window=6, spent_tv=how))
        .generate([""] * runs, range(runs))
        for how in ("exact", "estimate")
    )  # fmt: skip
    assert exact.tokens.equal(estimate.tokens)
    assert exact.stats.forward_passes == estimate.stats.forward_passes
    difference = np.array(exact.stats.spent_tv) - np.array(estimate.stats.spent_tv)
    assert abs(difference.mean()) < 4 * difference.std() / math.sqrt(runs)
    assert np.mean(exact.stats.spent_tv) > 20 * difference.std() / math.sqrt(runs)


@pytest.mark.parametrize("policy", [GSD(), CoolSD(), Veto(CSD())], ids=repr)
def test_estimates_are_refused_where_they_do_not_hold(policy: AcceptancePolicy) -> None:
    with pytest.raises(ValueError, match="'estimate'.*expected 'exact'"):
        JacobiDecoder(grid_model(), policy, config=DecodeConfig(spent_tv="estimate"))


def test_an_estimate_cannot_hold_a_budget() -> None:
    with pytest.raises(ValueError, match=r"tv_budget is 0.5.*expected spent_tv exact"):
        DecodeConfig(tv_budget=0.5, spent_tv="estimate")


def test_risk_is_recorded_by_place() -> None:
    policy = RiskGated(CSD(delta=0.9), RISK)
    result = JacobiDecoder(grid_model(), policy, Gumbel(), DecodeConfig(window=5)).generate(
        [""] * 20, range(20)
    )
    judged = ~result.trace.risk.isnan()
    rows = [[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0], [0.5, 0.5, 0.0, 0.0]]
    wanted = torch.tensor(rows).flatten().expand_as(judged)
    assert judged.any() and result.trace.risk[judged].equal(wanted[judged])
    assert judged.equal(~result.trace.b.isnan())


def test_without_a_risk_map_risk_gated_cannot_decode() -> None:
    with pytest.raises(ValueError, match=r"needs \['risk'\], which nothing provides"):
        JacobiDecoder(grid_model(), RiskGated())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Addition(-0.1), "eps is -0.1, expected a finite number at least 0"),
        (lambda: Amplify(0.5), "k is 0.5, expected a finite number at least 1"),
        (lambda: CoolSD(nu=-1), "nu is -1"),
        (lambda: EntropyAware(scale=0), "scale is 0"),
        (lambda: GSD(group=0), "group is 0"),
        (lambda: GSD(p_threshold=2), r"p_threshold is 2, expected a finite number in \[0, 1\]"),
        (lambda: GSD(d_threshold=-1), "d_threshold is -1"),
        (lambda: GSD(residual_rule="best"), "residual_rule is 'best'"),  # type: ignore[arg-type]
        (lambda: LANTERN(k=-1), "k is -1"),
        (lambda: LANTERN(delta=5), r"delta is 5, expected a finite number in \[0, 1\]"),
        (lambda: LANTERN(delta=0.5, multiplicative=True), "delta is 0.5"),
        (lambda: CSD(gate="l2"), "gate is 'l2', expected one of tv, kl, reverse_kl"),  # type: ignore[arg-type]
        (lambda: CSD(delta=-1, gate="kl"), "delta is -1"),
        (lambda: KLGate(-1), "delta is -1"),
        (lambda: Blend(weight=1.5), "weight is 1.5"),
        (lambda: Blend(first="Exact"), "first is 'Exact'"),  # type: ignore[arg-type]
        (lambda: Veto(ExactMatch()), r"inner is ExactMatch\(\).*does not need noise"),
        (lambda: Veto(min_ratio=-1), "min_ratio is -1"),
        (lambda: RiskGated(strength=-1), "strength is -1"),
        (lambda: RiskGated(risk=0.5), "risk is 0.5, expected a RiskMap"),  # type: ignore[arg-type]
        (
            lambda: RiskGated(RiskGated(risk=FixedRisk([[1.0]])), FixedRisk([[0.0]])),
            "holds 2 risk maps",
        ),
        (lambda: FixedRisk([[0.0], []]), "rows of equal length"),
        (lambda: FixedRisk([[1.5]]), "values holds 1.5"),
        (lambda: GSD().bind(TableModel(random_table(0))), "needs a codebook"),
        (lambda: LANTERN().bind(TableModel(random_table(0))), "needs a codebook"),
        (lambda: GSD().accept_prob(whole(*laws(0))), "is not bound to a model"),
        (
            lambda: GSD().bind(MODEL).accept_prob(whole(*laws(0, size=5))),
            "is bound to 6 codes, expected 5",
        ),
    ],
)
def test_wrong_parameters_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
