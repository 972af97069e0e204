"""Checkpoints with the names of the releases: every weight lands where it belongs."""

import json
import unicodedata
from itertools import pairwise
from pathlib import Path

import pytest
import regex
import torch
from release_names import CHAMELEON, EMU3, JANUS, expand
from safetensors.torch import load_file
from tiny_chameleon import tiny_chameleon
from tiny_emu3 import CODES, tiny_emu3
from tiny_models import PROMPTS, tiny_janus
from tiny_releases import (
    BOS,
    JANUS_TOKENS,
    MERGES,
    PAD,
    emu3_files,
    save,
    tiny_emu3_release,
    tiny_janus_release,
)
from transformers import (
    ChameleonForConditionalGeneration,
    Emu3ForConditionalGeneration,
    JanusForConditionalGeneration,
)

from csd_policy import load_model
from csd_policy.decoder import JacobiDecoder
from csd_policy.models.chameleon import Chameleon
from csd_policy.models.emu3 import Emu3
from csd_policy.models.emu3_release import load_tokenizer
from csd_policy.models.janus import Janus
from csd_policy.types import DecodeConfig

TINY = {"ratio": "1:1", "image_area": 256}


def same(network: torch.nn.Module, expected: torch.nn.Module, but: str = "nothing") -> None:
    weights = expected.state_dict()
    assert set(weights) == set(network.state_dict())
    for name, weight in network.state_dict().items():
        assert name.startswith(but) or weight.equal(weights[name]), name


def janus_prompt(prompt: str) -> list[int]:
    """As the release writes it: roles, two line ends (no token here), begin of image."""
    names = {token: i for i, token in enumerate(JANUS_TOKENS)}
    colon, words = 7, [8 + int(word[1:]) for word in prompt.split()]
    user, assistant = names["<|User|>"], names["<|Assistant|>"]
    return [names[BOS], user, colon, *words, assistant, colon, names["<begin_of_image>"]]


@pytest.mark.parametrize(
    ("stem", "parts"),
    [("pytorch_model.bin", 1), ("pytorch_model.bin", 2), ("model.safetensors", 3)],
)
def test_janus_of_deepseek(tmp_path: Path, stem: str, parts: int) -> None:
    """Weights by name, prompts by token, and codes by the greedy generation of transformers."""
    folder = tiny_janus_release(tmp_path, stem, parts)
    model = load_model(folder, "cpu")
    reference = JanusForConditionalGeneration.from_pretrained(folder / "hf")
    assert isinstance(model, Janus) and model.grid == (4, 4) and model.num_codes == 512
    same(model._model, reference, but="lm_head")  # a tied one in ``hf``, and not used
    rows = [janus_prompt(prompt) for prompt in PROMPTS]
    assert [model._prompts.ids(prompt).tolist() for prompt in PROMPTS] == rows
    reference.generation_config.generation_kwargs = {"boi_token_id": rows[0][-1]}
    reference.generation_config.pad_token_id = JANUS_TOKENS.index(PAD)
    width = max(map(len, rows))
    ids = torch.tensor([[2] * (width - len(row)) + row for row in rows])
    shown = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    expected = reference.generate(
        input_ids=ids, attention_mask=shown, generation_mode="image", do_sample=False,
        guidance_scale=3.0,
    )  # fmt: skip
    config = DecodeConfig(window=8, temperature=0.0, guidance_scale=3.0)
    result = JacobiDecoder(model, config=config).generate(PROMPTS, [0, 1, 2])
    assert len(expected.unique()) > 4 and result.tokens.equal(expected)


def test_janus_of_transformers(tmp_path: Path) -> None:
    folder = tiny_janus(tmp_path)
    weights = load_file(folder / "model.safetensors")
    names = set(expand(JANUS, layer=2))
    others = ("model.vqmodel.", "model.vision_model.", "model.aligner.")
    assert {name for name in weights if not name.startswith(others)} == names - {"lm_head.weight"}
    weights["lm_head.weight"] = weights["model.language_model.embed_tokens.weight"].clone()
    save(weights, folder, "model.safetensors")
    model = load_model(folder, "cpu")
    assert isinstance(model, Janus)
    same(model._model, JanusForConditionalGeneration.from_pretrained(folder))


