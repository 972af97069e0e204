"""Lumina-mGPT 1.0 and Anole: the adapter against transformers' Chameleon on tiny checkpoints."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from chameleon_reference import Written, exact_law, greedy_of_transformers
from chi_square import log10_p_of_codes
from safetensors.torch import load_file, save_file
from tiny_chameleon import tiny_chameleon
from tiny_models import PROMPTS
from tiny_vqgan import tiny_vqgan, vqgan_pixels
from torch import Tensor
from transformers import ChameleonForConditionalGeneration

from csd_policy import load_model
from csd_policy.decoder import JacobiDecoder
from csd_policy.models import chameleon_layout
from csd_policy.models.chameleon import Chameleon
from csd_policy.policies import Exact
from csd_policy.types import DecodeConfig, SamplingDefaults

ROW = ["code"] * 8 + ["<reserved08799>"]
LUMINA = Written(  # 128x64 pixels: 2 and 4 times 32 pixels
    text="Generate an image of 128x64 according to the following prompt:\n",
    opening=["<racm3:break>", "<reserved08802>", "<reserved08804>"],
    blank=["<racm3:break>", "<reserved08802>", "<reserved08804>"],
    slots=[*ROW * 4, "<eoss>"],
)
ANOLE = Written(
    text="", opening=["<racm3:break>"], blank=["<s>", "<racm3:break>"], slots=["code"] * 16
)
SMALL = Written(  # 32x32 pixels, a newline in front of the third code
    text=LUMINA.text.replace("128x64", "32x32"),
    opening=["<racm3:break>", "<reserved08801>", "<reserved08801>"],
    blank=["<racm3:break>", "<reserved08801>", "<reserved08801>"],
    slots=["code", "code", "<reserved08799>", "code", "code", "<reserved08799>", "<eoss>"],
)


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of 1 and of at most 9 patches in addition to those of the release."""
    monkeypatch.setattr(chameleon_layout, "RESOLUTIONS", (32, 96, 512, 768, 1024))


@pytest.fixture(scope="module")
def lumina(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chameleon(tmp_path_factory.mktemp("lumina"), "lumina")


@pytest.fixture(scope="module")
def anole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chameleon(tmp_path_factory.mktemp("anole"), "anole")


@pytest.mark.parametrize(
    ("kind", "dtype", "scale"),
    [
        ("lumina", torch.float32, 4.0),
        ("lumina", torch.float64, 4.0),
        ("lumina", torch.float32, 1.0),
        ("anole", torch.float32, 3.0),
        ("anole", torch.float64, 3.0),
    ],
    ids=str,
)
def test_greedy_decoding_is_that_of_transformers(
    kind: str, dtype: torch.dtype, scale: float, request: pytest.FixtureRequest
) -> None:
    """Token for token, for prompts of different lengths in one batch, with the forced tokens."""
    folder: Path = request.getfixturevalue(kind)
    written = LUMINA if kind == "lumina" else ANOLE
    expected, forced = greedy_of_transformers(folder, written, 64, dtype, scale)
    model = load_model(folder, "cpu", dtype, **({"size": "128x64"} if kind == "lumina" else {}))
    assert isinstance(model, Chameleon) and len(expected.unique()) > 4
    assert model.forced is not None and model.forced.tolist() == forced
    for window in (1, 4, 16):
        config = DecodeConfig(window=window, temperature=0.0, guidance_scale=scale)
        result = JacobiDecoder(model, config=config).generate(PROMPTS, [0, 1, 2])
        assert result.tokens.equal(expected)
        assert window == 1 or min(result.stats.forward_passes) < len(forced)


def test_sampled_codes_have_the_law_of_full_forward_passes(tmp_path: Path) -> None:
    """The first three codes, with a newline in front of the third, in a chi-square test.

    The seeds are fixed; correct code with other random numbers falls below the limit once in
    10,000 tests. Against the law without the newline the same codes must fall below it.
    """
    folder, runs, scale = tiny_chameleon(tmp_path, "lumina", codes=12), 4000, 2.0
    model = load_model(folder, "cpu", size="32x32")
    assert isinstance(model, Chameleon) and model.code_of_slot.tolist() == [0, 1, -1, 2, 3, -1, -1]
    config = DecodeConfig(window=4, guidance_scale=scale, temperature=1.0, top_k=0)
    decoder = JacobiDecoder(model, Exact(), config=config)
    codes = decoder.generate([PROMPTS[0]] * runs, list(range(runs))).tokens[:, :3]
    assert log10_p_of_codes(codes, exact_law(folder, SMALL, 12, scale), 4) > -4
    without = replace(SMALL, slots=["code"] * 4)
    assert log10_p_of_codes(codes, exact_law(folder, without, 12, scale), 4) < -4


def test_sampled_codes_of_anole_have_the_law_of_full_forward_passes(tmp_path: Path) -> None:
    """As above, without forced tokens. Against the law whose unconditional prompt lacks the first
    token the same codes must fall below the limit."""
    folder, runs, scale = tiny_chameleon(tmp_path, "anole", codes=12), 1500, 3.0
    config = DecodeConfig(window=4, guidance_scale=scale, temperature=1.0, top_p=1.0)
    decoder = JacobiDecoder(load_model(folder, "cpu"), Exact(), config=config)
    codes = decoder.generate([PROMPTS[0]] * runs, list(range(runs))).tokens[:, :3]
    assert log10_p_of_codes(codes, exact_law(folder, ANOLE, 12, scale), 4) > -4
    without = replace(ANOLE, blank=["<racm3:break>"])
    assert log10_p_of_codes(codes, exact_law(folder, without, 12, scale), 4) < -4


def test_one_norm_a_rank_is_one_norm_a_head(lumina: Path, tmp_path: Path) -> None:
    """Lumina-mGPT stores norms by rank of model parallelism, transformers by head."""
    stored = load_file(lumina / "model.safetensors")
    norm = "model.layers.1.self_attn.q_norm.weight"
    assert stored[norm].shape == (2, 8) and not stored[norm][0].equal(stored[norm][1])
    reference = ChameleonForConditionalGeneration.from_pretrained(lumina / "hf").state_dict()
    model = load_model(lumina, "cpu", size="128x64")
    assert isinstance(model, Chameleon)
    for name, weight in model.backbone.state_dict().items():
        assert weight.equal(reference[f"model.{name}"]), name
    folder = copied(lumina, tmp_path)
    stored[norm] = torch.ones(3, 8)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"{norm} has shape \[3, 8\].*divides 4 heads"):
        load_model(folder, "cpu", size="128x64")


