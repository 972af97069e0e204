"""Reading published weights: safetensors and files of PyTorch, in one file or several.

No file is unpickled freely: ``torch.load`` reads tensors alone, with ``weights_only``.
"""

import argparse
import json
import pickle
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils.hub import cached_file

Weights = dict[str, Tensor]
SAFE = ("model.safetensors",)
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.pth")
SHOWN = 5  # names in a message


def find(source: str, name: str) -> Path | None:
    """The file of that name in a folder or hub id, or None if it has none."""
    path = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    return None if path is None else Path(path)


def weight_files(source: str, names: Sequence[str] = SAFE) -> list[Path]:
    """The files with the weights of a checkpoint.

    Args:
        source: folder, or id on the Hugging Face hub.
        names: of which the first counts that is there, as it is or as parts that
            ``NAME.index.json`` lists.

    Raises:
        ValueError: there is none of them, or a part is missing.
    """
    for name in names:
        if whole := find(source, name):
            return [whole]
        if index := find(source, f"{name}.index.json"):
            try:
                parts = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            except (ValueError, KeyError, AttributeError) as error:
                raise ValueError(f"{index} has no weight_map of names and files") from error
            found = {part: find(source, part) for part in parts}
            if missing := [part for part, path in found.items() if path is None]:
                raise ValueError(f"{source} lacks {listed(missing)}, which {index.name} names")
            return [path for path in found.values() if path is not None]
    there = [name for name in PICKLED if find(source, name)]
    hint = f"; {there[0]} needs pickle: convert it to safetensors first" if there else ""
    raise ValueError(f"{source} lacks {' or '.join(names)}{hint}")


def stored_weights(source: str, names: Sequence[str] = SAFE) -> Weights:
    """All weights of a checkpoint as they are stored; see ``weight_files``.

    Raises:
        ValueError: a file is missing, broken, or holds more than tensors.
    """
    files = weight_files(source, names)
    return {name: weight for file in files for name, weight in read_weights(file).items()}


def read_weights(path: Path, without: re.Pattern[str] | None = None) -> Weights:
    """Tensors by name in a safetensors file or one of PyTorch (.pt, .bin, .ckpt).

    A file of PyTorch holds a bare table, or one under ``model``, ``module`` or ``state_dict``.

    Args:
        path: of the file.
        without: names in which it is found are left out.

    Raises:
        ValueError: there is no such file, it is none of these, or needs pickle.
    """
    if not path.is_file():
        raise ValueError(f"{path} is no file, expected published weights")
    content: Any
    if path.suffix == ".safetensors":
        try:
            content = load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is no safetensors file: {error}") from error
    else:
        content = _read_torch(path)
    return {n: w for n, w in content.items() if without is None or not without.search(n)}


def _read_torch(path: Path) -> Weights:
    try:  # training often stores its arguments beside the weights
        with torch.serialization.safe_globals([argparse.Namespace]):
            content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(
            f"{path} cannot be read safely, expected tensors that torch.load reads with "
            "weights_only=True, or the same as safetensors"
        ) from error
    for outer in ("model", "module", "state_dict"):
        if isinstance(content, dict) and isinstance(content.get(outer), dict):
            content = content[outer]
            break
    if not isinstance(content, dict) or not all(isinstance(w, Tensor) for w in content.values()):
        raise ValueError(f"{path} is no table of tensors, nor has it one as model or state_dict")
    return content


def listed(names: Iterable[str]) -> str:
    """The first names in a row, and how many more there are."""
    every = list(names)
    more = f" and {len(every) - SHOWN} more" if every[SHOWN:] else ""
    return ", ".join(every[:SHOWN]) + more


def check_names(found: Iterable[str], expected: Iterable[str], path: Path | str) -> None:
    """Raise ValueError with the names that ``path`` lacks, and those that nothing reads."""
    there, wanted = set(found), set(expected)
    lacks, extra = sorted(wanted - there), sorted(there - wanted)
    faults = [
        f"{verb} {listed(names)}"
        for verb, names in (("lacks", lacks), ("has unknown", extra))
        if names
    ]
    if faults:
        raise ValueError(f"{path} {' and '.join(faults)}")


def count(names: Iterable[str], pattern: str) -> int:
    """One more than the largest number that the group of ``pattern`` matches at a name's start."""
    found = (re.match(pattern, name) for name in names)
    return 1 + max((int(match[1]) for match in found if match), default=-1)
