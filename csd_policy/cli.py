"""The command line, ``csd-policy VERB``: each verb is a function here that loads its own module."""

import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from csd_policy.arguments import join_repeated, make_parser, name_class, parse
from csd_policy.listing import first_line, listing
from csd_policy.provenance import package_version

logger = logging.getLogger(__name__)


def main(args: Sequence[str] | None = None) -> int:
    """Run a verb; the exit status: 0, 2 after a mistake or without memory, 130 if interrupted.

    Args:
        args: verb and arguments, default those of the process.
    """
    words = list(sys.argv[1:] if args is None else args)
    if not words or words[0] in ("-h", "--help"):
        show(overview())
        return 0
    if words == ["--version"]:
        show(package_version())
        return 0
    verb, rest = words[0], words[1:]
    if not sys.stderr.isatty():  # transformers' bar for the weights
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.basicConfig(format="%(message)s")
    logging.getLogger("csd_policy").setLevel(logging.INFO)
    if os.getcwd() not in sys.path:  # noqa: PTH109
        sys.path.append(os.getcwd())  # noqa: PTH109 - for --policy my_policy.Mine
    try:
        if verb not in VERBS:
            raise ValueError(f"verb is {verb!r}, expected one of {', '.join(VERBS)}")
        VERBS[verb](rest)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        logger.debug("where it came from", exc_info=True)
        message = " ".join(str(error).split())
        sys.stderr.write(f"csd-policy{f' {verb}' if verb in VERBS else ''}: error: {message}\n")
        return 2
    except RuntimeError as error:  # of torch, on cards and on the CPU
        if not re.search("out of memory|can't allocate memory", str(error)):
            raise
        message = " ".join(str(error).split())
        hint = "not enough memory, expected a smaller batch_size, window or picture, or bfloat16"
        sys.stderr.write(f"csd-policy {verb}: error: {hint}: {message}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(f"csd-policy {verb}: interrupted\n")
        return 130
    return 0


def show(text: str) -> None:
    """Write a result to standard output."""
    print(text)  # noqa: T201


def overview() -> str:
    """The verbs with their first docstring lines."""
    lines = [f"  {name:<10} {first_line(verb)}" for name, verb in VERBS.items()]
    return "\n".join(["usage: csd-policy VERB [options]", "", *lines, "",
                      "csd-policy VERB --help lists the options of a verb."])  # fmt: skip


def generate(args: Sequence[str]) -> None:
    """Draw pictures and show how each of their tokens was committed."""
    from csd_policy.generate import generate as run
    from csd_policy.memory import gigabytes
    from csd_policy.tables import text_table

    parser = make_parser("generate", run.__doc__)
    parser.add_function_arguments(run, as_group=False)
    words = join_repeated(args, "--prompt")
    for option, usual in (("policy", "CSD"), ("draft", "Independent")):
        words = name_class(parser, words, option, usual)
    rows = run(**{name: value for name, value in parse(parser, words).items() if value is not None})
    columns = ("file", "passes", "tokens per pass", "spent TV", "s per image", "peak GB")
    cells = [
        (r["file"], str(r["forward_passes"]), f"{r['tokens_per_pass']:.2f}",
         f"{r['spent_tv']:.3f}", f"{r['seconds']['total']:.2f}", gigabytes(r["peak_memory"]))
        for r in rows
    ]  # fmt: skip
    show(text_table(columns, cells))


def compare(args: Sequence[str]) -> None:
    """Compare policies on one model: pictures, tables and plots."""
    from csd_policy.compare import run
    from csd_policy.comparison import Comparison, plan_text, read_prompts

    parser = make_parser("compare", Comparison.__doc__)
    parser.add_class_arguments(Comparison, as_group=False)
    parser.add_argument("--dry_run", action="store_true", help="show the plan and stop")
    parser.add_argument(
        "--prompt_file", type=str, help="text file, one prompt a line, in the place of prompts"
    )
    values = parse(parser, join_repeated(args, "--prompts"))
    dry_run, file = values.pop("dry_run"), values.pop("prompt_file")
    if file is not None:
        values["prompts"] = read_prompts(Path(file))
    comparison = Comparison(**values)
    show(plan_text(comparison) if dry_run else run(comparison))


def bench(args: Sequence[str]) -> None:
    """Time what policies and draft strategies add to a forward pass."""
    from csd_policy.bench import bench as run

    parser = make_parser("bench", run.__doc__)
    parser.add_function_arguments(run, as_group=False)
    show(run(**parse(parser, args)))


def study(args: Sequence[str]) -> None:
    """Study where an error is seen and what it costs (study risk)."""
    from csd_policy.comparison import read_prompts

    name, words = (args[0], args[1:]) if args else (None, [])
    if name in ("-h", "--help"):
        show("\n".join(f"csd-policy study {n} --help" for n in STUDIES))
        return
    if name not in STUDIES:
        raise ValueError(f"study is {name!r}, expected one of {', '.join(STUDIES)}")
    module = import_module(f"csd_policy.study.{name}")
    settings = getattr(module, STUDIES[name])
    parser = make_parser(f"study {name}", settings.__doc__)
    parser.add_class_arguments(settings, as_group=False)
    if reads_prompts := "prompts" in inspect.signature(settings).parameters:
        parser.add_argument(
            "--prompt_file", type=str, help="text file, one prompt a line, in the place of prompts"
        )
    values = parse(parser, join_repeated(words, "--prompts"))
    if reads_prompts and (file := values.pop("prompt_file")) is not None:
        values["prompts"] = read_prompts(Path(file))
    show(module.run(settings(**values)))


def train(args: Sequence[str]) -> None:
    """Train the parts that are learnt (LightningCLI: fit, validate, test)."""
    try:
        from trainers.cli import main as lightning_main
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("lightning", "lightning_fabric"):
            raise
        raise ModuleNotFoundError(
            "train needs lightning, which is not installed: pip install 'csd-policy[train]'"
        ) from error
    sys.argv = ["csd-policy train"]  # the program's name in Lightning's help and errors
    lightning_main(list(args))


def list_(args: Sequence[str]) -> None:
    """List policies, draft strategies, risk maps, segmenters and models."""
    parse(make_parser("list", list_.__doc__), args)
    show(listing())


STUDIES = {  # module of csd_policy.study: the class of its settings
    "risk": "RiskStudy",
    "matched": "MatchedStudy",
    "codebook": "CodebookStudy",
}
VERBS: dict[str, Callable[[Sequence[str]], None]] = {
    "generate": generate,
    "compare": compare,
    "bench": bench,
    "study": study,
    "train": train,
    "list": list_,
}
