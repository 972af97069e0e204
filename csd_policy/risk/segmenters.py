"""Masks of the things in a picture: what a segmenter is, and a classical method."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from csd_policy.parameters import Parametrized

Picture = npt.NDArray[np.uint8]  # [H, W, 3], RGB
Masks = npt.NDArray[np.bool_]  # [M, H, W]
BACKGROUND_SHARE = 0.1  # of the picture's edge, above which a region is background


class Segmenter(Parametrized, ABC):
    """Finds the things in a picture."""

    device: torch.device = torch.device("cpu")

    def load(self) -> None:
        """Load what the segmenter needs; ValueError or ModuleNotFoundError if that is missing."""

    @abstractmethod
    def segment(self, picture: Picture) -> Masks:
        """Masks bool ``[M, H, W]`` of a picture uint8 ``[H, W, 3]`` (RGB); M may be 0."""


class Felzenszwalb(Segmenter):
    """Regions of even colour without weights (Felzenszwalb & Huttenlocher 2004), by scikit-image.

    A region that holds at least a tenth of the picture's edge is taken for background.

    Args:
        scale: larger gives larger regions, above 0.
        sigma: of the smoothing in front, in pixels, 0 or more.
        min_size: pixels of the smallest region, 1 or more.
    """

    def __init__(self, scale: float = 200.0, sigma: float = 0.8, min_size: int = 40) -> None:
        lowest = {"scale": (scale, 1e-9), "sigma": (sigma, 0), "min_size": (min_size, 1)}
        for name, (value, low) in lowest.items():
            if not low <= value < float("inf"):
                raise ValueError(f"{name} is {value!r}, expected a finite number, {low:g} or more")
        self.scale, self.sigma, self.min_size = scale, sigma, min_size

    def load(self) -> None:
        try:
            import skimage.segmentation  # noqa: F401
        except ModuleNotFoundError as error:
            raise missing("scikit-image", "Felzenszwalb") from error

    def segment(self, picture: Picture) -> Masks:
        self.load()
        from skimage.segmentation import felzenszwalb

        return things(felzenszwalb(picture, self.scale, self.sigma, self.min_size))


def things(labels: npt.NDArray[np.integer[Any]]) -> Masks:
    """Masks bool ``[M, H, W]`` of the regions that are no background.

    Args:
        labels: of the regions, whole numbers of 0 or more, ``[H, W]``; a region that holds at least
            ``BACKGROUND_SHARE`` of the picture's edge is background.
    """
    edge = np.concatenate([labels[0], labels[-1], labels[1:-1, 0], labels[1:-1, -1]])
    share = np.bincount(edge, minlength=labels.max() + 1) / len(edge)
    found = [label for label in np.unique(labels) if share[label] < BACKGROUND_SHARE]
    none = np.zeros((0, *labels.shape), dtype=bool)
    return np.stack([labels == label for label in found]) if found else none


def missing(package: str, what: str) -> ModuleNotFoundError:
    """The error that names what to install."""
    return ModuleNotFoundError(
        f"{what} needs {package}, which is not installed: pip install 'csd-policy[risk]'"
    )
