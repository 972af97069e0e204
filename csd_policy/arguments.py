"""Command-line arguments and config files: one parser for all verbs, one line per mistake."""

import importlib
import inspect
import json
import pydoc
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser

from csd_policy.risk import RiskMap, Segmenter

_PACKAGED = Path(__file__).parent / "configs"  # in the wheel
_CHECKOUT = Path(__file__).parents[1] / "configs"
_POLICIES = dict.fromkeys(("policy", "inner", "first", "second"), "csd_policy.policies")
_FAMILIES = _POLICIES | {  # by last key
    "draft": "csd_policy.drafts",
    "risk": "csd_policy.risk",
    "segmenter": "csd_policy.risk",
}
_BASES: dict[str, type] = {"risk": RiskMap, "segmenter": Segmenter}  # of a module's several


def make_parser(verb: str, description: str | None) -> ArgumentParser:
    """A parser that raises instead of exiting, with ``--config``."""
    parser = ArgumentParser(
        prog=f"csd-policy {verb}",
        description=(description or "").strip().split("\n")[0],
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        action="config",
        help="YAML file, or the name of a packaged one; overrides the options in front of it",
    )
    return parser


def parse(parser: ArgumentParser, args: Sequence[str]) -> dict[str, Any]:
    """The arguments' values, classes instantiated; ValueError in one line if any is wrong."""
    for family in _FAMILIES.values():  # jsonargparse knows the short names of imported classes
        importlib.import_module(family)
    words = _find_configs(args)
    try:
        namespace = parser.parse_args(words)
        values: dict[str, Any] = vars(parser.instantiate(namespace))
    except ArgumentError as error:
        message = one_line(str(error), parser)
        if message.startswith("Problems parsing config"):  # which does not say of which
            message = f"{' or '.join(w for w in words if Path(w).is_file())}: {message}"
        raise ValueError(message) from error
    except (OSError, ValueError):
        raise
    except Exception as error:  # whatever a user's own module or constructor does
        where = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"the objects named in the arguments cannot be made: {where}") from error
    values.pop("config")
    return values


def config_folder() -> Path:
    """Where the packaged configs are: inside the package, or at the top of a checkout."""
    return _PACKAGED if _PACKAGED.is_dir() else _CHECKOUT


def find_config(name: str) -> Path:
    """``name`` if it is a file, else the packaged config of that name; ValueError if there is none.

    A packaged config is named relative to ``configs`` (``compare/emoji.yaml``), with or without it.
    """
    if Path(name).is_file():
        return Path(name)
    folder = config_folder()
    packaged = folder / name.removeprefix("configs/")
    if packaged.is_file() and packaged.resolve().is_relative_to(folder.resolve()):
        return packaged
    names = sorted(str(path.relative_to(folder)) for path in folder.glob("*/*.yaml"))
    raise ValueError(
        f"config is {name!r}, expected a YAML file or the name of a packaged one "
        f"({', '.join(names) or 'there are none'})"
    )


def _find_configs(args: Sequence[str]) -> list[str]:
    """``args`` with the path of each ``--config``."""
    found = list(args)
    for i, arg in enumerate(found):
        if arg == "--config" and i + 1 < len(found):
            found[i + 1] = str(find_config(found[i + 1]))
        elif arg.startswith("--config="):
            found[i] = f"--config={find_config(arg.removeprefix('--config='))}"
    return found


def join_repeated(args: Sequence[str], option: str) -> list[str]:
    """``args`` with a repeated ``option TEXT`` joined into one JSON list; a JSON list stays."""
    joined: list[str] = []
    first = True
    words = iter(args)
    for word in words:
        name, equals, value = word.partition("=")
        if name != option:
            joined.append(word)
            continue
        text = value if equals else next(words, None)
        if text is None:
            joined.append(word)
        else:
            items = text if text.startswith("[") else json.dumps([text], ensure_ascii=False)
            joined.append(f"{option if first else option + '+'}={items}")
            first = False
    return joined


