"""Models: the interface of the loop and one adapter a file."""

import importlib
import json
from pathlib import Path
from typing import Any

import torch

from csd_policy.models.base import ImageTokenModel

SHIPPED = Path(__file__).parent / "weights"

__all__ = ["ImageTokenModel", "adapter_of", "load_model", "shipped_models"]


def shipped_models() -> list[str]:
    """Names of the models inside the package."""
    return sorted(path.parent.name for path in SHIPPED.glob("*/image_model.json"))


def load_model(
    name_or_folder: str | Path = "emoji-scenes",
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> ImageTokenModel:
    """Load a model with its weights.

    Args:
        name_or_folder: a local folder, else the name of a shipped model.
        device: default is CUDA if there is a card, else the CPU.
        dtype: of the network; laws are computed in at least fp32.

    Raises:
        ValueError: there is no such model, or the folder is not one that an adapter can read.
    """
    folder = Path(name_or_folder)
    if not folder.is_dir():
        folder = SHIPPED / str(name_or_folder)
    layout = folder / "image_model.json"
    if not layout.is_file():
        raise ValueError(
            f"no model {str(name_or_folder)!r}: neither a folder with image_model.json "
            f"nor a shipped model (there are {', '.join(shipped_models())})"
        )
    model: ImageTokenModel = adapter_of(layout)(folder, find_device(device), dtype)
    return model


def find_device(device: str | torch.device | None) -> torch.device:
    """The device of that name, by default CUDA if there is one; ValueError if it is not there."""
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = ["cpu", *(["cuda"] if cards else []), *(f"cuda:{i}" for i in range(cards))]
    name = str(device) if device is not None else ("cuda" if cards else "cpu")
    if name not in there:
        raise ValueError(f"device is {name!r}, expected one of {', '.join(there)}")
    return torch.device(name)


def adapter_of(layout: Path) -> type[Any]:
    """The class that ``image_model.json`` names by import path under ``adapter``.

    It is called with (folder, device, dtype) and makes an ``ImageTokenModel``.
    """
    path = json.loads(layout.read_text()).get("adapter")
    module, _, name = str(path).rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{layout}: adapter is {path!r}, which cannot be imported") from error
    if not (isinstance(found, type) and issubclass(found, ImageTokenModel)):
        raise ValueError(f"{layout}: adapter is {path!r}, expected a subclass of ImageTokenModel")
    return found
