"""Pictures in rows and columns, with labels."""

import textwrap
from collections.abc import Mapping, Sequence

from PIL import Image, ImageDraw, ImageFont

from csd_policy.figures import INK

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def labelled_grid(
    cells: Sequence[Sequence[Image.Image | None]],
    row_labels: Sequence[str],
    column_labels: Sequence[str],
    side: int = 144,
    legend: Mapping[str, str] | None = None,
) -> Image.Image:
    """Pictures in rows and columns, with a label for each.

    Args:
        cells: rows of pictures, shown with at most ``side`` pixels; None leaves a place empty.
        legend: label and colour of squares explained at the top.
    """
    font, gap = ImageFont.load_default(14), 6
    heads = ["\n".join(textwrap.wrap(label, max(8, side // 8))) for label in column_labels]
    sides = ["\n".join(textwrap.wrap(label, 20)) for label in row_labels]
    pen = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    left = gap * 2 + max(int(pen.multiline_textbbox((0, 0), s, font=font)[2]) for s in sides)
    head = max(int(pen.multiline_textbbox((0, 0), h, font=font)[3]) for h in heads)
    width = left + len(heads) * (side + gap)
    marks = _legend_places(legend or {}, left, width, font)
    width = max([width, *(right for _, _, right in marks)])
    above = max([0, *(y + 26 for _, y, _ in marks)])
    top = above + head + gap * 2
    sheet = Image.new("RGB", (width, top + len(sides) * (side + gap)), "white")
    pen = ImageDraw.Draw(sheet)
    for (label, colour), (x, y, _) in zip((legend or {}).items(), marks, strict=True):
        pen.rectangle((x, y + gap, x + 14, y + gap + 14), fill=colour)
        pen.text((x + 20, y + gap + 7), label, fill=INK, font=font, anchor="lm")
    for column, label in enumerate(heads):
        centre = left + column * (side + gap) + side // 2
        pen.multiline_text(
            (centre, top - gap), label, fill=INK, font=font, anchor="md", align="center"
        )
    for row, (label, pictures) in enumerate(zip(sides, cells, strict=True)):
        y = top + row * (side + gap)
        pen.multiline_text(
            (left - gap, y + side // 2), label, fill=INK, font=font, anchor="rm", align="right"
        )
        for column, picture in enumerate(pictures):
            if picture is not None:
                sheet.paste(_fit(picture, side), (left + column * (side + gap), y))
    return sheet


def _legend_places(
    legend: Mapping[str, str], left: int, right: int, font: Font
) -> list[tuple[int, int, int]]:
    """Left, upper and right end of each entry, in lines between ``left`` and ``right``."""
    places, x, y = [], left, 0
    for label in legend:
        width = 24 + int(font.getlength(label))
        if x > left and x + width > right:
            x, y = left, y + 24
        places.append((x, y, x + width))
        x += width + 22
    return places


def _fit(picture: Image.Image, side: int) -> Image.Image:
    """``picture`` with its longer edge scaled to ``side``."""
    scale = side / max(picture.size)
    smooth = Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.BICUBIC
    width, height = (max(1, round(edge * scale)) for edge in picture.size)
    return picture.convert("RGB").resize((width, height), smooth)
