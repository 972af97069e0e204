"""The comparison: resumes, refuses to mix results, plans without a model, and adds up."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flat_model import DRIVER, FlatModel
from PIL import Image

import csd_policy.compare
from csd_policy import DecodeConfig, JacobiDecoder, Trace
from csd_policy.arguments import config_folder, find_config, make_parser, parse
from csd_policy.cli import main
from csd_policy.compare import run
from csd_policy.comparison import Comparison, Method, plan_text
from csd_policy.drafts import Gumbel, Independent
from csd_policy.metrics import log_likelihood
from csd_policy.models import shipped_models
from csd_policy.policies import CSD, GSD, Addition, Amplify, Exact, JacobiMatch
from csd_policy.results import locked
from trainers.scenes import caption_words

METHODS = [
    Method("AR", window=1),
    Method("Exact", draft=Gumbel(), window=5),
    Method("CSD .5", CSD(delta=0.5), window=5),
]
PROMPTS = ["a cat", "two dogs", "an owl"]


@pytest.fixture(autouse=True)
def _flat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csd_policy.compare, "load_model", lambda *_: FlatModel())


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    return Comparison(
        METHODS, PROMPTS, seeds=[0, 7], output=str(tmp_path / "out"), batch_size=4, wandb="disabled"
    )


def records(output: str) -> dict[str, Any]:
    paths = sorted((Path(output) / "images").rglob("*.json"))
    return {str(path.relative_to(output)): json.loads(path.read_text()) for path in paths}


def times(output: str) -> dict[str, int]:
    paths = sorted((Path(output) / "images").rglob("*.json"))
    return {str(path.relative_to(output)): path.stat().st_mtime_ns for path in paths}


def test_files_and_numbers(comparison: Comparison) -> None:
    text = run(comparison)
    output = Path(comparison.output)
    names = {path.name for path in output.iterdir()}
    figures = {"pictures.png", "commits.png", "tradeoff.png"}
    tables = {"results.json", "table.md", "table.csv", "manifest.json", "resolved_config.json"}
    assert names == figures | tables | {"images"}
    assert not list(output.rglob("*.partial"))
    found = records(comparison.output)
    assert len(found) == len(METHODS) * len(PROMPTS) * 2
    results = json.loads((output / "results.json").read_text())
    assert [line["method"] for line in results["table"]] == ["AR", "Exact", "CSD .5"]
    for line, method in zip(results["table"], METHODS, strict=True):
        rows = [row for row in found.values() if row["method"] == method.name]
        passes = [row["forward_passes"] for row in rows]
        assert line["accept/forward_passes"]["mean"] == pytest.approx(sum(passes) / 6)
        assert line["accept/compression"]["mean"] == pytest.approx(16 * 6 / sum(passes))
        spent = sum(row["spent_tv"] for row in rows) / 6
        assert line["quality/spent_tv"]["mean"] == pytest.approx(spent)
        assert (spent > 0) == (method.name == "CSD .5")
        shares = [line[f"speed/share_{part}"] for part in ("forward", "verification", "rest")]
        assert sum(shares) == pytest.approx(1)
        assert method.name in text and method.name in (output / "table.md").read_text()
    facts = results["provenance"]
    assert facts["warm_up_passes"] == 8 and facts["dtype"] == "float32"
    assert facts["threads"] == [torch.get_num_threads()]


def test_an_image_is_what_the_decoder_draws_alone(comparison: Comparison) -> None:
    run(comparison)
    for method in METHODS:
        stem = comparison.stem(method, (1, 7))
        row = json.loads(Path(f"{stem}.json").read_text())
        model = FlatModel()
        decoder = JacobiDecoder(model, method.policy, method.draft, method.decode)
        result = decoder.generate(["two dogs"], seeds=[7])
        assert row["tokens"] == result.tokens[0].tolist()
        assert row["forward_passes"] == result.stats.forward_passes[0]
        likelihood = log_likelihood(model, result.tokens, ["two dogs"], result.config)
        assert row["log_likelihood"] == pytest.approx(likelihood.item(), abs=1e-6)
        trace = Trace.load(f"{stem}.safetensors")
        assert trace.how.equal(result.trace.how)
        assert sum(row["tokens_by_kind"].values()) == 16
        with Image.open(f"{stem}.png") as picture:
            assert picture.text["prompt"] == "two dogs" and picture.text["seed"] == "7"
            assert json.loads(picture.text["settings"])["policy"] == repr(method.policy)


KILLED = """
import os, signal
saved = []
save = csd_policy.compare.save_image

def save_five(*args):
    if len(saved) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    saved.append(save(*args))

