"""The command line: what users type, and one clear line for each of their mistakes."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from flat_model import DRIVER, FlatModel
from PIL import Image

import csd_policy.generate
from csd_policy import JacobiDecoder, Trace
from csd_policy.arguments import find_config, join_repeated, make_parser, one_line, parse
from csd_policy.cli import VERBS, main
from csd_policy.drafts import Gumbel, Independent
from csd_policy.generate import generate, plan
from csd_policy.models import shipped_models
from csd_policy.policies import CSD, TVGate
from csd_policy.risk import HedWatershed

LIGHT = ["wandb", "matplotlib", "lightning", "transformers", "lpips", "segment_anything"]
LIGHT += ["skimage", "h5py", "tensorflow"]


@pytest.fixture(autouse=True)
def _flat(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(csd_policy.generate, "load_model", lambda *_: FlatModel())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # undone at the end, with what `main` adds


def test_the_verbs_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    for args in ([], ["--help"], ["-h"]):
        assert main(args) == 0
        out = capsys.readouterr().out
        assert all(f"  {verb} " in out for verb in VERBS)


@pytest.mark.parametrize("verb", ["generate", "compare", "list"])
def test_help_names_the_options(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([verb, "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: csd-policy {verb}") and "--config" in out


CLASSES = "one of CSD, EntropyOnly, Exact, TVGate"
MISTAKES = {  # arguments behind --prompt cat: what the line says
    "--policy CDS": ["policy is 'CDS'", "CSD, ", "TVGate", "import path"],
    "--policy nosuch.Mine": ["policy is 'nosuch.Mine'", "No module named 'nosuch'"],
    "--policy csd_policy.policies.Nope": ["csd_policy.policies.Nope", "no attribute 'Nope'"],
    "--policy Gumbel": ["policy is 'Gumbel'", "CSD, "],
    "--policy csd_policy.drafts.Gumbel": ["csd_policy.drafts.Gumbel", "AcceptancePolicy"],
    "--policy.delta 7": ["delta is 7.0", "in [0, 1]"],
    "--policy.delta high": ["policy.delta is 'high'", "expected float"],
    "--policy.dleta 0.3": ["CSD has no option 'dleta'", "lam, delta, normalize_entropy"],
    "--policy Exact --policy.delta 0.3": ["Exact", "'delta'"],
    "--draft Gumble": ["draft is 'Gumble'", "Gumbel, Independent"],
    "--seed x": ["seed is 'x'", "expected int"],
    "--seed 1.5": ["seed is '1.5'", "expected int"],
    "--seed -1": ["seed is -1", "[0, 2^63)"],
    "--window 0": ["window is 0", "1 or more"],
    "--dtype float8": ["dtype is 'float8'", "expected one of float32, bfloat16, float16, float64"],
    "--draft Gumbel --draft.start below": ["start is 'below'", "expected one of random, uniform"],
    "--policy CSD --policy.gate l2": ["gate is 'l2'", "expected one of tv, kl, reverse_kl"],
    "--policy Veto --policy.inner Nope": ["inner is 'Nope'", "expected one of Addition, Amplify"],
    "--policy RiskGated --policy.risk Fixed": [
        "risk is 'Fixed'",
        "expected one of FixedRisk, GroundTruthRisk, PerceptualRisk, SegmentationRisk, or",
    ],
    "--policy RiskGated --policy.risk SegmentationRisk --policy.risk.segmenter Sam": [
        "segmenter is 'Sam'",
        "expected one of Felzenszwalb, HedWatershed, SegmentAnything, TransformersSam, or",
    ],
    "--policy AcceptancePolicy": ["policy names no class that can be made", "not abstract"],
    "--temperature warm": ["temperature is 'warm'", "expected float or null"],
    "--temperature -1": ["temperature is -1", "0 or more"],
    "--top_p 0": ["top_p is 0.0", "in (0, 1]"],
    "--tv_budget inf": ["tv_budget is 'inf'", "expected float or null"],
    "--tv_budget -1": ["tv_budget is -1.0", "0 or more"],
    "--num_images 0": ["num_images is 0", "1 or more"],
    "--batch_size 0": ["batch_size is 0", "1 or more"],
    "--sed 1": ["unknown option '--sed 1'", "seed", "policy"],
    "--num 3": ["unknown option '--num 3'", "num_images"],
    "more": ["unknown option 'more'"],
    "--seed": ["--seed", "expected one argument"],
    "--prompt dog9": ["dog9", "no digits"],
    "--prompt cat": ["'cat' and 'cat'", "cat_0.png"],
    "--config nofile.yaml": ["config is 'nofile.yaml'", "compare/emoji.yaml"],
    "--config wrong.yaml": ["unknown option 'foo'", "seed"],
    "--config broken.yaml": ["broken.yaml"],
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_line(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("wrong.yaml").write_text("foo: 3\n")
    Path("broken.yaml").write_text("prompt: [cat\n")
    before = sorted(Path().rglob("*"))
    assert main(["generate", "--prompt", "cat", *words.split()]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("csd-policy generate: error: ")
    assert streams.err.count("\n") == 1 and streams.err.endswith("\n")
    assert [part for part in MISTAKES[words] if part not in streams.err] == []
    assert "<class" not in streams.err and "Parser key" not in streams.err
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["generte"], ["verb is 'generte'", "generate, compare"]),
        (["generate"], ["prompt"]),
        (["generate", "--prompt=[]"], ["prompt is []"]),
        (["compare"], ["methods"]),
        (["compare", "--methods=[{name: a}]"], ["prompts is []", "at least one"]),
        (["compare", "--methods=[{name: a}]", "--prompt_file", "none"], ["prompt_file is 'none'"]),
        (["compare", "--methods=[{name: a, windw: 3}]", "--prompts", "cat"], ["windw", "window"]),
        (["compare", "--methods=[{name: a, window: 0}]", "--prompts", "cat"], ["window is 0"]),
        (
            ["compare", "--methods=[{name: a, policy: Exct}]", "--prompts", "cat"],
            ["methods.policy is 'Exct'", "Exact"],
        ),
        (
            ["compare", "--methods=[{name: a}]", "--prompts", "cat", "--seeds", "[0, x]"],
            ["seeds is 'x'", "expected int"],
        ),
        (
            ["compare", "--methods=[{name: a}]", "--prompts", "cat", "--wandb", "maybe"],
            ["wandb", "maybe", "offline"],
        ),
        (["list", "--all"], ["unknown option '--all'"]),
    ],
)
def test_mistakes_elsewhere(
    args: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    streams = capsys.readouterr()
    assert streams.out == "" and streams.err.count("\n") == 1
    assert [part for part in parts if part not in streams.err] == []


def test_generate_writes_what_the_decoder_draws(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["generate", "--prompt", "A cat: left", "--prompt", "dog", "--num_images", "2"]
    args += ["--seed", "5", "--policy", "CSD", "--policy.delta", "0.6", "--draft", "Gumbel"]
    assert main([*args, "--window", "4", "--output", "out", "--batch_size", "3"]) == 0
    out = capsys.readouterr().out
    stems = ["a-cat-left_5", "a-cat-left_6", "dog_5", "dog_6"]
    suffixes = [".json", ".png", ".safetensors", "_heat.png"]
    assert sorted(p.name for p in Path("out").iterdir()) == sorted(
        s + e for s in stems for e in suffixes
    )
    assert all(f"{stem}.png" in out for stem in stems)
    config = {"window": 4, "relax_fresh": False}
    for stem, prompt, seed in zip(
        stems, ["A cat: left"] * 2 + ["dog"] * 2, [5, 6] * 2, strict=True
    ):
        row = json.loads(Path(f"out/{stem}.json").read_text())
        decoder = JacobiDecoder(
            FlatModel(), CSD(delta=0.6), Gumbel(), csd_policy.DecodeConfig(window=4)
        )
        result = decoder.generate([prompt], seeds=[seed])
        assert row["tokens"] == result.tokens[0].tolist()
        assert (row["prompt"], row["seed"]) == (prompt, seed)
        assert row["decode"] == row["decode"] | config and row["policy"] == repr(CSD(delta=0.6))
        assert Trace.load(f"out/{stem}.safetensors").pass_number.equal(result.trace.pass_number)
        with Image.open(f"out/{stem}.png") as picture:
            assert picture.text["prompt"] == prompt and picture.text["seed"] == str(seed)
            assert json.loads(picture.text["settings"])["draft"] == repr(Gumbel())
        with Image.open(f"out/{stem}_heat.png") as heat:
            assert heat.width > 1000


def test_the_defaults_of_generate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "cat"]) == 0
    row = json.loads(Path("outputs/generate/cat_0.json").read_text())
    assert (row["policy"], row["draft"]) == (repr(CSD()), repr(Independent()))
    assert row["decode"]["window"] == 16
    assert generate(["cat"], output="again")[0]["seed"] == 0
    assert json.loads(Path("again/cat_0.json").read_text())["tokens"] == row["tokens"]


def test_a_config_and_what_overrides_it() -> None:
    Path("my.yaml").write_text(
        "prompt: [cat, dog]\npolicy: {class_path: TVGate, init_args: {delta: 0.2}}\nseed: 3\n"
    )
    assert main(["generate", "--config", "my.yaml", "--policy.delta", "0.4", "--output", "a"]) == 0
    row = json.loads(Path("a/dog_3.json").read_text())
    assert row["policy"] == repr(TVGate(0.4))
    assert main(["generate", "--config=my.yaml", "--prompt", "owl", "--output", "b"]) == 0
    assert sorted(p.name for p in Path("b").glob("*.json")) == ["owl_3.json"]


@pytest.mark.parametrize(
    ("args", "joined"),
    [
        (["--prompt", "a: b"], ['--prompt=["a: b"]']),
        (["--prompt=5", "--x", "1"], ['--prompt=["5"]', "--x", "1"]),
        (["--prompt", "a", "--prompt", 'b"'], ['--prompt=["a"]', '--prompt+=["b\\""]']),
        (["--prompt", '["a", "b"]'], ['--prompt=["a", "b"]']),
        (["--prompt"], ["--prompt"]),
        (["--prompts", "a"], ["--prompts", "a"]),
    ],
)
def test_repeated_prompts(args: list[str], joined: list[str]) -> None:
    assert join_repeated(args, "--prompt") == joined


def test_long_prompts_that_would_share_a_file_are_refused() -> None:
    long = "very " * 20
    with pytest.raises(ValueError, match="both belong into"):
        plan([long + "cat", long + "dog"], 0, 1)
    assert list(plan(["a/b ../c", "\N{CAT}"], 2, 1)) == ["a-b-c_2", "prompt_2"]


def test_packaged_configs_are_found_from_anywhere() -> None:
    for name in ("compare/emoji.yaml", "configs/compare/emoji.yaml"):
        assert find_config(name).name == "emoji.yaml"
    Path("compare").mkdir()
    Path("compare/emoji.yaml").write_text("")
    assert find_config("compare/emoji.yaml") == Path("compare/emoji.yaml")
    with pytest.raises(ValueError, match=r"expected a YAML file .*train/emoji_vq\.yaml"):
        find_config("../pyproject.toml")


def test_unknown_messages_stay_readable() -> None:
    text = one_line("Something\n  new about <class 'a.b.Thing'>", make_parser("x", ""))
    assert text == "Something new about Thing"


MINE = '''
from csd_policy import AcceptancePolicy

class Mine(AcceptancePolicy):
    """Accept more by a constant."""

    def __init__(self, extra: float = 0.1) -> None:
        self.extra = extra

    def accept_prob(self, c):
        return c.ratio + self.extra
'''


def test_a_policy_of_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "my_policy.py").write_text(MINE)
    scripts = tmp_path / "elsewhere"
    scripts.mkdir()
    (scripts / "run.py").write_text(DRIVER + "sys.exit(main())")
    command = [sys.executable, str(scripts / "run.py"), "generate", "--prompt", "cat"]
    command += ["--policy", "my_policy.Mine", "--policy.extra", "0.2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    row = json.loads((tmp_path / "outputs/generate/cat_0.json").read_text())
    assert row["policy"] == "Mine(extra=0.2)"


def test_what_comes_with_the_package_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    tables = [table.splitlines() for table in capsys.readouterr().out.strip().split("\n\n")]
    listed = {" ".join(t[0].split("  ")[0].split()): [r.split()[0] for r in t[2:]] for t in tables}
    maps = ["FixedRisk", "GroundTruthRisk", "PerceptualRisk", "SegmentationRisk"]
    segmenters = ["Felzenszwalb", "HedWatershed", "SegmentAnything", "TransformersSam"]
    assert listed["risk map"] == maps and listed["segmenter"] == segmenters
    assert list(listed) == ["policy", "draft", "risk map", "segmenter", "model"]
    assert all(len(row.split()) > 3 for table in tables for row in table[2:])  # it says what it is


def test_short_names_of_segmenters_in_a_config() -> None:
    Path("my.yaml").write_text(
        "policy:\n"
        "  class_path: RiskGated\n"
        "  init_args:\n"
        "    risk:\n"
        "      class_path: SegmentationRisk\n"
        "      init_args: {segmenter: {class_path: HedWatershed, init_args: {threshold: 0.3}}}\n"
    )
    parser = make_parser("generate", None)
    parser.add_function_arguments(generate, as_group=False)
    policy = parse(parser, ["--config", "my.yaml", "--prompt", '["cat"]'])["policy"]
    assert repr(policy.risk.segmenter) == repr(HedWatershed(threshold=0.3))


def test_python_m_and_light_imports(tmp_path: Path) -> None:
    code = (
        "import sys, runpy; sys.argv = ['csd-policy', 'list']\n"
        "import csd_policy.cli, csd_policy.compare, csd_policy.generate\n"
        f"found = set(sys.modules) & set({LIGHT!r}); assert not found, found\n"
        "runpy.run_module('csd_policy', run_name='__main__')"
    )
    path = Path(csd_policy.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Exact" in done.stdout and "exact" in done.stdout and "Gumbel" in done.stdout
    assert "Accept with min(1, q/p): lossless speculative sampling." in done.stdout
    assert all(name in done.stdout for name in shipped_models())


def test_train_without_lightning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "trainers.cli", raising=False)
    monkeypatch.setitem(sys.modules, "lightning", None)
    assert main(["train", "fit"]) == 2
    err = capsys.readouterr().err
    assert "csd-policy[train]" in err and err.count("\n") == 1


def test_train_hands_over_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    module = ModuleType("trainers.cli")
    module.main = lambda args: seen.append((args, list(sys.argv)))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trainers.cli", module)
    monkeypatch.setattr(sys, "argv", ["csd-policy", "train", "fit"])
    assert main(["train", "fit", "--config", "x.yaml"]) == 0
    assert seen == [(["fit", "--config", "x.yaml"], ["csd-policy train"])]


@pytest.mark.slow
def test_help_of_train() -> None:
    command = [sys.executable, "-m", "csd_policy", "train", "--help"]
    path = Path(csd_policy.__file__).parents[1]
    done = subprocess.run(command, cwd=path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "csd-policy train" in done.stdout and "fit" in done.stdout


@pytest.mark.skipif("emoji-scenes" not in shipped_models(), reason="the weights are missing")
def test_the_shipped_model(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "csd_policy", "generate"]
    command += ["--prompt", "two cats on blue plain", "--output", str(tmp_path)]
    path = Path(csd_policy.__file__).parents[1]
    done = subprocess.run(command, cwd=path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with Image.open(tmp_path / "two-cats-on-blue-plain_0.png") as picture:
        assert picture.size == (96, 96)
    command[5] = "two flying cats"
    done = subprocess.run(command, cwd=path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "flying" in done.stderr and done.stderr.count("\n") == 1


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == csd_policy.__version__


@pytest.mark.parametrize(
    ("args", "policy", "draft"),
    [
        (
            "--policy LANTERN",
            "LANTERN(k=1000, delta=0.1, multiplicative=False, table=None)",
            "Independent",
        ),
        ("--policy EntropyOnly", "EntropyOnly(lam=0.02)", "Independent"),
        ("--policy CoolSD --draft Gumbel", "CoolSD(delta=1.1, nu=0.7, mu=0.0)", "Gumbel"),
        ("--policy.delta 0.5", repr(CSD(delta=0.5)), "Independent"),
        ("--draft.start above", repr(CSD()), "Independent(start='above')"),
        (
            "--policy RiskGated --policy.inner TVGate --policy.inner.delta 0.6 "
            "--policy.risk FixedRisk",
            "RiskGated(inner=TVGate(delta=0.6), risk=FixedRisk(",
            "Independent",
        ),
        (
            "--policy RiskGated --policy.inner Exact --policy.risk SegmentationRisk "
            "--policy.risk.segmenter HedWatershed --policy.risk.segmenter.side 96",
            f"RiskGated(inner=Exact(), risk=SegmentationRisk(segmenter={HedWatershed(side=96)!r}",
            "Independent",
        ),
    ],
)  # fmt: skip
def test_a_class_keeps_its_own_defaults(
    args: str, policy: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Choosing another class must not hand it the arguments of the default one."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(csd_policy.generate, "JacobiDecoder", lambda *a: seen.update(a=a) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["generate", "--prompt", "cat", *args.split()])
    _, made, drafts, _ = seen["a"]
    assert repr(made).startswith(policy) and repr(drafts).startswith(draft)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("class P(", ["SyntaxError"]),
        ("1 / 0", ["ZeroDivisionError"]),
        (
            "from csd_policy.policies import Exact\n"
            "class P(Exact):\n    def __init__(self):\n        nope",
            ["NameError", "nope"],
        ),
    ],
)  # fmt: skip
def test_a_broken_module_is_one_line(
    source: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"broken_{words[0].lower()}"
    Path(f"{name}.py").write_text(source)
    assert main(["generate", "--prompt", "cat", "--policy", f"{name}.P"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(word in error for word in words)
