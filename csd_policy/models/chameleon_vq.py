"""The weights of a Chameleon checkpoint: language model, and pixel decoder of the VQGAN."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import ChameleonForConditionalGeneration
from transformers.models.janus.configuration_janus import JanusVQVAEConfig
from transformers.models.janus.modeling_janus import JanusVQVAEDecoder

from csd_policy.models.published import find, read_weights
from csd_policy.models.transformer import load_checkpoint

VQGAN = ("vqgan.safetensors", "vqgan.ckpt")
PREFIX = "model.vqmodel."  # of the VQGAN among the weights of the language model
PARTS = ("decoder.", "post_quant_conv.", "quantize.embedding.")
CODEBOOK = f"{PREFIX}quantize.embedding.weight"


def load_language_model(
    source: str, config: Any, stored: Mapping[str, Tensor], dtype: torch.dtype, **options: Any
) -> Any:
    """A ``ChameleonForConditionalGeneration`` in evaluation mode; the VQGAN may be missing.

    Raises:
        ValueError: weights are missing, are left over, or have another shape.
    """
    state = {
        name: _one_a_head(name, weight, config)
        for name, weight in stored.items()
        if not name.startswith(f"{PREFIX}decoder.")  # transformers has none
    }
    return load_checkpoint(
        ChameleonForConditionalGeneration, source, dtype, state, PREFIX, config=config, **options
    )


def _one_a_head(name: str, weight: Tensor, config: Any) -> Tensor:
    """Norms of queries and keys as transformers has them, ``[heads, head_dim]``.

    Lumina-mGPT stores one for each rank of model parallelism, ``[model_parallel_size, head_dim]``.
    """
    kind = re.search(r"\.([qk])_norm\.(weight|bias)$", name)
    if kind is None:
        return weight
    heads = config.num_attention_heads if kind[1] == "q" else config.num_key_value_heads
    if weight.ndim != 2 or heads % len(weight):
        raise ValueError(
            f"{name} has shape {list(weight.shape)}, expected [ranks, head_dim] with a number of "
            f"ranks that divides {heads} heads"
        )
    return weight.repeat_interleave(heads // len(weight), 0)


class PixelDecoder(nn.Module):
    """Pixels of codes: ``quantize.embedding``, ``post_quant_conv`` and ``decoder`` of the VQGAN.

    The decoder is that of Janus without attention on its levels.

    Args:
        config: a ``ChameleonVQVAEConfig``.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        sizes = JanusVQVAEConfig(
            embed_dim=config.embed_dim,
            num_embeddings=config.num_embeddings,
            latent_channels=config.latent_channels,
            base_channels=config.base_channels,
            channel_multiplier=list(config.channel_multiplier),
            num_res_blocks=config.num_res_blocks,
        )
        self.embedding = nn.Embedding(config.num_embeddings, config.embed_dim)
        self.post_quant_conv = nn.Conv2d(config.embed_dim, config.latent_channels, 1)
        self.decoder: Any = JanusVQVAEDecoder(sizes)
        for level in self.decoder.up:
            level.attn = nn.ModuleList()

    def forward(self, codes: Tensor) -> Tensor:
        """Pixels ``[B, H, W, 3]``, about [-1, 1], of codebook ids ``[B, rows, columns]``."""
        latents = self.post_quant_conv(self.embedding(codes).permute(0, 3, 1, 2))
        pixels: Tensor = self.decoder(latents).permute(0, 2, 3, 1)
        return pixels


def load_pixel_decoder(
    source: str, file: str | Path | None, stored: Mapping[str, Tensor], config: Any
) -> PixelDecoder | None:
    """The pixel decoder in fp32, or None if there are no weights for one.

    Args:
        source: folder or hub id, which may hold one of ``VQGAN``.
        file: a file elsewhere, in the place of those.
        stored: weights of the language model, which may hold ``model.vqmodel.decoder.*``.
        config: a ``ChameleonVQVAEConfig``.

    Raises:
        ValueError: ``file`` is not there, needs pickle, or weights do not fit ``config``.
    """
    if file is not None and not Path(file).is_file():
        raise ValueError(f"vqgan is {str(file)!r}, expected a file such as {' or '.join(VQGAN)}")
    found = [file] if file is not None else [f for name in VQGAN if (f := find(source, name))]
    weights: Mapping[str, Tensor]
    if found:
        where, weights = str(found[0]), read_weights(Path(found[0]))
    elif any(name.startswith(f"{PREFIX}decoder.") for name in stored):
        where = f"{source}, {PREFIX}*"
        weights = {
            name.removeprefix(PREFIX): weight
            for name, weight in stored.items()
            if name.startswith(PREFIX)
        }
    else:
        return None
    top = len(config.channel_multiplier) - 1
    state = {
        _rename(name, top): weight.float()
        for name, weight in weights.items()
        if name.startswith(PARTS)
    }
    with torch.device("meta"):
        decoder = PixelDecoder(config)
    try:
        decoder.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise ValueError(f"the weights of {where} do not fit the VQGAN: {error}") from error
    return decoder.eval().requires_grad_(False)


def _rename(name: str, top: int) -> str:
    """Levels count from the finest in the VQGAN, from the coarsest in Janus."""
    name = re.sub(r"^decoder\.up\.(\d+)", lambda m: f"decoder.up.{top - int(m[1])}", name)
    return name.removeprefix("quantize.")
