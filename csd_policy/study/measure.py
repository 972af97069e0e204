"""What a study measures on pictures: predictors at every code, and the cost of errors at some."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from csd_policy.counterfactual import replacement_costs
from csd_policy.decoder import JacobiDecoder
from csd_policy.models.base import ImageTokenModel
from csd_policy.risk import Canvas, RiskMap
from csd_policy.trace import BONUS


@dataclass(frozen=True)
class Measurements:
    """Of n pictures; the names of ``predictors`` are those of the study.

    Attributes:
        tokens: int64 ``[n, N]``.
        predictors: fp32 ``[n, N]`` each; NaN where there was no draft.
        draft: the verified codes, int64 ``[n, N]``, -1 at a bonus.
        alternative: another draw from the law of each draft, int64 ``[n, N]``.
        position: where the cost was measured, int64 ``[n, k]``, -1 for none.
        whole, around: the costs there, fp32 ``[n, k]``, NaN for none.
    """

    tokens: Tensor
    predictors: dict[str, Tensor]
    draft: Tensor
    alternative: Tensor
    position: Tensor
    whole: Tensor
    around: Tensor

    def to_tensors(self) -> dict[str, Tensor]:
        """Plain tensors by name, for a file."""
        fields = {name: value for name, value in vars(self).items() if name != "predictors"}
        named = {f"predictor.{name}": value for name, value in self.predictors.items()}
        return {name: value.contiguous() for name, value in (fields | named).items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "Measurements":
        """What ``to_tensors`` gave."""
        head = "predictor."
        named = {k.removeprefix(head): v for k, v in tensors.items() if k.startswith(head)}
        fields = {k: v for k, v in tensors.items() if not k.startswith(head)}
        return cls(predictors=named, **fields)

    def of(self, names: Sequence[str]) -> "Measurements":
        """The same with these predictors, in this order."""
        return replace(self, predictors={name: self.predictors[name] for name in names})

    @classmethod
    def join(cls, parts: Sequence["Measurements"]) -> "Measurements":
        """All pictures of the parts."""
        tables = [part.to_tensors() for part in parts]
        return cls.from_tensors({k: torch.cat([t[k] for t in tables]) for k in tables[0]})


def measure(
    decoder: JacobiDecoder,
    metric: Any,
    prompts: Sequence[str],
    tokens: Tensor,
    seeds: Sequence[int],
    costs: int,
) -> Measurements:
    """Replay pictures; entropy and TV at every code, and the cost of the draft at some.

    The cost is the LPIPS between the picture with the drafted code and the picture with what the
    exact rule puts there instead, at codes where the exact rule rejects the draft: what a
    relaxation would have done to the picture by accepting. Positions are drawn evenly among those.

    Args:
        decoder: of an exact rule; its draft strategy makes the drafts.
        metric: spatial LPIPS.
        tokens: codebook ids, int64 ``[n, N]``.
        seeds: of drafts and of the choice of positions.
        costs: positions per picture at most, 0 or more.
    """
    result = decoder.replay(prompts, tokens, seeds)
    trace, others = result.trace, result.others
    wrong = (trace.how != BONUS) & (trace.uniform >= trace.ratio)
    position = choose(wrong, seeds, costs)
    taken = position >= 0
    picture, place = taken.nonzero()[:, 0], position[taken]
    drafted, corrected = trace.draft.long()[picture, place], others["correction"][picture, place]
    found = replacement_costs(decoder.model, metric, tokens[picture], place, (drafted, corrected))
    cost = {}
    for name in ("whole", "around"):
        cost[name] = torch.full(position.shape, torch.nan)
        cost[name][taken] = getattr(found, name)
    predictors = {"entropy": trace.entropy, "tv": trace.tv}
    return Measurements(tokens, predictors, trace.draft.long(), others["alternative"], position,
                        **cost)  # fmt: skip


def add_maps(
    found: Measurements, model: ImageTokenModel, maps: Mapping[str, RiskMap], prompts: Sequence[str]
) -> tuple[Measurements, dict[str, float]]:
    """What bound risk maps say of the complete pictures, as further predictors.

    Returns:
        the measurements, and the seconds of each map per picture.
    """
    tokens, device = found.tokens, model.device
    whole = torch.full((len(tokens),), tokens.shape[1], device=device)
    canvas = Canvas.of(tokens.to(device), whole, model, prompts, found.alternative.to(device))
    said, seconds = {}, {}
    for name, risk_map in maps.items():
        start = time.perf_counter()
        said[name] = risk_map.risk(canvas).cpu()
        seconds[name] = (time.perf_counter() - start) / len(tokens)
    return replace(found, predictors=found.predictors | said), seconds


def choose(where: Tensor, seeds: Sequence[int], count: int) -> Tensor:
    """At most ``count`` places of each row of ``where``, bool ``[n, N]``: int64 ``[n, count]``.

    Evenly drawn by the row's seed and in order; -1 where a row has fewer.
    """
    chosen = torch.full((len(where), count), -1)
    for i, seed in enumerate(seeds):
        places = where[i].nonzero()[:, 0]
        order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))
        taken = places[order[:count]].sort().values
        chosen[i, : len(taken)] = taken
    return chosen
