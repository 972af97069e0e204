"""Collect the pictures that emoji scenes are made of, from Debian packages.

    python -m trainers.pictures --output data/pictures

writes ``emoji/<code point>.png`` (RGBA, from Noto Color Emoji), ``backgrounds/*.png`` (RGB, at most
640 pixels) and ``sources.json`` (packages and file names). On a system without ``apt-get`` and
``dpkg``, unpack the packages elsewhere and pass the folder with ``--root``.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, ImageStat
from tqdm import tqdm

from trainers.scenes import ObjectKind, object_kinds

FONT_PACKAGE = "fonts-noto-color-emoji"
WALLPAPER_PACKAGES = ("gnome-backgrounds", "plasma-workspace-wallpapers", "mate-backgrounds",
                      "lomiri-wallpapers-16.04", "lomiri-wallpapers-20.04",
                      "ukui-wallpapers")  # fmt: skip
FONT = "usr/share/fonts/truetype/noto/NotoColorEmoji.ttf"
FONT_SIZE = 109  # the only size of the bitmap font
LONGEST_SIDE = 640
PICTURE_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}
LEAST_CONTRAST = 6.0  # standard deviation of the grey levels, 0 to 128


def unpack_packages(root: Path) -> None:
    """Download and unpack the packages under ``root`` without installing them."""
    for package in (FONT_PACKAGE, *WALLPAPER_PACKAGES):
        subprocess.run(["apt-get", "download", "-qq", package], cwd=root, check=True)
        (archive,) = root.glob(f"{package}_*.deb")
        subprocess.run(["dpkg", "-x", archive.name, "."], cwd=root, check=True)
        archive.unlink()


def render_emoji(kind: ObjectKind, font: ImageFont.FreeTypeFont) -> Image.Image:
    """The emoji as an RGBA picture of 136x128 pixels, transparent outside it."""
    image = Image.new("RGBA", (136, 128))
    ImageDraw.Draw(image).text((0, 0), kind.character, font=font, embedded_color=True)
    if image.getchannel("A").getbbox() is None:
        raise ValueError(f"the font has no picture for {kind.name!r} (U+{ord(kind.character):X})")
    return image


def find_wallpapers(root: Path) -> list[Path]:
    """One file per wallpaper: the largest of its sizes, in name order."""
    best: dict[str, Path] = {}
    for path in sorted((root / "usr/share").rglob("*")):
        text = path.relative_to(root).as_posix()
        if path.suffix.lower() not in PICTURE_SUFFIXES or "screenshot" in text or path.is_symlink():
            continue
        if "backgrounds" not in text and "wallpapers" not in text:
            continue
        key = re.sub(r"(/contents/images|[_/]?\d{3,4}x\d{3,4}|\.\w+$)", "", text)
        if key not in best or path.stat().st_size > best[key].stat().st_size:
            best[key] = path
    return [best[key] for key in sorted(best)]


def read_wallpaper(path: Path) -> Image.Image | None:
    """The picture, at most 640 pixels a side; None if it is flat or has transparent parts."""
    with Image.open(path) as picture:
        picture.thumbnail((LONGEST_SIDE, LONGEST_SIDE), Image.Resampling.LANCZOS)
        if picture.mode in ("RGBA", "LA", "P") and picture.convert("RGBA").getextrema()[3][0] < 255:
            return None
        if ImageStat.Stat(picture.convert("L")).stddev[0] < LEAST_CONTRAST:
            return None
        return picture.convert("RGB")


def collect(output: Path, root: Path | None = None) -> None:
    """Write the folder that ``SceneGenerator`` reads.

    Args:
        output: folder to make; existing pictures in it are overwritten.
        root: a folder with the packages already unpacked; None downloads them.
    """
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) if root is None else root
        if root is None:
            unpack_packages(source)
        if not (source / FONT).is_file():
            raise FileNotFoundError(f"no emoji font at {source / FONT}")
        font = ImageFont.truetype(str(source / FONT), FONT_SIZE)
        (output / "emoji").mkdir(parents=True, exist_ok=True)
        (output / "backgrounds").mkdir(exist_ok=True)
        for stale in (output / "backgrounds").glob("*.png"):
            stale.unlink()
        for kind in object_kinds():
            render_emoji(kind, font).save(output / "emoji" / kind.file_name)
        used = []
        for path in tqdm(find_wallpapers(source), desc="backgrounds"):
            picture = read_wallpaper(path)
            if picture is not None:
                picture.save(output / "backgrounds" / f"{len(used):03d}.png")
                used.append(path.relative_to(source).as_posix())
    record = {"packages": [FONT_PACKAGE, *WALLPAPER_PACKAGES], "backgrounds": used}
    (output / "sources.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli(collect, as_positional=False)
