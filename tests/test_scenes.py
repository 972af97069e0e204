"""Scenes: every statement that a scene makes about itself is true of its pixels."""

import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from trainers.scenes import (
    SIZE,
    TONES,
    PlacedObject,
    Scene,
    SceneGenerator,
    caption_words,
    is_held_out,
    make_caption,
    object_kinds,
    tone_of,
)

PICTURES = Path(__file__).parent / "fixtures" / "pictures"
COUNT = 300
SPLITS = ("train", "validation", "test")
GENERATORS = {split: SceneGenerator(PICTURES, split) for split in SPLITS}
CAPTIONS = [
    "two pizzas on red plain",
    "violin left of pizza on yellow photo",
    "dog on yellow photo",
    "violin above taxi on gray photo",
    "banana above dog on yellow photo",
]
indices = st.integers(0, 2**40)


@pytest.fixture(scope="module")
def scenes() -> dict[str, list[Scene]]:
    """The first scenes of every split."""
    return {split: [make(i) for i in range(COUNT)] for split, make in GENERATORS.items()}


def same(a: Scene, b: Scene) -> bool:
    values = ((getattr(a, field.name), getattr(b, field.name)) for field in fields(Scene))
    return all(np.array_equal(x, y) if isinstance(x, np.ndarray) else x == y for x, y in values)


def painted(target: Path, colour: tuple[int, int, int]) -> SceneGenerator:
    """A generator of the same scenes, the emoji's colours replaced by one colour."""
    shutil.copytree(PICTURES, target)
    for path in (target / "emoji").glob("*.png"):
        alpha = Image.open(path).getchannel("A")
        emoji = Image.new("RGBA", alpha.size, colour)
        emoji.putalpha(alpha)
        emoji.save(path)
    return SceneGenerator(target, "test")


@pytest.fixture(scope="module")
def opacity(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], np.ndarray]]:
    """Opacity of the objects in a test scene, float [96, 96] in [0, 1], to 1/255.

    Objects painted white on a background minus objects painted black on it: the background cancels.
    """
    folder = tmp_path_factory.mktemp("painted")
    white = painted(folder / "white", (255, 255, 255))
    black = painted(folder / "black", (0, 0, 0))

    def measure(index: int) -> np.ndarray:
        difference = white(index).image.astype(float) - black(index).image
        assert np.ptp(difference, axis=2).max() <= 1
        outside = difference.max(2) == 0
        assert np.array_equal(white(index).image[outside], GENERATORS["test"](index).image[outside])
        return difference.mean(2) / 255

    yield measure


def extent(mask: np.ndarray) -> tuple[int, int, int, int]:
    """Smallest box (left, top, right, bottom) around the True pixels, right/bottom exclusive."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return columns[0], rows[0], columns[-1] + 1, rows[-1] + 1


def inside(placed: PlacedObject, mask: np.ndarray) -> np.ndarray:
    """``mask`` within the object's box, False elsewhere."""
    left, top, right, bottom = placed.box
    part = np.zeros_like(mask)
    part[top:bottom, left:right] = mask[top:bottom, left:right]
    return part


# --- a scene depends on (split, index) alone ---


def test_scenes_do_not_depend_on_the_order_of_calls(scenes: dict[str, list[Scene]]) -> None:
    again = SceneGenerator(str(PICTURES), "train")
    for index in np.random.default_rng(0).permutation(COUNT)[:60]:
        assert same(again(int(index)), scenes["train"][index])


@settings(max_examples=25, deadline=None)
@given(indices, indices, st.sampled_from(SPLITS))
def test_a_scene_is_the_same_after_another_one(index: int, other: int, split: str) -> None:
    first = GENERATORS[split](index)
    GENERATORS[split](other)
    assert same(GENERATORS[split](index), first)


def test_splits_and_indices_give_different_scenes(scenes: dict[str, list[Scene]]) -> None:
    pictures = {scene.image.tobytes() for split in SPLITS for scene in scenes[split]}
    assert len(pictures) == 3 * COUNT


def test_scenes_stay_what_they_are(scenes: dict[str, list[Scene]]) -> None:
    """Trained weights and cached codes refer to scenes by number: a change here is a break."""
    assert [scene.caption for scene in scenes["train"][:5]] == CAPTIONS


# --- what the pixels show ---


