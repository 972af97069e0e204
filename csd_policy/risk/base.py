"""The risk map: how visible an error would be at each place of the grid."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from csd_policy.parameters import Parametrized


class RiskMap(Parametrized, ABC):
    """How visible an error would be, from 0 (not at all) to 1, for each code of an image.

    A map may depend on committed tokens and on nothing else: if it saw a draft, the acceptance
    would depend on the drafted token, and residual and spent TV would be wrong.
    """

    @abstractmethod
    def compute(self, tokens: Tensor, known: Tensor, grid: tuple[int, int]) -> Tensor:
        """Risk ``[B, rows, columns]`` in [0, 1].

        Args:
            tokens: codebook ids in raster order, int64 ``[B, N]``.
            known: how many of them are committed, int64 ``[B]``; the rest is 0.
            grid: (rows, columns), N = rows * columns.
        """


class FixedRisk(RiskMap):
    """A map that is given, the same for every picture; stretched to the grid (nearest entry).

    Args:
        values: rows of equal length, each number in [0, 1]; the default is the picture's centre.

    Example:
        >>> FixedRisk([[0.0], [1.0]])  # the lower half
        FixedRisk(values=[[0.0], [1.0]])
    """

    def __init__(self, values: list[list[float]] | None = None) -> None:
        given = [[0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]] if values is None else values
        if not given or not given[0] or any(len(row) != len(given[0]) for row in given):
            raise ValueError(f"values is {values!r}, expected rows of equal length, at least one")
        for number in (number for row in given for number in row):
            if not 0 <= number <= 1:
                raise ValueError(f"values holds {number!r}, expected numbers in [0, 1]")
        self.values = given

    def compute(self, tokens: Tensor, known: Tensor, grid: tuple[int, int]) -> Tensor:
        values = torch.tensor(self.values, dtype=torch.float32, device=tokens.device)
        stretched = torch.nn.functional.interpolate(values[None, None], grid)[0]
        return stretched.expand(len(tokens), -1, -1)
