"""Published LlamaGen weights as a folder that ``load_model`` reads.

    python -m csd_policy.models.llamagen_convert --gpt t2i_XL_stage1_256.pt --vq vq_ds16_t2i.pt \
        --output llamagen-xl-256

Queries and keys are reordered: the release turns neighbouring numbers of a head as a pair, Llama
those half a head apart. A text file ``labels.txt`` with the names of a class per line may be added
to the folder of a class-conditional model.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import JanusVQVAE, JanusVQVAEConfig

from csd_policy.models.published import Weights, check_names, count, read_weights
from csd_policy.models.vq16 import published_name, vq_sizes

T5 = "google/flan-t5-xl"
HEADS = {768: 12, 1024: 16, 1280: 20, 1536: 24, 2048: 32, 2560: 40, 3200: 32, 4096: 32}
WHOLE = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attention.wo.weight": "self_attn.o_proj.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
WQKV = "attention.wqkv.weight"
CLASSES = ("embedding_table.weight",)
CAPTIONS = ("cap_proj.fc1.weight", "cap_proj.fc2.weight", "uncond_embedding")
BUFFERS = re.compile(r"freqs_cis$|causal_mask$|\.kv_cache\.|codebook_used$")  # no weights


def pairs_apart(rows: Tensor, head_dim: int) -> Tensor:
    """Rows ``[heads * head_dim, D]`` with the pairs of each head half a head apart."""
    apart: Tensor = rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
    return apart


def convert_network(
    weights: Weights, path: Path, heads: int | None
) -> tuple[dict[str, Any], Weights, Weights]:
    """Settings of ``LlamaConfig``, weights of ``LlamaForCausalLM``, weights of the condition."""
    layers = count(weights, r"layers\.(\d+)\.")
    prefix = "cls_embedding."
    kind = CAPTIONS if f"{prefix}uncond_embedding" in weights else CLASSES
    named = {f"layers.{i}.{old}": f"model.layers.{i}.{new}"
             for i in range(layers) for old, new in LAYER.items()} | WHOLE  # fmt: skip
    joint = [f"layers.{i}.{WQKV}" for i in range(max(1, layers))]
    check_names(weights, [*named, *joint, *(prefix + name for name in kind)], path)
    codes, width = weights["tok_embeddings.weight"].shape
    heads = heads or HEADS.get(width)
    if heads is None or width % heads or width // heads % 4:
        raise ValueError(
            f"{path} is {width} wide with {heads} heads, expected a width of the release "
            f"({', '.join(map(str, HEADS))}), or --heads that divides it into multiples of 4"
        )
    size = width // heads
    kv_heads = (len(weights[joint[0]]) // size - heads) // 2
    network = {new: weights[old] for old, new in named.items()}
    for i, name in enumerate(joint):
        q, k, v = weights[name].split([width, kv_heads * size, kv_heads * size])
        for part, rows in (("q", pairs_apart(q, size)), ("k", pairs_apart(k, size)), ("v", v)):
            network[f"model.layers.{i}.self_attn.{part}_proj.weight"] = rows
    config = {
        "vocab_size": codes,
        "hidden_size": width,
        "intermediate_size": len(weights["layers.0.feed_forward.w1.weight"]),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-5,
    }
    return config, network, {name: weights[prefix + name] for name in kind}


def convert_pictures(weights: Weights, path: Path, image_size: int) -> JanusVQVAE:
    """The picture tokenizer, for square pictures of that many pixels a side."""
    sizes = vq_sizes(weights, path)
    side = image_size // 2 ** (len(sizes["channel_multiplier"]) - 1)
    config = JanusVQVAEConfig(**sizes, num_patches=side)
    model = JanusVQVAE(config)
    ours = {published_name(name): name for name in model.state_dict()}
    check_names(weights, ours, path)
    model.load_state_dict({ours[name]: weight for name, weight in weights.items()})
    return model


def convert(
    gpt: Path,
    vq: Path,
    output: Path,
    t5: str = T5,
    image_size: int | None = None,
    heads: int | None = None,
) -> None:
    """Write the folder ``output``.

    Args:
        gpt: weights of the decoder.
        vq: weights of the picture tokenizer.
        t5: folder or hub id of the T5 encoder, for captions.
        image_size: pixels a side; default is the number at the end of the name of ``gpt``.
        heads: attention heads; default is the release's for the width of the decoder.

    Raises:
        ValueError: a file is missing, lacks weights, or has unknown ones.
    """
    ending = re.search(r"_(256|384|512)$", gpt.stem)
    if image_size is None and ending is None:
        raise ValueError(f"{gpt.name} does not end with _256, _384 or _512, expected --image-size")
    config, network, condition = convert_network(read_weights(gpt, BUFFERS), gpt, heads)
    pixels = image_size or int(ending[1] if ending else 0)
    pictures = convert_pictures(read_weights(vq, BUFFERS), vq, pixels)
    side = pictures.config.num_patches
    output.mkdir(parents=True, exist_ok=True)
    pictures.save_pretrained(output / "vq")
    for name, weights in (("model", network), ("condition", condition)):
        whole = {key: weight.contiguous() for key, weight in weights.items()}
        save_file(whole, output / f"{name}.safetensors", metadata={"format": "pt"})
    encoder = str(Path(t5).resolve()) if Path(t5).is_dir() else t5
    layout = {
        "model_type": "llamagen",
        "grid": [side, side],
        "t5": encoder if set(condition) == set(CAPTIONS) else None,
        "network": config,
    }
    (output / "config.json").write_text(json.dumps(layout, indent=2) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line of this module."""
    parser = argparse.ArgumentParser(description="Convert published weights of LlamaGen.")
    for name, text in (("gpt", "decoder"), ("vq", "picture tokenizer")):
        parser.add_argument(f"--{name}", type=Path, required=True, help=f"weights of the {text}")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--t5", default=T5, help="folder or hub id of the T5 encoder, for captions")
    parser.add_argument("--image-size", type=int, help="pixels a side, if not in the name of gpt")
    parser.add_argument("--heads", type=int, help="attention heads, if gpt is not of a known width")
    try:
        convert(**vars(parser.parse_args(arguments)))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
