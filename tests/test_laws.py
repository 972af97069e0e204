"""Exact means exact, relaxed means as relaxed as said: joint laws of whole images, enumerated.

Wrong rules must fail. ``tests/test_exactness.py`` has the mistakes of published code.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from chi_square import log10_p
from gumbel_reference import gumbel_counts
from scipy.stats import chi2_contingency

from csd_policy import drafts, policies
from csd_policy.arguments import class_names
from csd_policy.candidates import Candidates
from csd_policy.decoder import JacobiDecoder
from csd_policy.drafts import DraftStrategy, Gumbel, Independent, MaximalCoupling, Tail
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
from csd_policy.redraft import Redrafter
from csd_policy.risk import FixedRisk
from csd_policy.rows import Rows
from csd_policy.sampling import Noise, Purpose
from csd_policy.starts import STARTS, Start
from csd_policy.testing import (
    TableModel,
    image_counts,
    joint_law,
    law_error,
    own_law,
    random_table,
)
from csd_policy.types import DecodeConfig

LIMIT = 0.02  # sampling alone gives 0.003 to 0.006 for 64 images and 200,000 runs
PLAIN = DecodeConfig(window=3)
SETTINGS = {
    "plain": PLAIN,
    "top_k": DecodeConfig(window=3, top_k=2),
    "top_p": DecodeConfig(window=3, top_p=0.8),
    "guidance": DecodeConfig(window=3, guidance_scale=2.5),
    "wide": DecodeConfig(window=5, temperature=1.5),
    "budget": DecodeConfig(window=3, tv_budget=0.0),
}
RISK = FixedRisk([[0.3, 1.0, 0.0]])
POLICIES = [
    Exact(),
    JacobiMatch(),
    ExactMatch(),
    Veto(),
    Blend(Exact(), Veto(min_ratio=0.8), 0.3),
    CSD(lam=0.3, delta=0.9),
    CSD(lam=0.5, delta=0.6, gate="kl"),
    EntropyOnly(0.2),
    TVGate(0.6),
    KLGate(0.5, reverse=True),
    Addition(0.2),
    Amplify(2.0),
    CoolSD(2.0),
    EntropyAware(1.0),
    GSD(group=3, p_threshold=0.5, d_threshold=1.0),
    LANTERN(k=2, delta=0.3),
    Veto(CSD(delta=0.9), min_ratio=0.4),
    Blend(JacobiMatch(), GSD(p_threshold=0.5, d_threshold=1.0), 0.6),
    RiskGated(CSD(lam=1.0, delta=0.9), RISK),
]
DRAFTS = [Independent(), Gumbel(), MaximalCoupling()]
FILTERS = ["plain", "top_k", "top_p", "guidance"]
RUNS = 40_000
SMALLEST = 1e-4  # p-value; with some 230 tests here, one in 40 suites of other seeds would fail


def test_every_policy_and_draft_is_tested() -> None:
    for names, module, tested in (
        (class_names("csd_policy.policies"), policies, POLICIES),
        (class_names("csd_policy.drafts"), drafts, DRAFTS),
    ):
        assert {getattr(module, name) for name in names} == {type(thing) for thing in tested}


def fit(counts: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    """p-value of a chi-square test; images outside the support fail."""
    assert not counts[expected < 1e-9].any()
    return float(10 ** log10_p(torch.as_tensor(counts), torch.as_tensor(expected)))


def table_model() -> TableModel:
    """27 images; two of the three codes are near each other."""
    codebook = torch.tensor([[0.0], [0.5], [2.0]])
    return TableModel(random_table(0, size=3), random_table(1, size=3), codebook=codebook)


def law_p_value(policy: AcceptancePolicy, draft: DraftStrategy, config: DecodeConfig) -> float:
    """How well decoded images fit the law that the pair must have: the target's, or its own."""
    model = table_model()
    counts = image_counts(model, policy, draft, config, RUNS)[0].numpy()
    if policy.exact:
        return fit(counts, RUNS * joint_law(model, config).numpy())
    if isinstance(draft, Gumbel):
        others = gumbel_counts(model, policy, config, 8_000)
        both = np.stack([counts, others])
        both = both[:, both.sum(0) >= 5]
        return float(chi2_contingency(both).pvalue)
    return fit(counts, RUNS * own_law(model, policy, draft, config))


