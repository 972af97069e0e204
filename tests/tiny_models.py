"""Small random checkpoints with the file layout of the published ones.

Two-dimensional weights are multiplied by 3: random ones give nearly uniform laws, on which drafts
are never accepted.
"""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import csd_policy

PROMPTS = ["w1 w2 w3 w4", "w9", "w7 w8 w3 w1 w2 w6"]  # of different lengths


def word_tokenizer(special: Sequence[str], words: Sequence[str]) -> Tokenizer:
    """A word-level tokenizer that puts ``special[0]`` in front; ids in the given order."""
    vocabulary = {word: i for i, word in enumerate([*special, "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{special[0]} $A", special_tokens=[(special[0], 0)]
    )
    return tokenizer


def sharpen(model: torch.nn.Module, *parts: str) -> None:
    """Multiply the matrices of the named parts by 3."""
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and any(part in name for part in parts):
            weight.data.mul_(3)


def tiny_emoji_scenes(folder: Path) -> Path:
    """The shipped model with 8x8 codes and the first two of its layers; pictures of 48 pixels."""
    shipped = Path(csd_policy.__file__).parent / "models/weights/emoji-scenes"
    shutil.copytree(shipped, folder)
    changes = {
        "config.json": {"num_hidden_layers": 2},
        "image_model.json": {"grid": [8, 8]},
        "vq_config.json": {"image_size": 48},
    }
    for name, change in changes.items():
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | change))
    weights = load_file(folder / "model.safetensors")
    kept = {k: v for k, v in weights.items() if not re.search(r"layers\.[2-9]\.", k)}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


def tiny_janus(folder: Path, seed: int = 0, codes: int = 512) -> Path:
    """Janus with 4x4 codes, and its processor."""
    from transformers import (
        GenerationConfig,
        JanusConfig,
        JanusForConditionalGeneration,
        JanusImageProcessor,
        JanusProcessor,
        JanusVisionConfig,
        JanusVQVAEConfig,
        LlamaConfig,
    )

    torch.manual_seed(seed)
    text = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=512, max_position_embeddings=4096, bos_token_id=0,
        eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    vision = JanusVisionConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=64, patch_size=16,
        mlp_ratio=2, projection_dim=64, num_image_tokens=16, depth=2,
    )  # fmt: skip
    vq = JanusVQVAEConfig(
        embed_dim=8, num_embeddings=codes, latent_channels=32, base_channels=32, num_res_blocks=1,
        channel_multiplier=[1, 1, 1, 1, 1], projection_dim=64, image_token_embed_dim=64,
        num_hidden_layers=2,
    )  # fmt: skip
    config = JanusConfig(text_config=text, vision_config=vision, vq_config=vq, image_token_id=5)
    model = JanusForConditionalGeneration(config)
    sharpen(model, "language_model", "generation")
    model.generation_config = GenerationConfig(
        bos_token_id=0, eos_token_id=1, pad_token_id=2, generation_kwargs={"boi_token_id": 3}
    )
    special = ["<|bos|>", "<|eos|>", "<pad>", "<boi>", "<eoi>", "<image>"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer(special, [f"w{i}" for i in range(400)]),
        bos_token="<|bos|>", eos_token="<|eos|>", pad_token="<pad>", unk_token="<unk>",
        padding_side="left",
        extra_special_tokens={
            "image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>"
        },
    )  # fmt: skip
    model.save_pretrained(folder)
    JanusProcessor(JanusImageProcessor(), tokenizer, num_image_tokens=16).save_pretrained(folder)
    return folder
