"""Checkpoints that cannot be loaded: one ValueError that says what is wrong, for every adapter."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llamagen_release
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_chameleon import tiny_chameleon
from tiny_emu3 import tiny_emu3
from tiny_models import tiny_janus
from tiny_releases import save, tiny_emu3_release, tiny_janus_release

from csd_policy import load_model
from csd_policy.decoder import JacobiDecoder
from csd_policy.models.llamagen_convert import main
from csd_policy.provenance import weights_hash
from csd_policy.types import DecodeConfig

Folders = dict[str, Path]
LAYER = {  # a weight of each, by its name in the file
    "janus": "model.language_model.layers.1.mlp.up_proj.weight",
    "janus_release": "language_model.model.layers.1.mlp.up_proj.weight",
    "anole": "model.layers.1.mlp.up_proj.weight",
    "emu3": "text_model.model.layers.1.mlp.up_proj.weight",
    "emu3_release": "model.layers.1.mlp.up_proj.weight",
    "llamagen": "model.layers.1.mlp.up_proj.weight",
}
OPTIONS = {name: {"ratio": "1:1", "image_area": 256} for name in ("emu3", "emu3_release")}


def tiny_llamagen(folder: Path) -> Path:
    torch.save({"model": llamagen_release.network_weights(False)}, folder / "c2i_16.pt")
    torch.save({"model": llamagen_release.picture_weights()}, folder / "vq.pt")
    main([
        *("--gpt", str(folder / "c2i_16.pt"), "--vq", str(folder / "vq.pt"), "--heads", "4"),
        *("--image-size", "16", "--output", str(folder / "converted")),
    ])  # fmt: skip
    return folder / "converted"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Small checkpoints, each with model.safetensors."""
    there = {name: tmp_path_factory.mktemp(name) for name in LAYER}
    there["llamagen"] = tiny_llamagen(there["llamagen"])
    tiny_janus(there["janus"])
    tiny_janus_release(there["janus_release"], "model.safetensors")
    tiny_chameleon(there["anole"], "anole")
    tiny_emu3(there["emu3"])
    tiny_emu3_release(there["emu3_release"], parts=1)
    there["emu3_release"] /= "language"
    return there


@pytest.fixture
def copied(folders: Folders, tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        ignore = shutil.ignore_patterns("hf")
        return shutil.copytree(folders[name], tmp_path / f"copy-{name}", ignore=ignore)

    return copy


def refused(folder: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(folder, "cpu", **OPTIONS.get(name, {}))


@pytest.mark.parametrize("name", LAYER)
def test_weights_that_do_not_fit(name: str, copied: Callable[[str], Path]) -> None:
    """A missing, a renamed and an extra weight; a table without a network; a broken file."""
    folder, layer = copied(name), LAYER[name]
    file = folder / "model.safetensors"
    weights = load_file(file)
    shown = layer.removeprefix("text_model.model.").replace(".", r"\.")

    def given(changed: dict[str, torch.Tensor], message: str) -> None:
        save_file(changed, file, {"format": "pt"})
        refused(folder, name, message)

    rest = {n: w for n, w in weights.items() if n != layer}
    given(rest, rf"(missing_keys|lacks).*{shown}")
    given(rest | {f"{layer}s": weights[layer]}, rf"{shown}.*(unexpected_keys|unknown).*{shown}s")
    given(weights | {f"{layer}s": torch.ones(2, 2)}, rf"(unexpected_keys|has unknown).*{shown}s")
    given(
        weights | {layer: weights[layer][:3].clone()},
        r"do not fit.*mismatched_keys.*layers\.1\.mlp\.up_proj\.weight",
    )
    given({"other": torch.ones(1)}, r"missing_keys .* and \d+ more|lacks .*_proj|lacks .*\.fc1\.w")
    file.write_bytes(b"no weights")
    refused(folder, name, r"(is broken|is no safetensors file): ")


@pytest.mark.parametrize("name", LAYER)
def test_files_that_are_not_there(name: str, copied: Callable[[str], Path]) -> None:
    """A part of several, all weights, weights in a pickle alone."""
    folder = copied(name)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    refused(folder, name, r"lacks .*model\.safetensors")
    save(weights, folder, "model.safetensors", parts=3)
    if name != "llamagen":  # its converter writes one file
        load_model(folder, "cpu", **OPTIONS.get(name, {}))
        (folder / "model-00002-of-00003.safetensors").unlink()
        message = r"lacks model-00002-of-00003\.safetensors, which .*index\.json names"
        refused(folder, name, message)
    for part in folder.glob("model*.safetensors*"):
        part.unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    if name == "janus_release":  # as deepseek-ai publishes them
        load_model(folder, "cpu")
        torch.save(weights | {"hook": Hook()}, folder / "pytorch_model.bin")
        refused(folder, name, "pytorch_model.bin cannot be read safely, expected tensors")
        assert not Hook.called
    elif name != "llamagen":
        refused(folder, name, r"pytorch_model\.bin needs pickle: convert it to safetensors first")


class Hook:
    """What a pickle can do when it is read."""

    called: list[str] = []

    def __reduce__(self) -> Any:
        return Hook.called.append, ("read",)


@pytest.mark.parametrize("name", LAYER)
def test_another_model(name: str, copied: Callable[[str], Path]) -> None:
    folder = copied(name)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    refused(folder, name, "has model_type 'gpt2', expected one of .*janus.*multi_modality")
    kept = {k: v for k, v in config.items() if k != "model_type"}
    (folder / "config.json").write_text(json.dumps(kept))
    refused(folder, name, "has model_type None, expected one of")
    (folder / "config.json").write_text("{")
    refused(folder, name, "config.json cannot be read")
    (folder / "config.json").unlink()
    refused(folder, name, "has neither image_model.json nor config.json")


@pytest.mark.parametrize("name", ["janus", "anole", "emu3"])
def test_broken_configs_name_the_checkpoint(name: str, copied: Callable[[str], Path]) -> None:
    folder = copied(name)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        text.replace('"num_hidden_layers": 2', '"num_hidden_layers": "two"')
    )
    refused(folder, name, r"copy-\w+' cannot be loaded(.|\n)*num_hidden_layers")
    (folder / "config.json").write_text(text)
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text()[:999])
    refused(folder, name, r"copy-\w+' cannot be loaded")