@settings(max_examples=60, deadline=None)
@given(indices, st.sampled_from(SPLITS))
def test_types_and_layout(index: int, split: str) -> None:
    scene = GENERATORS[split](index)
    assert scene.image.shape == (SIZE, SIZE, 3) and scene.image.dtype == np.uint8
    assert scene.mask.shape == (SIZE, SIZE) and scene.mask.dtype == bool
    covered = np.zeros((SIZE, SIZE), dtype=int)
    for left, top, right, bottom in (placed.box for placed in scene.objects):
        assert 0 <= left < right <= SIZE and 0 <= top < bottom <= SIZE
        covered[top:bottom, left:right] += 1
    assert covered.max() == 1, "objects overlap"
    assert not scene.mask[covered == 0].any()


def test_mask_is_where_the_objects_hide_more_than_half(
    opacity: Callable[[int], np.ndarray],
) -> None:
    for index in range(100):
        alpha = opacity(index)
        sure = abs(alpha - 0.5) > 1 / 255
        assert np.array_equal((alpha > 0.5)[sure], GENERATORS["test"](index).mask[sure])


def test_boxes_are_the_extents_of_the_objects(opacity: Callable[[int], np.ndarray]) -> None:
    for index in range(100):
        scene, alpha = GENERATORS["test"](index), opacity(index)
        for placed in scene.objects:
            seen, half = extent(inside(placed, alpha > 0)), extent(inside(placed, scene.mask))
            assert np.abs(np.subtract(seen, placed.box)).max() <= 1
            assert np.abs(np.subtract(half, placed.box)).max() <= 2


def test_objects_are_their_emoji(opacity: Callable[[int], np.ndarray]) -> None:
    """Where an object is opaque, its colours are those of its own emoji, scaled to its box."""
    files = {kind.name: PICTURES / "emoji" / kind.file_name for kind in object_kinds()}
    for index in range(100):
        scene = GENERATORS["test"](index)
        solid = opacity(index) > 0.99
        for placed in scene.objects:
            left, top, right, bottom = placed.box
            emoji = Image.open(files[placed.name])
            emoji = emoji.crop(emoji.getchannel("A").getbbox())
            scaled = np.asarray(emoji.resize((right - left, bottom - top), Image.Resampling.BOX))
            window = scene.image[top:bottom, left:right].astype(float)
            difference = np.abs(window - scaled[..., :3])[solid[top:bottom, left:right]]
            assert difference.mean() < 12


def test_relations_hold_in_the_pixels(scenes: dict[str, list[Scene]]) -> None:
    seen = set()
    for scene in scenes["train"] + scenes["test"]:
        if scene.relation is None:
            continue
        first, second = (extent(inside(placed, scene.mask)) for placed in scene.objects)
        axis = {"left of": 0, "above": 1}[scene.relation]
        assert first[axis + 2] <= second[axis]
        assert scene.objects[0].name != scene.objects[1].name
        seen.add(scene.relation)
    assert seen == {"left of", "above"}


def test_tone_is_the_colour_around_the_objects(scenes: dict[str, list[Scene]]) -> None:
    """On plain backgrounds, which vary little: the pixels far from the objects have that colour."""
    plain = [scene for scene in scenes["train"] if scene.kind == "plain"]
    agree = 0
    for scene in plain:
        free = np.ones((SIZE, SIZE), dtype=bool)
        for left, top, right, bottom in (placed.box for placed in scene.objects):
            free[top:bottom, left:right] = False
        agree += tone_of(scene.image[free].mean(0)) == scene.tone
    assert agree > 0.9 * len(plain)


# --- captions ---

NAMES = {kind.name: kind for kind in object_kinds()}
ONE = "|".join(sorted(NAMES, key=len, reverse=True))
MANY = "|".join(sorted({kind.plural for kind in NAMES.values()}, key=len, reverse=True))
CAPTION = re.compile(
    rf"(?:(?P<first>{ONE})(?: (?P<relation>left of|above) (?P<second>{ONE}))?"
    rf"|(?P<count>two|three|four) (?P<plural>{MANY}))"
    r" on (?P<tone>black|gray|white|brown|red|orange|yellow|green|cyan|blue|purple|pink)"
    r" (?P<kind>plain|photo)"
)