@pytest.mark.parametrize("kind", ["lumina", "anole"])
def test_names_of_chameleon(tmp_path: Path, kind: str) -> None:
    """Lumina-mGPT has a norm for each rank; Anole the decoder of the VQGAN too."""
    folder = tiny_chameleon(tmp_path, kind)
    stored = load_file(folder / "model.safetensors")
    language = {name for name in stored if not name.startswith("model.vqmodel.")}
    assert language == set(expand(CHAMELEON, layer=2))
    assert any(name.startswith("model.vqmodel.decoder.up.") for name in stored) == (kind == "anole")
    model = load_model(folder, "cpu", layout=kind)
    assert isinstance(model, Chameleon)
    reference = ChameleonForConditionalGeneration.from_pretrained(folder / "hf")
    same(model.backbone, reference.model, but="vqmodel.")


def test_emu3_of_transformers(tmp_path: Path) -> None:
    """The community's checkpoint has the names of an older transformers."""
    folder = tiny_emu3(tmp_path)
    reference = Emu3ForConditionalGeneration.from_pretrained(folder)
    weights = load_file(folder / "model.safetensors")  # transformers writes those names too
    of_vq = {name for name in weights if name.startswith("vqmodel.")}
    assert of_vq and set(weights) - of_vq == set(expand(EMU3, layer=2))
    (folder / "model.safetensors").unlink()
    save(weights, folder, "model.safetensors", parts=2)
    model = load_model(folder, "cpu", **TINY)
    assert isinstance(model, Emu3)
    same(model.backbone, reference.model.text_model)
    same(model._vq, reference.model.vqmodel)
    assert model._image_rows.equal(reference.lm_head.weight[model._word_of_code])


@torch.inference_mode()
def test_emu3_of_baai(tmp_path: Path) -> None:
    """Weights by name; logits and pictures by the classes of transformers."""
    language, vision = tiny_emu3_release(tmp_path)
    source, vq = str(tmp_path / "language"), str(tmp_path / "vq")
    model = load_model(source, "cpu", vq=vq, **TINY)
    assert isinstance(model, Emu3) and model.num_codes == CODES and model.grid == (2, 2)
    same(model.backbone, language.model)
    same(model._vq, vision)
    names = load_tokenizer(source).get_vocab()
    assert model.forced is not None
    ends = [names[f"<|extra_{i}|>"] for i in (200, 201)]
    assert model.forced.tolist() == [
        -1, -1, ends[0], -1, -1, ends[0], ends[1], names["<|image end|>"], names["<|extra_204|>"]
    ]  # fmt: skip
    text = "w1 w2" + model._positive
    prompt = f"<|extra_203|>{text}<|image start|>2*2<|image token|>"
    words = torch.tensor([load_tokenizer(source)(prompt)["input_ids"]])
    of_codes = [names[f"<|visual token {code:06d}|>"] for code in range(CODES)]
    law = language(words).logits[0, -1, of_codes]
    config = DecodeConfig(window=4, temperature=0.0, guidance_scale=1.0)
    result = JacobiDecoder(model, config=config).generate(["w1 w2"], [0])
    assert result.tokens[0, 0] == law.argmax() and law.std() > 0.3
    pixels = vision.decode(result.tokens.view(1, 1, 2, 2))[0, 0]
    wanted = ((pixels.permute(1, 2, 0) + 1) * 127.5).clamp(0, 255)
    (picture,) = result.images
    data = torch.tensor(list(picture.tobytes())).view(16, 16, 3)
    assert (data - wanted).abs().max() <= 1
    with pytest.raises(ValueError, match=r"vq is .* of model_type 'Emu3', expected Emu3VisionVQ"):
        load_model(source, "cpu", vq=source, **TINY)


