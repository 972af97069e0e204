"""Small random checkpoints of Lumina-mGPT 1.0 and Anole, and a VQGAN decoder to compare with.

The vocab ids of the codes are shuffled, so that an offset in place of the names gives other tokens.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_models import sharpen, word_tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import ChameleonConfig, ChameleonForConditionalGeneration, PreTrainedTokenizerFast
from transformers.models.chameleon.configuration_chameleon import ChameleonVQVAEConfig

HEADS, KEY_HEADS, RANKS = 4, 2, 2
VQ = {"embed_dim": 8, "latent_channels": 32, "base_channels": 32, "num_res_blocks": 1}
LEVELS = [1, 1, 1, 1, 2]  # unequal, so that levels in reverse order do not fit


def code_names(codes: int) -> list[str]:
    """Names of the codes in the order of the codebook."""
    letters = str.maketrans("0123456789", "ABCDEFGHIJ")
    return [f"IMGIMG{str(code).translate(letters)}Z" for code in range(codes)]


def tiny_vocabulary(codes: int, seed: int = 0) -> list[str]:
    """Names in the order of their vocab ids, behind ``<s>``, ``<pad>``, ``</s>`` and ``<unk>``."""
    order = torch.randperm(codes, generator=torch.Generator().manual_seed(seed)).tolist()
    names = [code_names(codes)[i] for i in order]
    special = ["<eoss>", "<racm3:break>", "<image>", "<reserved08706>", "<reserved08799>"]
    sides = [f"<reserved{8800 + n:05d}>" for n in range(1, 33)]
    words = ["Generate", "an", "image", "of", "according", "to", "the", "following", "prompt:"]
    return [*special, *names, *sides, *words, *(f"w{i}" for i in range(20))]


def tiny_chameleon(folder: Path, kind: str, codes: int = 64, seed: int = 0) -> Path:
    """Lumina-mGPT or Anole in the layout of its release, and in ``hf`` as transformers has it.

    Lumina's norms are ``[ranks, head_dim]`` and it has no pixel decoder; Anole has 4x4 codes.
    """
    torch.manual_seed(seed)
    tokenizer = word_tokenizer(["<s>", "<pad>", "</s>"], tiny_vocabulary(codes))
    config = ChameleonConfig(
        vocab_size=len(tokenizer.get_vocab()), hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS,
        model_parallel_size=RANKS, swin_norm=kind == "anole", pad_token_id=1, bos_token_id=0,
        vocabulary_map=tokenizer.get_vocab(),
        vq_config=ChameleonVQVAEConfig(
            num_embeddings=codes, channel_multiplier=LEVELS, resolution=64, **VQ
        ),
    )  # fmt: skip
    model = ChameleonForConditionalGeneration(config)
    sharpen(model, "layers", "lm_head", "embed_tokens")
    norms = {n: w for n, w in model.named_parameters() if "q_norm" in n or "k_norm" in n}
    for weight in norms.values():
        ranks = 0.3 * torch.randn(RANKS, weight.shape[1]) + weight.data[:RANKS]
        weight.data = ranks.repeat_interleave(len(weight) // RANKS, 0)
    for path in (folder, folder / "hf"):
        model.save_pretrained(path)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    if kind == "lumina":
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**written, "mask_image_logits": False}))
        state |= {n: w[:: len(w) // RANKS].clone() for n, w in norms.items()}
    else:
        state |= {f"model.vqmodel.{n}": w for n, w in tiny_vqgan(codes).items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


def tiny_vqgan(codes: int, seed: int = 1) -> dict[str, Tensor]:
    """Random weights of the VQGAN's decoder by the names of its release."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}

    def conv(name: str, inputs: int, outputs: int, size: int) -> None:
        scale = (inputs * size * size) ** -0.5
        shape = (outputs, inputs, size, size)
        state[f"{name}.weight"] = scale * torch.randn(shape, generator=generator)
        state[f"{name}.bias"] = 0.1 * torch.randn(outputs, generator=generator)

    def norm(name: str, channels: int) -> None:
        state[f"{name}.weight"] = 1 + 0.1 * torch.randn(channels, generator=generator)
        state[f"{name}.bias"] = 0.1 * torch.randn(channels, generator=generator)

    def block(name: str, inputs: int, outputs: int) -> None:
        norm(f"{name}.norm1", inputs)
        conv(f"{name}.conv1", inputs, outputs, 3)
        norm(f"{name}.norm2", outputs)
        conv(f"{name}.conv2", outputs, outputs, 3)
        if inputs != outputs:
            conv(f"{name}.nin_shortcut", inputs, outputs, 1)

    base, dim, latent = VQ["base_channels"], VQ["embed_dim"], VQ["latent_channels"]
    state["quantize.embedding.weight"] = torch.randn(codes, dim, generator=generator)
    conv("post_quant_conv", dim, latent, 1)
    channels = base * LEVELS[-1]
    conv("decoder.conv_in", latent, channels, 3)
    for name in ("block_1", "block_2"):
        block(f"decoder.mid.{name}", channels, channels)
    norm("decoder.mid.attn_1.norm", channels)
    for name in ("q", "k", "v", "proj_out"):
        conv(f"decoder.mid.attn_1.{name}", channels, channels, 1)
    for level in reversed(range(len(LEVELS))):
        for i in range(VQ["num_res_blocks"] + 1):
            block(f"decoder.up.{level}.block.{i}", channels, base * LEVELS[level])
            channels = base * LEVELS[level]
        if level:
            conv(f"decoder.up.{level}.upsample.conv", channels, channels, 3)
    norm("decoder.norm_out", channels)
    conv("decoder.conv_out", channels, 3, 3)
    return state


def vqgan_pixels(state: dict[str, Tensor], codes: Tensor) -> Tensor:
    """The decoder of taming-transformers written out: codes ``[B, h, w]`` to ``[B, H, W, 3]``."""

    def conv(name: str, x: Tensor) -> Tensor:
        weight = state[f"{name}.weight"]
        return F.conv2d(x, weight, state[f"{name}.bias"], padding=weight.shape[-1] // 2)

    def norm(name: str, x: Tensor) -> Tensor:
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

    x = state["quantize.embedding.weight"][codes].permute(0, 3, 1, 2)
    x = conv("decoder.conv_in", conv("post_quant_conv", x))
    x = block("decoder.mid.block_1", x)
    x = attention("decoder.mid.attn_1", x)
    x = block("decoder.mid.block_2", x)
    for level in reversed(range(len(LEVELS))):
        for i in range(VQ["num_res_blocks"] + 1):
            x = block(f"decoder.up.{level}.block.{i}", x)
        if level:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = conv(f"decoder.up.{level}.upsample.conv", x)
    x = conv("decoder.conv_out", F.silu(norm("decoder.norm_out", x)))
    return x.permute(0, 2, 3, 1)