def test_a_layout_under_the_name_of_the_other(folders: Folders, tmp_path: Path) -> None:
    for name, other in (("janus", "janus_release"), ("janus_release", "janus")):
        folder = tmp_path / name
        shutil.copytree(folders[name], folder, ignore=shutil.ignore_patterns("hf"))
        shutil.copy(folders[other] / "model.safetensors", folder)
        refused(folder, name, r"(do not fit JanusFor.*missing_keys|lacks vision_model\.vision_to)")


@pytest.mark.parametrize("name", ["janus", "janus_release", "anole", "emu3"])
def test_a_folder_without_a_tokenizer(name: str, copied: Callable[[str], Path]) -> None:
    folder = copied(name)
    for path in (*folder.glob("tokenizer*"), *folder.glob("special_tokens*")):
        path.unlink()
    refused(folder, name, "tokenizer|token")


def test_a_file(folders: Folders) -> None:
    with pytest.raises(ValueError, match=r"is the file '.*config\.json', expected its folder"):
        load_model(folders["janus"] / "config.json", "cpu")


def test_a_vision_tokenizer_that_is_not_there(folders: Folders) -> None:
    with pytest.raises(ValueError, match="vq is 'nowhere', whose config.json cannot be read"):
        load_model(folders["emu3_release"], "cpu", vq="nowhere", **OPTIONS["emu3"])


def test_no_network() -> None:
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    with pytest.raises(ValueError, match=r"no model 'deepseek-ai/x'.*HF_HUB_OFFLINE is set"):
        load_model("deepseek-ai/x", "cpu")


def tokens_of(folder: Path, name: str) -> torch.Tensor:
    config = DecodeConfig(window=4, temperature=0.0)
    model = load_model(folder, "cpu", **OPTIONS.get(name, {}))
    return JacobiDecoder(model, config=config).generate(["w1 w2"], [0]).tokens


@pytest.mark.parametrize("name", ["janus", "emu3"])
def test_generation_settings_are_not_read(name: str, copied: Callable[[str], Path]) -> None:
    """Without generation_config.json, or with a part of it, the defaults are those of the adapter.

    A field that transformers fills in, and stopped to, once broke the drawing of Janus.
    """
    folder = copied(name)
    expected = tokens_of(folder, name)
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": 1}))
    assert tokens_of(folder, name).equal(expected)
    file.unlink()
    assert tokens_of(folder, name).equal(expected)


@pytest.mark.parametrize(
    ("name", "token"),
    [("janus", "pad_token"), ("janus", "boi_token"), ("emu3", "eof_token"), ("emu3", "eos_token")],
)
def test_special_tokens_that_are_not_there(
    name: str, token: str, copied: Callable[[str], Path]
) -> None:
    folder = copied(name)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())

    def changed(value: str | None) -> None:
        text = json.loads(json.dumps(config))
        for table in (text, text.get("extra_special_tokens", {}), text.get("model_specific", {})):
            if token in table:
                table.pop(token)
                if value is not None:
                    table[token] = value
        file.write_text(json.dumps(text))

    changed(None)
    refused(folder, name, rf"tokenizer_config.json of .* lacks {token}")


def test_a_token_outside_the_vocabulary(copied: Callable[[str], Path]) -> None:
    folder = copied("emu3")
    file = folder / "tokenizer_config.json"
    file.write_text(file.read_text().replace("<|image start|>", "<|new|>"))
    refused(folder, "emu3", r"boi_token of .* is '<\|new\|>' with id \d+, expected one below vocab")


def test_what_tells_weights_from_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of another commit of the hub, or of another vision tokenizer, are other results."""
    folder, commit = tmp_path / "model", "0123456789abcdef0123456789abcdef01234567"
    (folder / "vq").mkdir(parents=True)
    assert weights_hash(str(folder)) is None
    found = set()
    for name, content in (("model", b"a"), ("vq/model", b"b"), ("vq/model", b"c")):
        (folder / f"{name}.safetensors").write_bytes(content)
        found.add(weights_hash(str(folder)))
    assert len(found) == 3 and None not in found
    cached = tmp_path / "hub" / "models--owner--name"
    (cached / "snapshots" / commit).mkdir(parents=True)
    (cached / "snapshots" / commit / "config.json").write_text("{}")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert weights_hash("owner/name") == f"commit {commit}"
    assert weights_hash("owner/other") is None
