"""How the releases on Chameleon write a picture: prompts, special tokens, rows of codes."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from csd_policy.types import SamplingDefaults

# vocab ids of Chameleon's releases, for a tokenizer without the names
CHAMELEON = {"<s>": 0, "<eoss>": 8196, "<racm3:break>": 8197} | {
    f"<reserved{n:05d}>": n + 4 for n in range(8706, 8900)
}
BEGIN, SEPARATOR, NEWLINE = "<s>", "<reserved08706>", "<reserved08799>"
START_IMAGE, END_IMAGE = "<racm3:break>", "<eoss>"
LUMINA2_CODES = range(155000, 171384)  # vocab ids, in the order of the codebook
RESOLUTIONS = (512, 768, 1024)  # of Lumina-mGPT's checkpoints: each has its list of sizes
LUMINA2_RESOLUTIONS = (512, 768)  # that of its solver, that of its README
MOST_RATIO = 4  # of the sides of a picture


@dataclass(frozen=True)
class Layout:
    """How a release writes a picture.

    Attributes:
        template: text between ``begin`` and ``separator``.
        begin: vocab id in front of the text.
        separator: vocab id behind it.
        opening: vocab ids between the separator and slot 0.
        blank: vocab ids of the unconditional prompt.
        grid: rows and columns of codes.
        forced: vocab id of each slot, -1 where it holds a code.
        defaults: sampling settings of the release.
        codes: vocab ids in the order of the codebook; None if the vocabulary names its codes
            ``IMGIMG...Z``.
    """

    template: str
    begin: int
    separator: int
    opening: list[int]
    blank: list[int]
    grid: tuple[int, int]
    forced: list[int]
    defaults: SamplingDefaults
    codes: range | None = None


def lumina(size: str, vocabulary: Mapping[str, int]) -> Layout:
    """Lumina-mGPT: ``start, h, w`` (in 32 pixels), rows of codes with a newline each, ``end``.

    The unconditional prompt is ``start, h, w`` alone. Guidance and top-k are those of the README.
    Its own decoder samples h and w; here they are given.

    Args:
        size: ``WIDTHxHEIGHT``, one of the crop sizes of the release at 512, 768 or 1024.
        vocabulary: vocab ids of the tokenizer.
    """
    ids = CHAMELEON | dict(vocabulary)
    h, w = _find_size(size, RESOLUTIONS)
    return _rows(ids, ids[BEGIN], (h, w), 2, SamplingDefaults(4.0, 1.0, 2000), None)


def lumina2(size: str, vocabulary: Mapping[str, int], begin: int) -> Layout:
    """Lumina-mGPT 2.0: as 1.0, by the same names in Qwen's vocabulary, with 8 pixels a code.

    Its own decoder raises a guidance scale below 4, and lowers one above, step by step, to 4; here
    the scale is constant.

    Args:
        size: ``WIDTHxHEIGHT``, one of the crop sizes of the release at 512 or 768.
        vocabulary: vocab ids of the tokenizer, with all of those names.
        begin: vocab id of the tokenizer's beginning of a text, or of its end if it has none.
    """
    h, w = _find_size(size, LUMINA2_RESOLUTIONS)
    defaults = SamplingDefaults(4.0, 1.0, 4096)
    return _rows(vocabulary, begin, (h, w), 4, defaults, LUMINA2_CODES)


def anole(side: int, vocabulary: Mapping[str, int]) -> Layout:
    """Anole: ``start``, then codes without newlines; the unconditional prompt is ``bos, start``.

    Settings are those of its image decoder, whose text scale is the guidance scale when no picture
    is given. It appends ``end`` without a forward pass; here no slot stands for it.

    Args:
        side: of the square grid of codes, 32 in the release.
        vocabulary: vocab ids of the tokenizer.
    """
    ids = CHAMELEON | dict(vocabulary)
    begin, start = ids[BEGIN], ids[START_IMAGE]
    defaults = SamplingDefaults(guidance_scale=3.0, temperature=0.7, top_p=0.9)
    forced = [-1] * side**2
    return Layout(
        "{}", begin, ids[SEPARATOR], [start], [begin, start], (side, side), forced, defaults
    )


def _rows(
    ids: Mapping[str, int],
    begin: int,
    patches: tuple[int, int],
    per_patch: int,
    defaults: SamplingDefaults,
    codes: range | None,
) -> Layout:
    """Lumina-mGPT's layout of (h, w) patches of 32 pixels, ``per_patch`` codes a side of each."""
    h, w = patches
    names = (SEPARATOR, START_IMAGE, *(f"<reserved{8800 + n:05d}>" for n in patches))
    if lacking := [name for name in (*names, NEWLINE, END_IMAGE) if name not in ids]:
        raise ValueError(f"the tokenizer lacks {', '.join(lacking)} of Lumina-mGPT")
    separator, *opening = (ids[name] for name in names)
    row = [*[-1] * (per_patch * w), ids[NEWLINE]]
    forced = [*row * (per_patch * h), ids[END_IMAGE]]
    size = f"{32 * w}x{32 * h}"
    template = f"Generate an image of {size} according to the following prompt:\n{{}}"
    grid = (per_patch * h, per_patch * w)
    return Layout(template, begin, separator, opening, opening, grid, forced, defaults, codes)


