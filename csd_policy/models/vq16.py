"""VQ-16, the picture tokenizer of LlamaGen and Janus-Pro, as both publish it: names and sizes."""

import re
from pathlib import Path
from typing import Any

from csd_policy.models.published import Weights, check_names, count


def published_name(name: str) -> str:
    """The releases' name of a weight of ``JanusVQVAE``."""
    name = re.sub(r"\.(?:down|up)\.(\d+)\.", r".conv_blocks.\1.", name)
    name = re.sub(r"(\.conv_blocks\.\d+)\.block\.", r"\1.res.", name)
    for ours, theirs in {"block_1": "0", "attn_1": "1", "block_2": "2"}.items():
        name = name.replace(f".mid.{ours}.", f".mid.{theirs}.")
    return name


def vq_sizes(weights: Weights, path: Path | str, prefix: str = "") -> dict[str, Any]:
    """Settings of ``JanusVQVAEConfig`` that the weights tell, without ``num_patches``.

    Args:
        weights: by the releases' names.
        path: where they are from, for the message.
        prefix: of the names of the tokenizer.

    Raises:
        ValueError: weights that tell the sizes are missing.
    """
    levels = count(weights, re.escape(prefix) + r"encoder\.conv_blocks\.(\d+)\.")
    blocks = count(weights, re.escape(prefix) + r"encoder\.conv_blocks\.0\.res\.(\d+)\.")
    names = ["quantize.embedding.weight", "post_quant_conv.weight", "encoder.conv_in.weight"]
    names += [f"encoder.conv_blocks.{i}.res.0.conv1.weight" for i in range(max(1, levels))]
    if not {prefix + name for name in names} <= set(weights):
        check_names(weights, [*weights, *(prefix + name for name in names)], path)
    book, out, first, *widths = (weights[prefix + name] for name in names)
    return {
        "embed_dim": book.shape[1],
        "num_embeddings": len(book),
        "latent_channels": len(out),
        "base_channels": len(first),
        "channel_multiplier": [len(width) // len(first) for width in widths],
        "num_res_blocks": blocks,
    }
