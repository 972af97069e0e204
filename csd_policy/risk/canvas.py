"""What a risk map may look at: the codes of a picture that are known, and the picture they make."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

    from csd_policy.models.base import ImageTokenModel


def nearest_above(position: Tensor, known: Tensor, columns: int) -> Tensor:
    """The lowest known code in the column of each ``position``; negative if there is none.

    ``position`` int64 ``[B, L]`` are code numbers at or behind ``known``, int64 ``[B, 1]``, the
    count of known codes.
    """
    return position - columns * ((position - known) // columns + 1)


@dataclass(frozen=True)
class Canvas:
    """Pictures that are complete only in part.

    Attributes:
        tokens: codebook ids in raster order, int64 ``[B, N]``, with nothing unknown in them: each
            code below the known ones repeats the nearest known one (see ``nearest``).
        known: how many codes of each picture are known, int64 ``[B]``, 0 to N.
        nearest: the code number that each code was taken from, int64 ``[B, N]``: its own if it is
            known, else the nearest known one above, else (in the first row) the last known one.
        alternatives: what the draft would have put at each code, int64 ``[B, N]``: another draw
            from its law; None if the map does not ask for it.
        model: decodes them; has ``grid`` and ``codebook``.
        prompts: one a picture.
    """

    tokens: Tensor
    known: Tensor
    nearest: Tensor
    model: "ImageTokenModel"
    prompts: Sequence[str]
    alternatives: Tensor | None = None

    @classmethod
    def of(
        cls, tokens: Tensor, known: Tensor, model: "ImageTokenModel", prompts: Sequence[str],
        alternatives: Tensor | None = None,
    ) -> Self:  # fmt: skip
        """A canvas of the first ``known`` codes of ``tokens``; the others are not looked at."""
        position = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        count = known[:, None]
        above = nearest_above(position, count, model.grid[1])
        nearest = torch.where(above < 0, (count - 1).clamp(min=0), above)
        nearest = torch.where(position < count, position, nearest)
        whole = torch.where(count > 0, tokens.gather(1, nearest), 0)
        if alternatives is not None:
            alternatives = torch.where(count > 0, alternatives.gather(1, nearest), 0)
        return cls(whole, known, nearest, model, prompts, alternatives)

    @cached_property
    def images(self) -> "list[Image]":
        """The pictures as PIL images, decoded at the first use."""
        return self.model.decode(self.tokens)
