"""The table of perceptual distances between codes: its fit, its file, its use, and its study."""

import contextlib
import json
from pathlib import Path
from typing import Any

import lpips
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy.stats import spearmanr
from test_laws import PLAIN, SETTINGS, SMALLEST, law_p_value, table_model
from tiny_models import tiny_emoji_scenes

from csd_policy import load_model
from csd_policy.cli import main
from csd_policy.decoder import JacobiDecoder
from csd_policy.drafts import DraftStrategy, Independent, MaximalCoupling
from csd_policy.policies import LANTERN, Exact
from csd_policy.risk.codebook import (
    BLOCK,
    FORMAT,
    CodebookTable,
    codebook_checksum,
    table_of,
)
from csd_policy.risk.lpips import Features, load_lpips
from csd_policy.study.codebook_report import split
from csd_policy.study.embedding import fit_vectors
from csd_policy.study.pairs import Pairs, draw_pairs
from csd_policy.testing import TableModel, own_law, random_table
from csd_policy.types import DecodeConfig


def make_pairs(count: int, codes: int, picture: torch.Tensor, seed: int = 0) -> Pairs:
    """Pairs of different codes, drawn evenly, four at each place; costs are 0."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(codes, (count,), generator=generator)
    second = (first + torch.randint(1, codes, (count,), generator=generator)) % codes
    place = torch.arange(count) // 4
    return Pairs(picture, place, first, second, torch.full((count,), 2), *torch.zeros(2, count))


def make_table(codebook: torch.Tensor, vectors: torch.Tensor) -> CodebookTable:
    return CodebookTable(vectors, "table", codebook_checksum(codebook), "alex", 0.9, 0.5)


def test_the_fit_finds_a_planted_metric() -> None:
    """Half of it is in the codebook, half is not; places differ, and costs are noisy.

    Codes that are measured often are recovered almost exactly; the codebook alone is far off.
    """
    generator = torch.Generator().manual_seed(1)
    codebook = torch.randn(64, 8, generator=generator)
    linear = 0.1 * torch.randn(8, 4, generator=generator)
    true = codebook @ linear + 0.2 * torch.randn(64, 4, generator=generator)
    pairs = make_pairs(4000, 64, torch.arange(4000) // 400)
    place = torch.randn(1000, generator=generator).exp()[pairs.position]
    noise = (0.3 * torch.randn(4000, generator=generator)).exp()
    expected = (true[pairs.first] - true[pairs.second]).square().sum(-1)
    cost = expected * place * noise
    measured = Pairs(**vars(pairs) | {"around": cost})
    vectors = fit_vectors(codebook, measured, rank=4, steps=300, pull=1e-3)
    assert vectors.shape == (64, 4) and vectors.mean(0).abs().max() < 1e-4
    assert vectors.equal(fit_vectors(codebook, measured, rank=4, steps=300, pull=1e-3))

    def agreement(found: torch.Tensor) -> float:
        upper = torch.triu_indices(64, 64, 1)
        a, b = ((x[upper[0]] - x[upper[1]]).square().sum(-1) for x in (found, true))
        return float(spearmanr(a, b).statistic)

    assert agreement(vectors) > 0.97
    assert agreement(codebook) < 0.6
    fitted = (vectors[pairs.first] - vectors[pairs.second]).square().sum(-1)
    assert float(fitted.mean()) == pytest.approx(float(cost.mean()), rel=1e-4)


def test_no_pair_of_codes_is_both_fitted_and_judged() -> None:
    pairs = make_pairs(2000, 20, torch.arange(2000) // 100)
    fitted, judges = split(pairs, 15)
    assert (fitted.picture < 15).all() and len(fitted.first) > 0
    assert judges.picture.unique().tolist() == [15, 16, 17, 18, 19] and len(judges.first) == 500
    seen, judged = (
        {frozenset(pair) for pair in zip(p.first.tolist(), p.second.tolist(), strict=True)}
        for p in (fitted, judges)
    )
    assert not seen & judged


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    codebook, vectors = torch.randn(2, 10, 3)
    table = make_table(codebook, vectors)
    table.save(tmp_path / "table.safetensors")
    loaded = CodebookTable.load(tmp_path / "table.safetensors")
    assert loaded.vectors.dtype == torch.float32 and loaded.vectors.equal(vectors.half().float())
    assert vars(loaded) | {"vectors": None} == vars(table) | {"vectors": None}
    assert [path.name for path in tmp_path.iterdir()] == ["table.safetensors"]


def test_neighbours_are_the_nearest_others_in_order() -> None:
    """Also behind the first block, and where codes are equal."""
    vectors = torch.randn(BLOCK + 76, 3, generator=torch.Generator().manual_seed(0))
    vectors[5] = vectors[BLOCK + 3]
    found = make_table(vectors, vectors).neighbours(4)
    exact = torch.cdist(vectors.double(), vectors.double())
    exact.fill_diagonal_(torch.inf)
    expected = exact.gather(1, exact.argsort(1)[:, :4])
    assert exact.gather(1, found).allclose(expected, atol=1e-5)
    assert found[5, 0] == BLOCK + 3 and found[BLOCK + 3, 0] == 5
    with pytest.raises(ValueError, match=f"k is {BLOCK + 76}, expected 0 to {BLOCK + 75}"):
        make_table(vectors, vectors).neighbours(BLOCK + 76)


def test_broken_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.safetensors"
    facts = json.dumps(
        {"model": "m", "checksum": "c", "net": "alex", "agreement": 1, "baseline": 0}
    )
    good = {"format": FORMAT, "table": facts}
    unlike = {"vectors": torch.zeros(4)}, {"vectors": torch.full((4, 2), torch.nan)}
    for tensors, metadata, message in (
        (None, None, "broken.safetensors is no table of `csd-policy study codebook`"),
        (b"nothing", None, "broken.safetensors is no table"),
        ({"vectors": torch.zeros(4, 2)}, {}, "its format is None, expected"),
        ({"x": torch.zeros(4, 2)}, good, "vectors"),
        ({"vectors": torch.zeros(4, 2)}, {"format": FORMAT}, "'table'"),
        ({"vectors": torch.zeros(4, 2)}, good | {"table": "{"}, "is no table"),
        ({"vectors": torch.zeros(4, 2)}, good | {"table": "{}"}, "missing 5 required"),
        (unlike[0], good, r"vectors are \[4\]"),
        (unlike[1], good, "not finite"),
    ):
        path.unlink(missing_ok=True)
        if isinstance(tensors, bytes):
            path.write_bytes(tensors)
        elif tensors is not None:
            save_file(tensors, path, metadata)
        with pytest.raises(ValueError, match=message):
            CodebookTable.load(path)


def test_a_table_of_another_codebook_is_refused(tmp_path: Path) -> None:
    model, path = table_model(), str(tmp_path / "table.safetensors")
    assert model.codebook is not None
    make_table(model.codebook + 1, torch.zeros(3, 2)).save(path)
    with pytest.raises(ValueError, match="the table is of the codebook of table, .* but that of"):
        LANTERN(k=1, table=path).bind(model)
    make_table(model.codebook, torch.zeros(4, 2)).save(path)
    with pytest.raises(ValueError, match="the table has 4 codes, expected 3 of model table"):
        LANTERN(k=1, table=path).bind(model)
    make_table(model.codebook, torch.zeros(3, 2)).save(path)
    with pytest.raises(ValueError, match="model table has no codebook, expected that of table"):
        table_of(path, TableModel(random_table(0, size=3)))
    with pytest.raises(ValueError, match="needs a codebook, and model table has none"):
        LANTERN(table=path).bind(TableModel(random_table(0, size=3)))
    with pytest.raises(ValueError, match="table is '/nowhere', expected a file of"):
        LANTERN(table="/nowhere").bind(model)
    with pytest.raises(ValueError, match="table is 3, expected a file or None"):
        LANTERN(table=3)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def near_by_table(tmp_path_factory: pytest.TempPathFactory) -> str:
    """To the eye codes 0 and 2 are near each other; in the codebook 0 and 1 are."""
    model, path = table_model(), tmp_path_factory.mktemp("table") / "table.safetensors"
    assert model.codebook is not None
    make_table(model.codebook, torch.tensor([[0.0], [2.0], [0.5]])).save(path)
    return str(path)


@pytest.mark.parametrize(
    ("draft", "name"),
    [(Independent(), "plain"), (MaximalCoupling(), "top_p"), (Independent(), "guidance")],
    ids=repr,
)
def test_lantern_with_a_table_has_its_law(
    draft: DraftStrategy, name: str, near_by_table: str
) -> None:
    policy = LANTERN(k=1, delta=0.4, table=near_by_table)
    assert law_p_value(policy, draft, SETTINGS[name]) > SMALLEST


def test_the_table_takes_the_place_of_the_codebook(near_by_table: str, tmp_path: Path) -> None:
    """One that says what the codebook says changes nothing; the other changes the law."""
    model = table_model()
    assert model.codebook is not None
    make_table(model.codebook, model.codebook).save(tmp_path / "same.safetensors")
    plain, same, other = (
        own_law(model, LANTERN(k=1, delta=0.4, table=table), Independent(), PLAIN)
        for table in (None, str(tmp_path / "same.safetensors"), near_by_table)
    )
    assert np.array_equal(plain, same)
    assert np.abs(plain - other).sum() / 2 > 0.01


@pytest.mark.parametrize("spatial", [True, False])
@pytest.mark.parametrize("net", ["alex", "vgg"])
def test_features_compare_as_lpips_itself_does(net: Any, spatial: bool) -> None:
    """The package's own forward, with the same weights."""
    metric = load_lpips(net, spatial=spatial)  # the package's class, whose forward is compared
    assert type(metric) is lpips.LPIPS
    one, other = torch.rand(2, 2, 3, 72, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.inference_mode():
        a, b = Features.of(metric, one), Features.of(metric, other)
        expected = metric(one, other)
        assert a.distance(metric, b).shape == ((2, 1, 72, 64) if spatial else (2, 1, 1, 1))
        assert a.distance(metric, b).allclose(expected, rtol=0, atol=1e-6)
        flip = torch.tensor([1, 0])
        assert a[flip].distance(metric, b[flip]).allclose(expected[flip], rtol=0, atol=1e-6)
        smaller = Features.of(metric, one[..., :64, :])
        with pytest.raises(ValueError, match=r"\(72, 64\) and \(64, 64\) pixels, expected equal"):
            a.distance(metric, smaller)


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """A study of four pictures of the tiny model: 120 pairs, 30 of them held out."""
    config = tmp_path / "study.yaml"
    config.write_text(
        f"model: {tiny_emoji_scenes(tmp_path / 'tiny')}\noutput: {tmp_path / 'study'}\n"
        "prompts: [two cats on blue plain, taxi on green photo]\n"
        "pictures: 4\nplaces: 2\ncodes: 6\nbatch_size: 2\nrank: 2\nsteps: 20\nresamples: 20\n"
    )
    return ["study", "codebook", "--config", str(config), "--device", "cpu"]


def test_the_study_writes_its_files_and_resumes(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    module, output = "csd_policy.study.codebook", tmp_path / "study"
    real, calls = draw_pairs, []

    def killed(*args: Any) -> Pairs:
        calls.append(args[3])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(f"{module}.draw_pairs", killed)
    with contextlib.suppress(KeyboardInterrupt):
        main(command)
    assert calls == [[0, 1], [2, 3]] and not (output / "study.json").exists()
    assert main(command) == 0
    assert calls[2:] == [[2, 3]]  # the first batch was kept
    text = capsys.readouterr().out
    assert "Spearman, codebook vectors" in text
    first = json.loads((output / "study.json").read_text())
    assert first["pictures"] == 4 and first["held_out"] == 1
    assert first["pairs"]["held out"] == 30 and 60 < first["pairs"]["fitted"] <= 90
    assert {row["predictor"] for row in first["rows"]} == {"table", "codebook vectors"}
    for name in ("study.md", "study.png"):
        assert (output / name).stat().st_size > 100
    # the table is of this model, and a policy takes it
    path, model = output / "codebook.safetensors", load_model(tmp_path / "tiny", "cpu")
    table = table_of(str(path), model)
    assert table.vectors.shape == (1024, 2) and table.net == "alex"
    (every,) = (r for r in first["rows"] if (r["domain"], r["predictor"]) == ("all pairs", "table"))
    assert table.agreement == pytest.approx(every["spearman"]["mean"], abs=1e-4)
    LANTERN(k=3, table=str(path)).bind(model)
    codes = torch.arange(1024)
    distance = table.distance(codes[:, None], codes)
    assert distance.equal(distance.T) and distance.diagonal().eq(0).all() and (distance >= 0).all()
    # a broken part is measured anew, and the numbers are the same
    part = output / "measurements" / "pairs_00002.safetensors"
    part.write_bytes(part.read_bytes()[:500])
    assert main(command) == 0
    assert calls[3:] == [[2, 3]]
    assert json.loads((output / "study.json").read_text())["rows"] == first["rows"]
    # another rank: nothing is measured
    assert main([*command, "--rank", "3"]) == 0
    assert len(calls) == 4 and CodebookTable.load(path).rank == 3
    capsys.readouterr()
    assert main([*command, "--places", "3"]) == 2
    assert "places is 3, but the results in" in capsys.readouterr().err


def test_the_pairs_are_of_drawn_places_and_cost_something(tmp_path: Path) -> None:
    model = load_model(tiny_emoji_scenes(tmp_path / "tiny"), "cpu")
    decoder = JacobiDecoder(model, Exact(), Independent(), DecodeConfig(window=8))
    prompts = ["two cats on blue plain"]
    pairs = draw_pairs(decoder, load_lpips("alex"), prompts, [7], 3, places=2, codes=6)
    assert len(pairs.first) == 2 * 15 and pairs.picture.unique().tolist() == [7]
    assert (pairs.first != pairs.second).all()
    assert (pairs.whole > 0).all() and (pairs.around > pairs.whole).all()
    tokens = decoder.generate(prompts, [10]).tokens[0]
    for place in pairs.position.unique():
        at = pairs.position == place
        codes = torch.cat([pairs.first[at], pairs.second[at]]).unique()
        assert len(codes) == 6 and tokens[place] in codes
    assert Pairs.join([pairs.to_tensors()]).around.equal(pairs.around)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--pictures", "1"], "pictures is 1, expected 2 or more"),
        (["--codes", "5"], "codes is 5, expected 6 or more"),
        (["--pull", "-1"], "pull is -1.0, expected a finite number, 0 or more"),
        (["--rank", "0"], "rank is 0, expected 1 or more"),
        (["--held_out", "1"], r"held_out is 1.0, expected a share in (0, 1)"),
        (["--held_out", "0.1"], "held_out 0.1 of 4 pictures is 0, expected 1 to 3"),
        (["--codes", "1025"], "codes is 1025, expected at most 1024 of"),
        (["--net", "squeeze"], "expected one of"),
    ],
)
def test_wrong_settings_are_named(
    words: list[str], message: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
