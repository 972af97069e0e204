"""Risk from the things in a picture: their outlines, their insides, and small things."""

import copy
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from csd_policy.risk.base import RiskMap, Source
from csd_policy.risk.canvas import Canvas
from csd_policy.risk.segmenters import Felzenszwalb, Masks, Segmenter

if TYPE_CHECKING:
    from csd_policy.models.base import ImageTokenModel


class SegmentationRisk(RiskMap):
    """An error is seen on outlines and on small things more than on the background.

    Each place of the grid gets the largest of: ``background``; ``interior`` times the share of it
    that lies inside a thing; ``small`` times the share inside a small thing; ``boundary`` if an
    outline of a thing runs through it. A mask of nearly the whole picture is no thing. A picture
    in which nothing is found is all background.

    Args:
        segmenter: finds the things.
        boundary: risk at outlines, in [0, 1].
        interior: risk inside things, in [0, 1].
        small: risk inside small things, in [0, 1].
        background: risk elsewhere, in [0, 1].
        small_area: largest share of the picture that a small thing has, in [0, 1].
        source: what the map sees, see ``RiskMap``.
        refresh: forward passes between two computations, 1 or more.

    Example:
        >>> SegmentationRisk(interior=0.3).interior
        0.3
    """

    def __init__(
        self,
        segmenter: Segmenter = Felzenszwalb(),  # noqa: B008
        boundary: float = 1.0,
        interior: float = 0.5,
        small: float = 1.0,
        background: float = 0.0,
        small_area: float = 0.05,
        source: Source = "progressive",
        refresh: int = 16,
    ) -> None:
        super().__init__(source, refresh)
        if not isinstance(segmenter, Segmenter):
            raise ValueError(f"segmenter is {segmenter!r}, expected a Segmenter")
        self.segmenter = segmenter
        weights = {
            "boundary": boundary,
            "interior": interior,
            "small": small,
            "background": background,
            "small_area": small_area,
        }
        for name, value in weights.items():
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is {value!r}, expected a number in [0, 1]")
            setattr(self, name, value)

    boundary: float
    interior: float
    small: float
    background: float
    small_area: float

    def bind(self, model: "ImageTokenModel") -> Self:
        bound = copy.copy(self)
        bound.segmenter = copy.copy(self.segmenter)
        bound.segmenter.device = model.device
        bound.segmenter.load()
        return bound

    def compute(self, canvas: Canvas) -> Tensor:
        pictures = [np.array(image.convert("RGB")) for image in canvas.images]
        found = [self.of_masks(self.segmenter.segment(p), canvas.model.grid) for p in pictures]
        return torch.stack(found).to(canvas.tokens.device)

    def of_masks(self, masks: Masks, grid: tuple[int, int]) -> Tensor:
        """Risk ``[rows, columns]`` in [0, 1] from masks, bool ``[M, H, W]``."""
        things = torch.from_numpy(masks).float()
        area = things.mean((1, 2))
        things = things[(area > 0) & (area < MOST_AREA)]
        if len(things) == 0:
            return torch.full(grid, float(self.background))
        small = things[things.mean((1, 2)) <= self.small_area]
        inside = things.amax(0)
        tiny = small.amax(0) if len(small) else torch.zeros_like(inside)
        padded = F.pad(things[:, None], (1, 1, 1, 1), mode="replicate")
        outer, inner = F.max_pool2d(padded, 3, 1), -F.max_pool2d(-padded, 3, 1)
        outline = (outer - inner).amax(0)[0]
        levels = [
            torch.full(grid, float(self.background)),
            self.interior * F.adaptive_avg_pool2d(inside[None], grid)[0],
            self.small * F.adaptive_avg_pool2d(tiny[None], grid)[0],
            self.boundary * F.adaptive_max_pool2d(outline[None], grid)[0],
        ]
        return torch.stack(levels).amax(0).clamp(0, 1)


MOST_AREA = 0.95  # share of the picture above which a mask is the picture itself
