"""The loop: raggedness, common random numbers, budgets, forced slots, greedy limits, failures."""

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from csd_policy.candidates import Candidates
from csd_policy.decoder import JacobiDecoder
from csd_policy.drafts import DraftStrategy, Gumbel, Independent, MaximalCoupling
from csd_policy.policies import (
    CSD,
    AcceptancePolicy,
    Amplify,
    Blend,
    EntropyOnly,
    Exact,
    TVGate,
)
from csd_policy.sampling import law
from csd_policy.testing import TableModel, random_table
from csd_policy.trace import ACCEPTED, BONUS, RESAMPLED, Trace
from csd_policy.types import DecodeConfig

DRAFTS = [Independent(), Gumbel(), MaximalCoupling("above")]
POLICIES = [Exact(), CSD(delta=0.6), CSD(delta=0.6, normalize_entropy=True), EntropyOnly(0.2),
            TVGate(0.5), Amplify(2.0), Blend(Exact(), TVGate(0.8))]  # fmt: skip


def wide_table(codes: int = 24, size: int = 6, **kwargs: Any) -> TableModel:
    return TableModel(random_table(2, codes, size), random_table(3, codes, size), **kwargs)


def run(model: TableModel, seeds: list[int], policy: AcceptancePolicy, draft: DraftStrategy,
        **settings: Any) -> Any:  # fmt: skip
    config = DecodeConfig(**({"window": 6} | settings))
    return JacobiDecoder(model, policy, draft, config).generate([""] * len(seeds), seeds)


