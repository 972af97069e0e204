"""Risk maps: what they may see, when they are computed, and what that does to the law."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from csd_policy import AcceptancePolicy, Candidates, DecodeConfig, JacobiDecoder
from csd_policy.drafts import Gumbel, Independent, MaximalCoupling
from csd_policy.policies import CSD, Exact, RiskGated, TVGate, Veto
from csd_policy.risk import Canvas, FixedRisk, RiskMap
from csd_policy.testing import TableModel, check_risk_map, law_error, random_table

SIZE = 4


class Parity(RiskMap):
    """1 where the sum of the code and its place is odd: every code counts."""

    def compute(self, canvas: Canvas) -> Tensor:
        rows, columns = canvas.model.grid
        place = torch.arange(rows * columns, device=canvas.tokens.device)
        return ((canvas.tokens + place) % 2).float().unflatten(1, (rows, columns))


class Counting(RiskMap):
    """Remembers on how many known codes it was asked."""

    asked: list[list[int]] = []

    def compute(self, canvas: Canvas) -> Tensor:
        Counting.asked.append(canvas.known.tolist())
        return torch.full((len(canvas.tokens), *canvas.model.grid), 0.25)


class Vetoing(AcceptancePolicy):
    """Exact where the risk is low, and never accepts where it is high."""

    exact, may_veto, needs = True, True, frozenset({"risk"})

    def __init__(self, risk: RiskMap | None = None) -> None:
        self.risk = risk

    def accept_prob(self, c: Candidates) -> Tensor:
        return torch.where(c.risk > 0.5, 0.0, c.ratio)  # type: ignore[operator]


def grid_model(rows: int = 3, columns: int = 4) -> TableModel:
    return TableModel(random_table(3, rows * columns, SIZE), grid=(rows, columns))


def canvas(tokens: list[int], known: int) -> Canvas:
    return Canvas.of(torch.tensor([tokens]), torch.tensor([known]), grid_model(), [""])


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (12, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
        (6, [0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 2, 3]),
        (4, [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]),
        (2, [0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1]),
        (1, [0] * 12),
    ],
)
def test_unknown_codes_repeat_the_nearest_known_one_above(known: int, expected: list[int]) -> None:
    found = canvas(list(range(100, 112)), known)
    assert found.nearest[0].tolist() == expected
    assert found.tokens[0].tolist() == [100 + i for i in expected]


def test_risk_is_carried_on_below_the_known_codes() -> None:
    codes = [0, 1, 0, 1, 1, 1] + [3] * 6
    risk = Parity().risk(canvas(codes, 6))[0]
    own = [(code + i) % 2 for i, code in enumerate(codes[:6])]
    assert risk.tolist() == [own[i] for i in (0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 2, 3)]
    assert Parity().risk(canvas(codes, 0))[0].eq(1).all()  # nothing is known: as exact as can be


@pytest.mark.parametrize("refresh", [1, 3])
def test_a_map_is_computed_as_often_as_it_asks(refresh: int) -> None:
    Counting.asked = []
    decoder = JacobiDecoder(
        grid_model(), RiskGated(Exact(), Counting(refresh=refresh)), config=DecodeConfig(window=2)
    )
    passes: list[int] = []
    done: list[list[int]] = []

    def on_pass(number: int, slots: list[int]) -> None:
        passes.append(number)
        done.append(slots)

    result = decoder.generate(["", ""], [0, 1], on_pass=on_pass)
    due = [number for number in passes if number > 1 and (number - 1) % refresh == 0]
    assert Counting.asked == [done[number - 2] for number in due]
    assert result.stats.preview_passes == [0, 0] and result.stats.seconds["risk"] > 0
    judged = ~result.trace.risk.isnan()
    assert set(result.trace.risk[judged].tolist()) <= {0.25, 1.0}


@pytest.mark.parametrize("source", ["progressive", "preview"])
@pytest.mark.parametrize("draft", [Independent(), Gumbel(), MaximalCoupling()], ids=repr)
def test_a_veto_by_a_risk_map_stays_exact(source: Any, draft: Any) -> None:
    table = TableModel(random_table(0, 4), grid=(2, 2))
    policy = Vetoing(Parity(source, refresh=1))
    config = DecodeConfig(window=3)
    assert law_error(table, policy, draft, config, runs=50_000) < 0.02
    vetoed = JacobiDecoder(table, policy, draft, config).generate([""] * 500, range(500))
    plain = JacobiDecoder(table, Exact(), draft, config).generate([""] * 500, range(500))
    own = sum(vetoed.stats.forward_passes) - sum(vetoed.stats.preview_passes)
    assert own > sum(plain.stats.forward_passes)


def test_a_map_that_sees_the_drafts_would_bias_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the decoder's refusal protects from: the same veto, with the drafts on the canvas."""
    table = TableModel(random_table(0, 4), grid=(2, 2))
    policy, config = Vetoing(Parity("drafts", refresh=1)), DecodeConfig(window=3)
    with pytest.raises(ValueError, match="looks at the drafts"):
        JacobiDecoder(table, policy, config=config)
    monkeypatch.setattr("csd_policy.decoder.check_served", lambda policy, config: None)
    assert law_error(table, policy, Independent(), config, runs=50_000) > 0.05