def _find_size(size: str, resolutions: tuple[int, ...]) -> tuple[int, int]:
    """Height and width in patches."""
    sizes = {f"{32 * w}x{32 * h}": (h, w) for n in resolutions for h, w in _crops((n // 32) ** 2)}
    if size not in sizes:
        near = ", ".join(difflib.get_close_matches(size, sizes, n=6, cutoff=0))
        raise ValueError(
            f"size is {size!r}, expected WIDTHxHEIGHT of one of the {len(sizes)} sizes of "
            f"Lumina-mGPT at {', '.join(map(str, resolutions))}, for example {near}"
        )
    return sizes[size]


def _crops(most: int) -> list[tuple[int, int]]:
    """Heights and widths that ``most`` patches allow; each is as large as the other leaves room.

    They are those that the release's walk from ``most`` x 1 to 1 x ``most`` meets.
    """
    every = ((h, w) for w in range(1, most + 1) for h in range(most // (w + 1), most // w + 1))
    return [(h, w) for h, w in every if h and max(h, w) <= MOST_RATIO * min(h, w)]


def find_layout(
    config: Any, source: str, layout: str | None, size: str | None, tokenizer: Any
) -> Layout:
    """The layout of that name, or of the release that the checkpoint seems to be of.

    It is Lumina-mGPT 2.0's if the vocabulary holds its codes; Lumina-mGPT's if a size is given,
    config.json has ``mask_image_logits``, which only the class of that release writes, or the last
    part of ``source`` contains ``lumina``; else Anole's.

    Raises:
        ValueError: there is no such layout or size, or the tokenizer lacks a name.
    """
    ours = size is not None or hasattr(config, "mask_image_logits")
    ours = ours or "lumina" in Path(source).name.lower()
    if layout is None and config.vocab_size >= LUMINA2_CODES.stop:
        layout = "lumina2"
    layout = layout or ("lumina" if ours else "anole")
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    if layout == "lumina":
        return lumina(size or "768x768", vocabulary)
    if layout == "lumina2":
        ends = [tokenizer.bos_token_id, tokenizer.eos_token_id]  # Qwen's has the second alone
        begin = next((vocab_id for vocab_id in ends if vocab_id is not None), None)
        if begin is None:
            raise ValueError(f"the tokenizer of {source} has neither a bos_token nor an eos_token")
        return lumina2(size or "768x768", vocabulary, begin)
    if layout != "anole" or size is not None:
        raise ValueError(
            f"layout is {layout!r} with size {size!r}, expected lumina, lumina2, or anole without "
            "a size"
        )
    vq = config.vq_config
    return anole(vq.resolution // 2 ** (len(vq.channel_multiplier) - 1), vocabulary)