def test_captions_say_what_the_scenes_are(scenes: dict[str, list[Scene]]) -> None:
    words, forms = set(caption_words()), set()
    for scene in (scene for split in SPLITS for scene in scenes[split]):
        match = CAPTION.fullmatch(scene.caption)
        assert match is not None, scene.caption
        said, names = match.groupdict(), [placed.name for placed in scene.objects]
        assert (said["tone"], said["kind"]) == (scene.tone, scene.kind)
        assert said["relation"] == scene.relation
        if said["count"] is None:
            assert names == [said[key] for key in ("first", "second") if said[key]]
        else:
            assert len(set(names)) == 1 and NAMES[names[0]].plural == said["plural"]
            assert len(names) == {"two": 2, "three": 3, "four": 4}[said["count"]]
        assert set(scene.caption.split()) <= words
        forms.add(said["count"] or said["relation"] or "one")
    assert forms == {"one", "two", "three", "four", "left of", "above"}


@settings(deadline=None)
@given(st.data())
def test_caption_words_cover_every_caption(data: st.DataObject) -> None:
    first, second = (data.draw(st.sampled_from(object_kinds())) for _ in range(2))
    relation = data.draw(st.sampled_from(["left of", "above", None]))
    names = [first.name, second.name] if relation else [first.name] * data.draw(st.integers(1, 4))
    tone, kind = data.draw(st.sampled_from(TONES)), data.draw(st.sampled_from(["plain", "photo"]))
    caption = make_caption(names, first.plural, relation, tone, kind)
    assert CAPTION.fullmatch(caption)
    assert set(caption.split()) <= set(caption_words())


def test_objects_can_be_told_apart_by_name_and_file() -> None:
    kinds = object_kinds()
    assert len(kinds) == 229
    for distinct in ("name", "plural", "character", "file_name"):
        assert len({getattr(kind, distinct) for kind in kinds}) == len(kinds)


# --- held-out pairs ---


def test_held_out_pairs_are_kept_from_training(scenes: dict[str, list[Scene]]) -> None:
    for split in SPLITS:
        for scene in scenes[split]:
            pairs = [f"{placed.name}|{scene.tone}|{scene.kind}" for placed in scene.objects]
            new = any(zlib.crc32(pair.encode()) % 10 == 0 for pair in pairs)
            assert scene.held_out == new
            assert split == "test" or not new
    share = np.mean([scene.held_out for scene in scenes["test"]])
    assert 0.05 < share < 0.2


def test_one_pair_in_ten_is_held_out() -> None:
    pairs = [
        is_held_out(name, tone, kind)
        for name in NAMES
        for tone in TONES
        for kind in ("plain", "photo")
    ]
    assert np.mean(pairs) == pytest.approx(0.1, abs=0.01)


# --- colours ---


@pytest.mark.parametrize(
    ("rgb", "tone"),
    [
        ((0, 0, 0), "black"),
        ((40, 0, 0), "black"),
        ((128, 128, 128), "gray"),
        ((255, 255, 255), "white"),
        ((230, 225, 220), "white"),
        ((139, 69, 19), "brown"),
        ((255, 0, 0), "red"),
        ((200, 0, 20), "red"),
        ((255, 140, 0), "orange"),
        ((255, 255, 0), "yellow"),
        ((0, 255, 0), "green"),
        ((34, 139, 34), "green"),
        ((0, 255, 255), "cyan"),
        ((0, 0, 255), "blue"),
        ((135, 180, 235), "blue"),
        ((128, 0, 200), "purple"),
        ((255, 105, 180), "pink"),
    ],
)
def test_tone_of_known_colours(rgb: tuple[int, int, int], tone: str) -> None:
    assert tone_of(np.array(rgb)) == tone


@given(st.tuples(*[st.floats(0, 255)] * 3))
def test_every_colour_has_a_tone(rgb: tuple[float, float, float]) -> None:
    assert tone_of(np.array(rgb)) in TONES


@given(st.floats(0, 255))
def test_greys_have_no_hue(value: float) -> None:
    assert tone_of(np.full(3, value)) in {"black", "gray", "white"}


# --- errors ---


def test_unknown_split() -> None:
    with pytest.raises(ValueError, match="split is 'dev', expected one of .*'validation'"):
        SceneGenerator(PICTURES, "dev")


def test_missing_pictures(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere holds 0 known emoji and 0 backgrounds"):
        SceneGenerator(tmp_path / "nowhere", "train")
    shutil.copytree(PICTURES / "emoji", tmp_path / "emoji")
    with pytest.raises(FileNotFoundError, match="10 known emoji and 0 backgrounds"):
        SceneGenerator(tmp_path, "train")


def test_negative_index() -> None:
    with pytest.raises(ValueError, match="scene index is -1, expected 0 or more"):
        GENERATORS["train"](-1)
