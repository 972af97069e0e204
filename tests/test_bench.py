"""The time of policies and draft strategies: a complete table, and one line for each mistake."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from csd_policy.arguments import class_names
from csd_policy.bench import make_model
from csd_policy.cli import main
from csd_policy.models import shipped_models

ROOT = Path(__file__).parents[1]
POLICIES = class_names("csd_policy.policies")
DRAFTS = class_names("csd_policy.drafts")
STEPS = ["forward pass", *POLICIES, "CSD, spent_tv estimate", *(f"{d} redraw" for d in DRAFTS)]
SMALL = ["--window", "3", "--batch_size", "2", "--sizes", "[8, 24]", "--rounds", "1"]

needs_weights = pytest.mark.skipif(
    "emoji-scenes" not in shipped_models(), reason="the weights are missing"
)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "out"
    assert main(["bench", *SMALL, "--device", "cpu", "--output", str(folder)]) == 0
    return folder


@needs_weights
def test_the_json_is_complete(done: Path) -> None:
    assert sorted(path.name for path in done.iterdir()) == ["bench.json", "bench.md"]
    data = json.loads((done / "bench.json").read_text())
    assert data["settings"] == {"window": 3, "batch_size": 2, "rounds": 1, "sizes": [8, 24]}
    found = [(model["model"], model["num_codes"]) for model in data["models"]]
    assert found == [("emoji-scenes", 1024), ("random weights", 8), ("random weights", 24)]
    for model in data["models"]:
        assert model["parameters"] > 5e6 and model["shape"]["hidden_size"] == 256
        assert {"torch", "device_name", "threads", "dtype"} <= model.keys()
        check_steps(model["steps"])
    heads = [model["parameters"] for model in data["models"]]
    assert heads[2] - heads[1] == 2 * 16 * 256  # embeddings and head


def check_steps(steps: list[dict[str, Any]]) -> None:
    lines = {line["name"]: line for line in steps}
    assert list(lines) == STEPS and len(steps) == len(STEPS)
    assert {line["kind"] for line in steps} == {"forward", "policy", "draft"}
    assert "FixedRisk" in lines["RiskGated"]["what"]
    for line in steps:
        assert line["ms"] > 0 and line["quartiles"] == [line["ms"]] * 2
        assert line["ratio"] == pytest.approx(line["ms"] / lines["forward pass"]["ms"])
        above = line.get("ms_above_exact")
        assert (above is None) == (line["kind"] != "policy")
        assert above is None or above == pytest.approx(line["ms"] - lines["Exact"]["ms"])


@needs_weights
def test_the_table_has_every_policy_and_draft(done: Path) -> None:
    text = (done / "bench.md").read_text()
    head, rule, *rows = [line for line in text.splitlines() if line.startswith("|")]
    assert head == "| step | emoji-scenes, V 1024 | random weights, V 8 | random weights, V 24 |"
    assert rule.count("---") == 4
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == STEPS
    for name, row in zip(STEPS, rows, strict=True):
        cells = row.removesuffix(" |").split(" | ")[1:]
        assert len(cells) == 3
        inside = r" \(\d+\.\d\d(, [+-][\d.]+)?\)" if name != "forward pass" else ""
        assert all(re.fullmatch(r"\d+\.\d+" + inside, cell) for cell in cells), row
    for fact in ("window 3, batch 2", "Parameters", "5.9 M", "num_hidden_layers 6", "threads"):
        assert fact in text


@needs_weights
def test_random_models_are_the_same_each_time() -> None:
    model, again = (make_model(8, torch.device("cpu")) for _ in range(2))
    assert model.codebook is not None and again.codebook is not None
    assert model.codebook.shape == (8, 8) and model.codebook.equal(again.codebook)
    hidden = torch.zeros(2, 3, 256)
    assert model.head(hidden).shape == (2, 3, 8) and model.head(hidden).dtype == torch.float32


MISTAKES = {
    "--window 1": ["window is 1", "expected 2", "256"],
    "--window 257": ["window is 257", "256"],
    "--window wide": ["window is 'wide'", "expected int"],
    "--batch_size 0": ["batch_size is 0", "1 or more"],
    "--rounds 0": ["rounds is 0", "1 or more"],
    "--sizes [8,1]": ["sizes is [8, 1]", "2 or more"],
    "--sizes [8,8]": ["sizes is [8, 8]", "different"],
    "--sizes [x]": ["sizes", "'x'", "int"],
    "--device tpu": ["device is 'tpu'", "cpu"],
    "--output file": ["output is 'file'", "folder"],
    "--size 8": ["unknown option '--size 8'", "sizes"],
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_line(
    words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # undone at the end, with what `main` adds
    Path("file").write_text("")
    assert main(["bench", *words.split()]) == 2
    streams = capsys.readouterr()
    assert streams.out == "" and streams.err.count("\n") == 1
    assert streams.err.startswith("csd-policy bench: error: ")
    assert [part for part in MISTAKES[words] if part not in streams.err] == []
    assert [path.name for path in Path().iterdir()] == ["file"]


def test_help_and_documentation_name_real_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    commands = re.findall(r"csd-policy bench[^\n#]*", (ROOT / "docs/experiments.md").read_text())
    options = re.findall(r"--(\w+)", " ".join(commands))
    assert commands and options
    assert [name for name in options if f"--{name}" not in out] == []