def copied(folder: Path, to: Path) -> Path:
    """A copy without ``hf``."""
    return shutil.copytree(folder, to / "copy", ignore=shutil.ignore_patterns("hf"))


def test_weights_in_several_files(lumina: Path, tmp_path: Path) -> None:
    folder = copied(lumina, tmp_path)
    stored = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(stored)}
    for file in set(files.values()):
        save_file({n: w for n, w in stored.items() if files[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    model = load_model(folder, "cpu", size="128x64")
    assert isinstance(model, Chameleon)
    weight = model.backbone.state_dict()["layers.0.mlp.up_proj.weight"]
    assert weight.equal(stored["model.layers.0.mlp.up_proj.weight"])
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks model-1.safetensors, which .*index.json names"):
        load_model(folder, "cpu", size="128x64")


def pixels_of(picture: object) -> Tensor:
    return torch.from_numpy(np.array(picture)).float()


def test_pictures_of_the_vqgan(lumina: Path, anole: Path, tmp_path: Path) -> None:
    """Weights in either file, elsewhere, or among those of the language model; H and W unequal."""
    state = tiny_vqgan(64)
    codes = torch.randint(64, (1, 32), generator=torch.Generator().manual_seed(0))
    expected = ((vqgan_pixels(state, codes.view(1, 4, 8))[0] + 1) * 127.5).round().clamp(0, 255)
    assert expected.std() > 10
    folder, elsewhere = copied(lumina, tmp_path), tmp_path / "other.ckpt"
    model = load_model(folder, "cpu", size="128x64")
    with pytest.raises(ValueError, match=r"has no pixel decoder, expected vqgan.safetensors or"):
        model.decode(codes)
    torch.save({"state_dict": {**state, "loss.w": torch.ones(1)}}, elsewhere)
    pictures = load_model(folder, "cpu", size="128x64", vqgan=elsewhere).decode(codes)
    shutil.copy(elsewhere, folder / "vqgan.ckpt")
    pictures += load_model(folder, "cpu", size="128x64").decode(codes)
    (folder / "vqgan.ckpt").unlink()
    save_file(state, folder / "vqgan.safetensors")
    pictures += load_model(folder, "cpu", torch.float64, size="128x64").decode(codes)
    for picture in pictures:
        assert picture.size == (128, 64)
        assert (pixels_of(picture) - expected).abs().max() <= 1
    model = load_model(anole, "cpu")
    assert model.codebook is not None
    assert model.codebook.equal(state["quantize.embedding.weight"])
    (picture,) = model.decode(codes[:, :16])
    expected = ((vqgan_pixels(state, codes[:, :16].view(1, 4, 4))[0] + 1) * 127.5).clamp(0, 255)
    assert (pixels_of(picture) - expected.round()).abs().max() <= 1
    with pytest.raises(ValueError, match=r"codes are in \[64, 64\], expected \[0, 64\)"):
        model.decode(torch.full((1, 16), 64))


def test_wrong_vqgan_files(lumina: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"vqgan is '.*nowhere', expected a file"):
        load_model(lumina, "cpu", size="128x64", vqgan=tmp_path / "nowhere")
    state = tiny_vqgan(64)
    del state["decoder.conv_in.bias"]
    save_file(state, tmp_path / "part.safetensors")
    with pytest.raises(ValueError, match=r"part.safetensors do not fit the VQGAN(.|\n)*conv_in"):
        load_model(lumina, "cpu", size="128x64", vqgan=tmp_path / "part.safetensors")
    torch.save({"state_dict": state, "callbacks": Path("x")}, tmp_path / "objects.ckpt")
    with pytest.raises(ValueError, match="objects.ckpt cannot be read safely, expected tensors"):
        load_model(lumina, "cpu", size="128x64", vqgan=tmp_path / "objects.ckpt")


@pytest.mark.parametrize(("size", "slots"), [(512, 1057), (768, 2353), (1024, 4161)])
def test_published_numbers_of_lumina(size: int, slots: int) -> None:
    """Vocab ids of the release, where a tokenizer lacks the names."""
    layout = chameleon_layout.lumina(f"{size}x{size}", {})
    side = size // 16
    assert layout.grid == (side, side) and len(layout.forced) == slots
    assert layout.opening == [8197, 8804 + size // 32, 8804 + size // 32] == layout.blank
    assert layout.forced[side :: side + 1] == [8803] * side and layout.forced[-1] == 8196
    assert layout.defaults == SamplingDefaults(4.0, 1.0, 2000)


def test_layouts_and_sizes(lumina: Path, anole: Path) -> None:
    wide = chameleon_layout.lumina("1024x576", {})
    assert wide.grid == (36, 64) and wide.opening == [8197, 8804 + 18, 8804 + 32]
    assert wide.template.startswith("Generate an image of 1024x576 according")
    for size in ("2048x512", "512x2048"):  # the most unequal of 1024
        assert len(chameleon_layout.lumina(size, {}).forced) > 4000
    for size in ("700x700", "768", "2080x480", "64x64"):
        with pytest.raises(ValueError, match=rf"size is '{size}', expected WIDTHxHEIGHT of"):
            chameleon_layout.lumina(size, {})
    layout = chameleon_layout.anole(32, {})
    assert layout.blank == [0, 8197] and layout.forced == [-1] * 1024
    model = load_model(anole, "cpu")
    assert model.grid == (4, 4) and model.defaults == SamplingDefaults(3.0, 0.7, 0, 0.9)
    assert load_model(lumina, "cpu").grid == (48, 48)
    assert load_model(lumina, "cpu", layout="anole").grid == (4, 4)
    for options in ({"layout": "emu"}, {"layout": "anole", "size": "512x512"}):
        with pytest.raises(ValueError, match="expected lumina, lumina2, or anole without a size"):
            load_model(anole, "cpu", **options)


def test_wrong_checkpoints(anole: Path, tmp_path: Path) -> None:
    folder = copied(anole, tmp_path)
    stored = load_file(folder / "model.safetensors")
    weights = folder / "model.safetensors"
    weights.unlink()
    with pytest.raises(ValueError, match=r"lacks model.safetensors$"):
        load_model(folder, "cpu")
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match="pytorch_model.bin needs pickle: convert it"):
        load_model(folder, "cpu")
    weights.write_bytes(b"no weights")
    with pytest.raises(ValueError, match="is no safetensors file"):
        load_model(folder, "cpu")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({n: w for n, w in stored.items() if n != name}, weights, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"do not fit Chameleon.*missing_keys.*{name}"):
        load_model(folder, "cpu")
    save_file(stored | {name: torch.ones(3, 3)}, weights, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"do not fit Chameleon.*mismatched_keys.*{name}"):
        load_model(folder, "cpu")
    vqgan = {n: w for n, w in stored.items() if not n.startswith("model.vqmodel.")}
    save_file(vqgan, weights, {"format": "pt"})
    assert load_model(folder, "cpu").codebook is None
    for file in ("config.json", "tokenizer.json"):
        text = (folder / file).read_text()
        (folder / file).write_text(text.replace('"IMGIMGGZ"', '"w999"'))
    with pytest.raises(ValueError, match=r"names 63 codes as IMGIMG...Z, expected each of the 64"):
        load_model(folder, "cpu")
