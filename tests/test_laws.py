"""Exact means exact: joint laws of whole images, enumerated, and wrong rules that must fail."""

import inspect

import pytest
import torch

from csd_policy import policies
from csd_policy.candidates import Candidates
from csd_policy.decoder import JacobiDecoder
from csd_policy.drafts import DraftStrategy, Gumbel, Independent, Tail
from csd_policy.policies import CSD, AcceptancePolicy, EntropyOnly, Exact, TVGate
from csd_policy.rows import Rows
from csd_policy.sampling import Noise, Purpose
from csd_policy.testing import TableModel, joint_law, law_error, random_table
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
EXACT = [Exact(), CSD(lam=0), EntropyOnly(lam=0), TVGate(delta=0)]


def test_every_exact_policy_is_tested() -> None:
    found = [c for _, c in inspect.getmembers(policies, inspect.isclass) if c.exact]
    assert set(found) <= {type(policy) for policy in EXACT}


@pytest.mark.parametrize("draft", [Independent(), Gumbel()], ids=repr)
@pytest.mark.parametrize("name", SETTINGS)
def test_exact_rule_reproduces_the_joint_law(
    name: str, draft: DraftStrategy, table: TableModel
) -> None:
    policy = CSD(delta=0.8) if name == "budget" else Exact()  # a budget of 0 leaves nothing to CSD
    assert law_error(table, policy, draft, SETTINGS[name]) < LIMIT


@pytest.mark.parametrize("policy", EXACT[1:], ids=repr)
def test_policies_are_exact_at_zero_strength(policy: AcceptancePolicy, table: TableModel) -> None:
    assert law_error(table, policy, Gumbel(), PLAIN, runs=100_000) < LIMIT


@pytest.mark.parametrize("draft", [Independent(), Gumbel()], ids=repr)
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
    plain = JacobiDecoder._redraft

    def keeps_tokens(
        self: JacobiDecoder, rows: Rows, q: torch.Tensor, committed: torch.Tensor, noise: Noise
    ) -> None:
        old = torch.nn.functional.pad(rows.drafts, (0, rows.drafts.shape[1] + 1))
        plain(self, rows, q, committed, noise)
        width = rows.drafts.shape[1]
        source = committed[:, None] + torch.arange(width)
        kept = old.gather(1, source.clamp(max=old.shape[1] - 1))
        rows.drafts.copy_(torch.where(source < width, kept, rows.drafts))

    monkeypatch.setattr(JacobiDecoder, "_redraft", keeps_tokens)
    assert law_error(_biased_table(), Exact(), Independent(), PLAIN, runs=50_000) > 2 * LIMIT
