"""Damage: the summed cost of the tokens that a relaxation let through."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_emoji_scenes

from csd_policy import DecodeConfig, JacobiDecoder, load_model
from csd_policy.cli import main
from csd_policy.counterfactual import replacement_costs
from csd_policy.damage import measure_damage
from csd_policy.drafts import Gumbel
from csd_policy.models import ImageTokenModel
from csd_policy.policies import CSD, Exact, TVGate
from csd_policy.risk.lpips import load_lpips
from csd_policy.testing import TableModel, random_table

PROMPTS = ["two cats on blue plain", "rocket on black plain"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ImageTokenModel:
    return load_model(str(tiny_emoji_scenes(tmp_path_factory.mktemp("model") / "tiny")), "cpu")


@pytest.fixture(scope="module")
def metric() -> Any:
    return load_lpips("alex")


def test_others_are_kept_if_asked_for_and_change_nothing() -> None:
    table = TableModel(random_table(0, 12, 5), grid=(3, 4))
    for policy in (Exact(), TVGate(0.5)):
        decoder = JacobiDecoder(table, policy, Gumbel(), DecodeConfig(window=5))
        plain = decoder.generate([""] * 300, range(300))
        kept = decoder.generate([""] * 300, range(300), others=True)
        assert plain.others == {} and kept.tokens.equal(plain.tokens)
        again = decoder.replay([""] * 300, plain.tokens, range(300))
        for name in ("alternative", "correction"):  # a relaxation is replayed pass by pass
            assert kept.others[name].equal(again.others[name])
        relaxed = kept.trace.relaxed
        # behind a rejection the residual has no mass at the rejected token
        assert (kept.others["correction"] != kept.tokens)[relaxed].all()
        assert relaxed.any() == (not policy.exact)


def test_damage_is_the_sum_of_the_costs(model: ImageTokenModel, metric: Any) -> None:
    decoder = JacobiDecoder(model, CSD(delta=0.9), config=DecodeConfig(window=8))
    result = decoder.generate(PROMPTS, [0, 1], others=True)
    whole = measure_damage(model, result, metric, most=64)
    relaxed = result.trace.relaxed
    assert whole.relaxed.equal(relaxed.sum(1)) and (whole.relaxed > 8).all()
    for i in range(2):
        place = relaxed[i].nonzero()[:, 0]
        pair = (result.tokens[i, place], result.others["correction"][i, place])
        costs = replacement_costs(
            model, metric, result.tokens[i].expand(len(place), -1), place, pair
        )
        assert float(whole.whole[i]) == pytest.approx(float(costs.whole.sum()), rel=1e-4)
        assert float(whole.around[i]) == pytest.approx(float(costs.around.sum()), rel=1e-4)
    part = measure_damage(model, result, metric, most=8)
    assert part.relaxed.equal(whole.relaxed)
    assert ((part.whole / whole.whole).log().abs() < 1).all()  # an estimate from 8 of them


def test_an_exact_picture_has_none(model: ImageTokenModel, metric: Any) -> None:
    decoder = JacobiDecoder(model, Exact(), config=DecodeConfig(window=8))
    result = decoder.generate(PROMPTS[:1], [0], others=True)
    found = measure_damage(model, result, metric)
    assert found.relaxed.tolist() == [0] and found.whole.tolist() == [0.0]


def test_compare_measures_it_if_asked_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = tiny_emoji_scenes(tmp_path / "tiny")
    config = tmp_path / "compare.yaml"
    config.write_text(
        f"model: {tiny}\noutput: {tmp_path}/out\nprompts: {list(PROMPTS)}\nwandb: disabled\n"
        "methods:\n- {name: Exact, policy: Exact}\n"
        "- {name: CSD, policy: {class_path: CSD, init_args: {delta: 0.9}}}\n"
    )
    command = ["compare", "--config", str(config), "--device", "cpu"]
    assert main([*command, "--damage", "4"]) == 0
    assert "damage" in capsys.readouterr().out
    exact, csd = json.loads((tmp_path / "out" / "results.json").read_text())["table"]
    assert exact["quality/damage"] == {"mean": 0, "low": 0, "high": 0}
    assert csd["quality/damage"]["mean"] > 0
    row = json.loads((tmp_path / "out/images/CSD/000_0.json").read_text())
    assert row["relaxed_tokens"] > 8 and row["damage"] > 0
    assert main(command) == 2  # a run without is another run
    assert "damage is None, but the results" in capsys.readouterr().err
    assert main([*command, "--damage", "-1"]) == 2
    assert "damage is -1, expected 0 or more" in capsys.readouterr().err


def test_faults_are_named(model: ImageTokenModel, metric: Any) -> None:
    result = JacobiDecoder(model).generate(PROMPTS[:1], [0])
    with pytest.raises(ValueError, match=r"no others, expected one of generate\(..., others=True"):
        measure_damage(model, result, metric)
    with pytest.raises(ValueError, match="most is 0, expected 1 or more"):
        measure_damage(model, result, metric, most=0)
    assert torch.equal(result.tokens, JacobiDecoder(model).generate(PROMPTS[:1], [0]).tokens)
