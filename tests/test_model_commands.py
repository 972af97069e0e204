"""The command line on a small checkpoint of each adapter: pictures, comparisons, options, settings.

Presets are of the papers on speculative decoding, defaults of a model's own release; the two differ
for Lumina-mGPT, and what the user sets differs from both.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llamagen_release
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from safetensors.torch import save_file
from tiny_chameleon import tiny_chameleon, tiny_vqgan
from tiny_emu3 import tiny_emu3
from tiny_models import tiny_janus

import csd_policy.generate
from csd_policy import DecodeConfig, JacobiDecoder, Trace, load_model
from csd_policy.bench import bench
from csd_policy.cli import main
from csd_policy.drafts import Gumbel
from csd_policy.models import chameleon, chameleon_layout, llamagen_convert
from csd_policy.models.options import option_types, read_options
from csd_policy.policies import CSD


def tiny_lumina(folder: Path) -> Path:
    tiny_chameleon(folder, "lumina")
    save_file(tiny_vqgan(64), folder.parent / "decoder.safetensors")
    return folder


def tiny_llamagen(folder: Path) -> Path:
    """Class-conditional, through the converter."""
    folder.mkdir()
    torch.save({"model": llamagen_release.network_weights(False)}, folder / "c2i.pt")
    torch.save({"model": llamagen_release.picture_weights()}, folder / "vq.pt")
    made = folder / "converted"
    llamagen_convert.main([
        *("--gpt", str(folder / "c2i.pt"), "--vq", str(folder / "vq.pt"), "--output", str(made)),
        *("--image-size", "16", "--heads", str(llamagen_release.HEADS)),
    ])  # fmt: skip
    return made


Maker = Callable[[Path], Any]
LUMINA = {"size": "64x32", "vqgan": "decoder.safetensors"}
MODELS: dict[str, tuple[Maker, str, dict[str, str], tuple[int, int]]] = {
    # maker, prompt, options, size of the picture
    "janus": (tiny_janus, "w1 w2", {}, (64, 64)),
    "lumina": (tiny_lumina, "w1 w2", LUMINA, (64, 32)),
    "anole": (lambda folder: tiny_chameleon(folder, "anole"), "w1 w2", {}, (64, 64)),
    "emu3": (tiny_emu3, "w1 w2", {"ratio": "3:2", "image_area": "1536"}, (48, 32)),
    "llamagen": (tiny_llamagen, "7", {}, (16, 16)),
}
METHODS = "[{name: AR, window: 1}, {name: CSD, policy: {class_path: CSD}, window: 4}]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def model(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The folder of a small checkpoint, as a word of the command line; the current one is above."""
    name: str = request.param
    monkeypatch.setattr(chameleon_layout, "RESOLUTIONS", (64, 768))  # 64: small pictures
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))  # undone at the end, with what `main` adds
    made = next(folder.glob(f"{name}/converted"), folder / name)
    return str(made if made.is_dir() else MODELS[name][0](made))


def options_of(name: str) -> list[str]:
    words = MODELS[name][2].items()
    return [word for key, value in words for word in (f"--model_options.{key}", value)]


def kind_of(model: str) -> str:
    path = Path(model)
    return path.parent.name if path.name == "converted" else path.name


every = pytest.mark.parametrize("model", MODELS, indirect=True)
one = [m if m == "lumina" else pytest.param(m, marks=pytest.mark.slow) for m in MODELS]
one_and_slow_rest = pytest.mark.parametrize("model", one, indirect=True)
lumina = pytest.mark.parametrize("model", ["lumina"], indirect=True)


