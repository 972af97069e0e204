"""Random weights of the decoders of VQGANs, and the decoders written out to compare with."""

import torch
from torch import Tensor
from torch.nn import functional as F

VQ = {"embed_dim": 8, "latent_channels": 32, "base_channels": 32, "num_res_blocks": 1}
LEVELS = [1, 1, 1, 1, 2]  # unequal, so that levels in reverse order do not fit
MOVQ = {"embed_dim": 4, "latent_channels": 4, "base_channels": 32, "num_res_blocks": 2}
MOVQ_LEVELS = [1, 2, 2, 4]


def tiny_vqgan(codes: int, seed: int = 1, movq: bool = False) -> dict[str, Tensor]:
    """Random weights of the decoder of a VQGAN, or MoVQGAN, by the names of its release."""
    generator = torch.Generator().manual_seed(seed)
    sizes, levels = (MOVQ, MOVQ_LEVELS) if movq else (VQ, LEVELS)
    state: dict[str, Tensor] = {}

    def conv(name: str, inputs: int, outputs: int, size: int) -> None:
        scale = (inputs * size * size) ** -0.5
        shape = (outputs, inputs, size, size)
        state[f"{name}.weight"] = scale * torch.randn(shape, generator=generator)
        state[f"{name}.bias"] = 0.1 * torch.randn(outputs, generator=generator)

    def norm(name: str, channels: int) -> None:
        if movq:
            conv(f"{name}.conv_y", sizes["embed_dim"], channels, 1)
            conv(f"{name}.conv_b", sizes["embed_dim"], channels, 1)
            name += ".norm_layer"
        state[f"{name}.weight"] = 1 + 0.1 * torch.randn(channels, generator=generator)
        state[f"{name}.bias"] = 0.1 * torch.randn(channels, generator=generator)

    def attention(name: str, channels: int) -> None:
        norm(f"{name}.norm", channels)
        for part in ("q", "k", "v", "proj_out"):
            conv(f"{name}.{part}", channels, channels, 1)

    def block(name: str, inputs: int, outputs: int) -> None:
        norm(f"{name}.norm1", inputs)
        conv(f"{name}.conv1", inputs, outputs, 3)
        norm(f"{name}.norm2", outputs)
        conv(f"{name}.conv2", outputs, outputs, 3)
        if inputs != outputs:
            conv(f"{name}.nin_shortcut", inputs, outputs, 1)

    base, dim, latent = sizes["base_channels"], sizes["embed_dim"], sizes["latent_channels"]
    state["quantize.embedding.weight"] = torch.randn(codes, dim, generator=generator)
    conv("post_quant_conv", dim, latent, 1)
    channels = base * levels[-1]
    conv("decoder.conv_in", latent, channels, 3)
    for name in ("block_1", "block_2"):
        block(f"decoder.mid.{name}", channels, channels)
    attention("decoder.mid.attn_1", channels)
    for level in reversed(range(len(levels))):
        for i in range(sizes["num_res_blocks"] + 1):
            block(f"decoder.up.{level}.block.{i}", channels, base * levels[level])
            channels = base * levels[level]
            if movq and level == len(levels) - 1:
                attention(f"decoder.up.{level}.attn.{i}", channels)
        if level:
            conv(f"decoder.up.{level}.upsample.conv", channels, channels, 3)
    norm("decoder.norm_out", channels)
    conv("decoder.conv_out", channels, 3, 3)
    return state


def vqgan_pixels(state: dict[str, Tensor], codes: Tensor) -> Tensor:
    """The decoder of taming-transformers written out: codes ``[B, h, w]`` to ``[B, H, W, 3]``.

    With the weights of MoVQGAN it is that of ai-forever/MoVQGAN.
    """
    vectors = state["quantize.embedding.weight"][codes].permute(0, 3, 1, 2)

    def conv(name: str, x: Tensor) -> Tensor:
        weight = state[f"{name}.weight"]
        return F.conv2d(x, weight, state[f"{name}.bias"], padding=weight.shape[-1] // 2)

    def norm(name: str, x: Tensor) -> Tensor:
        if f"{name}.norm_layer.weight" in state:
            size = x.shape[-1] // vectors.shape[-1]
            z = vectors.repeat_interleave(size, 2).repeat_interleave(size, 3)
            return norm(f"{name}.norm_layer", x) * conv(f"{name}.conv_y", z) + conv(
                f"{name}.conv_b", z
            )
        return F.group_norm(x, 32, state[f"{name}.weight"], state[f"{name}.bias"], eps=1e-6)

    def block(name: str, x: Tensor) -> Tensor:
        h = conv(f"{name}.conv1", F.silu(norm(f"{name}.norm1", x)))
        h = conv(f"{name}.conv2", F.silu(norm(f"{name}.norm2", h)))
        return h + (conv(f"{name}.nin_shortcut", x) if f"{name}.nin_shortcut.bias" in state else x)

    def attention(name: str, x: Tensor) -> Tensor:
        h = norm(f"{name}.norm", x)
        q, k, v = (conv(f"{name}.{part}", h).flatten(2).transpose(1, 2) for part in "qkv")
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return x + conv(f"{name}.proj_out", seen)

    x = conv("decoder.conv_in", conv("post_quant_conv", vectors))
    x = block("decoder.mid.block_1", x)
    x = attention("decoder.mid.attn_1", x)
    x = block("decoder.mid.block_2", x)
    for level in reversed(range(5)):
        for i in range(3):
            if f"decoder.up.{level}.block.{i}.conv1.weight" in state:
                x = block(f"decoder.up.{level}.block.{i}", x)
            if f"decoder.up.{level}.attn.{i}.q.weight" in state:
                x = attention(f"decoder.up.{level}.attn.{i}", x)
        if f"decoder.up.{level}.upsample.conv.weight" in state:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = conv(f"decoder.up.{level}.upsample.conv", x)
    x = conv("decoder.conv_out", F.silu(norm("decoder.norm_out", x)))
    return x.permute(0, 2, 3, 1)
