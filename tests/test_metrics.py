"""Log-likelihood against the direct sum over a table, intervals against theory."""

import math

import pytest
import torch
from torch import Tensor

from csd_policy import DecodeConfig, JacobiDecoder
from csd_policy.metrics import Interval, bootstrap_interval, bootstrap_ratio, log_likelihood
from csd_policy.sampling import guide
from csd_policy.testing import TableModel, random_table

ROWS, COLUMNS, SIZE = 3, 4, 5


def table_model(row_ends: bool) -> TableModel:
    tables = (random_table(seed, ROWS * COLUMNS, SIZE) for seed in (0, 1))
    return TableModel(*tables, grid=(ROWS, COLUMNS), row_ends=row_ends)


def direct(model: TableModel, tokens: Tensor, scale: float, temperature: float) -> list[float]:
    """Mean nats per code, one table look-up per code, in Python."""
    sums = []
    for row in tokens.tolist():
        total, previous = 0.0, 0
        for number in model.code_of_slot.tolist():
            if number < 0:
                previous = 0
                continue
            both = model.table[:, number, previous][:, None]
            logits = guide(both if scale != 1 else both[:1], scale).flatten() / temperature
            total += float(logits.double().log_softmax(-1)[row[number]])
            previous = row[number] + 1
        sums.append(total / len(row))
    return sums


@pytest.mark.parametrize("window", [1, 3, 64])
@pytest.mark.parametrize("row_ends", [False, True])
@pytest.mark.parametrize(("scale", "temperature"), [(1.0, 1.0), (2.5, 1.0), (0.0, 1.0), (3.0, 0.7)])
def test_log_likelihood_is_the_direct_sum(
    scale: float, temperature: float, row_ends: bool, window: int
) -> None:
    model = table_model(row_ends)
    tokens = torch.randint(SIZE, (6, ROWS * COLUMNS), generator=torch.Generator().manual_seed(3))
    config = DecodeConfig(guidance_scale=scale, temperature=temperature, top_k=2, top_p=0.5)
    found = log_likelihood(model, tokens, [""] * 6, config, window)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(direct(model, tokens, scale, temperature), abs=1e-5)


def test_greedy_pictures_have_a_finite_likelihood() -> None:
    model, config = table_model(False), DecodeConfig(temperature=0.0)
    tokens = JacobiDecoder(model, config=config).generate([""], [0]).tokens
    assert log_likelihood(model, tokens, [""], config).tolist() == pytest.approx(
        direct(model, tokens, 1.0, 1.0), abs=1e-5
    )


def test_exact_pictures_have_the_expected_likelihood() -> None:
    """Its mean over exact pictures is minus the entropy: here of independent codes, log 5 each."""
    model = TableModel(torch.zeros(8, SIZE + 1, SIZE))
    result = JacobiDecoder(model).generate([""] * 3, [0, 1, 2])
    found = log_likelihood(model, result.tokens, [""] * 3, result.config)
    assert found.tolist() == pytest.approx([-math.log(SIZE)] * 3)


def test_the_interval_is_the_normal_one_for_many_clusters() -> None:
    """400 clusters of one normal value: ends at mean -+ 1.96 s / sqrt(n), to bootstrap accuracy."""
    values = torch.randn(400, generator=torch.Generator().manual_seed(0)) * 3 + 10
    found = bootstrap_interval([[v] for v in values.tolist()], draws=4000)
    half = 1.96 * values.std().item() / 20
    assert found.mean == pytest.approx(values.mean().item(), abs=1e-5)
    assert found.low == pytest.approx(found.mean - half, abs=0.1 * half)
    assert found.high == pytest.approx(found.mean + half, abs=0.1 * half)


def test_equal_values_of_a_cluster_are_no_evidence() -> None:
    """Copying each prompt's value ten times must not narrow the interval."""
    values = torch.randn(30, generator=torch.Generator().manual_seed(1)).tolist()
    once, copied = ([[v] * n for v in values] for n in (1, 10))
    assert bootstrap_interval(once) == pytest.approx(bootstrap_interval(copied))
    pooled = bootstrap_interval([[v] for v in values for _ in range(10)])
    narrow, wide = (i.high - i.low for i in (pooled, bootstrap_interval(once)))
    assert narrow < 0.5 * wide  # 1 / sqrt(10), to bootstrap accuracy


def test_a_paired_ratio_knows_of_the_pairing() -> None:
    """Passes that are always half of AR's have compression 2 without any spread."""
    passes = [[10.0, 12.0], [40.0, 44.0], [21.0, 25.0]]
    doubled = [[2 * v for v in cluster] for cluster in passes]
    assert bootstrap_ratio(doubled, passes) == pytest.approx((2, 2, 2))
    found = bootstrap_ratio([[256.0]] * 3, [[100.0], [60.0], [128.0]])
    assert found.mean == pytest.approx(768 / 288)


def test_one_cluster_and_equal_seeds() -> None:
    assert bootstrap_interval([[3.0, 5.0]]) == (4, 4, 4)
    values = [[float(i)] for i in range(9)]
    assert bootstrap_interval(values, seed=1) == bootstrap_interval(values, seed=1)
    assert bootstrap_interval(values, seed=1) != bootstrap_interval(values, seed=2)
    assert Interval(1.0, 0.5, 2.0).text(1) == "1.0 [0.5, 2.0]"


@pytest.mark.parametrize(("above", "below"), [([], []), ([[1.0]], [[1.0], [2.0]]), ([[]], [[]])])
def test_wrong_clusters_are_refused(above: list[list[float]], below: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="clusters, expected"):
        bootstrap_ratio(above, below)
