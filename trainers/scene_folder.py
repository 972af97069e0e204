"""Write scenes with their masks to a folder: ``python -m trainers.scene_folder --help``."""

from pathlib import Path

from PIL import Image

from trainers.scenes import SceneGenerator


def write_scenes(
    output: Path, folder: Path = Path("data/pictures"), split: str = "test", count: int = 256
) -> None:
    """Write pictures, masks (white on objects) and ``captions.txt``, no caption twice.

    Args:
        output: folder to make.
        folder: pictures that scenes are made of, see ``trainers.pictures``.
        split: train, validation or test.
        count: scenes, 1 or more.

    Raises:
        ValueError: count below 1.
    """
    if count < 1:
        raise ValueError(f"count is {count}, expected 1 or more")
    generate, captions, index = SceneGenerator(folder, split), list[str](), 0
    output.mkdir(parents=True, exist_ok=True)
    while len(captions) < count:
        scene = generate(index)
        index += 1
        if scene.caption in captions:
            continue
        stem = f"{len(captions):05d}"
        Image.fromarray(scene.image).save(output / f"{stem}.png")
        Image.fromarray(scene.mask.astype("uint8") * 255).save(output / f"{stem}_mask.png")
        captions.append(scene.caption)
    (output / "captions.txt").write_text("\n".join(captions) + "\n", encoding="utf-8")


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli(write_scenes, as_positional=False)
