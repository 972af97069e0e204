"""Emoji scenes: captioned 96x96 pictures with exact masks, composed on the fly from a seed.

A scene shows one object, two to four copies of one object, or two objects in a relation, on a plain
gradient or on a random crop of a picture. Scene ``i`` of a split depends on ``(split, i)`` alone.
"""

import csv
import zlib
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

import numpy as np
from PIL import Image

SIZE = 96
SCENES_VERSION = 1  # raise it when the same index gives another scene
SPLITS = {"train": 0, "validation": 1, "test": 2}
COUNT_WORDS = ("one", "two", "three", "four")
RELATIONS = ("left of", "above")
KINDS = ("plain", "photo")
TONES = ("black", "gray", "white", "brown", "red", "orange", "yellow", "green", "cyan", "blue",
         "purple", "pink")  # fmt: skip
HELD_OUT_SHARE = 10  # one (object, background) pair in HELD_OUT_SHARE never occurs in training


@dataclass(frozen=True)
class ObjectKind:
    """A kind of object: its emoji character, caption words and category."""

    character: str
    name: str
    plural: str
    category: str

    @property
    def file_name(self) -> str:
        return f"{ord(self.character):x}.png"


@dataclass(frozen=True)
class PlacedObject:
    """One object in a scene; ``box`` is (left, top, right, bottom) in pixels, ends exclusive."""

    name: str
    box: tuple[int, int, int, int]


@dataclass(frozen=True)
class Scene:
    """A picture with everything that is true about it.

    ``image`` uint8 [96, 96, 3]; ``mask`` bool [96, 96], True on the objects; ``held_out`` is True
    if an (object, background) pair of the scene never occurs in the training split.
    """

    image: np.ndarray
    mask: np.ndarray
    objects: tuple[PlacedObject, ...]
    relation: str | None
    tone: str
    kind: str
    caption: str
    held_out: bool


@lru_cache(maxsize=1)
def object_kinds() -> tuple[ObjectKind, ...]:
    """The closed list of objects, in the order that defines their class index."""
    text = files("trainers").joinpath("data/objects.csv").read_text(encoding="utf-8")
    return tuple(ObjectKind(**row) for row in csv.DictReader(text.splitlines()))


def caption_words() -> list[str]:
    """Every word a caption can contain, sorted: the vocabulary of the shipped model."""
    words = {"on", "left", "of", "above", *COUNT_WORDS[1:], *TONES, *KINDS}
    for kind in object_kinds():
        words.update(f"{kind.name} {kind.plural}".split())
    return sorted(words)


def tone_of(rgb: np.ndarray) -> str:
    """The colour word for a mean colour; ``rgb`` [3] in [0, 255]."""
    r, g, b = (float(c) / 255 for c in rgb)
    value, chroma = max(r, g, b), max(r, g, b) - min(r, g, b)
    if value < 0.17:
        return "black"
    if chroma / value < 0.13 or chroma < 0.06:
        return "white" if value > 0.8 else "gray"
    if value == r:
        hue = 60 * ((g - b) / chroma % 6)
    elif value == g:
        hue = 60 * ((b - r) / chroma + 2)
    else:
        hue = 60 * ((r - g) / chroma + 4)
    if hue < 45 and value < 0.62 and hue >= 12:
        return "brown"
    bounds = ((14, "red"), (42, "orange"), (68, "yellow"), (165, "green"), (192, "cyan"),
              (255, "blue"), (292, "purple"), (342, "pink"), (361, "red"))  # fmt: skip
    return next(name for upper, name in bounds if hue < upper)


def is_held_out(name: str, tone: str, kind: str) -> bool:
    """Whether training never shows object ``name`` on a ``tone`` ``kind`` background."""
    return zlib.crc32(f"{name}|{tone}|{kind}".encode()) % HELD_OUT_SHARE == 0


def make_caption(names: list[str], plural: str, relation: str | None, tone: str, kind: str) -> str:
    """The caption of a scene, e.g. ``two cats on blue plain``; counts above one use ``plural``."""
    if relation is not None:
        subject = f"{names[0]} {relation} {names[1]}"
    elif len(names) > 1:
        subject = f"{COUNT_WORDS[len(names) - 1]} {plural}"
    else:
        subject = names[0]
    return f"{subject} on {tone} {kind}"


