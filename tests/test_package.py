"""The project around the code: imports, docstrings, documentation that runs, links, version."""

import dataclasses
import doctest
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import csd_policy
from csd_policy import (
    AcceptancePolicy,
    DecodeConfig,
    JacobiDecoder,
    drafts,
    models,
    policies,
    testing,
)
from csd_policy.cli import main
from csd_policy.drafts import DraftStrategy, Gumbel
from csd_policy.testing import TableModel, check_policy

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
OPTIONAL = ("transformers", "lightning", "wandb", "lpips", "segment_anything", "matplotlib")


def concrete(module: Any, base: type) -> list[type]:
    """The classes of a module that can be instantiated."""
    found = [value for _, value in inspect.getmembers(module, inspect.isclass)]
    return [cls for cls in found if issubclass(cls, base) and not inspect.isabstract(cls)]


POLICIES = concrete(policies, AcceptancePolicy)
DRAFTS = concrete(drafts, DraftStrategy)


def public() -> Iterator[tuple[str, Any]]:
    """Every public class and function, by its dotted name."""
    for module in (csd_policy, policies, models, testing):
        for name in module.__all__:
            yield f"{module.__name__}.{name}", getattr(module, name)
    for cls in (DraftStrategy, drafts.Tail, *DRAFTS):
        yield f"csd_policy.drafts.{cls.__name__}", cls


PUBLIC = dict(public())
CLASSES = {name: thing for name, thing in PUBLIC.items() if inspect.isclass(thing)}


# --- imports ---


