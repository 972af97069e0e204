"""How the releases on Chameleon write a picture: prompts, special tokens, rows of codes."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from csd_policy.types import SamplingDefaults

# vocab ids of the releases, for a tokenizer without the name; "<reservedN>" is N + 4
BEGIN, END_IMAGE, START_IMAGE = ("<s>", 0), ("<eoss>", 8196), ("<racm3:break>", 8197)
SEPARATOR, NEWLINE = ("<reserved08706>", 8710), ("<reserved08799>", 8803)
RESOLUTIONS = (512, 768, 1024)  # of Lumina-mGPT's checkpoints: each has its list of sizes
MOST_RATIO = 4  # of the sides of a picture


@dataclass(frozen=True)
class Layout:
    """How a release writes a picture.

    Attributes:
        template: text in front of the separator.
        opening: vocab ids between the separator and slot 0.
        blank: vocab ids of the unconditional prompt.
        grid: rows and columns of codes.
        forced: vocab id of each slot, -1 where it holds a code.
        defaults: sampling settings of the release.
    """

    template: str
    opening: list[int]
    blank: list[int]
    grid: tuple[int, int]
    forced: list[int]
    defaults: SamplingDefaults


def lumina(size: str, vocabulary: Mapping[str, int]) -> Layout:
    """Lumina-mGPT: ``start, h, w`` (in 32 pixels), rows of codes with a newline each, ``end``.

    The unconditional prompt is ``start, h, w`` alone. Guidance and top-k are those of the README.
    Its own decoder samples h and w; here they are given.

    Args:
        size: ``WIDTHxHEIGHT``, one of the crop sizes of the release at 512, 768 or 1024.
        vocabulary: vocab ids of the tokenizer.
    """
    sizes = {f"{32 * w}x{32 * h}": (h, w) for n in RESOLUTIONS for h, w in _crops((n // 32) ** 2)}
    if size not in sizes:
        near = ", ".join(difflib.get_close_matches(size, sizes, n=6, cutoff=0))
        raise ValueError(
            f"size is {size!r}, expected WIDTHxHEIGHT of one of the {len(sizes)} sizes of "
            f"Lumina-mGPT at {', '.join(map(str, RESOLUTIONS))}, for example {near}"
        )
    h, w = sizes[size]
    sides = [vocab_id(vocabulary, f"<reserved{8800 + n:05d}>", 8804 + n) for n in (h, w)]
    opening = [vocab_id(vocabulary, *START_IMAGE), *sides]
    row = [*[-1] * (2 * w), vocab_id(vocabulary, *NEWLINE)]
    forced = [*row * (2 * h), vocab_id(vocabulary, *END_IMAGE)]
    template = f"Generate an image of {size} according to the following prompt:\n{{}}"
    defaults = SamplingDefaults(guidance_scale=4.0, temperature=1.0, top_k=2000)
    return Layout(template, opening, opening, (2 * h, 2 * w), forced, defaults)


def anole(side: int, vocabulary: Mapping[str, int]) -> Layout:
    """Anole: ``start``, then codes without newlines; the unconditional prompt is ``bos, start``.

    Settings are those of its image decoder, whose text scale is the guidance scale when no picture
    is given. It appends ``end`` without a forward pass; here no slot stands for it.

    Args:
        side: of the square grid of codes, 32 in the release.
        vocabulary: vocab ids of the tokenizer.
    """
    start = vocab_id(vocabulary, *START_IMAGE)
    blank = [vocab_id(vocabulary, *BEGIN), start]
    defaults = SamplingDefaults(guidance_scale=3.0, temperature=0.7, top_p=0.9)
    return Layout("{}", [start], blank, (side, side), [-1] * side**2, defaults)


def _crops(most: int) -> list[tuple[int, int]]:
    """Heights and widths that ``most`` patches allow; each is as large as the other leaves room.

    They are those that the release's walk from ``most`` x 1 to 1 x ``most`` meets.
    """
    every = ((h, w) for w in range(1, most + 1) for h in range(most // (w + 1), most // w + 1))
    return [(h, w) for h, w in every if h and max(h, w) <= MOST_RATIO * min(h, w)]


def vocab_id(vocabulary: Mapping[str, int], name: str, published: int) -> int:
    """The vocab id of a name, or the published one if the tokenizer lacks the name."""
    return vocabulary.get(name, published)


def find_layout(
    config: Any, source: str, layout: str | None, size: str | None, vocabulary: Mapping[str, int]
) -> Layout:
    """The layout of that name, or of the release that the checkpoint seems to be of.

    It is Lumina-mGPT's if a size is given, config.json has ``mask_image_logits``, which only the
    class of that release writes, or the last part of ``source`` contains ``lumina``.

    Raises:
        ValueError: there is no such layout or size.
    """
    ours = size is not None or hasattr(config, "mask_image_logits")
    ours = ours or "lumina" in Path(source).name.lower()
    layout = layout or ("lumina" if ours else "anole")
    if layout == "lumina":
        return lumina(size or "768x768", vocabulary)
    if layout != "anole" or size is not None:
        raise ValueError(
            f"layout is {layout!r} with size {size!r}, expected lumina, or anole without a size"
        )
    vq = config.vq_config
    return anole(vq.resolution // 2 ** (len(vq.channel_multiplier) - 1), vocabulary)
