"""How well one number predicts another: Spearman and AUROC, with intervals by picture.

Codes of one picture are not independent, so whole pictures are resampled (Davison & Hinkley 1997,
section 3.8): each resample gives every picture a whole weight, and the statistics below take
weights, as if a value were there several times.
"""

import warnings
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from csd_policy.metrics import Interval

Floats = npt.NDArray[np.float64]


class Sorted(NamedTuple):
    """Values sorted once, for many weights.

    ``inverse`` int64 ``[n]`` numbers each value among the ``distinct`` ones, from the lowest.
    """

    inverse: npt.NDArray[np.int64]
    distinct: int


def sort_values(values: Floats) -> Sorted:
    """``values`` ``[n]``, finite."""
    distinct, inverse = np.unique(values, return_inverse=True)
    return Sorted(inverse.astype(np.int64), len(distinct))


def ranks(values: Sorted, weights: Floats) -> Floats:
    """Ranks ``[n]`` from 0.5: the weight below each value and half of the weight at it."""
    at = np.bincount(values.inverse, weights, values.distinct)
    below = np.cumsum(at) - at
    found: Floats = (below + at / 2)[values.inverse]
    return found


def spearman(x: Sorted, y: Sorted, weights: Floats) -> float:
    """Spearman's rank correlation in [-1, 1]; NaN if either side has one value only."""
    total = weights.sum()
    a, b = ranks(x, weights) - total / 2, ranks(y, weights) - total / 2  # means of ranks are half
    spread = np.sqrt((weights * a * a).sum() * (weights * b * b).sum())
    return float((weights * a * b).sum() / spread) if spread > 0 else float("nan")


def auroc(score: Sorted, label: npt.NDArray[np.bool_], weights: Floats) -> float:
    """Chance that a positive has the higher score, ties half; NaN without both kinds."""
    positive = weights * label
    up, down = positive.sum(), weights.sum() - positive.sum()
    if up <= 0 or down <= 0:
        return float("nan")
    above = (positive * ranks(score, weights)).sum() - up * up / 2
    return float(above / (up * down))


class Association(NamedTuple):
    """Both statistics of a predictor and a target, with 95 % intervals."""

    spearman: Interval
    auroc: Interval


def associate(
    predictor: Floats,
    target: Floats,
    positive: npt.NDArray[np.bool_],
    cluster: npt.NDArray[np.int64],
    resamples: int = 500,
    seed: int = 0,
) -> Association:
    """Spearman with ``target`` and AUROC for ``positive``; percentile intervals.

    Args:
        predictor, target: ``[n]``, finite.
        positive: bool ``[n]``, what the AUROC is for.
        cluster: the picture of each value, ``[n]``, 0 or more.
        resamples: draws of the pictures, 1 or more.
        seed: of the resampling; equal seeds draw equal pictures for every predictor.
    """
    x, y = sort_values(predictor), sort_values(target)
    pictures, number = np.unique(cluster, return_inverse=True)
    generator = np.random.default_rng(seed)
    found = np.empty((resamples, 2))
    for i in range(resamples):
        drawn = generator.integers(len(pictures), size=len(pictures))
        weights = np.bincount(drawn, minlength=len(pictures)).astype(float)[number]
        found[i] = spearman(x, y, weights), auroc(x, positive, weights)
    whole = np.ones(len(predictor))
    values = spearman(x, y, whole), auroc(x, positive, whole)
    with warnings.catch_warnings():  # numpy's, on a predictor of one value: NaN
        warnings.simplefilter("ignore", RuntimeWarning)
        bounds = np.nanquantile(found, [0.025, 0.975], axis=0)
    return Association(*(Interval(v, *b) for v, b in zip(values, bounds.T.tolist(), strict=True)))
