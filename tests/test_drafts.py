"""Draft strategies: what they keep, and what a position starts with."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from csd_policy.decoder import JacobiDecoder
from csd_policy.drafts import DraftStrategy, Gumbel, Independent, MaximalCoupling, Tail
from csd_policy.policies import Exact
from csd_policy.sampling import Noise, Purpose
from csd_policy.starts import STARTS, Known, Start, first_drafts
from csd_policy.testing import TableModel, random_table
from csd_policy.timing import PhaseTimer
from csd_policy.types import DecodeConfig

ROWS = 20_000


def tail(p: Tensor, q: Tensor, drafts: Tensor) -> Tail:
    """One position in each of many rows, drafted from p."""
    rows = len(drafts)
    return Tail(
        q.expand(rows, 1, -1),
        torch.zeros(rows, 1, dtype=torch.int64),
        torch.ones(rows, 1, dtype=torch.int64),
        Noise(torch.arange(rows), len(q)),
        drafts,
        p.expand(rows, 1, -1),
        torch.zeros(rows, 1, dtype=torch.int64),
    )


def tv(p: Tensor, q: Tensor) -> float:
    return float((p - q).abs().sum()) / 2


@pytest.mark.parametrize(
    ("draft", "least"),
    [
        (Independent(), lambda p, q: float((p * q).sum())),
        (Gumbel(), lambda p, q: (1 - tv(p, q)) / (1 + tv(p, q))),
        (MaximalCoupling(), lambda p, q: 1 - tv(p, q)),
    ],
    ids=["independent", "gumbel", "coupling"],
)
def test_drafts_persist_as_often_as_said(
    draft: DraftStrategy, least: Callable[[Tensor, Tensor], float]
) -> None:
    """And follow the law that is stored with them."""
    generator = torch.Generator().manual_seed(0)
    p, q = (1.5 * torch.randn(2, 5, generator=generator)).softmax(-1)
    noise = Noise(torch.arange(ROWS), 5)
    place = torch.zeros(ROWS, 1, dtype=torch.int64)
    nothing = place[:, :0], p.new_zeros(ROWS, 0, 5)
    first = Tail(p.expand(ROWS, 1, -1), place, place, noise, *nothing, place)
    drafts, law = draft.redraw(first)
    assert law.equal(p.expand(ROWS, 1, -1))
    tokens, law = draft.redraw(tail(p, q, drafts))
    assert law.equal(q.expand(ROWS, 1, -1))
    share = torch.bincount(tokens.flatten(), minlength=5) / ROWS
    assert (share - q).abs().max() < 0.015
    kept = float((tokens == drafts).double().mean())
    assert kept > least(p, q) - 0.015
    if not isinstance(draft, Gumbel):
        assert kept == pytest.approx(least(p, q), abs=0.015)


def test_coupling_of_equal_laws_keeps_every_draft() -> None:
    q = torch.tensor([0.7, 0.2, 0.1])
    drafts = torch.randint(3, (500, 1), generator=torch.Generator().manual_seed(0))
    tokens, _ = MaximalCoupling().redraw(tail(q, q, drafts))
    assert tokens.equal(drafts)


def known_grid() -> Known:
    """Two images with grids of 4 columns, of which five codes and two are known."""
    tokens = torch.zeros(2, 13, dtype=torch.int64)
    tokens[0, :5], tokens[1, :2] = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([6, 7])
    tokens[:, -1] = 9  # where what belongs nowhere is written
    laws = torch.nn.functional.one_hot(tokens, 10).float()
    return Known(tokens, laws, torch.tensor([5, 2]), 4)


@pytest.mark.parametrize("start", ["left", "sample_left", "above", "sample_above"])
def test_starts_copy_what_is_known(start: Start) -> None:
    position = torch.tensor([[5, 7, 8, 9, -1], [2, 3, 4, 5, 6]])
    noise = Noise(torch.tensor([0, 1]), 10)
    random = noise.token(Purpose.FRESH, position)
    got = first_drafts(start, position, noise, known_grid)
    none = [int(x) for x in random[1]]
    expected = {  # 8 is below 4, whose code is 5; 9 is below 5, not known, below 1, whose code is 2
        "left": [[5, 5, 5, 2, int(random[0, 4])], [7, 7, 6, 7, none[4]]],
        "above": [[2, 4, 5, 2, int(random[0, 4])], [none[0], none[1], 6, 7, none[4]]],
    }[start.removeprefix("sample_")]
    assert got.tolist() == expected


def test_starts_give_a_one_hot_law_or_the_uniform_one() -> None:
    model = TableModel(random_table(0, 6, 3), grid=(2, 3))
    for start in STARTS:
        decoder = JacobiDecoder(model, Exact(), Gumbel(start), DecodeConfig(window=4))
        rows = decoder._start(Noise(torch.arange(5), 3), others=(), given=None)
        assert rows.fresh.all()
        if start == "uniform":
            assert torch.allclose(rows.p, torch.full_like(rows.p, 1 / 3))
        else:
            assert rows.p.equal(torch.nn.functional.one_hot(rows.drafts, 3).float())
        assert (rows.laws is not None) == start.startswith("sample")


@pytest.mark.parametrize("start", ["left", "above"])
def test_the_loop_copies_from_what_it_knows(start: Start) -> None:
    """After every pass, against the committed codes and the drafts that a pass has seen."""
    model = TableModel(random_table(0, 24, 5), grid=(4, 6), row_ends=True)
    decoder = JacobiDecoder(model, Exact(), Gumbel(start), DecodeConfig(window=5))
    noise, timer = Noise(torch.arange(30), 5), PhaseTimer(model.device)
    rows, copied = decoder._start(noise, others=(), given=None), 0
    while int(rows.done.min()) < 28:
        decoder._step(1, rows, noise, timer)
        for row in range(30):
            codes, done = rows.tokens[row, :-1].tolist(), int(rows.done[row])
            places = [decoder._code_of_slot[done + i].item() for i in range(4)]
            known = codes[: sum(int(n) >= 0 for n in model.code_of_slot[:done])]
            for i, place in enumerate(places):
                if place >= 0 and not rows.fresh[row, i]:
                    known.append(int(rows.drafts[row, i]))
            for i, place in enumerate(places):
                if place < 0 or not rows.fresh[row, i]:
                    continue
                left = [known[n] for n in range(place - place % 6, len(known))]
                above = [known[n] for n in range(place % 6, len(known), 6)]
                source = left if start == "left" and left else above
                if source:
                    assert int(rows.drafts[row, i]) == source[-1]
                    copied += 1
    assert copied > 100


def test_an_unknown_start_is_refused() -> None:
    with pytest.raises(ValueError, match="start is 'below', expected one of random, uniform, left"):
        Independent("below")  # type: ignore[arg-type]
