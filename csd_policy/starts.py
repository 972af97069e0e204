"""The first draft of a position that no pass has seen."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from csd_policy.risk.canvas import nearest_above
from csd_policy.sampling import Noise, Purpose, draw

Start = Literal["random", "uniform", "left", "above", "sample_left", "sample_above"]
STARTS = get_args(Start)


@dataclass(frozen=True)
class Known:
    """What a row knows of its picture: committed codes, then drafts that a pass has seen.

    Attributes:
        tokens: codes in raster order, int64 ``[B, N + 1]``; column N is of no meaning.
        laws: the target's law that each of them was judged by, ``[B, N + 1, V]``, or None if the
            start does not ask for it.
        count: how many codes are known, int64 ``[B]``; 0 to N.
        columns: of the grid.
    """

    tokens: Tensor
    laws: Tensor | None
    count: Tensor
    columns: int


def first_drafts(
    start: Start, position: Tensor, noise: Noise, known: Callable[[], Known]
) -> Tensor:
    """First drafts at code numbers ``position``, int64 ``[B, L]``; ``known`` is asked if needed.

    ``random`` and ``uniform`` are uniformly random. ``left`` repeats the last known code of the
    row, ``above`` the nearest known code of the column; ``sample_left`` and ``sample_above`` draw
    from the law of that place instead (SJD, arXiv 2410.01699, section 4.3). Where there is no such
    code it is random.
    """
    token = noise.token(Purpose.FRESH, position)
    if start in ("random", "uniform"):
        return token
    k = known()
    count = k.count[:, None]
    above = nearest_above(position, count, k.columns)
    source = above
    if start.endswith("left"):
        source = torch.where(count > position - position % k.columns, count - 1, above)
    place = source.clamp(min=0)
    if start.startswith("sample"):
        assert k.laws is not None
        weights = k.laws.gather(1, place[..., None].expand(*place.shape, k.laws.shape[-1]))
        copied = draw(weights, noise.exponential(Purpose.FRESH, position))
    else:
        copied = k.tokens.gather(1, place)
    return torch.where((source >= 0) & (position >= 0), copied, token)