class SceneGenerator:
    """Composes the scenes of one split from a folder of pictures (see ``trainers.pictures``).

    Args:
        folder: holds ``emoji/<code point>.png`` (RGBA) and ``backgrounds/*.png`` (RGB).
        split: ``train``, ``validation`` or ``test``; their seeds are disjoint.

    Raises:
        FileNotFoundError: a sub-folder is missing or empty.
        ValueError: unknown split.
    """

    def __init__(self, folder: str | Path, split: str) -> None:
        if split not in SPLITS:
            raise ValueError(f"split is {split!r}, expected one of {sorted(SPLITS)}")
        self.folder, self.split = Path(folder), split
        found = {path.name: path for path in sorted((self.folder / "emoji").glob("*.png"))}
        self.kinds = [kind for kind in object_kinds() if kind.file_name in found]
        paths = sorted((self.folder / "backgrounds").glob("*.png"))
        if len(self.kinds) < 2 or not paths:
            raise FileNotFoundError(
                f"{self.folder} holds {len(self.kinds)} known emoji and {len(paths)} backgrounds; "
                "make the folder with `python -m trainers.pictures --output FOLDER`"
            )
        self._emoji = [_crop_to_alpha(Image.open(found[k.file_name])) for k in self.kinds]
        self._backgrounds = [Image.open(path).convert("RGB") for path in paths]

    def __call__(self, index: int) -> Scene:
        """Scene number ``index`` (0 or more) of the split."""
        if index < 0:
            raise ValueError(f"scene index is {index}, expected 0 or more")
        rng = np.random.default_rng((SPLITS[self.split], index))
        which, relation = self._subject(rng)
        while True:
            kind = KINDS[int(rng.random() >= 1 / 3)]
            canvas = _gradient(rng) if kind == "plain" else self._crop(rng)
            tone = tone_of(canvas.mean(axis=(0, 1)))
            held_out = any(is_held_out(self.kinds[i].name, tone, kind) for i in which)
            if self.split == "test" or not held_out:
                break
        canvas, mask = canvas.astype(np.float32), np.zeros((SIZE, SIZE), dtype=bool)
        boxes = _layout(rng, len(which), relation)
        objects = []
        for i, (x, y, side) in zip(which, boxes, strict=True):
            box = _paste(canvas, mask, self._emoji[i], x, y, side)
            objects.append(PlacedObject(self.kinds[i].name, box))
        names, plural = [o.name for o in objects], self.kinds[which[0]].plural
        caption = make_caption(names, plural, relation, tone, kind)
        image = np.rint(canvas).astype(np.uint8)
        return Scene(image, mask, tuple(objects), relation, tone, kind, caption, held_out)

    def _subject(self, rng: np.random.Generator) -> tuple[list[int], str | None]:
        """Indices of the objects and their relation."""
        draw = rng.random()
        first = int(rng.integers(len(self.kinds)))
        if draw < 0.45:
            return [first], None
        if draw < 0.75:
            return [first] * int(rng.integers(2, 5)), None
        second = int(rng.integers(len(self.kinds) - 1))
        second += second >= first
        return [first, second], RELATIONS[int(rng.integers(2))]

    def _crop(self, rng: np.random.Generator) -> np.ndarray:
        picture = self._backgrounds[int(rng.integers(len(self._backgrounds)))]
        limit = min(picture.size)
        side = int(rng.integers(min(SIZE, limit), limit + 1))
        x, y = (int(rng.integers(extent - side + 1)) for extent in picture.size)
        box = (x, y, x + side, y + side)
        small = picture.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box, reducing_gap=1.5)
        return np.asarray(small)


def _crop_to_alpha(image: Image.Image) -> Image.Image:
    image = image.convert("RGBA")
    return image.crop(image.getchannel("A").getbbox())


def _gradient(rng: np.random.Generator) -> np.ndarray:
    """A soft linear gradient, float32 [96, 96, 3] in [0, 255], around a random colour."""
    hue, saturation, value = rng.random(), rng.random() ** 0.7, 0.1 + 0.9 * rng.random()
    sector = np.array([5, 3, 1]) + 6 * hue
    k = sector % 6
    rgb = value - value * saturation * np.clip(np.minimum(k, 4 - k), 0, 1)
    slope = rng.uniform(-0.15, 0.15, size=(2, 1)) + rng.uniform(-0.03, 0.03, size=(2, 3))
    ramp = np.linspace(-1, 1, SIZE)
    field = rgb + ramp[:, None, None] * slope[0] + ramp[None, :, None] * slope[1]
    return (255 * np.clip(field, 0, 1)).astype(np.float32)


def _layout(
    rng: np.random.Generator, count: int, relation: str | None
) -> list[tuple[int, int, int]]:
    """Top-left corners and sides of the objects' squares, inside the picture and disjoint."""
    half = SIZE // 2
    if count == 1:
        side = int(rng.integers(40, 77))
        x, y = rng.integers(SIZE - side + 1, size=2)
        return [(int(x), int(y), side)]
    if relation is None:
        side, cells = int(rng.integers(28, 45)), rng.permutation(4)[:count]
        corners = [(half * (c % 2), half * (c // 2)) for c in cells]
        jitter = rng.integers(half - side + 1, size=(count, 2))
        return [
            (int(a + dx), int(b + dy), side)
            for (a, b), (dx, dy) in zip(corners, jitter, strict=True)
        ]
    boxes = []
    for i, side in enumerate(rng.integers(32, half + 1, size=2)):
        along = i * half + int(rng.integers(half - side + 1))
        across = int(rng.integers(SIZE - side + 1))
        x, y = (along, across) if relation == "left of" else (across, along)
        boxes.append((x, y, int(side)))
    return boxes


def _paste(
    canvas: np.ndarray, mask: np.ndarray, emoji: Image.Image, x: int, y: int, side: int
) -> tuple[int, int, int, int]:
    """Blend ``emoji`` into the square at (x, y), keep its aspect, mark the mask, return its box."""
    scale = side / max(emoji.size)
    width, height = (max(1, round(extent * scale)) for extent in emoji.size)
    x, y = x + (side - width) // 2, y + (side - height) // 2
    small = np.asarray(emoji.resize((width, height), Image.Resampling.LANCZOS), dtype=np.float32)
    alpha = small[..., 3:] / 255
    window = np.s_[y : y + height, x : x + width]
    canvas[window] += alpha * (small[..., :3] - canvas[window])
    mask[window] |= alpha[..., 0] > 0.5
    return (x, y, x + width, y + height)
