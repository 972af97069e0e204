"""What stands behind a set of results: versions, hardware, weights, and the settings they share."""

import hashlib
import json
import platform
import re
from pathlib import Path
from typing import Any

import torch

from csd_policy.models import SHIPPED, ImageTokenModel


def package_version() -> str:
    """The version of this package."""
    from csd_policy import __version__

    return __version__


def weights_hash(name_or_folder: str) -> str | None:
    """What tells a model's weights from others: SHA-256 over its safetensors files.

    Of an id on the Hugging Face hub it is the commit in the local cache; None if there is neither.
    """
    folder = Path(name_or_folder)
    folder = folder if folder.is_dir() else SHIPPED / name_or_folder
    if not folder.is_dir():
        return _hub_commit(name_or_folder)
    files = sorted(folder.glob("*.safetensors")) + sorted(folder.glob("vq/*.safetensors"))
    whole = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest() if files else None


def _hub_commit(name: str) -> str | None:
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json")
    return f"commit {Path(config).parent.name}" if isinstance(config, str) else None


def device_name(device: torch.device) -> str:
    """The processor behind a device, for records."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.is_file() else None
    return found[1] if found else platform.processor() or platform.machine()


def provenance(model: ImageTokenModel) -> dict[str, Any]:
    """Versions, hardware and number formats behind a set of results."""
    return {
        "csd_policy": package_version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(model.device),
        "device_name": device_name(model.device),
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "model": model.name,
        "model_options": dict(model.options),
        "grid": list(model.grid),
        "slots": len(model.code_of_slot),
    }


def check_manifest(
    path: Path, manifest: dict[str, Any], ignore: tuple[str, ...] = (), growing: str = "methods"
) -> dict[str, Any]:
    """The manifest at ``path`` extended by new methods; ValueError naming the field that differs.

    Args:
        manifest: ``growing`` and whatever else two runs must share to be comparable.
        ignore: fields that are not compared.
        growing: the field, a table by name, that later runs may extend.
    """
    manifest = json.loads(json.dumps(manifest, default=repr))  # as it is read again
    if not path.is_file():
        if (path.parent / "images").is_dir():
            raise ValueError(
                f"{path.parent} holds images but no manifest.json that says how they were made, "
                "expected an empty or new output folder"
            )
        return manifest
    old = _read_manifest(path, growing)
    new, known = manifest[growing], old[growing]
    shared = {name: value for name, value in new.items() if name in known}
    theirs = _flat(old | {growing: {name: known[name] for name in shared}})
    ours = _flat(manifest | {growing: shared})
    for key in sorted(theirs.keys() | ours.keys()):
        if key.split(".")[0] not in ignore and theirs.get(key) != ours.get(key):
            raise ValueError(
                f"{key} is {_short(ours.get(key))}, but the results in {path.parent} were made "
                f"with {_short(theirs.get(key))}; choose another output folder or restore the "
                "setting"
            )
    return manifest | {growing: known | new}


def _read_manifest(path: Path, growing: str) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except ValueError:
        data = None
    if not (isinstance(data, dict) and isinstance(data.get(growing), dict)):
        raise ValueError(
            f"{path} is not the manifest of such results; move it away with what is beside it, "
            "or choose another output folder"
        )
    return data


def _short(value: object, longest: int = 400) -> str:
    text = repr(value)
    return text if len(text) <= longest else f"{text[:longest]}... ({len(text)} letters)"


def _flat(data: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with dotted keys."""
    if not isinstance(data, dict):
        return {prefix: data}
    return {
        key: leaf
        for name, value in data.items()
        for key, leaf in _flat(value, f"{prefix}.{name}" if prefix else str(name)).items()
    }
