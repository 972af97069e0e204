"""Risk where the things are known: the upper bound of what a segmenter can tell."""

import copy
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from csd_policy.risk.base import RiskMap
from csd_policy.risk.canvas import Canvas

if TYPE_CHECKING:
    from csd_policy.models.base import ImageTokenModel


class GroundTruthRisk(RiskMap):
    """The share of each place of the grid that lies on a thing, by the exact masks of known scenes.

    The scene is found by its caption. It says something of a picture only if that picture is the
    scene: use it in studies that replay scenes (``JacobiDecoder.replay``), not on drawn pictures.

    Args:
        scenes: folder of pictures, masks and captions, see ``csd_policy.study.scenes.read_scenes``.
    """

    source = "nothing"

    def __init__(self, scenes: str = "data/scenes") -> None:
        self.scenes = scenes

    def bind(self, model: "ImageTokenModel") -> Self:
        from csd_policy.study.scenes import read_scenes

        bound, scenes = copy.copy(self), read_scenes(self.scenes)
        covered = F.adaptive_avg_pool2d(scenes.masks[:, None].float(), model.grid)[:, 0]
        bound._covered = dict(zip(scenes.captions, covered.to(model.device), strict=True))
        return bound

    _covered: dict[str, Tensor] | None = None

    def compute(self, canvas: Canvas) -> Tensor:
        if self._covered is None:
            raise ValueError(f"{self!r} is not bound to a model")
        if unknown := [prompt for prompt in canvas.prompts if prompt not in self._covered]:
            raise ValueError(f"no scene of {self.scenes} has the caption {unknown[0]!r}")
        return torch.stack([self._covered[prompt] for prompt in canvas.prompts])