@pytest.mark.parametrize("draft", DRAFTS, ids=repr)
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_rows_alone_equal_rows_in_a_batch(policy: AcceptancePolicy, draft: DraftStrategy) -> None:
    """300 seeds, bit for bit: rows know nothing of their neighbours, and stop when done."""
    model, seeds = wide_table(12), list(range(300))
    together = run(model, seeds, policy, draft, guidance_scale=2.0)
    for part in (slice(0, 1), slice(1, 8), slice(8, 75), slice(75, 300)):
        alone = run(model, seeds[part], policy, draft, guidance_scale=2.0)
        assert alone.tokens.equal(together.tokens[part])
        assert alone.stats.forward_passes == together.stats.forward_passes[part]
        for name, value in vars(alone.trace).items():
            assert _same(value, getattr(together.trace, name)[part]), name


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal, NaN at the same places."""
    return torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))


def test_seeds_belong_to_rows() -> None:
    model, policy = wide_table(), CSD(delta=0.6)
    mixed = run(model, [7, 8, 7, 9], policy, Independent())
    assert mixed.tokens[0].equal(mixed.tokens[2])
    assert not mixed.tokens[0].equal(mixed.tokens[1])
    assert mixed.tokens[3].equal(run(model, [9], policy, Independent()).tokens[0])
    decoder = JacobiDecoder(model, policy, Independent(), DecodeConfig(window=6))
    drawn = decoder.generate(["", ""], None)
    assert drawn.seeds[0] != drawn.seeds[1]
    assert decoder.generate(["", ""], drawn.seeds).tokens.equal(drawn.tokens)


@pytest.mark.parametrize("draft", DRAFTS, ids=repr)
def test_a_window_of_one_is_plain_ar_whatever_the_rule(draft: DraftStrategy) -> None:
    """Policies, drafts and windows see common random numbers: W = 1 gives one image per seed."""
    model, seeds = wide_table(), list(range(40))
    plain = run(model, seeds, Exact(), Independent(), window=1)
    assert set(plain.stats.forward_passes) == {24}
    assert plain.tokens.equal(run(model, seeds, TVGate(1.0), draft, window=1).tokens)
    assert (plain.trace.how == BONUS).all()
    assert plain.trace.pass_number.equal(torch.arange(1, 25).expand(40, 24).int())
    assert plain.trace.spent_tv.abs().max() == 0


@pytest.mark.parametrize("window", [1, 2, 5, 16, 40])
@pytest.mark.parametrize("draft", DRAFTS, ids=repr)
def test_greedy_equals_the_argmax_chain(draft: DraftStrategy, window: int) -> None:
    tables = [
        wide_table(),
        TableModel(random_table(8, 24, 6).round()),
    ]  # the second is full of ties
    for model in tables:
        expected, previous = [], 0
        for position in range(24):
            row = model.table[0, position, previous].tolist()
            expected.append(row.index(max(row)))
            previous = expected[-1] + 1
        for policy in POLICIES:
            for temperature in (0.0, 1e-6) if model is tables[0] else (0.0,):
                got = run(model, [0, 1], policy, draft, window=window, temperature=temperature)
                assert got.tokens.tolist() == [expected, expected], (policy, temperature)


def test_greedy_rejects_a_likely_token_that_is_not_the_argmax() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(4, 4, 3)
    result = run(TableModel(logits), list(range(50)), Exact(), Independent(), temperature=0.0)
    assert (result.tokens == 0).all()


@pytest.mark.parametrize("policy", POLICIES[1:], ids=repr)
@pytest.mark.parametrize("budget", [0.0, 0.05, 0.5])
def test_budget_is_a_hard_bound(policy: AcceptancePolicy, budget: float) -> None:
    model, seeds = wide_table(), list(range(200))
    free = run(model, seeds, policy, Gumbel())
    held = run(model, seeds, policy, Gumbel(), tv_budget=budget)
    assert max(free.stats.spent_tv) > budget
    assert max(held.stats.spent_tv) <= budget + 1e-6
    assert held.trace.spent_tv.sum(1).tolist() == pytest.approx(held.stats.spent_tv, abs=1e-5)
    if budget == 0:
        exact = run(model, seeds, Exact(), Gumbel())
        assert held.tokens.equal(exact.tokens)
        assert held.stats.forward_passes == exact.stats.forward_passes


def test_trace_tells_what_happened() -> None:
    model, seeds = wide_table(), list(range(100))
    result = run(model, seeds, CSD(delta=0.7), Independent())
    t = result.trace
    accepted, bonus = t.how == ACCEPTED, t.how == BONUS
    assert (t.uniform[accepted] < t.b[accepted]).all()
    assert (t.uniform[t.how == RESAMPLED] >= t.b[t.how == RESAMPLED]).all()
    assert t.b[bonus].isnan().all() and t.tv[bonus].isnan().all() and (t.spent_tv[bonus] == 0).all()
    assert not t.b[~bonus].isnan().any() and t.entropy.isfinite().all()
    assert t.relaxed.any() and (t.b[t.relaxed] > t.ratio[t.relaxed]).all()
    assert (t.pass_number.diff(dim=1) >= 0).all()
    assert t.pass_number.amax(1).tolist() == result.stats.forward_passes
    last_of_pass = torch.nn.functional.pad(t.pass_number.diff(dim=1) > 0, (0, 1), value=True)
    assert (~accepted == last_of_pass)[:, :-1].all()  # a pass ends with a token of its own law
    assert result.stats.batch_passes == max(result.stats.forward_passes)
    assert result.stats.tokens_per_pass[0] == 24 / result.stats.forward_passes[0]
    assert sum(v for k, v in result.stats.seconds.items() if k != "total") == pytest.approx(
        result.stats.seconds["total"]
    )


def test_trace_round_trip(tmp_path: Any) -> None:
    trace = run(wide_table(), [0, 1], CSD(), Independent()).trace
    trace.save(tmp_path / "trace.safetensors")
    again = Trace.load(tmp_path / "trace.safetensors")
    for name, value in vars(trace).items():
        assert _same(value, getattr(again, name))
    from safetensors.torch import save_file

    save_file({"b": torch.zeros(1)}, tmp_path / "bad.safetensors")
    with pytest.raises(ValueError, match="pass_number"):
        Trace.load(tmp_path / "bad.safetensors")


@pytest.mark.parametrize("draft", DRAFTS, ids=repr)
def test_forced_slots_cost_a_pass_at_window_one_and_appear_nowhere(draft: DraftStrategy) -> None:
    model = wide_table(grid=(4, 6), row_ends=True)
    plain = run(model, list(range(20)), Exact(), draft, window=1)
    assert set(plain.stats.forward_passes) == {24 + 4}
    assert plain.tokens.shape == (20, 24)
    for window in (2, 5, 30):
        wide = run(model, list(range(20)), CSD(), draft, window=window)
        assert wide.tokens.shape == wide.trace.b.shape == (20, 24)
        assert max(wide.stats.forward_passes) <= 28
        assert wide.trace.pass_number.min() > 0  # every code was written


def test_window_larger_than_the_image() -> None:
    model = wide_table(6)
    result = run(model, list(range(50)), TVGate(1.0), Gumbel(), window=20)
    assert result.trace.pass_number.min() > 0
    assert max(result.stats.forward_passes) <= 6


class OneBuffer(TableModel):
    """Writes every result into the same memory, as a captured graph does."""

    def head(self, hidden: Tensor) -> Tensor:
        logits = super().head(hidden)
        if getattr(self, "buffer", None) is None or self.buffer.shape != logits.shape:
            self.buffer = torch.empty_like(logits)
        return self.buffer.copy_(logits)


@pytest.mark.parametrize("draft", DRAFTS, ids=repr)
def test_nothing_kept_is_a_view_of_the_models_output(draft: DraftStrategy) -> None:
    args = (random_table(2, 24, 6), random_table(3, 24, 6))
    for scale in (1.0, 2.0):
        fresh = run(TableModel(*args), [0, 1], CSD(), draft, guidance_scale=scale)
        reused = run(OneBuffer(*args), [0, 1], CSD(), draft, guidance_scale=scale)
        assert fresh.tokens.equal(reused.tokens)


class Counting(TableModel):
    """Counts forward passes."""

    calls = 0

    def forward(self, state: Any, embeddings: Tensor, slots: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(state, embeddings, slots)


def test_reported_passes_are_true_calls() -> None:
    model = Counting(random_table(2, 24, 6))
    seen: list[tuple[int, list[int]]] = []
    decoder = JacobiDecoder(model, Exact(), Gumbel(), DecodeConfig(window=6))
    result = decoder.generate(["", ""], [0, 1], on_pass=lambda n, done: seen.append((n, done)))
    assert model.calls == result.stats.batch_passes == len(seen)
    assert seen[-1][1] == [24, 24]


class Recording(Exact):
    """Keeps what the loop shows it."""

    def __init__(self) -> None:
        self.seen: list[Candidates] = []

    def accept_prob(self, c: Candidates) -> Tensor:
        self.seen.append(copy.deepcopy(c))  # the loop reuses its memory
        return super().accept_prob(c)


def test_candidates_are_what_they_say() -> None:
    policy, model = Recording(), wide_table(grid=(4, 6))
    decoder = JacobiDecoder(model, policy, Independent(), DecodeConfig(window=6, top_k=3))
    decoder.generate([""] * 8, list(range(8)))
    seen = decoder.policy.seen  # type: ignore[attr-defined]
    first = next(c for c in seen if c.p_all.shape[1] == 5)
    assert first.fresh.all() and (first.p_all.amax(-1) == 1).all()
    assert first.row[0, :, 0].tolist() == [0] * 5 and first.column[0, :, 0].tolist() == [*range(5)]
    for c in (c for c in seen if c.p_all.shape[1] == 5):
        inside = c.row[..., 0] < 4
        assert torch.allclose(c.q_all.sum(-1), torch.ones(8, 5))
        assert torch.allclose(c.p_all.sum(-1), torch.ones(8, 5))
        assert ((c.q_all > 0).sum(-1) <= 3).all()
        position = (c.row * 6 + c.column)[..., 0]
        hidden_position = c.hidden[..., 1].long()
        live = inside & (position >= 0)
        assert (position == hidden_position)[live].all()
        logits = model.table[0, c.hidden[..., 1].long(), c.hidden[..., 2].long()]
        assert torch.allclose(law(logits, 1.0, 3, 1.0)[live], c.q_all[live])


class NeedsRisk(Exact):
    """Asks for what nothing provides."""

    needs = frozenset({"risk"})


class NeedsNoise(AcceptancePolicy):
    """Accepts when the token is the target's own draw."""

    needs = frozenset({"noise"})

    def accept_prob(self, c: Candidates) -> Tensor:
        return (c.tokens == c.target_draw).to(c.q.dtype)


