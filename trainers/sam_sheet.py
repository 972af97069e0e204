"""A sheet of pictures with the masks that segmenters find in them, and the risk maps of these."""

from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from csd_policy.risk import SegmentationRisk
from csd_policy.risk.segmenters import Masks, Picture, Segmenter

GRID = (16, 16)  # of the shipped model's codes
COLOURS = np.array([(230, 60, 60), (60, 170, 250), (250, 200, 40), (90, 210, 90), (190, 90, 230),
                    (250, 140, 40), (60, 220, 210), (240, 110, 180)])  # fmt: skip
GAP, HEAD = 4, 14  # pixels


def painted(picture: Picture, masks: Masks) -> Picture:
    """The picture in grey under its masks, each in a colour, the smallest on top."""
    grey = np.array(Image.fromarray(picture).convert("L"))[..., None].repeat(3, 2)
    shown = grey.astype(float)
    order = np.argsort(-masks.sum((1, 2)), kind="stable")
    for i, mask in enumerate(masks[order]):
        shown[mask] = 0.45 * grey[mask] + 0.55 * COLOURS[i % len(COLOURS)]
    return shown.astype(np.uint8)


def contact_sheet(
    pictures: Sequence[Picture], segmenters: Mapping[str, Segmenter], zoom: int = 1
) -> Image.Image:
    """A row for each picture: itself, and for each segmenter its masks and the risk map.

    Args:
        pictures: uint8 ``[H, W, 3]``, all of one size, at least one.
        segmenters: by the names in the head of the sheet.
        zoom: pixels of the sheet per pixel of a picture.
    """
    height, width = (zoom * extent for extent in pictures[0].shape[:2])
    titles = ["picture"] + [f"{n} {part}" for n in segmenters for part in ("masks", "risk")]
    size = (len(titles) * (width + GAP), HEAD + len(pictures) * (height + GAP))
    sheet = Image.new("RGB", size, "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(9)
    for column, title in enumerate(titles):
        pen.text((column * (width + GAP), 1), title[:18], fill="black", font=font)
    for row, picture in enumerate(pictures):
        shown = [picture]
        for segmenter in segmenters.values():
            masks = segmenter.segment(picture)
            risk = SegmentationRisk().of_masks(masks, GRID).numpy()
            shown += [painted(picture, masks), np.uint8(255 * risk)]
        for column, tile in enumerate(shown):
            large = Image.fromarray(tile).resize((width, height), Image.Resampling.NEAREST)
            sheet.paste(large, (column * (width + GAP), HEAD + row * (height + GAP)))
    return sheet
