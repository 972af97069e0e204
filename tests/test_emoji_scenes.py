"""The shipped model: against transformers' generate, batches, prompts, files."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from csd_policy import DecodeConfig, JacobiDecoder, load_model
from csd_policy.drafts import DraftStrategy, Gumbel, Independent
from csd_policy.models import SHIPPED, shipped_models
from csd_policy.models.emoji_scenes import EmojiScenes
from csd_policy.policies import CSD, AcceptancePolicy, Exact, TVGate

FOLDER = SHIPPED / "emoji-scenes"
MARGIN = 1e-4  # in fp32, a divergence is allowed only where a decision is closer than this


@pytest.fixture(scope="module")
def model() -> EmojiScenes:
    loaded = load_model("emoji-scenes", device="cpu")
    assert isinstance(loaded, EmojiScenes)
    return loaded


@pytest.fixture(scope="module")
def prior() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast, int]:
    network = LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(FOLDER)
    return network, tokenizer, tokenizer.convert_tokens_to_ids("<image_0000>")


def test_the_shipped_model_is_listed_and_small() -> None:
    assert "emoji-scenes" in shipped_models()
    weights = sum(path.stat().st_size for path in FOLDER.iterdir())
    assert weights < 25 * 2**20
    assert (FOLDER / "README.md").is_file()


@torch.inference_mode()
@pytest.mark.parametrize("draft", [Independent(), Gumbel()], ids=repr)
@pytest.mark.parametrize("window", [1, 16])
def test_greedy_equals_generate(
    model: EmojiScenes, prior: Any, draft: DraftStrategy, window: int
) -> None:
    """Guidance 1, prompts of different lengths, left-padded for transformers."""
    network, tokenizer, first = prior
    prompts = list(model.example_prompts[:4])
    batch = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    out = network.generate(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"],
        do_sample=False, max_new_tokens=256, eos_token_id=None,
    )  # fmt: skip
    expected = out[:, batch["input_ids"].shape[1] :] - first
    config = DecodeConfig(window=window, temperature=0.0, guidance_scale=1.0)
    result = JacobiDecoder(model, Exact(), draft, config).generate(prompts, [0, 1, 2, 3])
    _assert_equal_up_to_margin(model, result.tokens, expected, prompts, 1.0)


@torch.inference_mode()
def test_greedy_with_guidance_equals_a_plain_loop(model: EmojiScenes, prior: Any) -> None:
    """Guidance 3: both branches recomputed in full for every token."""
    network, tokenizer, first = prior
    prompt = "two cats on blue plain"
    cond, uncond = (tokenizer(t, return_tensors="pt")["input_ids"] for t in (prompt, ""))
    codes: list[int] = []
    for _ in range(256):
        fed = torch.tensor([codes], dtype=torch.int64) + first
        c, u = (
            network(torch.cat([ids, fed], 1), use_cache=False).logits[0, -1, first:].double()
            for ids in (cond, uncond)
        )
        codes.append(int((u + 3 * (c - u)).argmax()))
    config = DecodeConfig(window=16, temperature=0.0, guidance_scale=3.0)
    result = JacobiDecoder(model, Exact(), Independent(), config).generate([prompt], [0])
    _assert_equal_up_to_margin(model, result.tokens, torch.tensor([codes]), [prompt], 3.0)


def _assert_equal_up_to_margin(
    model: EmojiScenes, got: torch.Tensor, expected: torch.Tensor, prompts: list[str], scale: float
) -> None:
    """Equal tokens, or a first difference where the two best logits are closer than MARGIN."""
    for row, prompt in enumerate(prompts):
        different = (got[row] != expected[row]).nonzero()
        if len(different) == 0:
            continue
        at = int(different[0])
        state = model.prefill([prompt], scale != 1, 256)
        slots = torch.arange(-1, 255)[None]
        codes = torch.nn.functional.pad(expected[row : row + 1, :-1], (1, 0))
        hidden = model.forward(state, model.embed(state, codes, slots), slots)
        logits = model.head(hidden)
        if scale != 1:
            c, u = logits.chunk(2)
            logits = u + scale * (c - u)
        two, _ = logits[0, at].topk(2)
        assert float(two[0] - two[1]) < MARGIN, f"{prompt!r} differs at {at}"


@pytest.mark.parametrize("policy", [Exact(), CSD(delta=0.5), TVGate(0.5)], ids=repr)
def test_alone_equals_a_batch_of_eight(model: EmojiScenes, policy: AcceptancePolicy) -> None:
    """fp64: bit for bit, among prompts of other lengths."""
    double = load_model("emoji-scenes", device="cpu", dtype=torch.float64)
    prompts = [*model.example_prompts, "cat on red plain", "two dogs on gray photo"]
    seeds = list(range(8))
    decoder = JacobiDecoder(double, policy, Gumbel(), DecodeConfig(window=16))
    together = decoder.generate(prompts, seeds)
    for i in (0, 3):
        alone = decoder.generate([prompts[i]], [seeds[i]])
        assert alone.tokens[0].equal(together.tokens[i])
        assert alone.stats.forward_passes[0] == together.stats.forward_passes[i]


def test_a_prompt_is_read_up_to_case_and_articles(model: EmojiScenes) -> None:
    decoder = JacobiDecoder(model, config=DecodeConfig(window=16))
    one = decoder.generate(["cat on blue plain"], [3]).tokens
    assert one.equal(decoder.generate(["A Cat on  a blue plain"], [3]).tokens)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("two catz on blue plain", "'catz'.*near words: .*cats"),
        ("", "0 words"),
        ("the", "does not know 'the'"),
        ("cat " * 17, "17 words"),
        ("<boi> cat", "does not know '<boi>'"),
        ("<image_0003> on blue plain", "does not know"),
    ],
)
def test_wrong_prompts_are_refused(model: EmojiScenes, prompt: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JacobiDecoder(model).generate([prompt], [0])


def test_pictures(model: EmojiScenes) -> None:
    result = JacobiDecoder(model, Exact(), Gumbel()).generate(["rocket on black plain"], [0])
    (picture,) = result.images
    assert picture.size == (96, 96) and picture.mode == "RGB"
    for bad in (-1, 1024):
        with pytest.raises(ValueError, match="codes are in"):
            model.decode(torch.full((1, 256), bad))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOLDER, tmp_path / "model"))


def test_a_folder_loads_like_the_shipped_name(folder: Path, model: EmojiScenes) -> None:
    copy = load_model(folder, device="cpu")
    config = DecodeConfig(window=16)
    one = JacobiDecoder(copy, config=config).generate(["cat on blue plain"], [1]).tokens
    assert one.equal(
        JacobiDecoder(model, config=config).generate(["cat on blue plain"], [1]).tokens
    )


def test_missing_and_renamed_weights_are_refused(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    value = weights.pop(name)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj"):
        load_model(folder)
    save_file(weights | {"renamed": value}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj"):
        load_model(folder)


@pytest.mark.parametrize("change", [{}, {"hidden_size": 512}, {"model_type": "gpt2"}])
def test_a_config_of_another_network_is_refused(folder: Path, change: dict[str, object]) -> None:
    """At once: the defaults of an empty config are a network of 7 billion parameters."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change if change else {}))
    with pytest.raises(ValueError, match=r"config\.json describes a .*expected a llama"):
        load_model(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "vq.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ValueError, match=name):
        load_model(folder)


def test_unknown_models_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"no-such-model.*emoji-scenes"):
        load_model("no-such-model")
    layout = json.loads((folder / "image_model.json").read_text())
    (folder / "image_model.json").write_text(json.dumps(layout | {"adapter": "other"}))
    with pytest.raises(ValueError, match="'other'.*cannot be imported"):
        load_model(folder)
    path = "csd_policy.types.DecodeConfig"
    (folder / "image_model.json").write_text(json.dumps(layout | {"adapter": path}))
    with pytest.raises(ValueError, match="expected a subclass of ImageTokenModel"):
        load_model(folder)


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "meta"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match=f"device is '{device}', expected one of cpu"):
        load_model("emoji-scenes", device=device)