@every
def test_generate(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The picture and the tokens that ``load_model`` with the same options gives."""
    name = kind_of(model)
    _, prompt, options, size = MODELS[name]
    words = ["generate", "--model", model, *options_of(name), "--prompt", prompt, "--draft"]
    assert main([*words, "Gumbel", "--window", "4", "--output", str(tmp_path)]) == 0
    head, _, line = capsys.readouterr().out.splitlines()
    row = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert head.split()[-2:] == ["peak", "GB"]
    assert line.split()[-1] == f"{row['peak_memory'] / 1e9:.2f}"
    with Image.open(next(tmp_path.glob("*_0.png"))) as picture:
        assert picture.size == size
        settings = json.loads(picture.text["settings"])
    loaded = load_model(model, "cpu", **options)
    decoder = JacobiDecoder(loaded, CSD(), Gumbel(), DecodeConfig(window=4))
    assert row["tokens"] == decoder.generate([prompt], [0]).tokens[0].tolist()
    assert row["model_options"] == settings["model_options"] == loaded.options
    assert row["model_options"].keys() == options.keys()
    assert row["seconds"]["total"] > 0 and row["peak_memory"] > 50e6  # torch alone takes more


@one_and_slow_rest
def test_compare(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, output = kind_of(model), tmp_path / "out"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"{MODELS[name][1]}\n\n")
    words = ["compare", "--model", model, *options_of(name), "--prompt_file", str(prompts)]
    words += ["--methods", METHODS, "--output", str(output), "--wandb", "disabled"]
    assert main(words) == 0
    assert "peak GB" in capsys.readouterr().out
    results = json.loads((output / "results.json").read_text())
    assert results["provenance"]["model_options"].keys() == MODELS[name][2].keys()
    ar, csd = results["table"]
    assert ar["accept/forward_passes"]["mean"] == results["provenance"]["slots"]
    assert csd["accept/compression"]["mean"] > 1
    rows = results["images"]["CSD"]
    assert csd["memory/peak_bytes"] == rows[0]["peak_memory"] > 0 < rows[0]["seconds"]["total"]
    assert Trace.load(output / "images" / "CSD" / "000_0.safetensors").how.shape[0] == 1
    before = (output / "images" / "CSD" / "000_0.json").stat().st_mtime_ns
    assert main(words) == 0
    assert (output / "images" / "CSD" / "000_0.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("model", ["emu3"], indirect=True)
def test_another_size_is_another_comparison(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options count in what a folder holds, whether from YAML or the command line; text counts as
    the number that it is."""
    config = tmp_path / "plan.yaml"
    config.write_text(
        f"model: {model}\nmodel_options: {{ratio: '1:1', image_area: 256}}\nprompts: [w1 w2]\n"
        f"methods: {METHODS}\nwandb: disabled\noutput: {tmp_path / 'out'}\n"
    )
    words = ["compare", "--config", str(config)]
    assert main(words) == 0
    assert main([*words, "--model_options.image_area", "256"]) == 0
    assert main([*words, "--model_options.ratio", "3:2"]) == 2
    error = capsys.readouterr().err
    assert "model_options.ratio is '3:2'" in error and "with '1:1'" in error
    resolved = json.loads((tmp_path / "out" / "resolved_config.json").read_text())
    assert resolved["model_options"]["ratio"] == "1:1"
    assert main([*words, "--dry_run", "--model_options.image_area", "1024"]) == 2
    assert "model_options.image_area is '1024'" in capsys.readouterr().err
    assert main([*words, "--dry_run"]) == 0
    assert "ratio 1:1, image_area 256" in capsys.readouterr().out


MISTAKES = {
    "--model_options.sise 32x32": [
        "Chameleon has no option 'sise'", "attn_implementation, device_map, layout, "
        "quantization_config, size, vqgan",
    ],
    "--model_options.size 40x40": ["size is '40x40'", "WIDTHxHEIGHT"],
    "--model_options.attn_implementation flash_attention_2": [
        "attn_implementation is 'flash_attention_2'", "expected one of sdpa, eager",
    ],
    "--model_options.quantization_config 4": ["quantization_config is '4'", "dict"],
    "--model_options size": ["model_options is 'size'", "dict"],
    "--model emoji-scenes --model_options.size 32x32": ["EmojiScenes has no option 'size'", "none"],
}  # fmt: skip


@lumina
@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_line(
    model: str, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    args = ["generate", "--model", model, "--prompt", "two cats", *words.split()]
    assert main([*args, "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and [p for p in MISTAKES[words] if p not in error] == []
    assert not (tmp_path / "out").exists()


@lumina
@pytest.mark.parametrize(
    "option",
    ['quantization_config {"load_in_4bit":true}', "quantization_config {load_in_4bit: true}"],
)
def test_a_missing_package_is_one_line(
    model: str, option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(*args: Any, **options: Any) -> None:
        assert isinstance(options["quantization_config"], dict)
        raise ImportError("requires such a\npackage")

    monkeypatch.setattr(chameleon, "load_language_model", lacks)
    key, _, value = option.partition(" ")
    args = ["generate", "--model", model, "--prompt", "w1", f"--model_options.{key}", value]
    assert main(args) == 2
    error = capsys.readouterr().err
    assert "a package that is missing: requires such a package" in error
    assert error.count("\n") == 1 and "{'load_in_4bit': True}" in error


@lumina
def test_what_is_missing_is_said_before_the_first_pass(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pixel decoder, a file, a text, room for a text: nothing is drawn and no folder made."""
    prefills: list[int] = []
    monkeypatch.setattr(JacobiDecoder, "_step", lambda *_: prefills.append(1))
    output = tmp_path / "out"
    config = json.loads((Path(model) / "config.json").read_text())
    long, whole = "w1 " * config["max_position_embeddings"], options_of("lumina")
    for words, prompt, expected in (
        (["--model_options.size", "64x32"], "w1", "has no pixel decoder, expected vqgan"),
        ([*whole[:3], "none.ckpt"], "w1", "vqgan is 'none.ckpt', expected a file"),
        (whole, " ", "prompt is ' ', expected a text"),
        (whole, long, f"max_position_embeddings {config['max_position_embeddings']}"),
    ):
        args = ["generate", "--model", model, *words, "--prompt", prompt]
        assert main([*args, "--output", str(output)]) == 2
        error = capsys.readouterr().err
        assert expected in error and not prefills and not list(output.glob("*.*"))


@lumina
def test_a_decoder_in_the_folder_by_its_name(model: str) -> None:
    stored = Path("decoder.safetensors").read_bytes()
    (Path(model) / "inside.safetensors").write_bytes(stored)
    loaded = load_model(model, "cpu", size="64x32", vqgan="inside.safetensors")
    (Path(model) / "inside.safetensors").unlink()
    loaded.check_pictures()


@pytest.mark.parametrize("model", ["emu3"], indirect=True)
def test_too_little_memory_is_one_line(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 9 GiB")

    monkeypatch.setattr(JacobiDecoder, "_step", full)
    args = ["generate", "--model", model, *options_of("emu3"), "--prompt", "w1"]
    assert main([*args, "--output", str(tmp_path)]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "not enough memory, expected a smaller batch_size" in line and "9 GiB" in line


@lumina
def test_device_map_without_accelerate(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"device_map is 'auto', which needs the package acc"):
        load_model(model, "cpu", device_map="auto")


@lumina
def test_attention_by_option(model: str) -> None:
    loaded: Any = load_model(model, "cpu", attn_implementation="eager", size="64x32")
    assert loaded.backbone.config._attn_implementation == "eager"
    assert loaded.options == {"attn_implementation": "eager", "size": "64x32"}


class Adapter:
    """Takes options of several types, and none of transformers."""

    def __init__(
        self, source: str, device: str, dtype: str, side: int = 4, scale: float = 1.0, mark: Any = 0
    ) -> None:
        self.side = side


def test_options_get_their_types() -> None:
    assert option_types(Adapter) == {"side": int, "scale": float, "mark": Any}
    cpu, mark = torch.device("cpu"), Path("there")
    given = {"side": "8", "scale": "2", "mark": mark}
    assert read_options(Adapter, given, cpu) == {"side": 8, "scale": 2.0, "mark": mark}
    for wrong, message in (({"side": "8x"}, "side is '8x', expected int"), ({"a": 1}, "scale")):
        with pytest.raises(ValueError, match=message):
            read_options(Adapter, wrong, cpu)


PRECEDENCE = {  # words: guidance, temperature, top-k, top-p
    "": (4.0, 1.0, 2000, 1.0),  # the release's
    "--config policies/sjd_lumina.yaml": (3.0, 1.0, 2000, 1.0),  # the papers'
    "--config policies/sjd_lumina.yaml --guidance_scale 2 --top_k 9": (2.0, 1.0, 9, 1.0),
    "--temperature 0.5 --top_p 0.8": (4.0, 0.5, 2000, 0.8),
}


@lumina
@pytest.mark.parametrize("words", PRECEDENCE)
def test_release_then_preset_then_user(
    model: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csd_policy.generate, "decode_figure", lambda *_: Figure((1, 1)))
    args = ["generate", "--model", model, *options_of("lumina"), "--prompt", "w1", *words.split()]
    assert main([*args, "--output", str(tmp_path)]) == 0
    decode = json.loads(next(tmp_path.glob("*.json")).read_text())["decode"]
    names = ("guidance_scale", "temperature", "top_k", "top_p")
    assert tuple(decode[name] for name in names) == PRECEDENCE[words]


RELEASES = {  # guidance, temperature, top-k, top-p of the models' own releases
    "janus": (5.0, 1.0, 0, 1.0),
    "lumina": (4.0, 1.0, 2000, 1.0),
    "anole": (3.0, 0.7, 0, 0.9),
    "emu3": (3.0, 1.0, 2048, 1.0),
    "llamagen": (4.0, 1.0, 2000, 1.0),
}


@every
def test_defaults_are_those_of_the_release(model: str) -> None:
    name = kind_of(model)
    d = load_model(model, "cpu", **MODELS[name][2]).defaults
    assert (d.guidance_scale, d.temperature, d.top_k, d.top_p) == RELEASES[name]


@pytest.mark.parametrize(
    "model", [pytest.param(m, marks=pytest.mark.slow) if m == "emu3" else m for m in MODELS],
    indirect=True,
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(model: str, dtype: torch.dtype) -> None:
    """Laws are computed in fp32, so that guidance cannot overflow, and the loop stops at a law that
    is not finite; pictures come from a decoder that fits its input."""
    name = kind_of(model)
    _, prompt, options, size = MODELS[name]
    loaded = load_model(model, "cpu", dtype, **options)
    config = DecodeConfig(window=8, guidance_scale=7.5)
    result = JacobiDecoder(loaded, CSD(delta=0.65), Gumbel(), config).generate([prompt], [0])
    assert result.images[0].size == size and result.images[0].getcolors(1) is None
    assert result.trace.entropy.dtype == torch.float32 and result.trace.entropy.isfinite().all()
    assert (result.trace.spent_tv.isfinite() & (result.trace.spent_tv <= 1)).all()


@lumina
def test_bench(model: str, tmp_path: Path) -> None:
    """Only the model itself, whose rows end in forced tokens."""
    text = bench(4, 1, model, LUMINA, rounds=1, device="cpu", output=str(tmp_path))
    assert "CSD" in text
    (column,) = json.loads((tmp_path / "bench.json").read_text())["models"]
    assert column["model_options"] == LUMINA and column["num_codes"] == 64
    assert column["parameters"] > 0 and column["shape"]["num_hidden_layers"] == 2
