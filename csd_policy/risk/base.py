"""The risk map: how visible an error would be at each place of the grid."""

import copy
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal, Self, get_args

import torch
from torch import Tensor

from csd_policy.parameters import Parametrized
from csd_policy.risk.canvas import Canvas

if TYPE_CHECKING:
    from csd_policy.models.base import ImageTokenModel

Source = Literal["progressive", "preview", "drafts", "nothing"]
SOURCES = get_args(Source)


class RiskMap(Parametrized, ABC):
    """How visible an error would be, from 0 (not at all) to 1, for each code of an image.

    Subclass it and write ``compute``; the loop decides when it is called, keeps what it gave and
    hands each draft its value. ``csd_policy.testing.check_risk_map`` checks the contract.

    What the map sees is chosen by ``source``:

    - ``progressive``: the codes committed so far. Below them the canvas repeats the nearest code
      above, and the risk there is that of the place it was repeated from. Before the first code
      it is 1, so that a gated policy begins exactly.
    - ``preview``: another picture of the same prompt, drawn first and fast by a relaxed rule with
      random numbers of its own. Its passes are counted with those of the picture.
    - ``drafts``: the committed codes and the drafts under verification. Then the acceptance depends
      on the drafted token: residual and spent TV no longer hold, and no policy is exact. Only for
      studies; the decoder asks for ``spent_tv="estimate"`` with it.
    - ``nothing``: the map does not look (for maps that are given).

    A map of the first two kinds depends on committed tokens and on numbers that nothing else uses,
    so that residual and spent TV hold for any map, and a policy that may veto stays exact.

    Args:
        source: what the map sees.
        refresh: forward passes between two computations, 1 or more (``preview`` and ``nothing`` are
            computed once).
    """

    source: Source = "progressive"
    refresh: int = 16
    alternatives: bool = False  # ask for ``canvas.alternatives``

    def __init__(self, source: Source = "progressive", refresh: int = 16) -> None:
        if source not in SOURCES:
            raise ValueError(f"source is {source!r}, expected one of {', '.join(SOURCES)}")
        if isinstance(refresh, bool) or not isinstance(refresh, int) or refresh < 1:
            raise ValueError(f"refresh is {refresh!r}, expected a whole number, 1 or more")
        self.source, self.refresh = source, refresh

    @abstractmethod
    def compute(self, canvas: Canvas) -> Tensor:
        """Risk ``[B, rows, columns]`` in [0, 1], one value per code of the grid."""

    def bind(self, model: "ImageTokenModel") -> Self:
        """A copy that holds what the map needs (networks, tables) on the model's device."""
        return copy.copy(self)

    def risk(self, canvas: Canvas) -> Tensor:
        """``compute``, checked, and carried on below the codes that are known: ``[B, N]``, fp32.

        Raises:
            ValueError: the map has another shape, or a value outside [0, 1].
        """
        found = self.compute(canvas)
        shape = (len(canvas.tokens), *canvas.model.grid)
        if not (isinstance(found, Tensor) and found.shape == shape and found.is_floating_point()):
            what = (
                f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else repr(found)
            )
            raise ValueError(f"compute of {self!r} gives {what}, expected floats {list(shape)}")
        if not ((found >= 0) & (found <= 1)).all():
            low, high = float(found.min()), float(found.max())
            raise ValueError(f"compute of {self!r} gives [{low:g}, {high:g}], expected [0, 1]")
        values = found.flatten(1).float()
        if self.source == "nothing":
            return values
        carried = values.gather(1, canvas.nearest)
        return torch.where(canvas.known[:, None] > 0, carried, 1.0)


class FixedRisk(RiskMap):
    """A map that is given, the same for every picture; stretched to the grid (nearest entry).

    Args:
        values: rows of equal length, each number in [0, 1]; the default is the picture's centre.

    Example:
        >>> FixedRisk([[0.0], [1.0]])  # the lower half
        FixedRisk(values=[[0.0], [1.0]])
    """

    source = "nothing"

    def __init__(self, values: list[list[float]] | None = None) -> None:
        given = [[0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]] if values is None else values
        if not given or not given[0] or any(len(row) != len(given[0]) for row in given):
            raise ValueError(f"values is {values!r}, expected rows of equal length, at least one")
        for number in (number for row in given for number in row):
            if not 0 <= number <= 1:
                raise ValueError(f"values holds {number!r}, expected numbers in [0, 1]")
        self.values = given

    def compute(self, canvas: Canvas) -> Tensor:
        values = torch.tensor(self.values, dtype=torch.float32, device=canvas.tokens.device)
        stretched = torch.nn.functional.interpolate(values[None, None], canvas.model.grid)[0]
        return stretched.expand(len(canvas.tokens), -1, -1)
