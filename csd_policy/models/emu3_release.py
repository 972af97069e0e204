"""Emu3-Gen as BAAI published it: config, tiktoken vocabulary, and the vision tokenizer.

Names and texts follow github.com/baaivision/Emu3.
"""

import base64
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from tokenizers import normalizers
from transformers import (
    Emu3ForCausalLM,
    Emu3ImageProcessor,
    Emu3Processor,
    Emu3TextConfig,
    Emu3VQVAE,
    Emu3VQVAEConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.convert_slow_tokenizer import TikTokenConverter

from csd_policy.models.published import check_names, find, stored_weights
from csd_policy.models.transformer import load_checkpoint

MODEL_TYPE, VISION_TYPE = "Emu3", "Emu3VisionVQ"
RANKS, VISION_TOKENS = "emu3.tiktoken", "emu3_vision_tokens.txt"
FIRST_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EXTRAS = 205  # <|extra_0|> and so on, in front of the vision tokens
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ROLES = {
    "image_token": "<|extra_0|>",  # transformers' mark of a picture in a prompt
    "boi_token": "<|image start|>",
    "eoi_token": "<|image end|>",
    "image_wrapper_token": "<|image token|>",
    "eof_token": "<|extra_201|>",
}
VISION_CONFIG = {"ch": "base_channels", "ch_mult": "channel_multiplier",
                 "z_channels": "latent_channels", "double_z": "double_latent"}  # fmt: skip
VISION_NAMES = (  # transformers' patterns and the release's names
    (r"\.(down|up)_block\.", "."),
    (r"\.middle_block\.attn_norm\.", ".mid.attn_1.norm."),
    (r"\.middle_block\.", ".mid."),
    (r"\.attn_norms\.(\d+)\.", r".attn.\1.norm."),
    (r"(\.attn(?:_1|\.\d+))\.([qkv])_proj\.", r"\1.\2."),
    (r"(\.attn(?:_1|\.\d+))\.out_proj\.", r"\1.proj_out."),
)


class _Converter(TikTokenConverter):
    """Reads the file of ranks without the package tiktoken."""

    @staticmethod
    def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
        ranks = {}
        for number, line in enumerate(Path(tiktoken_url).read_bytes().splitlines()):
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
            if int(rank) != number:
                raise ValueError(f"line {number} has rank {int(rank)}")
        return ranks


def load_tokenizer(source: str) -> PreTrainedTokenizerFast:
    """The tokenizer of emu3.tiktoken and emu3_vision_tokens.txt.

    Special tokens follow the ranks: three, 205 extras, then those of the second file.

    Raises:
        ValueError: a file is missing or broken.
    """
    ranks, vision = find(source, RANKS), find(source, VISION_TOKENS)
    if ranks is None or vision is None:
        raise ValueError(
            f"{source} lacks {RANKS if ranks is None else VISION_TOKENS}, expected the tokenizer "
            "of BAAI/Emu3-Gen; a tokenizer.json needs model_type emu3 in config.json"
        )
    special = [*FIRST_SPECIAL, *(f"<|extra_{i}|>" for i in range(EXTRAS))]
    special += [line.strip() for line in vision.read_text().splitlines() if line.strip()]
    if lacks := sorted(set(ROLES.values()) - set(special)):
        raise ValueError(f"{vision} lacks {', '.join(lacks)}")
    try:
        converter: Any = _Converter  # transformers' constructor has no types
        tokenizer = converter(str(ranks), PATTERN, extra_special_tokens=special).converted()
    except ValueError as error:
        raise ValueError(
            f"{ranks} is no list of base64 tokens and ranks 0, 1, ...: {error}"
        ) from error
    tokenizer.normalizer = normalizers.NFC()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|extra_203|>", eos_token="<|extra_204|>",
        pad_token="<|endoftext|>", padding_side="left", extra_special_tokens=ROLES,
    )  # fmt: skip


def load_release_processor(source: str, vocab_size: int) -> Emu3Processor:
    """The processor of transformers with the release's tokenizer, for pixels in [-1, 1].

    Raises:
        ValueError: a file is missing or broken, or ids are not below ``vocab_size``.
    """
    tokenizer = load_tokenizer(source)
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"{RANKS} and {VISION_TOKENS} of {source} make {len(tokenizer)} tokens, expected at "
            f"most vocab_size {vocab_size} of config.json"
        )
    images = Emu3ImageProcessor(image_mean=[0.5] * 3, image_std=[0.5] * 3)
    return Emu3Processor(images, tokenizer)


def load_language_model(source: str, dtype: torch.dtype, **options: Any) -> Any:
    """An ``Emu3ForCausalLM``, whose names of weights are the release's."""
    published, _ = PretrainedConfig.get_config_dict(source)
    known = {field.name for field in fields(Emu3TextConfig)} | {"rope_theta"}
    ours = {k: v for k, v in published.items() if k in known and k != "model_type"}
    config = Emu3TextConfig(**ours)
    return load_checkpoint(Emu3ForCausalLM, source, dtype, config=config, **options)


def vision_name(name: str) -> str:
    """The release's name of a weight of ``Emu3VQVAE``."""
    for ours, theirs in VISION_NAMES:
        name = re.sub(ours, theirs, name)
    return name


def load_vision_tokenizer(source: str, dtype: torch.dtype) -> Any:
    """An ``Emu3VQVAE``, from BAAI/Emu3-VisionTokenizer or in transformers' own layout.

    Raises:
        ValueError: it is neither, or weights are missing, unknown, or do not fit.
    """
    try:
        published, _ = PretrainedConfig.get_config_dict(source)
    except OSError as error:
        raise ValueError(f"vq is {source!r}, whose config.json cannot be read: {error}") from error
    kind = published.get("model_type")
    if kind == Emu3VQVAEConfig.model_type:
        return load_checkpoint(Emu3VQVAE, source, dtype)
    if kind != VISION_TYPE:
        raise ValueError(
            f"vq is {source!r} of model_type {kind!r}, expected {VISION_TYPE} or "
            f"{Emu3VQVAEConfig.model_type}"
        )
    known = {field.name for field in fields(Emu3VQVAEConfig)} - {"hidden_size", "model_type"}
    ours = {VISION_CONFIG.get(k, k): v for k, v in published.items()}
    config = Emu3VQVAEConfig(**{k: v for k, v in ours.items() if k in known})
    config.hidden_size = config.base_channels * config.channel_multiplier[-1]
    with torch.device("meta"):
        network: Any = Emu3VQVAE(config)
    shapes = {name: weight.shape for name, weight in network.state_dict().items()}
    weights = stored_weights(source)
    check_names(weights, map(vision_name, shapes), source)
    state = {}
    for name, shape in shapes.items():
        weight = weights[vision_name(name)]  # attention is of 1x1 convolutions in the release
        linear = len(shape) == 2 and weight.ndim == 4 and weight.shape[2:] == (1, 1)
        state[name] = weight.flatten(1) if linear else weight
    return load_checkpoint(Emu3VQVAE, source, dtype, state, config=config)