def test_needs_are_provided_or_refused() -> None:
    with pytest.raises(ValueError, match="risk"):
        JacobiDecoder(wide_table(), NeedsRisk())
    result = run(wide_table(), [0, 1], NeedsNoise(), Gumbel())
    assert (result.trace.how == ACCEPTED).any()


class NanPolicy(AcceptancePolicy):
    """Not a number beyond the first row of the grid."""

    def accept_prob(self, c: Candidates) -> Tensor:
        return torch.where(c.column > 9, torch.nan, c.ratio)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("window", [1, 6])
def test_broken_logits_are_named(bad: float, window: int) -> None:
    logits = random_table(2, 24, 6)
    if bad == -torch.inf:
        logits[10] = bad
    else:
        logits[10, :, 2] = bad
    with pytest.raises(ValueError, match=r"pass \d+, image 0 .*position 10.*finite"):
        run(TableModel(logits), [0, 1], Exact(), Independent(), window=window)


def test_a_policy_that_gives_nan_is_named() -> None:
    with pytest.raises(ValueError, match=r"position 10.*NanPolicy\(\)"):
        run(wide_table(), [0, 1], NanPolicy(), Independent())


@pytest.mark.parametrize(
    ("prompts", "seeds", "message"),
    [
        ([], None, "at least one"),
        ("two cats", None, "expected a list"),
        (["a", "b"], [1], "1 seeds for 2 prompts"),
        (["a"], [-1], "-1"),
        (["a"], [2**63], "expected an integer"),
        (["a"], [0.5], "0.5"),
    ],
)
def test_wrong_calls_are_refused(prompts: Any, seeds: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JacobiDecoder(wide_table()).generate(prompts, seeds)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("window", 0),
        ("window", 16.0),
        ("window", True),
        ("top_k", 2.5),
        ("guidance_scale", -1.0),
        ("guidance_scale", float("nan")),
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("tv_budget", -1.0),
    ],
)
def test_wrong_settings_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value!r}"):
        DecodeConfig(**{name: value})


