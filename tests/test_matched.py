"""Families of methods at equal passes and at equal harm."""

import json
from pathlib import Path

import numpy as np
import pytest

from csd_policy.cli import main

POINTS = {  # passes, spent TV, damage
    "AR": (256, 0, 0),
    "Exact": (100, 0, 0),
    "CSD .3": (80, 10, 1),
    "CSD .6": (60, 30, 4),
    "Gated .3": (90, 2, 1),
    "Gated .6": (70, 10, 4),
}


def write_results(folder: Path, prompts: int = 12, spread: float = 0.0) -> Path:
    """Two seeds of each prompt; a prompt is hard or easy for all methods alike."""
    hard = spread * np.random.default_rng(0).standard_normal(prompts).repeat(2)
    images = {
        name: [
            {"prompt_number": i // 2, "forward_passes": passes + extra, "spent_tv": tv,
             "damage": damage}
            for i, extra in enumerate(hard)
        ]
        for name, (passes, tv, damage) in POINTS.items()
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "results.json").write_text(json.dumps({"images": images}))
    return folder


def run(folder: Path, *words: str) -> list[dict]:
    assert main(["study", "matched", "--results", str(folder), *words]) == 0
    return json.loads((folder / "matched.json").read_text())["matches"]


def test_a_family_is_read_between_its_strengths(tmp_path: Path) -> None:
    weak, strong = run(write_results(tmp_path))[:2]
    assert (weak["family"], weak["at"], weak["measure"]) == ("Gated", "CSD .3", "spent_tv")
    assert weak["harm"] == pytest.approx([-4, -4, -4])  # 80 lies half way between 90 and 70
    assert weak["harm_ratio"] == pytest.approx([0.6, 0.6, 0.6])
    assert weak["passes"] == pytest.approx([-10, -10, -10])
    assert weak["passes_ratio"] == pytest.approx([0.875, 0.875, 0.875])
    assert strong["at"] == "CSD .6"
    assert strong["harm"] is strong["passes"] is None  # nothing of it lies beyond 70 passes and 10
    for name in ("matched.md", "matched.png"):
        assert (tmp_path / name).is_file()
    assert "| Gated | CSD .6 | - | - | - | - |" in (tmp_path / "matched.md").read_text()


def test_every_measure_has_its_own_curve(tmp_path: Path) -> None:
    damage = [m for m in run(write_results(tmp_path)) if m["measure"] == "damage"]
    assert damage[0]["harm"] == pytest.approx([1.5] * 3)  # 2.5 at 80 passes, CSD has 1
    assert damage[0]["passes"] == pytest.approx([10] * 3)
    assert damage[1]["passes"] == pytest.approx([10] * 3)  # 70 against 60, at damage 4


def test_what_a_prompt_does_to_all_methods_alike_does_not_widen_the_interval(
    tmp_path: Path,
) -> None:
    weak = run(write_results(tmp_path, spread=20.0))[0]
    assert weak["passes"] == pytest.approx([-10, -10, -10])
    low, high = weak["passes_ratio"][1:]
    assert 0.001 < high - low < 0.05


def test_families_can_be_given(tmp_path: Path) -> None:
    folder = write_results(tmp_path)
    words = ["--families", '{"a": "CSD .*", "b": "Gated .3|CSD .6"}', "--baseline", "a"]
    found = run(folder, *words)
    assert {m["family"] for m in found} == {"b"}
    assert found[1]["harm"] == pytest.approx([0, 0, 0])  # at CSD .6, which it holds


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--results", "nowhere"], "nowhere holds no results of a finished comparison"),
        (["--exact", "Exakt"], "exact is 'Exakt', expected one of AR, Exact, CSD .3"),
        (["--baseline", "GSD"], "baseline is 'GSD', expected one of CSD, Gated"),
        (["--families", '{"a": "("}'], "family 'a' is '(', no pattern"),
        (["--families", '{"a": "b"}'], "family 'a' is 'b', which no method's name matches"),
        (["--resamples", "0"], "resamples is 0, expected 1 or more"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    folder = write_results(tmp_path)
    assert main(["study", "matched", "--results", str(folder), *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
