"""MoVQGAN (arXiv 2209.09002), the pixel decoder of Lumina-mGPT 2.0, by transformers' Emu3 classes.

Emu3's decoder is that of MoVQGAN with layers between the frames of a film, which are left out.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.emu3.configuration_emu3 import Emu3VQVAEConfig
from transformers.models.emu3.modeling_emu3 import Emu3VQVAEDecoder

from csd_policy.models.chameleon_vq import PARTS
from csd_policy.models.published import count, find, read_weights

MOVQGAN = ("movqgan_270M.safetensors", "movqgan_270M.ckpt")
RENAMES = (  # published to transformers' names, each after those above it
    (r"^quantize\.", ""),
    (r"^decoder\.mid\.attn_1\.norm\.", "decoder.mid.attn_norm."),
    (r"^(decoder\.up\.\d+)\.attn\.(\d+)\.norm\.", r"\1.attn_norms.\2."),
    (r"\.(attn_1|attn\.\d+)\.([qkv])\.", r".\1.\2_proj."),
    (r"\.(attn_1|attn\.\d+)\.proj_out\.", r".\1.out_proj."),
    (r"^decoder\.mid\.", "decoder.middle_block."),
    (r"^decoder\.up\.", "decoder.up_block.up."),
)


class MoVQDecoder(nn.Module):
    """Pixels of codes: ``quantize.embedding``, ``post_quant_conv`` and ``decoder`` of MoVQGAN.

    The vectors of the codes modulate every norm of the decoder.
    """

    def __init__(self, config: Emu3VQVAEConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.codebook_size, config.embed_dim)
        self.post_quant_conv = nn.Conv2d(config.embed_dim, config.latent_channels, 1)
        self.decoder = Emu3VQVAEDecoder(config)
        self.decoder.time_res_stack = nn.ModuleList()

    def forward(self, codes: Tensor) -> Tensor:
        """Pixels ``[B, H, W, 3]``, about [-1, 1], of codebook ids ``[B, rows, columns]``."""
        vectors = self.embedding(codes).permute(0, 3, 1, 2)
        latents = self.post_quant_conv(vectors)
        pixels: Tensor = self.decoder(latents[:, None], vectors[:, None])  # films of one frame
        return pixels.permute(0, 2, 3, 1)


def load_movqgan(source: str, file: str | Path | None, num_codes: int) -> MoVQDecoder | None:
    """The pixel decoder in fp32, or None if there are no weights for one.

    Sizes are those of the weights: 67M, 102M and 270M have the same layout.

    Args:
        source: folder or hub id, which may hold one of ``MOVQGAN``.
        file: a file elsewhere, in the place of those.
        num_codes: size of the codebook.

    Raises:
        ValueError: ``file`` is not there, needs pickle, or holds no such decoder.
    """
    if file is not None and not Path(file).is_file():
        raise ValueError(f"vqgan is {str(file)!r}, expected a file such as {' or '.join(MOVQGAN)}")
    found = [file] if file is not None else [f for name in MOVQGAN if (f := find(source, name))]
    if not found:
        return None
    weights = {n: w.float() for n, w in read_weights(Path(found[0])).items() if n.startswith(PARTS)}
    try:
        with torch.device("meta"):
            decoder = MoVQDecoder(_sizes(weights))
        decoder.load_state_dict(dict(map(_rename, weights, weights.values())), assign=True)
    except (KeyError, RuntimeError) as error:
        raise ValueError(f"the weights of {found[0]} do not fit MoVQGAN: {error}") from error
    if decoder.embedding.num_embeddings != num_codes:
        raise ValueError(
            f"{found[0]} has {decoder.embedding.num_embeddings} codes, expected {num_codes}"
        )
    return decoder.eval().requires_grad_(False)


def _sizes(weights: Mapping[str, Tensor]) -> Any:
    levels = range(count(weights, r"decoder\.up\.(\d+)\."))
    base = weights["decoder.conv_out.weight"].shape[1]
    widths = [len(weights[f"decoder.up.{i}.block.0.conv2.weight"]) for i in levels]
    codes, dim = weights["quantize.embedding.weight"].shape
    config: Any = Emu3VQVAEConfig
    return config(
        codebook_size=codes,
        embed_dim=dim,
        latent_channels=weights["decoder.conv_in.weight"].shape[1],
        temporal_downsample_factor=1,
        base_channels=base,
        channel_multiplier=[width // base for width in widths],
        num_res_blocks=count(weights, r"decoder\.up\.0\.block\.(\d+)\.") - 1,
        attn_resolutions=[i for i in levels if f"decoder.up.{i}.attn.0.q.weight" in weights],
        hidden_size=len(weights["decoder.conv_in.weight"]),
        attn_implementation="sdpa",
    )


def _rename(name: str, weight: Tensor) -> tuple[str, Tensor]:
    """Name in transformers, where projections of attention are no longer 1x1 convolutions."""
    for pattern, new in RENAMES:
        name = re.sub(pattern, new, name)
    return name, weight.flatten(1) if name.endswith("_proj.weight") else weight