def test_drafts_on_the_canvas_give_up_exactness() -> None:
    policy = RiskGated(Exact(), Parity("drafts"))
    assert not policy.exact and RiskGated(Exact(), Parity()).exact
    assert not Veto(policy).exact
    with pytest.raises(ValueError, match="spent_tv is 'exact', expected 'estimate'"):
        JacobiDecoder(grid_model(), policy)
    config = DecodeConfig(window=3, spent_tv="estimate")
    result = JacobiDecoder(grid_model(), RiskGated(TVGate(), Parity("drafts")), config=config)
    assert result.generate([""], [0]).record()["decode"]["spent_tv"] == "estimate"


def test_a_preview_is_paid_for_and_drawn_with_numbers_of_its_own() -> None:
    class Seen(Parity):
        tokens: list[Tensor] = []

        def compute(self, canvas: Canvas) -> Tensor:
            assert canvas.known.eq(12).all()
            Seen.tokens.append(canvas.tokens.clone())
            return super().compute(canvas)

    runs = 400
    config = DecodeConfig(window=4)
    policy = RiskGated(CSD(delta=0.9), Seen("preview"))
    result = JacobiDecoder(grid_model(), policy, config=config).generate([""] * runs, range(runs))
    (preview,) = Seen.tokens
    alone = JacobiDecoder(grid_model(), policy, config=config).generate([""], [7])
    assert Seen.tokens[1][0].equal(preview[7]) and alone.tokens[0].equal(result.tokens[7])
    own = [result.trace.pass_number[i].max().item() for i in range(runs)]
    paid = zip(result.stats.preview_passes, own, strict=True)
    assert result.stats.forward_passes == [a + b for a, b in paid]
    assert min(result.stats.preview_passes) > 0
    same = (preview == result.tokens).float().mean(0)  # as alike as two seeds are
    other = (preview.roll(1, 0) == result.tokens).float().mean(0)
    assert (same - other).abs().max() < 5 * (0.5 / runs) ** 0.5


@pytest.mark.parametrize("source", ["progressive", "preview"])
def test_a_picture_is_the_same_alone_and_in_a_batch(source: Any) -> None:
    policy = RiskGated(TVGate(delta=0.9), Parity(source, refresh=2))
    decoder = JacobiDecoder(grid_model(), policy, Gumbel(), DecodeConfig(window=4))
    together = decoder.generate([""] * 20, range(20))
    for seed in range(20):
        alone = decoder.generate([""], [seed])
        assert alone.tokens[0].equal(together.tokens[seed])
        assert alone.trace.risk[0].nan_to_num(-1).equal(together.trace.risk[seed].nan_to_num(-1))


class Shared(RiskMap):
    """Counts how often it was bound."""

    bound = 0

    def bind(self, model: Any) -> "Shared":
        Shared.bound += 1
        return Shared(self.source, self.refresh)

    def compute(self, canvas: Canvas) -> Tensor:
        return torch.zeros(len(canvas.tokens), *canvas.model.grid)


def test_a_map_inside_wrappers_is_bound_once() -> None:
    policy = Veto(RiskGated(RiskGated(CSD(), Shared()), Shared())).bind(grid_model())
    assert Shared.bound == 1 and policy.risk is not None


class Wrong(RiskMap):
    """Gives what it was made with."""

    def __init__(self, give: Callable[[Canvas], Any] = lambda canvas: None) -> None:
        super().__init__()
        self.give = give

    def compute(self, canvas: Canvas) -> Tensor:
        found: Tensor = self.give(canvas)
        return found


@pytest.mark.parametrize(
    ("give", "message"),
    [
        (lambda canvas: None, r"gives None, expected floats \[1, 3, 4\]"),
        (lambda canvas: torch.zeros(1, 4, 3), r"gives torch.float32 \[1, 4, 3\]"),
        (lambda canvas: torch.zeros(1, 3, 4).long(), "gives torch.int64"),
        (lambda canvas: torch.full((1, 3, 4), 1.5), r"gives \[1.5, 1.5\], expected \[0, 1\]"),
        (lambda canvas: torch.full((1, 3, 4), torch.nan), r"gives \[nan, nan\]"),
    ],
)
def test_a_wrong_map_is_named(give: Callable[[Canvas], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Wrong(give).risk(canvas([0] * 12, 12))


@pytest.mark.parametrize("arguments", [{"source": "canvas"}, {"refresh": 0}, {"refresh": 1.5}])
def test_wrong_arguments_are_named(arguments: Any) -> None:
    name, value = next(iter(arguments.items()))
    with pytest.raises(ValueError, match=f"{name} is {value!r}, expected"):
        Parity(**arguments)


@pytest.mark.parametrize("risk_map", [FixedRisk(), Parity(), Parity("preview", 3)], ids=repr)
def test_the_contract_holds(risk_map: RiskMap) -> None:
    check_risk_map(risk_map)
    check_risk_map(risk_map, grid_model())


class Peeking(Parity):
    """Looks at how many codes of the whole batch are known."""

    def compute(self, canvas: Canvas) -> Tensor:
        return super().compute(canvas) * canvas.known.float().mean() / canvas.known.max()


def test_the_contract_finds_a_map_that_looks_at_other_rows() -> None:
    with pytest.raises(AssertionError, match="depends on others"):
        check_risk_map(Peeking(), grid_model())
