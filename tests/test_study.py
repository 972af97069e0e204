"""The study of risk: scenes, costs of errors, and its files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_models import tiny_emoji_scenes

from csd_policy import load_model
from csd_policy.cli import main
from csd_policy.counterfactual import replacement_costs
from csd_policy.decoder import JacobiDecoder
from csd_policy.drafts import Gumbel
from csd_policy.models import ImageTokenModel
from csd_policy.policies import CSD
from csd_policy.risk import Canvas, GroundTruthRisk
from csd_policy.risk.lpips import load_lpips
from csd_policy.study.measure import choose
from csd_policy.study.scenes import read_scenes
from csd_policy.types import DecodeConfig

PROMPTS = ("two cats on blue plain", "penguin above pizza on pink plain", "taxi on green photo")


@pytest.fixture(scope="module")
def model() -> ImageTokenModel:
    return load_model("emoji-scenes", device="cpu")


@pytest.fixture(scope="module")
def drawn(model: ImageTokenModel) -> torch.Tensor:
    decoder = JacobiDecoder(model, CSD(), Gumbel(), DecodeConfig(window=32))
    return decoder.generate(PROMPTS, range(len(PROMPTS))).tokens


@pytest.fixture(scope="module")
def metric() -> Any:
    return load_lpips("alex")


def make_scenes(folder: Path, model: ImageTokenModel, drawn: torch.Tensor) -> Path:
    """Pictures as scenes; everything in the left half is a thing."""
    folder.mkdir()
    side = model.decode(drawn[:1])[0].width
    mask = np.zeros((side, side), dtype=np.uint8)
    mask[:, : side // 2] = 255
    for i, picture in enumerate(model.decode(drawn)):
        picture.save(folder / f"{i:05d}.png")
        Image.fromarray(mask).save(folder / f"{i:05d}_mask.png")
    (folder / "captions.txt").write_text("\n".join(PROMPTS) + "\n")
    return folder


@pytest.fixture
def scenes(model: ImageTokenModel, drawn: torch.Tensor, tmp_path: Path) -> Path:
    return make_scenes(tmp_path / "scenes", model, drawn)


def test_the_cost_is_lpips_of_the_two_pictures(
    model: ImageTokenModel, drawn: torch.Tensor, metric: Any
) -> None:
    generator = torch.Generator().manual_seed(0)
    position = torch.randint(256, (3,), generator=generator)
    one, other = torch.randint(1024, (2, 3), generator=generator)
    found = replacement_costs(model, metric, drawn, position, (one, other), batch_size=2)
    for i in range(3):
        pictures = []
        for code in (one[i], other[i]):
            tokens = drawn[i : i + 1].clone()
            tokens[0, position[i]] = code
            pixels = torch.from_numpy(np.array(model.decode(tokens)[0])).permute(2, 0, 1)
            large = torch.nn.functional.interpolate(
                pixels[None] / 127.5 - 1, scale_factor=3, mode="bilinear"
            )
            pictures.append(large)
        seen = metric(*pictures)[0, 0]
        assert float(found.whole[i]) == pytest.approx(float(seen.mean()), rel=1e-4, abs=1e-7)
        row, column = divmod(int(position[i]), 16)
        top, left = max(0, row - 1) * 18, max(0, column - 1) * 18
        near = seen[top : (row + 2) * 18, left : (column + 2) * 18].mean()
        assert float(found.around[i]) == pytest.approx(float(near), rel=1e-4, abs=1e-7)
    assert (found.around > 2 * found.whole).all()  # an error is seen where it is
    none = replacement_costs(model, metric, drawn, position, (one, one))
    assert none.whole.eq(0).all() and none.around.eq(0).all()
    with pytest.raises(ValueError, match=r"positions are in \[0, 256\], expected \[0, 256\)"):
        replacement_costs(model, metric, drawn[:2], torch.tensor([0, 256]), (one[:2], other[:2]))


def test_positions_are_chosen_evenly_and_by_seed() -> None:
    where = torch.zeros(3000, 8, dtype=torch.bool)
    where[:, [1, 2, 4, 7]] = True
    where[0] = False
    chosen = choose(where, range(3000), 2)
    assert chosen[0].tolist() == [-1, -1]
    assert (chosen[1:, 0] < chosen[1:, 1]).all()
    counts = torch.bincount(chosen[1:].flatten(), minlength=8)
    assert counts[[0, 3, 5, 6]].sum() == 0
    assert ((counts[[1, 2, 4, 7]] / 2999 - 0.5).abs() < 0.04).all()
    assert choose(where, range(3000), 2).equal(chosen)


def test_pictures_are_encoded_as_they_were_decoded(
    model: ImageTokenModel, drawn: torch.Tensor
) -> None:
    pictures = model.decode(drawn)
    again = model.encode(pictures)
    assert again.shape == drawn.shape and again.dtype == torch.int64
    error = torch.tensor(
        np.stack(pictures).astype(float) - np.stack(model.decode(again)).astype(float)
    )
    assert 10 * torch.log10(255**2 / error.square().mean()) > 27  # dB
    with pytest.raises(ValueError, match="a picture has 90x80 pixels, expected 96x96"):
        model.encode([Image.new("RGB", (90, 80))])


def test_ground_truth_is_the_covered_share(
    model: ImageTokenModel, drawn: torch.Tensor, scenes: Path
) -> None:
    truth = GroundTruthRisk(str(scenes)).bind(model)
    canvas = Canvas.of(drawn[:2], torch.tensor([256, 256]), model, PROMPTS[:2])
    found = truth.risk(canvas).view(2, 16, 16)
    assert found[:, :, :8].eq(1).all() and found[:, :, 8:].eq(0).all()
    unknown = Canvas.of(drawn[:1], torch.tensor([256]), model, ["one cow on red plain"])
    with pytest.raises(ValueError, match="has the caption 'one cow on red plain'"):
        truth.risk(unknown)


def test_faults_of_a_folder_of_scenes_are_named(scenes: Path) -> None:
    assert len(read_scenes(scenes).captions) == 3
    Image.new("L", (90, 96)).save(scenes / "00001_mask.png")
    with pytest.raises(ValueError, match=r"its mask \(90, 96\), expected \(96, 96\)"):
        read_scenes(scenes)
    (scenes / "captions.txt").write_text("a\na\n")
    with pytest.raises(ValueError, match="holds 'a' twice"):
        read_scenes(scenes)
    (scenes / "captions.txt").write_text("a\n" * 9)
    with pytest.raises(ValueError, match="no folder of scenes: .*00003.png"):
        read_scenes(scenes)


def test_the_study_writes_its_files_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("csd_policy.study.analysis.LEAST_VALUES", 10)
    tiny = tiny_emoji_scenes(tmp_path / "tiny")
    small = load_model(str(tiny), device="cpu")
    scenes = make_scenes(
        tmp_path / "scenes", small, JacobiDecoder(small).generate(PROMPTS, [0, 1, 2]).tokens
    )
    output = tmp_path / "study"
    config = tmp_path / "study.yaml"
    config.write_text(
        "maps:\n"
        "  left: {class_path: FixedRisk, init_args: {values: [[1.0, 0.0]]}}\n"
        "domains: {plain: ' plain$', photograph: ' photo$'}\n"
        "draft: {class_path: MaximalCoupling}\n"
        f"model: {tiny}\nscenes: {scenes}\noutput: {output}\n"
        "costs: 8\nbatch_size: 2\nresamples: 50\n"
    )
    command = ["study", "risk", "--config", str(config), "--device", "cpu"]
    assert main(command) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "scene pictures: left is a sign of being on a thing (AUROC 1.00 [1.00, 1.00])" in text
    first = json.loads((output / "study.json").read_text())
    assert first["pictures"] == {"drawn": 3, "scene": 3}
    found = {(r["pictures"], r["target"], r["domain"], r["predictor"]): r for r in first["rows"]}
    mask = found["scene", "foreground", "plain", "left"]
    assert mask["count"] == 2 * 64 and mask["auroc"]["mean"] == 1
    high = found["drawn", "cost, whole picture", "all", "high entropy"]["spearman"]["mean"]
    low = found["drawn", "cost, whole picture", "all", "low entropy"]["spearman"]["mean"]
    assert high == pytest.approx(-low) and high != 0
    assert ("scene", "cost, whole picture", "all", "exact mask") in found
    assert ("drawn", "cost, whole picture", "all", "exact mask") not in found
    for name in ("study.csv", "study.md", "study.png", "maps_drawn.png", "maps_scene.png"):
        assert (output / name).stat().st_size > 100
    # a part is lost, and one file broken: what is there is kept, the numbers are the same
    parts = sorted((output / "measurements").iterdir())
    assert len(parts) == 4
    parts[1].unlink()
    parts[3].write_bytes(parts[3].read_bytes()[:1000])
    kept = parts[0].stat().st_mtime_ns
    assert main(command) == 0
    assert parts[0].stat().st_mtime_ns == kept
    assert json.loads((output / "study.json").read_text())["rows"] == first["rows"]
    # another map: nothing but the map is computed
    monkeypatch.setattr("csd_policy.study.risk.measure", None)
    config.write_text(config.read_text().replace("maps:\n", "maps:\n  things: SegmentationRisk\n"))
    assert main(command) == 0
    rows = json.loads((output / "study.json").read_text())["rows"]
    assert [row for row in rows if row["predictor"] != "things"] == first["rows"]
    assert len(rows) > len(first["rows"])
    capsys.readouterr()
    assert main([*command, "--costs", "5"]) == 2
    assert "costs is 5, but the results in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "study is None, expected one of risk"),
        (["x"], "study is 'x', expected one of risk"),
        (["risk", "--maps", "{}"], "expected one of them"),
        (["risk", "--maps", "{}", "--prompts", "a", "--window", "1"], "window is 1, expected 2"),
        (["risk", "--maps", "{}", "--prompts", "a", "--domains", "{a: '('}"], "no pattern"),
        (["risk", "--maps", "{}", "--scenes", "/nowhere"], "/nowhere is no folder of scenes"),
        (["risk", "--maps", "{tv: {class_path: FixedRisk}}", "--prompts", "a"], "another name"),
    ],
)
def test_wrong_settings_are_named(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["study", *words]) == 2
    assert message in capsys.readouterr().err
