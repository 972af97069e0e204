"""Reading the masks that segment-anything's generator writes, in any of its formats."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from csd_policy.risk.segmenters import Masks, missing


def read_masks(records: Sequence[Mapping[str, Any]], size: tuple[int, int]) -> Masks:
    """The masks of ``SamAutomaticMaskGenerator`` in any of its output modes, bool ``[M, H, W]``.

    ``binary_mask`` is an array, ``uncompressed_rle`` a table of ``size`` and run lengths down the
    columns, ``coco_rle`` the same with the lengths as text (read by pycocotools).

    Raises:
        ValueError: a record in another format, or of another size than (H, W).
    """
    masks = [_read_mask(record["segmentation"]) for record in records]
    for mask in masks:
        if mask.shape != size:
            raise ValueError(f"a mask has size {mask.shape}, expected {size}")
    return np.stack(masks) if masks else np.zeros((0, *size), dtype=bool)


def _read_mask(segmentation: Any) -> npt.NDArray[np.bool_]:
    if isinstance(segmentation, np.ndarray):
        return segmentation.astype(bool)
    if not (isinstance(segmentation, Mapping) and {"size", "counts"} <= segmentation.keys()):
        raise ValueError(f"a mask is {segmentation!r}, expected an array or a table of run lengths")
    if isinstance(segmentation["counts"], list):
        from segment_anything.utils.amg import rle_to_mask

        return np.asarray(rle_to_mask(dict(segmentation)), dtype=bool)
    try:
        from pycocotools.mask import decode
    except ModuleNotFoundError as error:
        raise missing("pycocotools", "a mask in COCO's compressed format") from error
    return np.asarray(decode(segmentation), dtype=bool)
