"""Harm against passes: families of methods as curves, read where another family is."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from csd_policy.metrics import Interval
from csd_policy.summary import Row

HARMS = {"spent_tv": "spent TV", "damage": "damage"}  # in an image's record: title
REACHED = 0.95  # share of the resamples that must reach a point

Floats = npt.NDArray[np.float64]


class Match(NamedTuple):
    """A family where a method of the baseline is; None where it does not reach.

    ``harm`` and ``passes`` are the family's, less the baseline's: the harm at equal passes, and
    the passes at equal harm; the ratios are family / baseline.
    """

    family: str
    at: str
    measure: str
    harm: Interval | None
    harm_ratio: Interval | None
    passes: Interval | None
    passes_ratio: Interval | None


class Means(NamedTuple):
    """Mean passes and mean harm of methods in each resample, ``[draws + 1, methods]``.

    The last row is of all prompts.
    """

    passes: Floats
    harm: Floats


def resample(images: Mapping[str, Sequence[Row]], harm: str, draws: int, seed: int = 0) -> Means:
    """Means over resampled prompts."""
    found = []
    for name in ("forward_passes", harm):
        values = [[(row["prompt_number"], row[name]) for row in rows] for rows in images.values()]
        prompt, value = np.array(values, dtype=float).transpose(2, 0, 1)
        number = np.unique(prompt[0], return_inverse=True)[1]
        sums = np.stack([np.bincount(number, line) for line in value], axis=1)
        count = np.bincount(number)
        weights = np.random.default_rng(seed).multinomial(
            len(count), np.full(len(count), 1 / len(count)), size=draws
        )
        weights = np.concatenate([weights, np.ones((1, len(count)), dtype=weights.dtype)])
        found.append(weights @ sums / (weights @ count)[:, None])
    return Means(*found)


def match_families(
    means: Means, names: Sequence[str], families: Mapping[str, Sequence[str]], baseline: str,
    exact: str, measure: str,
) -> list[Match]:  # fmt: skip
    """Every other family at every method of the baseline."""
    matches = []
    for family in families:
        if family == baseline:
            continue
        own = [names.index(name) for name in (exact, *families[family])]
        passes, harm = means.passes[:, own], means.harm[:, own]
        for name in families[baseline]:
            at = names.index(name)
            base_passes, base_harm = means.passes[:, at], means.harm[:, at]
            there = _read(passes, harm, base_passes)
            reached = _read(harm, passes, base_harm)
            some = np.where(base_harm > 0, base_harm, np.nan)
            found = (there - base_harm, there / some,
                     reached - base_passes, reached / base_passes)  # fmt: skip
            matches.append(Match(family, name, measure, *map(_interval, found)))
    return matches


def _read(x: Floats, y: Floats, at: Floats) -> Floats:
    """Value at ``at`` ``[n]`` on the lines through each row's points, ``[n, k]``; else NaN."""
    order = x.argsort(axis=1)
    x, y = np.take_along_axis(x, order, 1), np.take_along_axis(y, order, 1)
    found = [np.interp(*row, left=np.nan, right=np.nan) for row in zip(at, x, y, strict=True)]
    return np.array(found)


def _interval(values: Floats) -> Interval | None:
    """Of resamples and, last, the value itself."""
    known = values[:-1][~np.isnan(values[:-1])]
    if np.isnan(values[-1]) or len(known) < REACHED * (len(values) - 1):
        return None
    return Interval(float(values[-1]), *np.quantile(known, [0.025, 0.975]).tolist())
