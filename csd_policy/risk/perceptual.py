"""Risk from LPIPS: how much the picture changes where the draft would have put another token."""

import copy
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from csd_policy.risk.base import RiskMap, Source
from csd_policy.risk.canvas import Canvas
from csd_policy.risk.lpips import Features, Net, load_lpips

if TYPE_CHECKING:
    from csd_policy.models.base import ImageTokenModel

CODE_PIXELS = 16  # a place of the coarsest layer of AlexNet and VGG16 in LPIPS
LEAST_PIXELS = 64  # AlexNet's last layers have no pixels below


class PerceptualRisk(RiskMap):
    """An error is seen where the draft's own alternative changes the picture to the eye.

    Every ``stride``-th code in both directions is replaced by another draw from its draft's law,
    the picture is decoded, and the spatial LPIPS (Zhang et al. 2018, arXiv 1801.03924) between it
    and the picture so far is averaged over the place of each replaced code: stride^2 decodings
    measure every code. The risk is 1 - exp(-distance / scale). Pictures of small codes are enlarged
    until a code is as large as a place in the coarsest layer of LPIPS.

    Args:
        net: trunk of LPIPS, ``alex`` or ``vgg``.
        trunk: file of its weights, see ``csd_policy.risk.lpips.load_lpips``.
        stride: distance of the codes that are replaced together, 1 or more; 1 replaces all at once.
        scale: LPIPS at which the risk is 0.63, above 0; the default is the upper quartile of what
            the codes of the shipped model's pictures have.
        source: what the map sees, see ``RiskMap``.
        refresh: forward passes between two computations, 1 or more.

    Example:
        >>> PerceptualRisk(stride=3).stride
        3
    """

    alternatives = True

    def __init__(
        self,
        net: Net = "alex",
        trunk: str | None = None,
        stride: int = 4,
        scale: float = 0.1,
        source: Source = "progressive",
        refresh: int = 16,
    ) -> None:
        super().__init__(source, refresh)
        if net not in ("alex", "vgg"):
            raise ValueError(f"net is {net!r}, expected alex or vgg")
        if isinstance(stride, bool) or not isinstance(stride, int) or stride < 1:
            raise ValueError(f"stride is {stride!r}, expected a whole number, 1 or more")
        if not 0 < scale < float("inf"):
            raise ValueError(f"scale is {scale!r}, expected a finite number above 0")
        self.net, self.trunk, self.stride, self.scale = net, trunk, stride, scale

    _metric: Any = None

    def bind(self, model: "ImageTokenModel") -> Self:
        bound = copy.copy(self)
        bound._metric = load_lpips(self.net, self.trunk).to(model.device)
        return bound

    def compute(self, canvas: Canvas) -> Tensor:
        return 1 - torch.exp(-self.distance(canvas) / self.scale)

    def distance(self, canvas: Canvas) -> Tensor:
        """Spatial LPIPS around each code when it is replaced, ``[B, rows, columns]``, 0 or more."""
        if self._metric is None or canvas.alternatives is None:
            raise ValueError(f"{self!r} is not bound to a model, or the canvas has no alternatives")
        grid = canvas.model.grid
        original = Features.of(self._metric, to_pixels(canvas.model, canvas.tokens))
        found = torch.zeros(len(canvas.tokens), *grid, device=canvas.tokens.device)
        place = torch.arange(grid[0] * grid[1], device=canvas.tokens.device)
        row, column = place // grid[1] % self.stride, place % grid[1] % self.stride
        for group in range(self.stride**2):
            chosen = (row * self.stride + column == group).expand_as(canvas.tokens)
            changed = torch.where(chosen, canvas.alternatives, canvas.tokens)
            others = Features.of(self._metric, to_pixels(canvas.model, changed))
            seen = original.distance(self._metric, others)
            there = F.adaptive_avg_pool2d(seen, grid)[:, 0]
            found = torch.where(chosen.unflatten(1, grid), there, found)
        return found.clamp(min=0)


def to_pixels(model: "ImageTokenModel", tokens: Tensor) -> Tensor:
    """Pictures of codes ``[B, N]`` in [-1, 1], fp32 ``[B, 3, H, W]``; small codes are enlarged."""
    return enlarge(decode_pixels(model, tokens), model.grid)


def decode_pixels(model: "ImageTokenModel", tokens: Tensor) -> Tensor:
    """Pictures of codes ``[B, N]`` in [-1, 1], fp32 ``[B, 3, H, W]``, as the model decodes them."""
    pictures = [np.array(image.convert("RGB")) for image in model.decode(tokens)]
    pixels = torch.from_numpy(np.stack(pictures)).to(tokens.device).permute(0, 3, 1, 2)
    return pixels.float() / 127.5 - 1


def enlarge(pixels: Tensor, grid: tuple[int, int]) -> Tensor:
    """``pixels`` ``[B, 3, H, W]``, enlarged if a place of the grid is too small for LPIPS."""
    side = max(1, min(n // cells for n, cells in zip(pixels.shape[2:], grid, strict=True)))
    factor = max(-(-CODE_PIXELS // side), -(-LEAST_PIXELS // min(pixels.shape[2:])))
    return pixels if factor == 1 else F.interpolate(pixels, scale_factor=factor, mode="bilinear")
