"""Janus-Pro: the adapter against transformers' own image generation, on a tiny checkpoint."""

from pathlib import Path

import numpy as np
import pytest
import torch
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
