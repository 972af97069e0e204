"""Janus-Pro: the adapter against transformers' own image generation, on a tiny checkpoint."""

from pathlib import Path

import numpy as np
import pytest
import torch
from chi_square import log10_p_of_codes
from tiny_models import PROMPTS, tiny_janus
from torch import Tensor
from transformers import JanusForConditionalGeneration, JanusProcessor

from csd_policy import load_model
from csd_policy.decoder import JacobiDecoder
from csd_policy.drafts import Gumbel
from csd_policy.models.janus import Janus
from csd_policy.policies import CSD
from csd_policy.types import DecodeConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_janus(tmp_path_factory.mktemp("janus"))


def greedy_of_transformers(folder: Path, dtype: torch.dtype, scale: float) -> Tensor:
    model = JanusForConditionalGeneration.from_pretrained(folder, dtype=dtype)
    processor = JanusProcessor.from_pretrained(folder)
    batch = processor(text=PROMPTS, generation_mode="image", padding=True, return_tensors="pt")
    tokens: Tensor = model.generate(
        **batch, generation_mode="image", do_sample=False, guidance_scale=scale
    )
    return tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [2.0, 5.0])
def test_greedy_decoding_is_that_of_transformers(
    folder: Path, dtype: torch.dtype, scale: float
) -> None:
    """Token for token, for prompts of different lengths in one batch."""
    expected = greedy_of_transformers(folder, dtype, scale)
    model = load_model(folder, "cpu", dtype)
    assert isinstance(model, Janus) and len(expected.unique()) > 4
    for window in (1, 4, 16):
        config = DecodeConfig(window=window, temperature=0.0, guidance_scale=scale)
        result = JacobiDecoder(model, config=config).generate(PROMPTS, [0, 1, 2])
        assert result.tokens.equal(expected)
        if window > 1:
            assert max(result.stats.forward_passes) < 16


def law_of_three(folder: Path, prompt: str, scale: float, pad: bool = True) -> Tensor:
    """Joint law ``[V, V, V]`` of the first three codes at top-k 12, by full forward passes.

    Without ``pad`` the unconditional prompt is the first and the last token alone.
    """
    model = JanusForConditionalGeneration.from_pretrained(folder).eval()
    batch = JanusProcessor.from_pretrained(folder)(
        text=[prompt], generation_mode="image", return_tensors="pt"
    )
    cond = batch["input_ids"][0]
    blank = torch.where(torch.isin(cond, torch.tensor([0, 3])), cond, 2)
    heads = [cond, blank if pad else cond[[0, -1]]]

    def law(codes: Tensor) -> Tensor:
        """Law ``[M, V]`` of the code behind ``codes``, ``[M, 0 to 2]``."""
        image = model.prepare_embeddings_for_image_generation(codes)
        logits = []
        for head in heads:
            text = model.get_input_embeddings()(head).expand(len(codes), -1, -1)
            hidden = model.model.language_model(
                inputs_embeds=torch.cat([text, image], 1), use_cache=False
            ).last_hidden_state[:, -1]
            logits.append(model.model.generation_head(hidden).double())
        guided = logits[1] + scale * (logits[0] - logits[1])
        best = guided.topk(12)
        kept = torch.full_like(guided, -torch.inf).scatter(1, best.indices, best.values)
        return kept.softmax(-1)

    joint = law(torch.empty(1, 0, dtype=torch.int64))[0]
    for _ in range(2):
        prefixes = joint.nonzero()
        following = torch.zeros(*joint.shape, len(joint), dtype=torch.float64)
        following[tuple(prefixes.T)] = law(prefixes)
        joint = joint[..., None] * following
    return joint


@torch.inference_mode()
def test_sampled_codes_follow_the_law_of_full_forwards(tmp_path: Path) -> None:
    """The first three codes, guided and filtered by top-k, of two prompts in one batch.

    Against the law of a shorter unconditional prompt the same codes fail.
    """
    folder, runs, prompts = tiny_janus(tmp_path, codes=48), 1500, ["w1 w2 w3 w4", "w9"]
    config = DecodeConfig(window=4, guidance_scale=2.0, top_k=12)
    decoder = JacobiDecoder(load_model(folder, "cpu"), config=config)
    tokens = decoder.generate(prompts * runs, range(2 * runs)).tokens[:, :3]
    for i, prompt in enumerate(prompts):
        assert log10_p_of_codes(tokens[i::2], law_of_three(folder, prompt, 2.0), 3) > -4
    other = law_of_three(folder, prompts[0], 2.0, pad=False) + 1e-9
    assert log10_p_of_codes(tokens[::2], other / other.sum(), 3) < -6


def test_defaults_and_pictures(folder: Path) -> None:
    model = load_model(folder, "cpu")
    assert model.defaults.guidance_scale == 5.0 and model.grid == (4, 4) and model.num_codes == 512
    result = JacobiDecoder(model, CSD(), Gumbel(), DecodeConfig(window=8)).generate(["w1 w2"], [0])
    assert result.config.guidance_scale == 5.0 and result.config.top_k == 0
    reference = JanusForConditionalGeneration.from_pretrained(folder)
    pixels = reference.decode_image_tokens(result.tokens.clone())[0].detach()
    (picture,) = result.images
    assert picture.size == (64, 64)
    wanted = ((pixels + 1) * 127.5).round().clamp(0, 255)
    assert (torch.from_numpy(np.array(picture)).float() - wanted).abs().max() <= 1
    with pytest.raises(ValueError, match=r"codes are in \[0, 512\], expected \[0, 512\)"):
        model.decode(torch.tensor([[0] * 15 + [512]]))