class NotStored(Exact):
    """Forgets its argument."""

    def __init__(self, lam: float = 0.3) -> None:
        self.weight = lam


class Flat(AcceptancePolicy):
    """Answers with one number per image."""

    def accept_prob(self, c: Candidates) -> Tensor:
        return c.ratio[:, 0, 0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: JacobiDecoder(wide_table(), NotStored()), "does not store its argument 'lam'"),
        (lambda: JacobiDecoder(wide_table(), CSD), "is no AcceptancePolicy"),
        (lambda: JacobiDecoder(wide_table(), draft=CSD()), "is no DraftStrategy"),
        (lambda: run(wide_table(), [0], Flat(), Gumbel()), r"Flat\(\) gives .*\[1\], expected"),
        (lambda: run(wide_table(), [0], CSD(), Gumbel(), window=257), "window is 257.* most 256"),
    ],
)
def test_wrong_objects_are_refused_before_decoding(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("logits", "uncond", "grid"),
    [((3, 4, 4), None, None), ((3, 5, 4), (2, 5, 4), None), ((3, 5, 4), None, (2, 2))],
)
def test_wrong_tables_are_refused(logits: Any, uncond: Any, grid: Any) -> None:
    with pytest.raises(ValueError, match="logits"):
        TableModel(torch.zeros(logits), None if uncond is None else torch.zeros(uncond), grid)


@pytest.mark.parametrize(
    ("policy", "draft"), [(CSD(delta=0.6), Gumbel()), (Exact(), Independent())], ids=repr
)
def test_a_step_is_one_graph_for_all_passes(
    policy: AcceptancePolicy, draft: DraftStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No host reads and fixed shapes: one graph, never compiled again, equal images."""
    settings = {"guidance_scale": 2.0, "top_k": 4, "tv_budget": 1.0}
    plain = run(wide_table(), [0, 1, 2], policy, draft, **settings)
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    whole = torch.compile(JacobiDecoder._step, fullgraph=True, backend=count)
    monkeypatch.setattr(JacobiDecoder, "_step", lambda *args: whole(*args[:-1], _untimed))
    compiled = run(wide_table(), [0, 1, 2], policy, draft, **settings)
    assert compiled.tokens.equal(plain.tokens)
    assert compiled.stats.forward_passes == plain.stats.forward_passes
    assert _same(compiled.trace.spent_tv, plain.trace.spent_tv)
    assert len(graphs) == 1


def _untimed(phase: str) -> contextlib.nullcontext[None]:
    return contextlib.nullcontext()
