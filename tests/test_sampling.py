"""Random numbers, laws and draws against slow or known references."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from csd_policy.sampling import (
    Noise,
    Purpose,
    draw,
    first_argmax,
    fold,
    guide,
    law,
    mix64,
    to_uniform,
)


def test_mix64_is_splitmix64() -> None:
    golden = -0x61C8864680B583EB
    state = torch.tensor([golden])  # SplitMix64 of seed 0: first output 0xE220A8397B1DCDAF
    assert int(mix64(state)) % 2**64 == 0xE220A8397B1DCDAF
    assert int(mix64(state * 2)) % 2**64 == 0x6E789E6AA1B965F4


def test_fold_takes_numbers_and_tensors_alike() -> None:
    key = torch.tensor([3, -7])
    for value in (0, 1, 4, 2**40):
        assert fold(key, value).equal(fold(key, torch.tensor(value)))


def test_uniform_is_strictly_inside_the_unit_interval() -> None:
    bits = torch.tensor([0, -1, 2**32 - 1, -(2**32), 1 << 31])
    u = to_uniform(bits)
    assert u.dtype == torch.float32
    assert (u > 0).all() and (u < 1).all()
    noise = -torch.log1p(-u)
    assert (noise > 0).all() and noise.isfinite().all()


@pytest.mark.parametrize("axis", ["seed", "position", "purpose", "counter", "element"])
def test_numbers_are_uniform_and_independent_along_every_key(axis: str) -> None:
    """4,096 numbers along one key: chi-square of singles and of neighbours, 5 sigma."""
    n, count = 4096, torch.arange(4096)
    if axis == "seed":
        u = Noise(count, 1).uniform(Purpose.ACCEPT, torch.zeros(n, dtype=torch.int64))
    elif axis == "position":
        u = Noise(torch.tensor([5]), 1).uniform(Purpose.ACCEPT, count[None])[0]
    elif axis == "counter":
        u = Noise(torch.tensor([5]), 1).uniform(Purpose.REDRAW, count[None] * 0, count[None])[0]
    elif axis == "element":
        e = Noise(torch.tensor([5]), n).exponential(Purpose.TARGET, torch.tensor([[3]]))[0, 0]
        u = 1 - (-e).exp()
    else:
        seeds, zero = torch.arange(n // 2), torch.zeros(n // 2, dtype=torch.int64)
        pair = [Noise(seeds, 1).uniform(p, zero) for p in (Purpose.ACCEPT, Purpose.RESIDUAL)]
        u = torch.stack(pair, 1).flatten()
    singles = torch.bincount((u * 16).long(), minlength=16).double()
    pairs = torch.bincount((u[:-1] * 8).long() * 8 + (u[1:] * 8).long(), minlength=64).double()
    for counts in (singles, pairs):
        expected = counts.sum() / len(counts)
        chi2 = float(((counts - expected) ** 2 / expected).sum())
        dof = len(counts) - 1
        assert abs(chi2 - dof) < 5 * math.sqrt(2 * dof), (axis, chi2)


def test_noise_does_not_depend_on_the_batch() -> None:
    position = torch.arange(12).view(3, 4)
    together = Noise(torch.tensor([7, 8, 7]), 5).exponential(Purpose.TARGET, position)
    alone = Noise(torch.tensor([8]), 5).exponential(Purpose.TARGET, position[1:2])
    assert together[1:2].equal(alone)
    assert Noise(torch.tensor([7]), 5).token(Purpose.FRESH, position[2:]).max() < 5


def test_draw_follows_its_weights() -> None:
    weights = torch.tensor([0.0, 1.0, 2.0, 5.0])
    noise = Noise(torch.arange(40_000), 4)
    tokens = draw(weights, noise.exponential(Purpose.RESIDUAL, torch.zeros(40_000).long()))
    share = torch.bincount(tokens, minlength=4) / 40_000
    assert share[0] == 0
    assert (share - weights / 8).abs().max() < 0.0125  # five standard deviations


def test_half_precision_logits_do_not_overflow() -> None:
    """Guidance on fp16 logits that is infinite in half precision is finite and right."""
    assert law(torch.tensor([65504.0, -65504.0]).half().float(), 0.5, 0, 1.0).tolist() == [1, 0]
    logits = torch.tensor([[30000.0, 0.0], [-10000.0, 0.0]], dtype=torch.float16)
    guided = guide(logits, 5.0)
    assert guided.tolist() == [[-10000.0 + 5 * 40000.0, 0.0]]


def test_guidance_scales() -> None:
    logits = torch.randn(4, 3, 5)
    cond, uncond = logits.chunk(2)
    assert torch.allclose(guide(logits, 0.0), uncond)
    assert torch.allclose(guide(logits, 2.5), uncond + 2.5 * (cond - uncond))
    assert guide(cond, 1.0) is cond
    assert guide(cond.double(), 1.0).dtype == torch.float64


def _slow_law(row: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """One row by plain Python, filters by sorting."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    if temperature == 0:
        return [float(i == order[0]) for i in range(len(row))]
    kept = order[:top_k] if top_k else order
    top = max(row)
    weight = {i: math.exp((row[i] - top) / temperature) for i in kept}
    total, before, inside = sum(weight.values()), 0.0, {}
    for i in kept:
        if before < top_p:
            inside[i] = weight[i] / total
        before += weight[i] / total
    mass = sum(inside.values())
    return [inside.get(i, 0.0) / mass for i in range(len(row))]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    st.integers(0, 8),
    st.sampled_from([0.1, 0.5, 0.9, 1.0]),
)
def test_law_of_a_window_equals_a_loop_over_rows(
    seed: int, temperature: float, top_k: int, top_p: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(8, 3, 2, generator=generator, dtype=torch.float64)
    window = logits.permute(2, 1, 0)  # [B, W, V], not contiguous
    got = law(window, temperature, top_k, top_p)
    assert torch.allclose(got.sum(-1), torch.ones(2, 3, dtype=torch.float64))
    for b in range(2):
        for w in range(3):
            expected = _slow_law(window[b, w].tolist(), temperature, top_k, top_p)
            assert torch.allclose(got[b, w], torch.tensor(expected, dtype=torch.float64))


def test_greedy_law_takes_the_lowest_id_of_a_tie() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    assert law(logits, 0.0, 0, 1.0).argmax(-1).tolist() == [1, 0]
    assert first_argmax(logits).tolist() == [1, 0]
    tiny = law(torch.tensor([1.0, 3.0, 2.0]), 1e-6, 0, 1.0)
    assert tiny.tolist() == [0, 1, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_broken_logits_give_nan_not_a_token(temperature: float, bad: float) -> None:
    logits = torch.zeros(2, 4)
    logits[0, 2] = bad
    q = law(logits, temperature, 0, 1.0)
    assert q[0].isnan().any() and q[1].isfinite().all()
    assert law(torch.full((4,), -torch.inf), temperature, 0, 1.0).isnan().any()
