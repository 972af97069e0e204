"""Lumina-mGPT 2.0: the adapter against transformers' Chameleon, and MoVQGAN, on tiny checkpoints.

Vocab ids are those of the release: its vocabulary has 155000 ids in front of the codes.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from chameleon_reference import Written, exact_law, greedy_of_transformers
from chi_square import log10_p_of_codes
from safetensors.torch import save_file
from tiny_chameleon import tiny_chameleon
from tiny_models import PROMPTS
from tiny_vqgan import tiny_vqgan, vqgan_pixels
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from csd_policy import load_model
from csd_policy.decoder import JacobiDecoder
from csd_policy.models import chameleon_layout
from csd_policy.models.chameleon import Chameleon
from csd_policy.models.movqgan import load_movqgan
from csd_policy.policies import Exact
from csd_policy.types import DecodeConfig, SamplingDefaults

ROW = ["code"] * 8 + ["<reserved08799>"]
WIDE = Written(  # 64x32 pixels: 1 and 2 times 32 pixels, 4 codes a side of each
    text="Generate an image of 64x32 according to the following prompt:\n",
    opening=["<racm3:break>", "<reserved08801>", "<reserved08802>"],
    blank=["<racm3:break>", "<reserved08801>", "<reserved08802>"],
    slots=[*ROW * 4, "<eoss>"],
    begin="<|im_end|>",  # there is no bos
    first_code=155000,
)


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of at most 2 patches in addition to those of the release."""
    sizes = chameleon_layout._crops
    monkeypatch.setattr(
        chameleon_layout, "_crops", lambda n: [*sizes(n), *([(1, 2)] if n == 256 else [])]
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chameleon(tmp_path_factory.mktemp("lumina2"), "lumina2")


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float32, 4.0), (torch.float64, 4.0), (torch.float32, 1.0)], ids=str
)
def test_greedy_decoding_is_that_of_transformers(
    dtype: torch.dtype, scale: float, folder: Path
) -> None:
    """Token for token, for prompts of different lengths in one batch, with the forced tokens."""
    expected, forced = greedy_of_transformers(folder, WIDE, 16384, dtype, scale)
    model = load_model(folder, "cpu", dtype, size="64x32")
    assert isinstance(model, Chameleon) and model.num_codes == 16384 and model.grid == (4, 8)
    assert len(expected.unique()) > 4 and forced[8::9] == [151670] * 4 and forced[-1] == 151666
    assert model.forced is not None and model.forced.tolist() == forced
    for window in (1, 4, 16):
        config = DecodeConfig(window=window, temperature=0.0, guidance_scale=scale)
        result = JacobiDecoder(model, config=config).generate(PROMPTS, [0, 1, 2])
        assert result.tokens.equal(expected)
        assert window == 1 or min(result.stats.forward_passes) < len(forced)


