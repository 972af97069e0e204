"""Replay: given pictures, token by token, and what draft and target said of them on the way."""

from typing import Any

import pytest
import torch

from csd_policy import DecodeConfig, JacobiDecoder
from csd_policy.drafts import Gumbel, Independent, MaximalCoupling
from csd_policy.policies import Exact, ExactMatch, TVGate
from csd_policy.testing import TableModel, random_table
from csd_policy.trace import ACCEPTED, BONUS, RESAMPLED

DRAFTS = [Independent(), Gumbel(), MaximalCoupling("above")]


def table(row_ends: bool = False) -> TableModel:
    logits, unconditional = random_table(2, 12, 5), random_table(3, 12, 5)
    return TableModel(logits, unconditional, grid=(3, 4), row_ends=row_ends)


@pytest.mark.parametrize("draft", DRAFTS, ids=repr)
@pytest.mark.parametrize("policy", [Exact(), ExactMatch()], ids=repr)
@pytest.mark.parametrize("row_ends", [False, True])
def test_an_exact_picture_takes_the_passes_that_made_it(
    policy: Any, draft: Any, row_ends: bool
) -> None:
    decoder = JacobiDecoder(table(row_ends), policy, draft, DecodeConfig(window=5))
    prompts, seeds = [""] * 300, range(300)
    drawn = decoder.generate(prompts, seeds)
    again = decoder.replay(prompts, drawn.tokens, seeds)
    assert again.tokens.equal(drawn.tokens)
    assert again.stats.forward_passes == drawn.stats.forward_passes
    for name, value in vars(drawn.trace).items():
        assert value.nan_to_num(-1).equal(getattr(again.trace, name).nan_to_num(-1)), name
    assert not drawn.others and again.others.keys() == {"alternative", "correction"}
    rejected = drawn.trace.how == RESAMPLED
    if isinstance(policy, Exact):
        assert again.others["correction"][rejected].equal(drawn.tokens[rejected])


def test_any_picture_can_be_replayed_and_drafts_are_recorded() -> None:
    generator = torch.Generator().manual_seed(0)
    given = torch.randint(5, (200, 12), generator=generator)
    decoder = JacobiDecoder(table(), TVGate(0.9), config=DecodeConfig(window=4))
    result = decoder.replay([""] * 200, given, range(200))
    assert result.tokens.equal(given)
    trace = result.trace
    assert trace.draft[trace.how == ACCEPTED].equal(given[trace.how == ACCEPTED].int())
    assert (trace.draft[trace.how == RESAMPLED] != given[trace.how == RESAMPLED]).all()
    assert trace.draft[trace.how == BONUS].eq(-1).all()
    assert {ACCEPTED, RESAMPLED, BONUS} <= set(trace.how.unique().tolist())


def test_alternatives_follow_the_law_of_the_draft() -> None:
    """At window 1 there is no draft and the law is the target's: known from the table."""
    model = TableModel(random_table(0, 1, 6))
    decoder = JacobiDecoder(model, config=DecodeConfig(window=1))
    runs = 40_000
    result = decoder.replay([""] * runs, torch.zeros(runs, 1, dtype=torch.int64), range(runs))
    other = result.others["alternative"]
    found = torch.bincount(other[:, 0], minlength=6) / runs
    drawn = decoder.generate([""] * runs, range(runs)).tokens[:, 0]
    expected = torch.bincount(drawn, minlength=6) / runs
    assert (found - expected).abs().sum() / 2 < 0.015
    # and they are another draw: as often equal as two independent ones are
    agree = (other[:, 0] == drawn).float().mean()
    assert abs(agree - (expected**2).sum()) < 0.01


def test_alternatives_of_a_one_hot_draft_are_the_draft() -> None:
    decoder = JacobiDecoder(table(), Exact(), config=DecodeConfig(window=12))
    given = torch.zeros(100, 12, dtype=torch.int64)
    result = decoder.replay([""] * 100, given, range(100))
    first = (result.trace.pass_number == 1) & (result.trace.draft >= 0)  # fresh: p is one-hot
    assert first.any()
    assert result.others["alternative"][first].equal(result.trace.draft[first].long())


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (torch.zeros(1, 12, dtype=torch.int32), "tokens are torch.int32"),
        (torch.zeros(2, 12, dtype=torch.int64), r"\[2, 12\], expected torch.int64 \[1, 12\]"),
        (torch.full((1, 12), 5), r"codes are in \[5, 5\], expected \[0, 5\)"),
    ],
)
def test_wrong_pictures_are_refused(tokens: torch.Tensor, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        JacobiDecoder(table()).replay([""], tokens, [0])
