"""Models: the interface of the loop and one adapter a file."""

import importlib
import json
import os
import re
from pathlib import Path
from typing import Any, Literal

import torch

from csd_policy.models.base import ImageTokenModel
from csd_policy.models.options import build_model

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
SHIPPED = Path(__file__).parent / "weights"
ADAPTERS = {  # import paths by model_type, each imported when it is used
    "chameleon": "csd_policy.models.chameleon.Chameleon",
    "emu3": "csd_policy.models.emu3.Emu3",
    "Emu3": "csd_policy.models.emu3.Emu3",  # of BAAI
    "emu3_text_model": "csd_policy.models.emu3.Emu3",
    "janus": "csd_policy.models.janus.Janus",
    "multi_modality": "csd_policy.models.janus.Janus",  # of deepseek-ai
    "llamagen": "csd_policy.models.llamagen.LlamaGen",
}

__all__ = ["ImageTokenModel", "adapter_of", "load_model", "shipped_models"]


def shipped_models() -> list[str]:
    """Names of the models inside the package."""
    return sorted(path.parent.name for path in SHIPPED.glob("*/image_model.json"))


def load_model(
    name_or_folder: str | Path = "emoji-scenes",
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> ImageTokenModel:
    """Load a model with its weights.

    The adapter is found from the checkpoint itself: by ``model_type`` in its config.json, or by
    ``image_model.json``, which names a class.

    Args:
        name_or_folder: a local folder, the name of a shipped model, or an id ``owner/name`` on the
            Hugging Face hub (downloaded unless HF_HUB_OFFLINE=1).
        device: default is CUDA if there is a card, else the CPU.
        dtype: of the network; laws are computed in at least fp32.
        options: those of the adapter, such as the size of its pictures, and of transformers'
            ``from_pretrained``: ``attn_implementation`` (``sdpa`` or ``eager``), ``device_map``,
            ``quantization_config``. Text is read as the type that the adapter names.

    Raises:
        ValueError: there is no such model, no adapter reads it, its weights do not fit, or the
            adapter does not take an option.
    """
    name = str(name_or_folder)
    if not name:
        raise ValueError("model is '', expected a name, a folder or an id of the Hugging Face hub")
    folder = Path(name_or_folder) if Path(name_or_folder).is_dir() else SHIPPED / name
    where = find_device(device)
    if (folder / "image_model.json").is_file():
        adapter = adapter_of(folder / "image_model.json")
        model: ImageTokenModel = build_model(adapter, folder, where, dtype, options)
        return model
    if Path(name).is_file():
        raise ValueError(f"model is the file {name!r}, expected its folder")
    if not folder.is_dir() and not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ValueError(
            f"no model {name!r}: neither a folder, nor a shipped model "
            f"({', '.join(shipped_models())}), nor an id owner/name of the Hugging Face hub"
        )
    adapter = _adapter_for(name)
    from huggingface_hub.errors import StrictDataclassError

    try:
        found: ImageTokenModel = build_model(adapter, name, where, dtype, options)
    except (OSError, StrictDataclassError, json.JSONDecodeError) as error:
        # how transformers and the hub say that a file is not there, or a config or tokenizer wrong
        raise ValueError(f"model {name!r} cannot be loaded{_offline()}: {error}") from error
    return found


def _adapter_for(source: str) -> Any:
    """The adapter of ``ADAPTERS`` for the ``model_type`` in the config.json of ``source``."""
    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise ValueError(f"{source} has neither image_model.json nor config.json")
    from transformers import PretrainedConfig

    try:
        config, _ = PretrainedConfig.get_config_dict(source)
        kind = config.get("model_type")
    except (OSError, AttributeError) as error:
        raise ValueError(
            f"no model {source!r}: its config.json cannot be read{_offline()}: {error}"
        ) from error
    if kind not in ADAPTERS:
        raise ValueError(
            f"{source}: config.json has model_type {kind!r}, expected one of {', '.join(ADAPTERS)}"
        )
    module, _, cls = ADAPTERS[kind].rpartition(".")
    return getattr(importlib.import_module(module), cls)


def _offline() -> str:
    return " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") == "1" else ""


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

    It is called with (folder, device, dtype), and its options, and makes an ``ImageTokenModel``.
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
