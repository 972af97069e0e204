"""From measurements to statistics by predictor, target and domain."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from csd_policy.study.association import Association, associate
from csd_policy.study.risk import TRUTH, PictureSet

ALL = "all"
FOREGROUND, WHOLE, AROUND = "foreground", "cost, whole picture", "cost, around the code"
GATES = (0.35, 0.65)  # TV below which CSD relaxes, in its paper's settings
TOP_SHARE = 0.1  # of costs that count as high
LEAST_VALUES = 100  # of a domain, below which no statistic is given


@dataclass(frozen=True)
class Row:
    """How well a predictor does in one set of pictures, for one target, in one domain."""

    pictures: str
    target: str
    domain: str
    predictor: str
    count: int
    found: Association

    def record(self) -> dict[str, Any]:
        """Plain data."""
        plain = {k: v for k, v in vars(self).items() if k != "found"}
        return plain | {k: v._asdict() for k, v in self.found._asdict().items()}


@dataclass(frozen=True)
class _Values:
    """One value a code: ``[m]`` each; ``picture`` is its picture's number."""

    picture: Tensor
    target: Tensor
    predictors: dict[str, Tensor]

    def where(self, kept: Tensor) -> "_Values":
        named = {name: value[kept] for name, value in self.predictors.items()}
        return _Values(self.picture[kept], self.target[kept], named)


def analyse(sets: Sequence[PictureSet], domains: Mapping[str, str], resamples: int) -> list[Row]:
    """Every predictor of every set against every target that the set has."""
    rows: list[Row] = []
    for pictures in sets:
        for target, values in _targets(pictures):
            for domain, part in _domains(pictures, domains, target, values):
                rows += _judge(pictures.name, target, domain, part, resamples)
    return rows


def _targets(pictures: PictureSet) -> Iterator[tuple[str, _Values]]:
    found = pictures.found
    count = found.tokens.shape[1]
    if pictures.covered is not None:
        number = torch.arange(len(found.tokens))[:, None].expand(-1, count)
        named = {k: v.flatten() for k, v in _signed(found.predictors).items() if k != TRUTH}
        yield FOREGROUND, _Values(number.flatten(), pictures.covered.flatten(), named)
    taken = found.position >= 0
    picture, place = taken.nonzero()[:, 0], found.position[taken]
    named = {k: v[picture, place] for k, v in _signed(found.predictors).items()}
    yield WHOLE, _Values(picture, found.whole[taken], named)
    yield AROUND, _Values(picture, found.around[taken], named)


def _signed(predictors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Entropy with both signs."""
    rest = {name: value for name, value in predictors.items() if name != "entropy"}
    entropy = predictors["entropy"]
    return {"high entropy": entropy, "low entropy": -entropy} | rest


def _domains(
    pictures: PictureSet, domains: Mapping[str, str], target: str, values: _Values
) -> Iterator[tuple[str, _Values]]:
    yield ALL, values
    for name, pattern in domains.items():
        inside = torch.tensor([bool(re.search(pattern, prompt)) for prompt in pictures.prompts])
        yield name, values.where(inside[values.picture])
    if target != FOREGROUND:
        for gate in GATES:
            yield f"tv < {gate:g}", values.where(values.predictors["tv"] < gate)


def _judge(
    pictures: str, target: str, domain: str, values: _Values, resamples: int
) -> Iterator[Row]:
    if len(values.target) < LEAST_VALUES:
        return
    high = 0.5 if target == FOREGROUND else float(values.target.quantile(1 - TOP_SHARE))
    for name, predictor in values.predictors.items():
        known = ~predictor.isnan()
        x, y = (v[known].double().numpy() for v in (predictor, values.target))
        cluster = values.picture[known].numpy()
        found = associate(x, y, y > high, cluster, resamples)
        yield Row(pictures, target, domain, name, len(x), found)
