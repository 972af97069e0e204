"""Reading published weights: files of PyTorch, and the names in them."""

import argparse
import pickle
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def read_weights(path: Path, without: re.Pattern[str]) -> Weights:
    """Tensors by name in a ``.pt`` file, but for names in which ``without`` is found.

    The file holds a bare table, or one under ``model``, ``module`` or ``state_dict``.

    Raises:
        ValueError: there is no such file, or it is none of these.
    """
    if not path.is_file():
        raise ValueError(f"{path} is no file, expected published weights (.pt)")
    try:  # training often stores its arguments beside the weights
        with torch.serialization.safe_globals([argparse.Namespace]):
            content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path} holds no tensors that can be read safely: {error}") from error
    for outer in ("model", "module", "state_dict"):
        if isinstance(content, dict) and isinstance(content.get(outer), dict):
            content = content[outer]
            break
    if not isinstance(content, dict) or not all(isinstance(w, Tensor) for w in content.values()):
        raise ValueError(f"{path} is no table of tensors, nor has it one as model or state_dict")
    return {name: weight for name, weight in content.items() if not without.search(name)}


def check_names(found: Iterable[str], expected: Iterable[str], path: Path) -> None:
    """Raise ValueError with the names that ``path`` lacks, and those that nothing reads."""
    lacks, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    faults = [
        f"{verb} {', '.join(names[:5])}" + (f" and {len(names) - 5} more" if names[5:] else "")
        for verb, names in (("lacks", lacks), ("has unknown", extra))
        if names
    ]
    if faults:
        raise ValueError(f"{path} {' and '.join(faults)}")


def count(names: Iterable[str], pattern: str) -> int:
    """One more than the largest number that the group of ``pattern`` matches at a name's start."""
    found = (re.match(pattern, name) for name in names)
    return 1 + max((int(match[1]) for match in found if match), default=-1)
