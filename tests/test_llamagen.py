"""LlamaGen: converter and adapter against the release's arithmetic, on tiny published files."""

import argparse
import json
from pathlib import Path
from typing import Any

import llamagen_release as release
import numpy as np
import pytest
import torch
from chi_square import log10_p_of_codes
from tiny_models import PROMPTS, word_tokenizer
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast, T5Config, T5EncoderModel

from csd_policy import load_model
from csd_policy.decoder import JacobiDecoder
from csd_policy.drafts import Gumbel
from csd_policy.models.llamagen import LlamaGen
from csd_policy.models.llamagen_convert import convert, main
from csd_policy.policies import CSD
from csd_policy.types import DecodeConfig

CAPTIONS = [*PROMPTS, " ".join(f"w{i}" for i in range(12))]  # the last one is cut
CLASSES = ["7", "0", "9"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Published files of a class-conditional and a text-conditional model, and a T5 encoder."""
    folder = tmp_path_factory.mktemp("published")
    arguments = argparse.Namespace(gpt_model="tiny")
    torch.save(
        {"model": release.network_weights(False, kv_heads=2), "args": arguments}, folder / "c2i.pt"
    )
    torch.save({"module": release.network_weights(True)}, folder / "t2i.pt")
    torch.save({"model": release.picture_weights()}, folder / "vq.pt")
    words = word_tokenizer(["<s>", "<pad>"], [f"w{i}" for i in range(40)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", unk_token="<unk>", bos_token="<s>"
    )
    torch.manual_seed(2)
    config = T5Config(
        vocab_size=64, d_model=release.CAPTION, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
        pad_token_id=1,
    )  # fmt: skip
    T5EncoderModel(config).save_pretrained(folder / "t5")
    tokenizer.save_pretrained(folder / "t5")
    return folder


@pytest.fixture(scope="module")
def folders(files: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the converter makes of them, by kind and codes a side."""
    folder = tmp_path_factory.mktemp("converted")
    made = {}
    for kind, size in (("c2i", 16), ("t2i", 16), ("t2i", 8)):
        made[f"{kind}-{size // 4}"] = folder / f"{kind}-{size // 4}"
        main([
            *("--gpt", str(files / f"{kind}.pt"), "--vq", str(files / "vq.pt")),
            *("--output", str(folder / f"{kind}-{size // 4}"), "--t5", str(files / "t5")),
            *("--image-size", str(size), "--heads", str(release.HEADS)),
        ])  # fmt: skip
    return made


def reference(kind: str, side: int, dtype: torch.dtype) -> release.Network:
    weights = release.network_weights(kind == "t2i", kv_heads=4 if kind == "t2i" else 2)
    return release.Network(weights, side, dtype)


def caption_rows(network: release.Network, files: Path, captions: list[str]) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(files / "t5")
    encoder = T5EncoderModel.from_pretrained(
        files / "t5", dtype=network.w["output.weight"].dtype
    ).eval()
    batch = tokenizer(
        captions, max_length=release.TOKENS, padding="max_length", truncation=True,
        return_tensors="pt",
    )  # fmt: skip
    ids, mask = batch["input_ids"], batch["attention_mask"]
    features = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
    return network.embed_captions(features, mask)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["c2i", "t2i"])
def test_greedy_decoding_is_that_of_the_release(
    files: Path, folders: dict[str, Path], kind: str, dtype: torch.dtype
) -> None:
    """Token for token, for captions of different lengths in one batch."""
    network = reference(kind, 4, dtype)
    prompts = CAPTIONS if kind == "t2i" else CLASSES
    if kind == "t2i":
        rows = caption_rows(network, files, prompts)
    else:
        rows = network.embed_classes([int(prompt) for prompt in prompts])
    model = load_model(folders[f"{kind}-4"], "cpu", dtype)
    assert isinstance(model, LlamaGen) and model.grid == (4, 4)
    for scale in (2.0, 7.5):
        expected = network.greedy(rows, scale)
        assert len(expected.unique()) > 4 and len(expected.unique(dim=0)) == len(prompts)
        for window in (1, 4, 16):
            config = DecodeConfig(window=window, temperature=0.0, guidance_scale=scale)
            result = JacobiDecoder(model, config=config).generate(prompts, range(len(prompts)))
            assert result.tokens.equal(expected)
            if window > 1:
                assert min(result.stats.forward_passes) < 16


