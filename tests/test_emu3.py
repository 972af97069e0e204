"""Emu3-Gen: the adapter against transformers' own generation, on a tiny checkpoint.

Where transformers pads a batch on the left it counts positions without the padding, and all
negative prompts are of one length, so that its batches can be compared as they are.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chi_square import log10_p_of_codes
from safetensors.torch import load_file, save_file
from tiny_emu3 import CODES, split_emu3, tiny_emu3
from tiny_models import PROMPTS
from torch import Tensor
from transformers import Emu3ForConditionalGeneration, Emu3Processor

from csd_policy import load_model
from csd_policy.decoder import JacobiDecoder
from csd_policy.drafts import Gumbel
from csd_policy.models.emu3 import NEGATIVE, POSITIVE, Emu3
from csd_policy.policies import CSD
from csd_policy.types import DecodeConfig

WIDE = {"ratio": "3:2", "image_area": 1536}  # 4 rows of 6 codes
SQUARE = {"ratio": "1:1", "image_area": 256}  # 2 rows of 2 codes
RUNS, LIMIT = 1500, -4  # of the law test; its seeds are fixed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_emu3(tmp_path_factory.mktemp("emu3"))


@pytest.fixture(scope="module")
def processor(folder: Path) -> Any:
    return Emu3Processor.from_pretrained(folder)


def words_of_codes(processor: Any) -> Tensor:
    """Vocabulary id of each code, ``[V]``, by the names of the visual tokens."""
    names = [f"<|visual token {code:06d}|>" for code in range(CODES)]
    return torch.tensor(processor.tokenizer.convert_tokens_to_ids(names))


def as_words(model: Emu3, tokens: Tensor, processor: Any) -> Tensor:
    """Vocabulary ids of whole images, ``[B, S]``, from codes ``[B, N]``."""
    assert model.forced is not None
    words = model.forced.repeat(len(tokens), 1)
    words[:, model.code_of_slot >= 0] = words_of_codes(processor)[tokens]
    return words


def greedy_of_transformers(folder: Path, processor: Any, dtype: torch.dtype) -> Tensor:
    """Vocabulary ids of whole images, ``[B, S]``."""
    network = Emu3ForConditionalGeneration.from_pretrained(folder, dtype=dtype)
    tokenizer, layout = processor.tokenizer, {
        "return_for_image_generation": True, "padding": True, "return_tensors": "pt", **WIDE
    }  # fmt: skip
    batch = processor(text=[prompt + POSITIVE for prompt in PROMPTS], **layout)
    negative = processor(text=[NEGATIVE] * len(PROMPTS), **layout)
    (rows, columns), start = batch["image_sizes"][0], batch["input_ids"].shape[1]
    body = rows * (columns + 1)
    eol = tokenizer.convert_tokens_to_ids("<|extra_200|>")
    ends = [tokenizer.eof_token_id, tokenizer.eoi_token_id, tokenizer.eos_token_id]

    def allowed(_: int, seen: Tensor) -> list[int]:
        number = len(seen) - start
        if number >= body:
            return [ends[number - body]]
        visual: list[int] = network.vocabulary_mapping.image_tokens
        return [eol] if number % (columns + 1) == columns else visual

    words: Tensor = network.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        negative_prompt_ids=negative["input_ids"],
        negative_prompt_attention_mask=negative["attention_mask"],
        prefix_allowed_tokens_fn=allowed,
        guidance_scale=3.0,
        do_sample=False,
        max_new_tokens=body + len(ends),
    )
    return words[:, start:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_greedy_decoding_is_that_of_transformers(
    folder: Path, processor: Any, dtype: torch.dtype
) -> None:
    """Token for token, forced ones too, for prompts of different lengths in one batch."""
    expected = greedy_of_transformers(folder, processor, dtype)
    model = load_model(folder, "cpu", dtype, **WIDE)
    assert isinstance(model, Emu3) and model.grid == (4, 6)
    assert expected.shape[1] == len(model.code_of_slot) == 4 * 7 + 3 and len(expected.unique()) > 9
    for window in (1, 4, 16):
        config = DecodeConfig(window=window, temperature=0.0)
        result = JacobiDecoder(model, config=config).generate(PROMPTS, [0, 1, 2])
        assert as_words(model, result.tokens, processor).equal(expected)
        assert (max(result.stats.forward_passes) < 31) == (window > 1)


def enumerated_law(folder: Path, processor: Any, prompt: str, negative: str, top_k: int) -> Tensor:
    """Joint law of the first three codes of a 2x2 image, ``[V, V, V]``, by full forwards."""
    network = Emu3ForConditionalGeneration.from_pretrained(folder).eval()
    layout = {"return_for_image_generation": True, "return_tensors": "pt", **SQUARE}
    heads = [processor(text=[text], **layout)["input_ids"] for text in (prompt, negative)]
    eol = torch.tensor(processor.tokenizer.convert_tokens_to_ids(["<|extra_200|>"]))
    words = words_of_codes(processor)

    def law(codes: Tensor) -> Tensor:
        """Law ``[M, V]`` of the code behind ``codes``, ``[M, 0 to 2]``."""
        seen = words[codes]
        if codes.shape[1] == 2:
            seen = torch.cat([seen, eol.expand(len(codes), 1)], 1)
        inputs = [torch.cat([head.expand(len(codes), -1), seen], 1) for head in heads]
        cond, uncond = (network(ids).logits[:, -1, words].double() for ids in inputs)
        guided = uncond + 3 * (cond - uncond)
        best = guided.topk(top_k)
        kept = torch.full_like(guided, -torch.inf).scatter(1, best.indices, best.values)
        return kept.softmax(-1)

    joint = law(torch.empty(1, 0, dtype=torch.int64))[0]
    for _ in range(2):
        prefixes = joint.nonzero()
        following = torch.zeros(*joint.shape, CODES, dtype=torch.float64)
        following[tuple(prefixes.T)] = law(prefixes)
        joint = joint[..., None] * following
    return joint


@torch.inference_mode()
def test_sampled_codes_follow_the_law_of_full_forwards(folder: Path, processor: Any) -> None:
    """Codes 0 and 1, a row end, and code 2, all guided and filtered by top-k.

    Against the law of another negative prompt, of no suffix or of another token as the row end
    the p-value is below 1e-40.
    """
    model = load_model(folder, "cpu", positive=" w8", negative="w5 w6 w3", **SQUARE)
    decoder = JacobiDecoder(model, config=DecodeConfig(window=4, top_k=8))
    tokens = decoder.generate(["w1 w2"] * RUNS, list(range(RUNS))).tokens[:, :3]
    joint = enumerated_law(folder, processor, "w1 w2 w8", "w5 w6 w3", 8)
    assert log10_p_of_codes(tokens, joint, groups=3) > LIMIT


def test_defaults_are_those_of_the_release(folder: Path) -> None:
    model = load_model(folder, "cpu")
    assert isinstance(model, Emu3) and model.grid == (90, 90) and model.num_codes == CODES
    assert len(model.code_of_slot) == 8193
    config = JacobiDecoder(model).config
    assert (config.guidance_scale, config.temperature, config.top_k) == (3.0, 1.0, 2048)


def same_pictures(found: list[Any], expected: list[Any]) -> bool:
    """Equal up to one level, by which a batch of another size can differ."""
    pairs = zip(found, expected, strict=True)
    return all(np.abs(np.array(a).astype(int) - np.array(b)).max() <= 1 for a, b in pairs)


def test_pictures_are_those_of_transformers(folder: Path, processor: Any) -> None:
    model = load_model(folder, "cpu", **WIDE)
    assert isinstance(model, Emu3)
    decoder = JacobiDecoder(model, CSD(), Gumbel(), DecodeConfig(window=8))
    result = decoder.generate(PROMPTS, [0, 1, 2])
    words = as_words(model, result.tokens, processor)
    network = Emu3ForConditionalGeneration.from_pretrained(folder)
    pixels = network.decode_image_tokens(image_tokens=words, height=4, width=6)
    expected = processor.postprocess(list(pixels), return_tensors="PIL.Image.Image")
    assert result.images[0].size == (48, 32) and np.ptp(np.array(result.images[0])) > 9
    assert same_pictures(result.images, expected["pixel_values"])


def test_language_model_and_vq_in_two_folders(folder: Path, tmp_path: Path) -> None:
    language, vq = tmp_path / "language", tmp_path / "vq"
    split_emu3(folder, language, vq)
    blind = load_model(language, "cpu", **WIDE)
    seeing = load_model(language, "cpu", vq=str(vq), **WIDE)
    whole = load_model(folder, "cpu", **WIDE)
    config = DecodeConfig(window=8)
    result = JacobiDecoder(blind, config=config).generate(PROMPTS, [0, 1, 2])
    other = JacobiDecoder(whole, config=config).generate(PROMPTS, [0, 1, 2])
    assert result.tokens.equal(other.tokens) and blind.codebook is None
    with pytest.raises(ValueError, match=r"holds a language model alone.*vq=SOURCE"):
        assert result.images
    assert same_pictures(seeing.decode(result.tokens), other.images)
    with pytest.raises(ValueError, match="vq is 'there', expected None"):
        load_model(folder, "cpu", vq="there")


@pytest.mark.parametrize(
    ("ratio", "area"), [("square", 1536), ("0:1", 1536), ("1:2:3", 1536), ("1:1", 9), ("1:1", -1)]
)
def test_a_grid_that_cannot_be_is_refused(folder: Path, ratio: str, area: int) -> None:
    with pytest.raises(ValueError, match=f"ratio is '{ratio}' and image_area {area}, expected"):
        load_model(folder, "cpu", ratio=ratio, image_area=area)


def test_codes_and_weights_that_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    model = load_model(folder, "cpu", **SQUARE)
    with pytest.raises(ValueError, match=r"codes are in \[0, 64\], expected \[0, 64\)"):
        model.decode(torch.tensor([[0, 1, 2, CODES]]))
    broken = shutil.copytree(folder, tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    del config["vocabulary_map"]["<|visual token 000003|>"]
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="has 63 visual tokens.*one for each of 64 codes"):
        load_model(broken, "cpu", **SQUARE)
    weights = load_file(broken / "model.safetensors")
    del weights[next(name for name in weights if "vqmodel.quantize" in name)]
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="do not fit Emu3ForConditionalGeneration.*missing_keys"):
        load_model(broken, "cpu", **SQUARE)
