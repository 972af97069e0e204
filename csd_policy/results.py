"""Files of results: each one complete or absent, image by image."""

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from csd_policy.figures import KINDS, commit_kinds
from csd_policy.provenance import package_version
from csd_policy.trace import Trace
from csd_policy.types import DecodeResult

RECORDED = {"prompt", "seed", "forward_passes", "spent_tv", "seconds", "batch", "tokens"}
SUFFIXES = (".png", ".safetensors", ".json")  # of an image's files; the record is written last


def prepare_folder(folder: Path) -> None:
    """Make ``folder`` and try to write into it; ValueError if that cannot be done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"output is {str(folder)!r}, expected a folder that can be written ({error.strerror})"
        ) from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold ``folder`` for this process; ValueError if another one is writing into it."""
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another process is writing into {str(folder)!r}") from error
        yield
    finally:
        os.close(handle)


def write_atomic(path: Path, write: Callable[[Path], Any]) -> None:
    """Let ``write`` fill a file that gets its name ``path`` only when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    write(partial)
    partial.chmod(0o644)  # safetensors keeps its files to their owner
    with partial.open("rb") as file:
        os.fsync(file.fileno())  # or a loss of power could leave the name without the content
    partial.replace(path)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    write_atomic(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def write_json(path: Path, data: Any) -> None:
    """Write plain data atomically; numbers that JSON lacks (NaN) are refused."""
    text = json.dumps(data, indent=1, allow_nan=False)
    numbers_in_a_line = re.sub(r"\[[-+.,\s\deE]+\]", lambda found: " ".join(found[0].split()), text)
    write_text(path, numbers_in_a_line + "\n")


def slug(text: str, longest: int = 60) -> str:
    """``text`` as a file name: lower-case letters and digits joined by dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:longest].strip("-") or "prompt"


def image_row(result: DecodeResult, i: int) -> dict[str, Any]:
    """What image ``i`` cost, as plain data; seconds are the batch's divided by its size."""
    stats, size = result.stats, len(result.prompts)
    kinds = commit_kinds(result.trace.row(i))
    return {
        "prompt": result.prompts[i],
        "seed": result.seeds[i],
        "forward_passes": stats.forward_passes[i],
        "tokens_per_pass": stats.tokens_per_pass[i],
        "spent_tv": stats.spent_tv[i],
        "tokens_by_kind": {name: int((kinds == k).sum()) for k, name in enumerate(KINDS)},
        "mean_entropy": float(result.trace.entropy[i].double().mean()),
        "seconds": {part: value / size for part, value in stats.seconds.items()},
        "batch": {"size": size, "passes": stats.batch_passes, "threads": torch.get_num_threads()},
    }


def save_image(result: DecodeResult, i: int, stem: Path, row: dict[str, Any]) -> None:
    """Write picture, trace and record of image ``i`` to ``stem`` with ``SUFFIXES``.

    The picture carries prompt, seed and settings as PNG text; the record holds ``row``, the
    settings and the tokens.
    """
    from PIL.PngImagePlugin import PngInfo

    settings = result.record() | {"csd_policy": package_version()}
    text = PngInfo()
    text.add_text("prompt", result.prompts[i])
    text.add_text("seed", str(result.seeds[i]))
    text.add_text("settings", json.dumps(settings))
    png, trace, record = (stem.with_name(stem.name + suffix) for suffix in SUFFIXES)
    write_atomic(trace, result.trace.row(i).save)
    write_atomic(png, lambda to: result.images[i].save(to, format="PNG", pnginfo=text))
    write_json(record, row | settings | {"tokens": result.tokens[i].tolist()})


def load_row(stem: Path) -> dict[str, Any] | None:
    """The record of an image; None unless all its files are there and can be read."""
    from PIL import Image

    png, trace, record = (stem.with_name(stem.name + suffix) for suffix in SUFFIXES)
    try:
        row = json.loads(record.read_text())
        with Image.open(png) as picture:
            picture.load()
        Trace.load(trace)
    except (OSError, ValueError, SyntaxError, SafetensorError):
        return None
    complete = isinstance(row, dict) and row.keys() >= RECORDED
    return row if complete else None
