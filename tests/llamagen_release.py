"""LlamaGen as its release computes it, on weights under the release's names; small random weights.

Written from the paper and the release's layout, without the package: neighbouring numbers of a head
are one complex number, prompts are padded on the left, and every pass recomputes everything.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

Weights = dict[str, Tensor]
WIDTH, HEADS, CODES, CLASSES, TOKENS, CAPTION = 64, 4, 32, 10, 8, 16
CHANNELS, LATENT, CODE_DIM = (32, 64, 64), 32, 8  # two levels down: 4 pixels per code


def network_weights(captions: bool, kv_heads: int = HEADS, layers: int = 2) -> Weights:
    def matrix(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return torch.randn(rows, columns) * gain * columns**-0.5

    torch.manual_seed(0)
    size, hidden = WIDTH // HEADS, 96
    weights = {
        "tok_embeddings.weight": torch.randn(CODES, WIDTH),
        "norm.weight": 1 + torch.randn(WIDTH) / 10,
        "output.weight": matrix(CODES, WIDTH),
    }
    for i in range(layers):
        weights |= {
            f"layers.{i}.attention.wqkv.weight": matrix(
                WIDTH + 2 * kv_heads * size, WIDTH, gain=2.0
            ),
            f"layers.{i}.attention.wo.weight": matrix(WIDTH, WIDTH, gain=2.0),
            f"layers.{i}.feed_forward.w1.weight": matrix(hidden, WIDTH),
            f"layers.{i}.feed_forward.w2.weight": matrix(WIDTH, hidden),
            f"layers.{i}.feed_forward.w3.weight": matrix(hidden, WIDTH),
            f"layers.{i}.attention_norm.weight": 1 + torch.randn(WIDTH) / 10,
            f"layers.{i}.ffn_norm.weight": 1 + torch.randn(WIDTH) / 10,
        }
    if captions:
        weights |= {
            "cls_embedding.cap_proj.fc1.weight": matrix(WIDTH, CAPTION),
            "cls_embedding.cap_proj.fc2.weight": matrix(WIDTH, WIDTH, gain=2.0),
            "cls_embedding.uncond_embedding": torch.randn(TOKENS, CAPTION),
        }
    else:
        weights["cls_embedding.embedding_table.weight"] = torch.randn(CLASSES + 1, WIDTH)
    return weights


class Network:
    """The decoder on full sequences; the rows of ``condition`` are left-padded prompts."""

    def __init__(self, weights: Weights, side: int, dtype: torch.dtype) -> None:
        self.w = {name: weight.to(dtype) for name, weight in weights.items()}
        self.layers = sum(name.endswith("wqkv.weight") for name in weights)
        half = WIDTH // HEADS // 2
        rates = 1.0 / (10000 ** (torch.arange(0, half, 2).float() / half))
        turns = [
            torch.cat([row * rates, column * rates])
            for row in range(side)
            for column in range(side)
        ]
        self.turns = torch.polar(torch.ones(side * side, half), torch.stack(turns))

    def embed_classes(self, classes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Conditional rows, then unconditional ones, and which places count."""
        numbers = torch.tensor([*classes, *[CLASSES] * len(classes)])
        table = self.w["cls_embedding.embedding_table.weight"]
        return table[numbers][:, None], torch.ones(len(numbers), 1, dtype=torch.bool)

    def embed_captions(self, features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The same of T5 features, right-padded ``[B, TOKENS, CAPTION]``."""
        rows = []
        for feature, n in zip(features, mask.sum(1).tolist(), strict=True):
            rows.append(torch.cat([torch.zeros_like(feature[n:]), feature[:n]]))
        blank = self.w["cls_embedding.uncond_embedding"].expand_as(features)
        x = torch.cat([torch.stack(rows), blank]) @ self.w["cls_embedding.cap_proj.fc1.weight"].T
        x = F.gelu(x, approximate="tanh") @ self.w["cls_embedding.cap_proj.fc2.weight"].T
        return x, mask.bool().flip(1).repeat(2, 1)

    def norm(self, x: Tensor, name: str) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-5)
        return y.to(x.dtype) * self.w[f"{name}.weight"]

    def rotate(self, x: Tensor, turns: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turns[:, None].to(pairs.dtype)).flatten(-2)

    def attend(self, x: Tensor, i: int, turns: Tensor, mask: Tensor) -> Tensor:
        joint = x @ self.w[f"layers.{i}.attention.wqkv.weight"].T
        size = WIDTH // HEADS
        kv_heads = (joint.shape[-1] // size - HEADS) // 2
        q, k, v = joint.unflatten(-1, (-1, size)).split([HEADS, kv_heads, kv_heads], dim=-2)
        q, k = self.rotate(q, turns), self.rotate(k, turns)
        k, v = (y.repeat_interleave(HEADS // kv_heads, dim=-2) for y in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * size**-0.5
        share = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1)
        mixed = torch.einsum("bhqk,bkhd->bqhd", share, v).flatten(-2)
        return mixed @ self.w[f"layers.{i}.attention.wo.weight"].T

    def logits(self, condition: Tensor, valid: Tensor, codes: Tensor) -> Tensor:
        """Logits of the code behind ``codes``, int64 ``[R, n]``: ``[R, CODES]``."""
        x = torch.cat([condition, self.w["tok_embeddings.weight"][codes]], dim=1)
        prompt, length = condition.shape[1], x.shape[1]
        none = torch.zeros(prompt, self.turns.shape[1], dtype=self.turns.dtype)
        turns = torch.cat([none, self.turns])[:length]
        mask = torch.ones(length, length, dtype=torch.bool).tril().repeat(len(x), 1, 1)
        mask[:, :, :prompt] &= valid[:, None]
        mask |= torch.eye(length, dtype=torch.bool)
        for i in range(self.layers):
            x = x + self.attend(self.norm(x, f"layers.{i}.attention_norm"), i, turns, mask)
            y = self.norm(x, f"layers.{i}.ffn_norm")
            w1, w2, w3 = (self.w[f"layers.{i}.feed_forward.w{n}.weight"] for n in (1, 2, 3))
            x = x + (F.silu(y @ w1.T) * (y @ w3.T)) @ w2.T
        return self.norm(x[:, -1], "norm") @ self.w["output.weight"].T

    def guided(self, rows: tuple[Tensor, Tensor], codes: Tensor, scale: float) -> Tensor:
        """Logits ``[B, CODES]`` with guidance, behind ``codes [B, n]``."""
        cond, uncond = self.logits(*rows, codes.repeat(2, 1)).chunk(2)
        return uncond + (cond - uncond) * scale

    def greedy(self, rows: tuple[Tensor, Tensor], scale: float) -> Tensor:
        codes = torch.zeros(len(rows[0]) // 2, 0, dtype=torch.long)
        for _ in range(len(self.turns)):
            best = self.guided(rows, codes, scale).argmax(-1)
            codes = torch.cat([codes, best[:, None]], dim=1)
        return codes


def picture_weights() -> Weights:
    """A picture tokenizer with two blocks per level, as in the release."""
    weights: Weights = {}

    def conv(name: str, inputs: int, outputs: int, size: int = 3) -> None:
        gain = (inputs * size * size) ** -0.5
        weights[f"{name}.weight"] = torch.randn(outputs, inputs, size, size) * gain
        weights[f"{name}.bias"] = torch.randn(outputs) / 10

    def norm(name: str, width: int) -> None:
        weights[f"{name}.weight"] = 1 + torch.randn(width) / 10
        weights[f"{name}.bias"] = torch.randn(width) / 10

    def residual(name: str, inputs: int, outputs: int) -> None:
        norm(f"{name}.norm1", inputs)
        conv(f"{name}.conv1", inputs, outputs)
        norm(f"{name}.norm2", outputs)
        conv(f"{name}.conv2", outputs, outputs)
        if inputs != outputs:
            conv(f"{name}.nin_shortcut", inputs, outputs, 1)

    def attention(name: str, width: int) -> None:
        norm(f"{name}.norm", width)
        for part in ("q", "k", "v", "proj_out"):
            conv(f"{name}.{part}", width, width, 1)

    def half(name: str, widths: Sequence[int], first: int, blocks: int, attended: int) -> None:
        """Levels of ``widths``; attention at one of them."""
        width = first
        for level, outputs in enumerate(widths):
            where = f"{name}.conv_blocks.{level}"
            for block in range(blocks):
                residual(f"{where}.res.{block}", width, outputs)
                width = outputs
                if level == attended:
                    attention(f"{where}.attn.{block}", width)
            if level < len(widths) - 1:
                conv(f"{where}.{'down' if name == 'encoder' else 'up'}sample.conv", width, width)
        middle = CHANNELS[-1]
        residual(f"{name}.mid.0", middle, middle)
        attention(f"{name}.mid.1", middle)
        residual(f"{name}.mid.2", middle, middle)
        norm(f"{name}.norm_out", width)

    torch.manual_seed(1)
    conv("encoder.conv_in", 3, CHANNELS[0])
    half("encoder", CHANNELS, CHANNELS[0], 2, attended=2)
    conv("encoder.conv_out", CHANNELS[-1], LATENT)
    conv("decoder.conv_in", LATENT, CHANNELS[-1])
    half("decoder", CHANNELS[::-1], CHANNELS[-1], 3, attended=0)
    conv("decoder.conv_out", CHANNELS[0], 3)
    conv("quant_conv", LATENT, CODE_DIM, 1)
    conv("post_quant_conv", CODE_DIM, LATENT, 1)
    weights["quantize.embedding.weight"] = torch.randn(CODES, CODE_DIM)
    weights["quantize.codebook_used"] = torch.zeros(64)
    return weights


def decode_pictures(w: Weights, codes: Tensor, side: int) -> Tensor:
    """Pixels ``[B, 3, 4 side, 4 side]`` of codes ``[B, side^2]``."""

    def conv(x: Tensor, name: str) -> Tensor:
        weight = w[f"{name}.weight"]
        return F.conv2d(x, weight, w[f"{name}.bias"], padding=weight.shape[-1] // 2)

    def norm(x: Tensor, name: str) -> Tensor:
        return F.group_norm(x, 32, w[f"{name}.weight"], w[f"{name}.bias"], eps=1e-6)

    def residual(x: Tensor, name: str) -> Tensor:
        y = conv(F.silu(norm(x, f"{name}.norm1")), f"{name}.conv1")
        y = conv(F.silu(norm(y, f"{name}.norm2")), f"{name}.conv2")
        return y + (conv(x, f"{name}.nin_shortcut") if f"{name}.nin_shortcut.bias" in w else x)

    def attention(x: Tensor, name: str) -> Tensor:
        y = norm(x, f"{name}.norm")
        q, k, v = (conv(y, f"{name}.{part}").flatten(2) for part in "qkv")
        share = (torch.einsum("bcq,bck->bqk", q, k) * q.shape[1] ** -0.5).softmax(-1)
        mixed = torch.einsum("bqk,bck->bcq", share, v).unflatten(2, x.shape[2:])
        return x + conv(mixed, f"{name}.proj_out")

    book = F.normalize(w["quantize.embedding.weight"], dim=-1)
    x = book[codes].unflatten(1, (side, side)).permute(0, 3, 1, 2)
    x = conv(conv(x, "post_quant_conv"), "decoder.conv_in")
    x = residual(x, "decoder.mid.0")
    x = residual(attention(x, "decoder.mid.1"), "decoder.mid.2")
    for level in range(len(CHANNELS)):
        where = f"decoder.conv_blocks.{level}"
        for block in range(3):
            x = residual(x, f"{where}.res.{block}")
            if level == 0:
                x = attention(x, f"{where}.attn.{block}")
        if level < len(CHANNELS) - 1:
            x = conv(F.interpolate(x, scale_factor=2.0), f"{where}.upsample.conv")
    return conv(F.silu(norm(x, "decoder.norm_out")), "decoder.conv_out")
