"""What a set of pictures says about a method, with intervals that respect how it was collected."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from csd_policy.models import ImageTokenModel
from csd_policy.sampling import guide
from csd_policy.types import DecodeConfig


@torch.inference_mode()
def log_likelihood(
    model: ImageTokenModel,
    tokens: Tensor,
    prompts: Sequence[str],
    config: DecodeConfig,
    window: int = 64,
) -> Tensor:
    """Mean log-likelihood of each picture under the target, in nats per code, by teacher forcing.

    The target's law is taken with the guidance and the temperature of ``config``, without top-k and
    top-p (a token outside them has no finite likelihood); temperature 0 counts as 1. Pictures of an
    exact method show what is normal: a gap of either sign is a deviation.

    Args:
        tokens: codebook ids, int64 ``[B, N]``.
        prompts: one text per picture.
        config: the settings that the pictures were decoded with.
        window: slots per forward pass, 1 or more.

    Returns:
        fp64 ``[B]`` on the CPU, 0 or less.
    """
    config = config.resolved(model.defaults)
    assert config.guidance_scale is not None and config.temperature is not None
    code_of_slot = model.code_of_slot
    slots, batch = len(code_of_slot), len(tokens)
    holds_code = code_of_slot >= 0
    in_slot = tokens.to(model.device)[:, code_of_slot.clamp(min=0)].where(holds_code, 0)  # [B, S]
    previous = torch.nn.functional.pad(in_slot, (1, 0))  # of slots -1, 0, ...; slot -1 has no code
    state = model.prefill(prompts, config.guidance_scale != 1, window)
    total = torch.zeros(batch, dtype=torch.float64, device=model.device)
    for start in range(0, slots, window):
        stop = min(start + window, slots)
        place = torch.arange(start - 1, stop - 1, device=model.device).expand(batch, -1)
        embeddings = model.embed(state, previous[:, start:stop], place)
        logits = model.head(model.forward(state, embeddings, place))
        logits = guide(logits, config.guidance_scale) / (config.temperature or 1.0)
        found = logits.log_softmax(-1).gather(-1, in_slot[:, start:stop, None])[..., 0]
        total += found.double().where(holds_code[start:stop], 0.0).sum(1)
    return (total / holds_code.sum()).cpu()


class Interval(NamedTuple):
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float

    def text(self, digits: int = 2) -> str:
        """``mean [low, high]``."""
        return f"{self.mean:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def bootstrap_interval(
    values_by_cluster: Sequence[Sequence[float]], draws: int = 2000, seed: int = 0
) -> Interval:
    """Mean of all values; percentile interval from resampled clusters.

    Values of one cluster (images of one prompt, or of one batch) are not independent, so whole
    clusters are drawn, with replacement (Davison & Hinkley 1997, section 3.8). With few clusters
    the interval is too narrow.

    Args:
        values_by_cluster: at least one cluster, each of at least one value.
        draws: resamples.
        seed: of the resampling.
    """
    return bootstrap_ratio(
        values_by_cluster, [[1.0] * len(v) for v in values_by_cluster], draws, seed
    )


def bootstrap_ratio(
    above: Sequence[Sequence[float]],
    below: Sequence[Sequence[float]],
    draws: int = 2000,
    seed: int = 0,
) -> Interval:
    """Ratio of two sums over the same clusters; percentile interval from paired resamples.

    For compression ``above`` are the passes of the W = 1 method and ``below`` those of another one,
    on the same prompts and seeds: the ratio of the mean passes.

    Args:
        above, below: values by cluster; both have the same clusters, ``below`` no sum of 0.
    """
    if len(above) != len(below) or not all([*above, *below]) or not above:
        raise ValueError(
            f"{len(above)} and {len(below)} clusters, expected as many, at least one, none empty"
        )
    pairs = [[sum(a), sum(b)] for a, b in zip(above, below, strict=True)]
    sums = torch.tensor(pairs, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(sums), (draws, len(sums)), generator=generator)
    top, bottom = sums[drawn].sum(1).unbind(-1)
    low, high = (top / bottom).quantile(sums.new_tensor([0.025, 0.975])).tolist()
    whole = sums.sum(0)
    return Interval(float(whole[0] / whole[1]), low, high)