@pytest.mark.parametrize(
    ("policy", "draft", "name"),
    [
        (policy, DRAFTS[(i + k) % 3], name)
        for i, policy in enumerate(POLICIES)
        for k, name in enumerate(FILTERS)
    ],
    ids=repr,
)
def test_pairs_have_their_law(policy: AcceptancePolicy, draft: DraftStrategy, name: str) -> None:
    """Every pair of policy, draft and filter; ``own_law`` knows that exact rules are exact."""
    assert law_p_value(policy, draft, SETTINGS[name]) > SMALLEST


@pytest.mark.slow
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("draft", DRAFTS, ids=repr)
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_all_have_their_law(policy: AcceptancePolicy, draft: DraftStrategy, name: str) -> None:
    assert law_p_value(policy, draft, SETTINGS[name]) > SMALLEST


@pytest.mark.parametrize("draft", [Independent(), MaximalCoupling()], ids=repr)
@pytest.mark.parametrize("policy", [Exact(), JacobiMatch(), Veto()], ids=repr)
def test_exact_rules_enumerate_to_the_target(
    policy: AcceptancePolicy, draft: DraftStrategy, table: TableModel
) -> None:
    """No sampling: the law of the whole process is the target's to rounding."""
    for config in (PLAIN, DecodeConfig(window=4, top_k=3)):
        expected = joint_law(table, config).numpy()
        assert np.abs(own_law(table, policy, draft, config) - expected).max() < 1e-12


@pytest.mark.parametrize("start", [s for s in STARTS if s != "random"])
def test_starts_leave_the_law_alone(start: Start) -> None:
    model = TableModel(random_table(3, codes=4, size=3), grid=(2, 2), row_ends=True)
    config = DecodeConfig(window=4)
    for draft in (Gumbel(start), MaximalCoupling(start)):
        counts = image_counts(model, Exact(), draft, config, 40_000)[0].numpy()
        assert fit(counts, 40_000 * joint_law(model, config).numpy()) > SMALLEST


@pytest.mark.parametrize("draft", DRAFTS, ids=repr)
def test_exact_match_draws_the_picture_of_ar(draft: DraftStrategy, table: TableModel) -> None:
    """Bit for bit, at any window and with any draft: W = 1 draws with the same noise."""
    config = DecodeConfig(guidance_scale=2.0, top_k=3)
    for window in (2, 3, 6):
        tokens = [
            JacobiDecoder(table, rule, draft, replace(config, window=w))
            .generate([""] * 500, range(500))
            .tokens
            for rule, w in ((ExactMatch(), window), (Exact(), 1))
        ]
        assert tokens[0].equal(tokens[1])


@pytest.mark.parametrize("draft", DRAFTS, ids=repr)
@pytest.mark.parametrize("name", SETTINGS)
def test_exact_rule_reproduces_the_joint_law(
    name: str, draft: DraftStrategy, table: TableModel
) -> None:
    policy = CSD(delta=0.8) if name == "budget" else Exact()  # a budget of 0 leaves nothing to CSD
    assert law_error(table, policy, draft, SETTINGS[name]) < LIMIT


@pytest.mark.parametrize("draft", DRAFTS, ids=repr)
def test_forced_slots_leave_the_law_alone(draft: DraftStrategy) -> None:
    model = TableModel(random_table(3, codes=4, size=3), grid=(2, 2), row_ends=True)
    assert law_error(model, Exact(), draft, DecodeConfig(window=4)) < LIMIT


