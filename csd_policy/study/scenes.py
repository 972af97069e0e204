"""Pictures whose things are known: a folder of pictures, masks and captions."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

CAPTIONS = "captions.txt"


@dataclass(frozen=True)
class Scenes:
    """Pictures with captions, all different, and masks: bool ``[n, H, W]``, True on things."""

    captions: Sequence[str]
    pictures: "Sequence[Image]"
    masks: Tensor


def read_scenes(folder: str | Path) -> Scenes:
    """The scenes of a folder, as ``python -m trainers.scene_folder`` writes it.

    It holds ``captions.txt`` and, by the line's number, ``00000.png`` and ``00000_mask.png``, white
    on things.

    Raises:
        ValueError: a file is missing or cannot be read, a caption is there twice, or a mask has
            another size than its picture or the first one.
    """
    from PIL import Image, UnidentifiedImageError

    folder = Path(folder)
    try:
        captions = (folder / CAPTIONS).read_text(encoding="utf-8").splitlines()
        pictures = [
            Image.open(folder / f"{i:05d}.png").convert("RGB") for i in range(len(captions))
        ]
        masks = [
            Image.open(folder / f"{i:05d}_mask.png").convert("L") for i in range(len(captions))
        ]
    except (OSError, UnicodeDecodeError, UnidentifiedImageError) as error:
        raise ValueError(f"{folder} is no folder of scenes: {error}") from error
    if not captions:
        raise ValueError(f"{folder / CAPTIONS} is empty, expected a caption a line")
    seen: set[str] = set()
    for caption, picture, mask in zip(captions, pictures, masks, strict=True):
        if not caption.strip() or caption in seen:
            raise ValueError(f"{folder / CAPTIONS} holds {caption!r} twice, or empty")
        seen.add(caption)
        if not picture.size == mask.size == pictures[0].size:
            raise ValueError(
                f"the picture of {caption!r} has {picture.size} pixels and its mask {mask.size}, "
                f"expected {pictures[0].size}"
            )
    return Scenes(
        captions, pictures, torch.from_numpy(np.stack([np.array(m) for m in masks]) > 127)
    )