def test_sampled_codes_have_the_law_of_full_forward_passes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first three codes of 12 in a chi-square test.

    The seeds are fixed; correct code with other random numbers falls below the limit once in
    10,000 tests. Against the law whose unconditional prompt lacks the size the same codes must
    fall below it.
    """
    monkeypatch.setattr(chameleon_layout, "LUMINA2_CODES", range(155000, 155012))
    runs, scale = 2500, 2.0
    model = load_model(folder, "cpu", size="64x32")
    assert isinstance(model, Chameleon) and model.num_codes == 12
    config = DecodeConfig(window=4, guidance_scale=scale, temperature=1.0, top_k=0)
    decoder = JacobiDecoder(model, Exact(), config=config)
    codes = decoder.generate([PROMPTS[0]] * runs, list(range(runs))).tokens[:, :3]
    assert log10_p_of_codes(codes, exact_law(folder, WIDE, 12, scale), 4) > -4
    without = replace(WIDE, blank=["<racm3:break>"])
    assert log10_p_of_codes(codes, exact_law(folder, without, 12, scale), 4) < -4


def pixels_of(picture: object) -> Tensor:
    return torch.from_numpy(np.array(picture)).float()


def test_pictures_of_movqgan(folder: Path, tmp_path: Path) -> None:
    """Weights by their published names, among others, in either file or elsewhere."""
    state = tiny_vqgan(16384, movq=True)
    codes = torch.randint(16384, (2, 32), generator=torch.Generator().manual_seed(0))
    exact = vqgan_pixels(state, codes.view(2, 4, 8))
    movqgan = tmp_path / "movqgan_270M.ckpt"
    others = {"encoder.conv_in.weight": torch.ones(1), "ema_decoder.decay": torch.ones(())}
    torch.save(state | others, movqgan)
    decoder = load_movqgan(str(tmp_path), None, 16384)
    assert decoder is not None
    torch.testing.assert_close(decoder(codes.view(2, 4, 8)), exact, rtol=1e-4, atol=1e-4)
    expected = ((exact + 1) * 127.5).round().clamp(0, 255)
    assert expected.std() > 10
    copy = shutil.copytree(folder, tmp_path / "copy", ignore=shutil.ignore_patterns("hf"))
    model = load_model(copy, "cpu", size="64x32")
    assert model.codebook is None
    with pytest.raises(ValueError, match=r"expected movqgan_270M.safetensors or movqgan_270M.ckpt"):
        model.decode(codes)
    model = load_model(copy, "cpu", size="64x32", vqgan=movqgan)
    assert model.codebook is not None
    assert model.codebook.equal(state["quantize.embedding.weight"])
    pictures = model.decode(codes)
    save_file(state, copy / "movqgan_270M.safetensors")
    pictures += load_model(copy, "cpu", torch.float64, size="64x32").decode(codes)
    for picture, wanted in zip(pictures, torch.cat([expected, expected]), strict=True):
        assert picture.size == (64, 32)
        assert (pixels_of(picture) - wanted).abs().max() <= 1


def test_wrong_movqgan_files(tmp_path: Path) -> None:
    file = tmp_path / "part.safetensors"
    with pytest.raises(ValueError, match=r"vqgan is '.*part.safetensors', expected a file such as"):
        load_movqgan(str(tmp_path), file, 64)
    assert load_movqgan(str(tmp_path), None, 64) is None
    state = tiny_vqgan(64, movq=True)
    save_file(state, file)
    with pytest.raises(ValueError, match=r"has 64 codes, expected 16384"):
        load_movqgan(str(tmp_path), file, 16384)
    for name in ("decoder.conv_in.weight", "decoder.mid.block_1.norm2.conv_y.bias"):
        save_file({n: w for n, w in state.items() if n != name}, file)
        with pytest.raises(ValueError, match=r"part.safetensors do not fit MoVQGAN"):
            load_movqgan(str(tmp_path), file, 64)
    save_file(tiny_vqgan(64), file)  # Chameleon's
    with pytest.raises(ValueError, match=r"part.safetensors do not fit MoVQGAN"):
        load_movqgan(str(tmp_path), file, 64)


def test_published_layout(folder: Path) -> None:
    names = PreTrainedTokenizerFast.from_pretrained(folder).get_vocab()
    layout = chameleon_layout.lumina2("768x768", names, 151645)
    assert layout.grid == (96, 96) and len(layout.forced) == 9313
    assert layout.opening == [151665, *[names["<reserved08824>"]] * 2] == layout.blank
    assert layout.forced[96::97] == [151670] * 96 and layout.forced[-1] == 151666
    assert layout.codes == range(155000, 155000 + 16384)
    assert layout.defaults == SamplingDefaults(4.0, 1.0, 4096)
    wide = chameleon_layout.lumina2("1024x576", names, 151645)
    assert wide.grid == (72, 128)
    assert wide.opening[1:] == [names["<reserved08818>"], names["<reserved08832>"]]
    with pytest.raises(ValueError, match=r"size is '1024x1024'.* at 512, 768, for example"):
        chameleon_layout.lumina2("1024x1024", names, 151645)
    with pytest.raises(ValueError, match=r"lacks <reserved08706>, <racm3:break>, <reserved08824>"):
        chameleon_layout.lumina2("768x768", {}, 0)


def test_which_layout(folder: Path, tmp_path: Path) -> None:
    """By the size of the vocabulary, unless ``layout`` says another."""
    assert load_model(folder, "cpu").grid == (96, 96)
    with pytest.raises(ValueError, match="names 0 codes as IMGIMG...Z"):
        load_model(folder, "cpu", layout="lumina")
    anole = tiny_chameleon(tmp_path, "anole")
    with pytest.raises(ValueError, match=r"vocab id 171383 .* is not below vocab_size"):
        load_model(anole, "cpu", layout="lumina2")