def test_joint_law_against_a_triple_loop(table: TableModel) -> None:
    q = table.table[0].double().softmax(-1)
    expected = [
        float(q[0, 0, a] * q[1, a + 1, b] * q[2, b + 1, c])
        for a in range(4)
        for b in range(4)
        for c in range(4)
    ]
    got = joint_law(table, PLAIN)
    assert torch.allclose(got, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("policy", [CSD(lam=2.0, delta=0.9), TVGate(delta=0.9)], ids=repr)
def test_relaxed_rules_are_off_by_no_more_than_their_spent_tv(
    policy: AcceptancePolicy, table: TableModel
) -> None:
    runs = 200_000
    result = JacobiDecoder(table, policy, Independent(), PLAIN).generate([""] * runs, range(runs))
    spent = sum(result.stats.spent_tv) / runs
    error = law_error(table, policy, Independent(), PLAIN)
    assert LIMIT < error < spent + 0.006


# Rules that look right and are not. Each must be caught by the test above.


class Doubled(AcceptancePolicy):
    """Ratio doubled."""

    def accept_prob(self, c: Candidates) -> torch.Tensor:
        return 2 * c.ratio


class Halved(AcceptancePolicy):
    """A veto of half the acceptances; the default residual keeps it exact."""

    exact, may_veto = True, True

    def accept_prob(self, c: Candidates) -> torch.Tensor:
        return c.ratio.clamp(max=1) / 2


class HalvedPlainResidual(Halved):
    """The same veto with the residual left at q - p."""

    def residual(self, c: Candidates) -> torch.Tensor:
        return (c.q_all - c.p_all).clamp(min=0)


class RedrawFromTarget(Exact):
    """Redraw from q in place of the residual."""

    def residual(self, c: Candidates) -> torch.Tensor:
        return c.q_all


class OnlyRejectedZeroed(Exact):
    """Only the rejected token zeroed."""

    def residual(self, c: Candidates) -> torch.Tensor:
        return c.q_all.scatter(-1, c.drafted[..., None], 0.0)


class SoftmaxResidual(Exact):
    """Softmax over the residual."""

    def residual(self, c: Candidates) -> torch.Tensor:
        return (c.q_all - c.p_all).clamp(min=0).softmax(-1)


class OlderLaw(Independent):
    """Draws anew, but states a law that is not the one it drew from."""

    def redraw(self, tail: Tail) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, p = super().redraw(tail)
        return tokens, (p + p.roll(1, -1)) / 2


def test_a_veto_is_exact_with_the_default_residual(table: TableModel) -> None:
    assert law_error(table, Halved(), Independent(), PLAIN) < LIMIT


@pytest.mark.parametrize(
    "rule", [Doubled, HalvedPlainResidual, RedrawFromTarget, OnlyRejectedZeroed, SoftmaxResidual]
)
def test_wrong_rules_fail(rule: type[AcceptancePolicy], table: TableModel) -> None:
    assert law_error(table, rule(), Independent(), PLAIN, runs=50_000) > 2 * LIMIT


def test_wrong_stored_law_fails(table: TableModel) -> None:
    assert law_error(table, Exact(), OlderLaw(), PLAIN, runs=50_000) > 2 * LIMIT


def _biased_table() -> TableModel:
    """Laws that change with the code before, so that drafts are often made with the wrong one.

    Their residual has two tokens of equal mass, of which one was likely under the draft's law.
    """
    draft, target = [0.5, 0.44, 0.05, 0.01], [0.01, 0.69, 0.29, 0.01]
    logits = torch.zeros(3, 5, 4)
    logits[0] = torch.tensor([0.94, 0.02, 0.02, 0.02]).log()
    logits[1] = torch.tensor([draft, target, draft, draft, draft]).log()
    logits[2] = torch.tensor([draft, draft, target, draft, draft]).log()
    return TableModel(logits)


def test_residual_with_the_drafts_gumbel_noise_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Noise.exponential

    def shared(self: Noise, purpose: Purpose, *args: object) -> torch.Tensor:
        same = Purpose.TARGET if purpose == Purpose.RESIDUAL else purpose
        return plain(self, same, *args)  # type: ignore[arg-type]

    table = _biased_table()
    assert law_error(table, Exact(), Gumbel(), PLAIN) < LIMIT
    monkeypatch.setattr(Noise, "exponential", shared)
    assert law_error(table, Exact(), Gumbel(), PLAIN, runs=50_000) > 2 * LIMIT


def test_verifying_a_committed_draft_again_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token kept from the old window under the law of the new one."""
    plain = Redrafter.__call__

    def keeps_tokens(
        self: Redrafter, rows: Rows, q: torch.Tensor, committed: torch.Tensor, noise: Noise
    ) -> None:
        old = torch.nn.functional.pad(rows.drafts, (0, rows.drafts.shape[1] + 1))
        plain(self, rows, q, committed, noise)
        width = rows.drafts.shape[1]
        source = committed[:, None] + torch.arange(width)
        kept = old.gather(1, source.clamp(max=old.shape[1] - 1))
        rows.drafts.copy_(torch.where(source < width, kept, rows.drafts))

    monkeypatch.setattr(Redrafter, "__call__", keeps_tokens)
    assert law_error(_biased_table(), Exact(), Independent(), PLAIN, runs=50_000) > 2 * LIMIT