def test_import_is_light() -> None:
    """A process that imports the package loads none of the packages that take seconds."""
    code = (
        "import sys, csd_policy, csd_policy.policies, csd_policy.drafts, csd_policy.testing;"
        f"print(*(name for name in {OPTIONAL!r} if name in sys.modules))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == []


# --- docstrings ---


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_have_a_docstring(name: str) -> None:
    thing = PUBLIC[name]
    doc = thing.__doc__ or ""
    assert doc, "no docstring of its own"
    assert not doc.startswith(f"{thing.__name__}("), "the docstring is the one that dataclass makes"
    first = doc.split("\n")[0]
    assert first[-1] in ".:" and len(first) <= 100, f"the first line is no sentence: {first!r}"


@pytest.mark.parametrize("name", CLASSES)
def test_docstrings_name_every_argument(name: str) -> None:
    cls = CLASSES[name]
    if dataclasses.is_dataclass(cls):
        arguments = [field.name for field in dataclasses.fields(cls)]
    elif "__init__" in vars(cls):
        arguments = list(inspect.signature(cls).parameters)
    else:
        arguments = []
    doc = inspect.getdoc(cls) or ""
    if "TRACE_FIELDS" in doc:  # which has a line for each
        arguments = []
    missing = [a for a in arguments if not re.search(rf"\b{a}\b", doc)]
    assert not missing, f"{name} says nothing about {missing}"


@pytest.mark.parametrize("name", CLASSES)
def test_public_methods_are_documented_with_shapes(name: str) -> None:
    """An override is documented by what it overrides; a tensor has its shape in the docstring."""
    cls = CLASSES[name]
    for key, member in inspect.getmembers(cls):
        function = member.fget if isinstance(member, property) else getattr(member, "func", member)
        if key.startswith("_") or (
            not inspect.isroutine(function) and not inspect.isfunction(function)
        ):
            continue
        if not (getattr(function, "__module__", None) or "").startswith("csd_policy"):
            continue
        doc = inspect.getdoc(getattr(cls, key)) or ""
        assert doc, f"{name}.{key} has no docstring"
        if "Tensor" in map(annotation_name, function.__annotations__.values()):
            assert "[" in doc + (cls.__doc__ or ""), f"{name}.{key} does not state a shape"


def annotation_name(annotation: object) -> str:
    return getattr(annotation, "__name__", str(annotation))


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_teach(policy: type[AcceptancePolicy]) -> None:
    """Equation, source and an example that runs, besides what every class has."""
    doc = inspect.getdoc(policy) or ""
    for part in ("b(x) = ", "arXiv", "Example:", ">>>"):
        assert part in doc, f"{policy.__name__} lacks {part!r}"
    scope = vars(importlib.import_module(policy.__module__)) | {policy.__name__: policy}
    (example,) = doctest.DocTestFinder(recurse=False).find(policy, policy.__name__, globs=scope)
    assert doctest.DocTestRunner().run(example).failed == 0


@pytest.mark.parametrize("draft", DRAFTS)
def test_draft_strategies_name_their_source(draft: type[DraftStrategy]) -> None:
    assert "arXiv" in (inspect.getdoc(draft) or "")


# --- documentation that runs ---


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def import_block(code: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A code block as a module that is forgotten after the test."""
    (folder / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, name)
    return importlib.import_module(name)


def test_the_policy_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: TableModel
) -> None:
    (code,) = (b for b in blocks(ROOT / "README.md", "python") if "class Mine" in b)
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    mine = import_block(code, "my_policy", tmp_path, monkeypatch).Mine
    check_policy(mine())
    decoder = JacobiDecoder(table, mine(), Gumbel(), DecodeConfig(window=3))
    result = decoder.generate([""] * 100, seeds=list(range(100)))
    assert sum(result.stats.spent_tv) > 0 and result.trace.relaxed.sum() > 0


def test_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = (b for b in blocks(ROOT / "README.md", "python") if "load_model" in b)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert (tmp_path / "cats.png").is_file()


def test_python_of_the_extension_guide_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, *others = blocks(ROOT / "docs" / "extend.md", "python")
    scope = vars(import_block(policy, "my_policy", tmp_path, monkeypatch))
    for code in others:
        exec(code, scope)


def test_the_metric_of_the_guide_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: TableModel, capsys: Any
) -> None:
    (code,) = blocks(ROOT / "docs" / "experiments.md", "python")
    trace = JacobiDecoder(table, config=DecodeConfig(window=3)).generate([""], [0]).trace
    folder = tmp_path / "outputs/compare/mine/images/Exact"
    folder.mkdir(parents=True)
    trace.save(folder / "000_0.safetensors")
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert capsys.readouterr().out.split() == ["Exact", "0.000"]


def test_the_comparison_of_the_guide_can_be_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (text,) = blocks(ROOT / "docs" / "experiments.md", "yaml")
    (tmp_path / "mine.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "--config", "mine.yaml", "--dry_run"]) == 0
    plan = capsys.readouterr().out
    assert "24 in all" in plan
    assert "tv_budget 0.5" in plan


def options_of(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


def commands() -> list[str]:
    """Every ``csd-policy VERB ...`` in the pages, README and Makefile."""
    text = "\n".join(b for page in PAGES for b in blocks(page, "bash"))
    text += (ROOT / "Makefile").read_text()
    return re.findall(r"csd-policy ((?:generate|compare|list)\b[^\n#]*)", text.replace("\\\n", " "))


def test_commands_in_the_documentation_have_real_options() -> None:
    from csd_policy.comparison import Comparison
    from csd_policy.generate import generate

    known = {
        "generate": options_of(generate) | {"config", "help"},
        "compare": options_of(Comparison) | {"config", "help", "dry_run"},
        "list": {"help"},
    }
    found = commands()
    assert len(found) > 5
    for command in found:
        verb = command.split()[0]
        for option in re.findall(r"--(\w+)", command):
            assert option in known[verb], f"csd-policy {command}: no --{option}"


def test_make_targets_in_the_documentation_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for target in re.findall(r"(?:^|`)make ([\w-]+)", page.read_text(), re.MULTILINE):
            assert target in targets, f"{page.name}: make {target}"


# --- links, names and paths ---


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_internal_links_exist(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: no heading for {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_in_the_documentation_exist(page: Path) -> None:
    pattern = r"\b(?:configs|csd_policy|trainers|tests)/[\w./-]*\w\.(?:yaml|py|csv|md)\b"
    for name in re.findall(pattern, page.read_text()):
        assert (ROOT / name).is_file(), f"{page.name}: {name}"


def test_the_tree_in_the_readme_is_the_tree() -> None:
    (tree,) = (b for b in blocks(ROOT / "README.md", "text") if "decoder.py" in b)
    modules = {path.name for path in (ROOT / "csd_policy").glob("*.py")} - {
        "__init__.py",
        "__main__.py",
    }
    named = set(re.findall(r"\b\w+\.py\b", tree)) - {"base.py"}
    assert named == modules


def project_files() -> list[Path]:
    """The project's own text files, wherever the checkout is."""
    folders = (".ci", "configs", "csd_policy", "docs", "tests", "trainers")
    paths = [p for p in ROOT.iterdir() if p.is_file()]
    paths += [p for folder in folders for p in (ROOT / folder).rglob("*") if p.is_file()]
    kinds = {".py", ".md", ".yaml", ".yml", ".toml", ".csv", ".json", ".txt", ""}
    skipped = {"__pycache__", "_build"}
    return [p for p in paths if p.suffix in kinds and not skipped & set(p.parts)]


def test_no_file_names_a_place_on_somebodys_machine() -> None:
    places = "|".join(("home", "root", "work", "Users", "mnt", "scratch", "opt"))
    pattern = re.compile(
        rf"(?<![\w.:/$}}\"'`*-])/(?:{places})/\w|[A-Z]:\\\\\w|[\"'`]/(?:{places})/\w"
    )
    files = project_files()
    assert len(files) > 40
    for path in files:
        if path.name == ".git":  # of a worktree
            continue
        found = pattern.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{path.relative_to(ROOT)}: {found and found[0]}"


# --- version ---


def test_version_is_the_newest_one_of_the_changelog() -> None:
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == csd_policy.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", versions[0])