csd_policy.compare.save_image = save_five
main(["compare", "--config", "plan.json"])
"""


def test_a_killed_run_goes_on(comparison: Comparison, tmp_path: Path) -> None:
    """Killed in the second batch of the first method: the first one stays as it is, the rest is
    drawn again from the same batches, so that nothing but the times can differ."""
    comparison = replace(comparison, output="out")
    (tmp_path / "plan.json").write_text(json.dumps(comparison.to_config()))
    (tmp_path / "killed.py").write_text(DRIVER + KILLED)
    status = subprocess.run([sys.executable, "killed.py"], cwd=tmp_path, check=False).returncode
    assert status == -signal.SIGKILL
    comparison = replace(comparison, output=str(tmp_path / "out"))
    before = times(comparison.output)
    assert len(before) == 5
    run(comparison)
    after = times(comparison.output)
    kept = [name for name in before if after[name] == before[name]]
    first_batch = [comparison.stem(METHODS[0], job) for job in next(comparison.batches())]
    assert kept == sorted(f"images/AR/{stem.name}.json" for stem in first_batch)
    whole = replace(comparison, output=str(tmp_path / "whole"))
    run(whole)
    resumed, unbroken = records(comparison.output), records(whole.output)
    assert resumed.keys() == unbroken.keys()
    for name, row in resumed.items():
        same = ("tokens", "forward_passes", "spent_tv", "log_likelihood", "decode", "seed")
        assert {key: row[key] for key in same} == {key: unbroken[name][key] for key in same}
        assert row["batch"]["size"] == unbroken[name]["batch"]["size"]


def test_a_complete_run_draws_nothing(
    comparison: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = run(comparison)
    before = times(comparison.output)

    def refuse(*args: Any, **more: Any) -> None:
        raise AssertionError("decoded again")

    monkeypatch.setattr(JacobiDecoder, "generate", refuse)
    assert run(comparison) == text
    assert times(comparison.output) == before


@pytest.mark.parametrize("damage", ["remove_picture", "cut_record"])
def test_a_damaged_image_is_drawn_again(comparison: Comparison, damage: str) -> None:
    run(comparison)
    stem = comparison.stem(METHODS[2], (2, 7))
    tokens = json.loads(Path(f"{stem}.json").read_text())["tokens"]
    if damage == "remove_picture":
        Path(f"{stem}.png").unlink()
    else:
        Path(f"{stem}.json").write_text('{"tokens": [1,')
    run(comparison)
    assert Path(f"{stem}.png").is_file()
    assert json.loads(Path(f"{stem}.json").read_text())["tokens"] == tokens


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seeds": [0, 8]}, r"seeds is \[0, 8\].*\[0, 7\]"),
        ({"prompts": ["a cat", "two dogs"]}, "prompts is"),
        ({"batch_size": 3}, "batch_size is 3, but .* with 4"),
        (
            {"methods": [*METHODS[:2], Method("CSD .5", CSD(delta=0.6), window=5)]},
            r"methods\.CSD \.5\.policy\.init_args\.delta is 0\.6, but .* with 0\.5",
        ),
        (
            {"methods": [Method("AR", window=1, guidance_scale=3.0), *METHODS[1:]]},
            r"methods\.AR\.guidance_scale is 3\.0, but .* with None",
        ),
        (
            {"methods": [METHODS[0], Method("Exact", window=5), METHODS[2]]},
            r"methods\.Exact\.draft\.class_path is 'csd_policy\.drafts\.Independent'",
        ),
    ],
)
def test_other_settings_are_refused(
    comparison: Comparison, change: dict[str, Any], named: str
) -> None:
    run(comparison)
    before = times(comparison.output)
    other = replace(comparison, **change)
    with pytest.raises(ValueError, match=named):
        run(other)
    with pytest.raises(ValueError, match=named):
        plan_text(other)
    assert times(comparison.output) == before


def test_other_weights_are_refused(comparison: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csd_policy.compare, "weights_hash", lambda name: "aaaa")
    run(comparison)
    monkeypatch.setattr(csd_policy.compare, "weights_hash", lambda name: "bbbb")
    with pytest.raises(ValueError, match=r"environment\.weights is 'bbbb'.*'aaaa'"):
        run(comparison)


def test_methods_can_be_added(comparison: Comparison) -> None:
    run(replace(comparison, methods=METHODS[:2]))
    before = times(comparison.output)
    run(comparison)
    after = times(comparison.output)
    assert {name: after[name] for name in before} == before and len(after) == 18
    run(replace(comparison, methods=METHODS[1:]))  # without AR there is no compression
    table = json.loads((Path(comparison.output) / "results.json").read_text())["table"]
    assert [line["method"] for line in table] == ["Exact", "CSD .5"]
    assert all("accept/compression" not in line for line in table)


def test_the_plan_needs_no_model(
    comparison: Comparison, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(replace(comparison, methods=METHODS[:1]))
    path = Path(comparison.output) / "plan.json"
    path.write_text(json.dumps(comparison.to_config()))

    def refuse(*args: Any) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(csd_policy.compare, "load_model", refuse)
    before = sorted(Path(comparison.output).rglob("*"))
    assert main(["compare", "--config", str(path), "--dry_run"]) == 0
    assert sorted(Path(comparison.output).rglob("*")) == before
    lines = capsys.readouterr().out.splitlines()
    assert any("6 per method, 18 in all, in batches of 4" in line for line in lines)
    ends = {line.split("  ")[0]: line.split()[-2:] for line in lines if "(start=" in line}
    assert ends == {"AR": ["6", "0"], "Exact": ["0", "6"], "CSD .5": ["0", "6"]}


def test_ctrl_c_keeps_what_there_is(
    comparison: Comparison,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    (tmp_path / "plan.json").write_text(json.dumps(comparison.to_config()))
    save: Callable[..., None] = csd_policy.compare.save_image
    saved: list[None] = []

    def save_two(*args: Any) -> None:
        if len(saved) == 2:
            raise KeyboardInterrupt
        saved.append(save(*args))

    monkeypatch.setattr(csd_policy.compare, "save_image", save_two)
    assert main(["compare", "--config", str(tmp_path / "plan.json")]) == 130
    assert "interrupted" in capsys.readouterr().err and "goes on from there" in caplog.text
    assert len(records(comparison.output)) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": []}, r"methods is \[\]"),
        ({"prompts": []}, r"prompts is \[\]"),
        ({"seeds": []}, r"seeds is \[\]"),
        ({"seeds": [-1]}, "seed is -1"),
        ({"seeds": [3, 3]}, "seeds holds 3 twice"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"methods": [Method("a"), Method("A")]}, "methods holds 'a' twice"),
    ],
)
def test_wrong_plans(comparison: Comparison, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(comparison, **change)


@pytest.mark.parametrize("name", ["", "../up", ".hidden", "a/b", "a\nb"])
def test_method_names_are_folder_names(name: str) -> None:
    with pytest.raises(ValueError, match="name of a method"):
        Method(name)


def test_wrong_prompts_stop_before_any_file(comparison: Comparison) -> None:
    with pytest.raises(ValueError, match="a cat 9"):
        run(replace(comparison, prompts=["an owl", "a cat 9"]))
    assert not Path(comparison.output).exists()


def test_the_resolved_config_makes_the_comparison_again(comparison: Comparison) -> None:
    run(comparison)
    parser = make_parser("compare", None)
    parser.add_class_arguments(Comparison, as_group=False)
    path = str(Path(comparison.output) / "resolved_config.json")
    again = Comparison(**parse(parser, ["--config", path, "--batch_size", "2"]))
    assert again.to_config() == comparison.to_config() | {"batch_size": 2}


def shipped(name: str) -> Comparison:
    parser = make_parser("compare", None)
    parser.add_class_arguments(Comparison, as_group=False)
    return Comparison(**parse(parser, ["--config", f"compare/{name}"]))


@pytest.mark.parametrize("name", [p.name for p in (config_folder() / "compare").glob("emoji*")])
def test_shipped_configs_can_be_drawn(name: str) -> None:
    words = set(caption_words())
    assert [p for p in shipped(name).prompts if not set(p.split()) <= words] == []


PAPERS = {  # model, guidance, top-k, and the policies beside AR and those of no table
    "csd_janus7b.yaml": (
        "deepseek-community/Janus-Pro-7B", 5.0, 0,
        [JacobiMatch(), Exact(), Amplify(4.0), Addition(0.4), GSD(35), CSD(0.5, 0.65),
         CSD(0.5, 0.8)],
    ),
    "csd_janus1b.yaml": (
        "deepseek-community/Janus-Pro-1B", 5.0, 0, [Exact(), CSD(0.5, 0.35), CSD(0.5, 0.65)],
    ),
    "csd_lumina.yaml": (
        "Alpha-VLLM/Lumina-mGPT-7B-768", 3.0, 2000,
        [JacobiMatch(), Exact(), Amplify(1.3), Addition(0.1), GSD(3), CSD(0.5, 0.35)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [p.name for p in (config_folder() / "compare").glob("*.yaml")])
def test_every_config_can_be_planned(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "--config", f"compare/{name}", "--output", str(tmp_path), "--dry_run"]
    assert main(words) == 0
    plan, out = shipped(name), capsys.readouterr().out
    assert all(method.name in out for method in plan.methods) and plan.model in out
    assert f"--config compare/{name}" in (find_config(f"compare/{name}")).read_text().replace(
        "configs/", ""
    )


@pytest.mark.parametrize("name", PAPERS)
def test_tables_of_papers(name: str) -> None:
    plan = shipped(name)
    model, guidance, top_k, policies = PAPERS[name]
    assert (plan.model, plan.dtype, plan.batch_size) == (model, "bfloat16", 1)
    ar, *rest = plan.methods
    assert ar.window == 1 and isinstance(ar.policy, Exact)
    rows = rest[: len(policies)]
    assert [repr(method.policy) for method in rows] == [repr(policy) for policy in policies]
    assert all(repr(m.draft) == repr(Independent()) and m.window == 16 for m in rows)
    for m in plan.methods:
        assert (m.guidance_scale, m.temperature, m.top_k, m.top_p) == (guidance, 1.0, top_k, None)


def test_prompts_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They take the place of the config's, and a comparison records the prompts themselves."""
    file = tmp_path / "prompts.txt"
    file.write_text("a cat: left\n\n  two dogs \n", encoding="utf-8")
    words = ["compare", "--methods=[{name: AR, window: 1}]", "--prompts", "an owl", "--output"]
    words += [str(tmp_path / "out"), "--wandb", "disabled", "--prompt_file", str(file)]
    assert main(words) == 0
    resolved = json.loads((tmp_path / "out" / "resolved_config.json").read_text())
    assert resolved["prompts"] == ["a cat: left", "two dogs"] and "prompt_file" not in resolved
    for text in ("\n \n", "a cat\na cat"):
        file.write_text(text)
        assert main(words) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_the_shipped_config() -> None:
    plan = shipped("emoji.yaml")
    assert len(plan.prompts) == 16 and plan.seeds == [0, 1] and plan.batch_size == 16
    assert plan.methods[0].decode == DecodeConfig(window=1)
    assert all(m.window == 16 for m in plan.methods[1:])
    assert isinstance(plan.methods[0].policy, Exact)
    assert (config_folder() / "compare" / "emoji.yaml").read_text().startswith("#")