def encode(text: str) -> list[int]:
    """Byte pairs as tiktoken merges them: the pair of lowest rank first, in pieces of the text."""
    tokens = [bytes([i]) for i in range(256)] + [token.encode() for token in MERGES]
    ranks = {token: i for i, token in enumerate(tokens)}
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    found = []
    for piece in regex.findall(pattern, unicodedata.normalize("NFC", text)):
        parts = [bytes([byte]) for byte in piece.encode()]
        while True:
            pairs = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
            if not pairs or min(pairs) == len(ranks):
                break
            i = pairs.index(min(pairs))
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        found += [ranks[part] for part in parts]
    return found


def test_tiktoken_of_emu3(tmp_path: Path) -> None:
    """Pieces and merges are those of the release, special tokens follow the ranks in order."""
    count = emu3_files(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    first = 256 + len(MERGES)
    assert len(tokenizer) == count
    order = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))]
    order += ["<|image token|>", "<|image start|>", "<|image end|>", "<|visual token 000000|>"]
    assert tokenizer.convert_tokens_to_ids(order) == list(range(first, first + len(order)))
    for text in ("a decade's 2024 cafe\u0301s", " w1w2  wide\n\n de*2*6", "\u4f60\u597d, it'LL  "):
        assert tokenizer(text)["input_ids"] == encode(text), text
    mixed = tokenizer("de<|image start|>w")["input_ids"]
    assert mixed == [*encode("de"), first + order.index("<|image start|>"), *encode("w")]


def test_tokenizer_files_of_emu3(tmp_path: Path) -> None:
    tiny_emu3_release(tmp_path)
    folder = tmp_path / "language"

    def refused(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            load_model(folder, "cpu", **TINY)

    vision, ranks = folder / "emu3_vision_tokens.txt", folder / "emu3.tiktoken"
    text, lines = vision.read_text(), ranks.read_text()
    vision.write_text(text + "<|one more|>\n")
    refused(r"make \d+ tokens, expected at most vocab_size \d+ of config.json")
    vision.write_text(text.replace("<|image start|>\n", ""))
    refused(r"emu3_vision_tokens.txt lacks <\|image start\|>")
    vision.write_text(text.replace("<|visual token 000003|>\n", ""))
    refused("has 63 visual tokens")
    vision.unlink()
    refused("lacks emu3_vision_tokens.txt, expected the tokenizer of BAAI/Emu3-Gen")
    vision.write_text(text)
    for broken in (lines.replace(" 7\n", " 8\n"), "no ranks\n", "one"):
        ranks.write_text(broken)
        refused("emu3.tiktoken is no list of base64 tokens and ranks")
    ranks.unlink()
    refused("lacks emu3.tiktoken, expected the tokenizer of BAAI/Emu3-Gen")


def test_configs_of_other_models_are_refused(tmp_path: Path) -> None:
    """JanusFlow and DeepSeek-VL have the model_type of Janus-Pro."""
    folder = tiny_janus_release(tmp_path)
    config = json.loads((folder / "config.json").read_text())

    def refused(message: str, **changes: object) -> None:
        kept = {k: v for k, v in (config | changes).items() if v is not None}
        (folder / "config.json").write_text(json.dumps(kept))
        with pytest.raises(ValueError, match=message):
            load_model(folder, "cpu")

    refused("lacks image_token_size of gen_vision_config, expected that of", gen_vision_config=None)
    refused("lacks vocab_size of language_config, expected that of", language_config={})
    head = {"params": {"n_embed": 32}}
    refused(r"do not fit Janus.*mismatched_keys.*proj_out", gen_head_config=head)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace("<begin_of_image>", "<other>"))
    refused(r"tokenizer.json of .* has the id None for '<begin_of_image>'")