def name_class(parser: ArgumentParser, args: Sequence[str], name: str, usual: str) -> list[str]:
    """``args`` with ``--name usual`` in front if only arguments of that class are given.

    A default of the parser would do the same, but hand its own arguments on to any other class that
    has arguments of these names; so the parser's default becomes None.
    """
    parser.set_defaults({name: None})
    named = any(word.partition("=")[0] in (f"--{name}", "--config") for word in args)
    asked = any(word.startswith(f"--{name}.") for word in args)
    return [f"--{name}", usual, *args] if asked and not named else list(args)


def one_line(message: str, parser: ArgumentParser) -> str:
    """A message of jsonargparse as one line that names the key, its value and what was expected."""
    text = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", " ".join(message.split()))
    text = text.replace("NoneType", "null")
    key = ".".join(re.findall(r'Parser key "([^"]+)"', text)) or "argument"
    if found := re.search(r"Errors: - ((?:(?! - Expected ).)*, expected .*?) - Expected ", text):
        return f"{key}: {found[1]}"
    if found := re.search(r"Subtypes: \[(.*?)\] Errors: .* Given value: (.*)$", text):
        types = " or ".join(found[1].split(", "))
        value = re.sub(r"^NestedArg\(key='\w+', val='(.*)'\)$", r"\1", found[2])
        return f"{key} is {value!r}, expected {_expected_classes(key, types)}"
    if "Expected an instantiatable class" in text:
        return (
            f"{key} names no class that can be made, expected class_path of one that is not "
            "abstract and, for its arguments, init_args"
        )
    if found := re.search(r"Expected a typing\.Literal\[(.*?)\]\. Got value: ?(.*)$", text):
        return f"{key} is {found[2]!r}, expected one of {found[1].replace(chr(39), '')}"
    if found := re.search(r"Unexpected config: ?(.*)$", text):
        return f"the config holds {found[1]!r}, expected options and their values"
    if found := re.search(r"Expected an? (\w+)\. Got value: ?(.*)$", text):
        return f"{key} is {found[2]!r}, expected {found[1]}"
    if found := re.search(r"(?:Expected a dot import path string|import path format): (.*)$", text):
        return f"{key} is {found[1]!r}, expected {_expected_classes(key)}"
    if found := re.search(r"given class_path '([\w.]+)': Option '([^']+)' is not accepted", text):
        return f"{found[1].rpartition('.')[2]} has no option {found[2]!r}, expected one of " + (
            _options_of(found[1]) or "no options at all"
        )
    if found := re.search(r"given class_path '([\w.]+)': (No module .*|module .*)$", text):
        return f"{key} is {found[1]!r}, expected {_expected_classes(key)} ({found[2]})"
    if found := re.search(r"unrecognized arguments: (.*)$|^Option '(.*)' is not accepted$", text):
        options = ", ".join(sorted({key.split(".")[0] for key in vars(parser.get_defaults())}))
        return f"unknown option {(found[1] or found[2])!r}, expected one of {options}"
    rest = re.sub(r'Parser key "[^"]+": |Problem with given class_path \S+: ', "", text)
    return text if rest == text else f"{key}: {rest}"


def _expected_classes(key: str, otherwise: str = "") -> str:
    """The choices for a class, e.g. of the key ``methods.policy``; ``otherwise`` for no class."""
    last = key.rpartition(".")[2]
    path = "an import path such as my_module.MyClass"
    if last not in _FAMILIES:
        return otherwise or path
    names = class_names(_FAMILIES[last], _BASES.get(last, object))
    return f"one of {', '.join(names)}, or {path}"


def class_names(module: str, base: type = object) -> list[str]:
    """Names of the classes in ``csd_policy.policies`` and such that users can ask for, sorted.

    Args:
        module: whose classes.
        base: of the classes, of which there are several kinds in ``csd_policy.risk``.
    """
    members = vars(importlib.import_module(module)).items()
    return sorted(
        name
        for name, value in members
        if isinstance(value, type)
        and hasattr(value, "__abstractmethods__")  # an ABC's
        and not value.__abstractmethods__
        and value.__module__.startswith(module)
        and issubclass(value, base)
    )


def _options_of(class_path: str) -> str:
    found = pydoc.locate(class_path)
    return ", ".join(inspect.signature(found).parameters) if callable(found) else ""