@pytest.mark.skipif("emoji-scenes" not in shipped_models(), reason="the weights are missing")
def test_the_shipped_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    methods = [Method("AR", window=1), Method("CSD .65 Gumbel", CSD(delta=0.65), Gumbel())]
    prompts = ["two cats on blue plain", "rocket on black plain"]
    plan = Comparison(methods, prompts, output=str(tmp_path), batch_size=2, wandb="disabled")
    run(plan)
    results = json.loads((tmp_path / "results.json").read_text())
    ar, csd = results["table"]
    assert ar["accept/forward_passes"]["mean"] == 256
    assert csd["accept/compression"]["mean"] > 1.5
    assert results["provenance"]["weights"] is not None
    with Image.open(f"{plan.stem(methods[0], (0, 0))}.png") as picture:
        assert picture.size == (96, 96)
    assert torch.isfinite(torch.tensor(csd["quality/log_likelihood"]["mean"]))
    assert os.environ["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(
    ("suffix", "junk"), [(".png", b"no picture"), (".safetensors", b""), (".json", b"[1]")]
)
def test_an_unreadable_file_is_drawn_again(
    comparison: Comparison, suffix: str, junk: bytes
) -> None:
    run(comparison)
    before = sorted(Path(comparison.output).glob("images/*/*.json"))
    texts = [path.read_text() for path in before]
    victim = comparison.stem(comparison.methods[0], (0, comparison.seeds[0]))
    victim.with_name(victim.name + suffix).write_bytes(junk)
    assert comparison.missing(comparison.methods[0])
    run(comparison)
    assert not comparison.missing(comparison.methods[0])
    tokens = [json.loads(text)["tokens"] for text in texts]
    assert [json.loads(path.read_text())["tokens"] for path in before] == tokens


@pytest.mark.parametrize("text", ["{oops", "[]", "{}"])
def test_a_damaged_manifest_is_named(comparison: Comparison, text: str) -> None:
    run(comparison)
    (Path(comparison.output) / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r"manifest.json is not the manifest"):
        run(comparison)
    (Path(comparison.output) / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"holds images but no manifest.json"):
        run(comparison)


def test_an_output_that_is_a_file_is_named(comparison: Comparison) -> None:
    Path(comparison.output).write_text("")
    with pytest.raises(ValueError, match="expected a folder that can be written"):
        run(comparison)


def test_two_processes_do_not_share_a_folder(comparison: Comparison) -> None:
    Path(comparison.output).mkdir(parents=True)
    with locked(Path(comparison.output)), pytest.raises(ValueError, match="another process"):
        run(comparison)
    run(comparison)  # the lock went with its process
    files = [p for p in Path(comparison.output).glob("images/*/*") if p.is_file()]
    assert files and all(path.stat().st_mode & 0o044 for path in files)