def law_of_three(network: release.Network, rows: tuple[Tensor, Tensor], scale: float) -> Tensor:
    """The law of the first three codes ``[CODES, CODES, CODES]`` at top-k 20 of one prompt."""
    joint = torch.ones(())
    for n in range(3):
        places = release.CODES ** torch.arange(n - 1, -1, -1)
        codes = torch.arange(release.CODES**n)[:, None] // places % release.CODES
        repeated = tuple(part.repeat_interleave(len(codes), 0) for part in rows)
        logits = network.guided(repeated, codes, scale)  # type: ignore[arg-type]
        least = logits.topk(20).values[:, -1:]
        law = logits.masked_fill(logits < least, -torch.inf).softmax(-1)
        joint = joint[..., None] * law.view(*[release.CODES] * (n + 1))
    return joint


@torch.inference_mode()
def test_sampling_follows_the_law_of_the_release(files: Path, folders: dict[str, Path]) -> None:
    """A chi-square test over 27 cells with fixed seeds. The law without guidance is far off."""
    network, runs = reference("t2i", 2, torch.float32), 1500
    captions = ["w3 w8", "w1 w2 w3 w4 w5"]
    config = DecodeConfig(window=3, guidance_scale=2.0, top_k=20)
    model = load_model(folders["t2i-2"], "cpu")
    result = JacobiDecoder(model, config=config).generate(captions * runs, range(2 * runs))
    for i, caption in enumerate(captions):
        rows = caption_rows(network, files, [caption])
        tokens = result.tokens[i::2, :3]
        guided, plain = (law_of_three(network, rows, scale).double() for scale in (2.0, 1.0))
        assert log10_p_of_codes(tokens, guided / guided.sum(), 3) > -4
        plain = plain + 1e-12  # the filter keeps other codes
        assert log10_p_of_codes(tokens, plain / plain.sum(), 3) < -6


def test_pictures_are_those_of_the_release(folders: dict[str, Path]) -> None:
    model = load_model(folders["c2i-4"], "cpu")
    decoder = JacobiDecoder(model, CSD(), Gumbel(), DecodeConfig(window=8))
    result = decoder.generate(["3", "8"], [0, 1])
    pixels = release.decode_pictures(release.picture_weights(), result.tokens, 4)
    for picture, wanted in zip(result.images, pixels, strict=True):
        assert picture.size == (16, 16)
        levels = ((wanted.permute(1, 2, 0) + 1) * 127.5).round().clamp(0, 255)
        assert (torch.from_numpy(np.array(picture)).float() - levels).abs().max() <= 1
        assert levels.std() > 10
    book = release.picture_weights()["quantize.embedding.weight"]
    assert model.codebook is not None
    assert model.codebook.allclose(book / book.norm(dim=1, keepdim=True))
    with pytest.raises(ValueError, match=r"codes are in \[0, 32\], expected \[0, 32\)"):
        model.decode(torch.tensor([[0] * 15 + [32]]))


def test_defaults_are_those_of_the_release(folders: dict[str, Path]) -> None:
    for name, scale, top_k in (("c2i-4", 4.0, 2000), ("t2i-4", 7.5, 1000)):
        model = load_model(folders[name], "cpu")
        assert model.defaults.guidance_scale == scale and model.defaults.top_k == top_k
        assert model.defaults.temperature == 1.0 and model.num_codes == release.CODES
        assert model.example_prompts


def test_classes_by_number_or_name(folders: dict[str, Path]) -> None:
    model = load_model(folders["c2i-4"], "cpu")
    for prompt in ("10", "-1", "dog", "", "1.5"):
        with pytest.raises(ValueError, match=rf"'{prompt}' is no class, expected a number in \[0,"):
            JacobiDecoder(model).generate([prompt])
    labels = folders["c2i-4"] / "labels.txt"
    labels.write_text("\n".join(["tench, Tinca tinca", "Goldfish", *(f"c{i}" for i in range(8))]))
    model = load_model(folders["c2i-4"], "cpu")
    labels.unlink()
    decoder = JacobiDecoder(model, config=DecodeConfig(temperature=0.0))
    tokens = decoder.generate(["0", "tinca Tinca", "1", "goldfish"], range(4)).tokens
    assert tokens[0].equal(tokens[1]) and tokens[2].equal(tokens[3])
    with pytest.raises(ValueError, match="or a name of labels.txt; near names: goldfish"):
        model.check_prompts(["goldfisch"])


