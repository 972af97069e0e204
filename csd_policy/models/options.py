"""What ``load_model`` takes beyond device and dtype: options of an adapter, and of transformers."""

import importlib.util
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

# text first: YAML's reading of 16:9 is the number 969
Options = dict[str, str | int | float | bool | dict[str, Any] | None]
LOADING = {  # what adapters with ``**options`` hand on to ``from_pretrained``
    "attn_implementation": Literal["sdpa", "eager"],  # others cannot take the loop's own masks
    "device_map": dict[str, Any] | str | None,
    "quantization_config": dict[str, Any] | None,
}
FIXED = 3  # arguments in front of the options: source, device and dtype
PLAIN = (str, int, float, bool, dict, list, type(None))


def option_types(adapter: Callable[..., Any]) -> dict[str, Any]:
    """The options that an adapter takes, with their types."""
    taken: dict[str, Any] = {}
    for parameter in list(inspect.signature(adapter, eval_str=True).parameters.values())[FIXED:]:
        if parameter.kind is parameter.VAR_KEYWORD:
            taken |= LOADING
        else:
            typed = parameter.annotation is not parameter.empty
            taken[parameter.name] = parameter.annotation if typed else Any
    return taken


def read_options(
    adapter: Callable[..., Any], options: Mapping[str, Any], device: torch.device
) -> dict[str, Any]:
    """``options`` as ``adapter`` takes them, with plain values, such as text, in their types.

    Quantised weights are put where they belong while they are read, so a quantised model without
    ``device_map`` gets one.

    Raises:
        ValueError: the adapter does not take an option, or not with such a value.
    """
    from jsonargparse import ArgumentError, ArgumentParser

    from csd_policy.arguments import one_line

    types = option_types(adapter)
    name = getattr(adapter, "__name__", repr(adapter))
    if unknown := [key for key in options if key not in types]:
        takes = f"expected {', '.join(sorted(types))}" if types else "it takes none"
        raise ValueError(f"{name} has no option {', '.join(map(repr, unknown))}, {takes}")
    read = dict(options)
    for key, value in options.items():
        if isinstance(value, PLAIN):
            parser = ArgumentParser(exit_on_error=False)
            parser.add_argument(f"--{key}", type=types[key])
            try:
                read[key] = vars(parser.parse_object({key: value}))[key]
            except ArgumentError as error:
                message = one_line(str(error), parser)
                raise ValueError(f"option of {name}: {message}") from error
    if read.get("device_map") is not None and not importlib.util.find_spec("accelerate"):
        raise ValueError(
            f"device_map is {read['device_map']!r}, which needs the package accelerate: "
            "pip install accelerate, or leave device_map out"
        )
    if read.get("quantization_config") is not None and importlib.util.find_spec("accelerate"):
        read.setdefault("device_map", {"": str(device)})
    return read


def build_model(
    adapter: Callable[..., Any],
    source: Any,
    device: torch.device,
    dtype: torch.dtype,
    options: Mapping[str, Any],
) -> Any:
    """``adapter(source, device, dtype, **options)``, which remembers its options.

    Raises:
        ValueError: see ``read_options``; or an option needs a package that is not installed.
    """
    read = read_options(adapter, options, device)
    try:
        model = adapter(source, device, dtype, **read)
    except ImportError as error:
        if not read:
            raise
        given = ", ".join(f"{key}={value}" for key, value in options.items())
        raise ValueError(f"{given} needs a package that is missing: {error}") from error
    model.options = plain(read)
    return model


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as data for records: objects as their text."""
    data: dict[str, Any] = json.loads(json.dumps(dict(options), default=str))
    return data
