"""Clicks and boxes on the exact masks of emoji scenes."""

import zlib

import numpy as np
import torch
from torch import Tensor

from trainers.scenes import SIZE, Scene

CLICKS, EMPTY_CLICKS, BOXES = 3, 1, 2  # of each scene: on objects, beside them, around them
JITTER = 0.1  # standard deviation of a box's sides, as a share of its extent
MOST_JITTER = 6  # pixels
Batch = dict[str, Tensor]


def object_masks(scene: Scene) -> np.ndarray:
    """The mask of each object, bool ``[objects, 96, 96]``; boxes of objects do not overlap."""
    masks = np.zeros((len(scene.objects), SIZE, SIZE), dtype=bool)
    for mask, thing in zip(masks, scene.objects, strict=True):
        left, top, right, bottom = thing.box
        window = np.s_[top:bottom, left:right]
        mask[window] = scene.mask[window]
    return masks


def prompts_of(scene: Scene) -> Batch:
    """A scene with prompts, drawn by a generator that the picture seeds.

    Returns:
        ``image`` uint8 ``[3, 96, 96]``; ``points`` fp32 ``[CLICKS + EMPTY_CLICKS, 2]`` (x, y) and
        ``boxes`` fp32 ``[BOXES, 4]``, in pixels; ``masks`` bool ``[prompts, 96, 96]``, of the
        points first; those of a click beside the objects are empty.
    """
    rng = np.random.default_rng(zlib.crc32(scene.image.tobytes()))
    masks = object_masks(scene)
    which = rng.integers(len(masks), size=CLICKS + BOXES)
    points = [_pixel(rng, masks[i]) for i in which[:CLICKS]]
    points += [_pixel(rng, ~scene.mask) for _ in range(EMPTY_CLICKS)]
    boxes = []
    for i in which[CLICKS:]:
        box = np.array(scene.objects[i].box, dtype=float)
        extent = np.tile(box[2:] - box[:2], 2)
        noise = (rng.standard_normal(4) * JITTER * extent).clip(-MOST_JITTER, MOST_JITTER)
        boxes.append((box + noise).clip(0, SIZE))
    empty = np.zeros((EMPTY_CLICKS, SIZE, SIZE), dtype=bool)
    return {
        "image": torch.from_numpy(scene.image).permute(2, 0, 1),
        "points": torch.tensor(np.array(points), dtype=torch.float32),
        "boxes": torch.tensor(np.array(boxes), dtype=torch.float32),
        "masks": torch.from_numpy(
            np.concatenate([masks[which[:CLICKS]], empty, masks[which[CLICKS:]]])
        ),
    }


def _pixel(rng: np.random.Generator, mask: np.ndarray) -> tuple[float, float]:
    rows, columns = mask.nonzero()
    i = int(rng.integers(len(rows)))
    return float(columns[i]) + 0.5, float(rows[i]) + 0.5