def test_captions_are_cleaned(folders: dict[str, Path]) -> None:
    model = load_model(folders["t2i-4"], "cpu")
    decoder = JacobiDecoder(model, config=DecodeConfig(temperature=0.0))
    tokens = decoder.generate(["w1 w2", " (W1)  #w2 ", "w2 w1"], range(3)).tokens
    assert tokens[0].equal(tokens[1]) and not tokens[0].equal(tokens[2])


def test_the_folder_is_checked(folders: dict[str, Path], tmp_path: Path) -> None:
    whole = folders["t2i-4"]
    for path in (p for p in whole.rglob("*") if p.is_file()):
        (tmp_path / path.relative_to(whole)).parent.mkdir(exist_ok=True)
        (tmp_path / path.relative_to(whole)).write_bytes(path.read_bytes())
    layout = json.loads((whole / "config.json").read_text())

    def refused(message: str, **changes: Any) -> None:
        changed = {k: v for k, v in (layout | changes).items() if v is not None}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=message):
            load_model(tmp_path, "cpu")

    refused("config.json of .* lacks grid", grid=None)
    refused("no T5 encoder 'no-such-folder', which .* names", t5="no-such-folder")
    network = layout["network"] | {"num_hidden_layers": 3}
    refused("do not fit LlamaForCausalLM: .*layers.2.mlp", network=network)
    wide = T5Config(vocab_size=64, d_model=24, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    T5EncoderModel(wide).save_pretrained(tmp_path / "t5")
    for path in Path(layout["t5"]).glob("tokenizer*"):
        (tmp_path / "t5" / path.name).write_bytes(path.read_bytes())
    refused("'t5' is a t5 of width 24 .*, expected a T5 encoder of width 16", t5="t5")
    (tmp_path / "vq/model.safetensors").unlink()
    refused("lacks vq/model.safetensors")


def test_the_converter_names_what_is_wrong(files: Path, tmp_path: Path, capsys: Any) -> None:
    gpt, vq = release.network_weights(False), release.picture_weights()

    def refused(message: str, gpt_file: str = "gpt_256.pt", **options: Any) -> None:
        torch.save(gpt, tmp_path / "gpt_256.pt")
        torch.save(gpt, tmp_path / "gpt.pt")
        torch.save({"state_dict": vq}, tmp_path / "vq.pt")
        with pytest.raises(ValueError, match=message):
            convert(tmp_path / gpt_file, tmp_path / "vq.pt", tmp_path / "out", **options)

    refused("gpt.pt does not end with _256, _384 or _512, expected --image-size", "gpt.pt")
    refused("nothing_256.pt is no file", "nothing_256.pt")
    refused("64 wide with None heads, expected a width of the release .*or --heads")
    refused("64 wide with 5 heads", heads=5)
    moved = gpt.pop("layers.1.feed_forward.w3.weight")
    gpt["layers.1.feed_forward.w4.weight"] = moved
    refused("lacks layers.1.feed_forward.w3.weight and has unknown layers.1.feed_forward.w4.weight")
    gpt = {name: w for name, w in gpt.items() if "layers.1." not in name or ".wo." in name}
    refused("lacks layers.1.attention.wqkv.weight, .*, layers.1.feed_forward.w3.weight and 1 more")
    gpt = {}
    refused("lacks cls_embedding.embedding_table.weight, layers.0.attention.wqkv.weight, norm")
    gpt = release.network_weights(True)
    del vq["decoder.mid.1.q.weight"]
    refused("vq.pt lacks decoder.mid.1.q.weight", heads=4)
    del vq["encoder.conv_in.weight"]
    refused("vq.pt lacks encoder.conv_in.weight", heads=4)
    (tmp_path / "text_256.pt").write_text("no weights")
    refused("text_256.pt cannot be read safely, expected tensors", "text_256.pt")
    torch.save([1], tmp_path / "list_256.pt")
    refused("list_256.pt is no table of tensors", "list_256.pt")
    with pytest.raises(SystemExit):
        main(["--gpt", "nothing_256.pt", "--vq", "vq.pt", "--output", str(tmp_path / "out")])
    assert "nothing_256.pt is no file" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
