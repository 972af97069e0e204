"""Rank statistics against scipy, and their intervals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from csd_policy.study.association import associate, auroc, sort_values, spearman


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(1, 3)), min_size=4))
def test_weights_stand_for_repeated_values(rows: list[tuple[int, int, int]]) -> None:
    x, y, weight = np.array(rows, dtype=float).T
    times = weight.astype(int)
    longer_x, longer_y = np.repeat(x, times), np.repeat(y, times)
    label, longer = y > 3, longer_y > 3
    found = spearman(sort_values(x), sort_values(y), weight)
    if len(set(x)) > 1 and len(set(y)) > 1:
        assert found == pytest.approx(stats.spearmanr(longer_x, longer_y).statistic, abs=1e-9)
    else:
        assert np.isnan(found)
    area = auroc(sort_values(x), label, weight)
    if 0 < longer.sum() < len(longer):
        u = stats.mannwhitneyu(longer_x[longer], longer_x[~longer]).statistic
        assert area == pytest.approx(u / (longer.sum() * (~longer).sum()), abs=1e-9)
    else:
        assert np.isnan(area)


def test_intervals_resample_pictures_not_codes() -> None:
    """Ten equal codes a picture say no more than one: the interval is as wide."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=60)
    y = x + rng.normal(size=60)
    one = associate(x, y, y > 0, np.arange(60))
    many = associate(*(np.repeat(v, 10) for v in (x, y, y > 0, np.arange(60))))
    for name in ("spearman", "auroc"):
        a, b = getattr(one, name), getattr(many, name)
        assert a == pytest.approx(b, abs=0.01)
        assert a.low < a.mean < a.high


def test_intervals_cover_the_truth() -> None:
    """95 % intervals of clustered data hold the true AUROC in about 95 % of 200 repetitions."""
    rng, inside = np.random.default_rng(1), 0
    truth = stats.norm.cdf(1 / np.sqrt(2 + 2 * 0.5))  # scores differ by 1, variances 1 + 0.5
    for _ in range(200):
        cluster = np.repeat(np.arange(80), 6)
        label = np.tile(np.array([True, False]), 240)
        shared = rng.normal(scale=np.sqrt(0.5), size=160)[2 * cluster + label]
        score = label + shared + rng.normal(size=480)
        found = associate(score, score, label, cluster, resamples=200).auroc
        inside += found.low <= truth <= found.high
    assert 180 <= inside <= 199
