"""Janus-Pro as deepseek-ai published it (model_type ``multi_modality``): config, names, prompt.

The names follow the modules of github.com/deepseek-ai/Janus. The SigLIP tower and the VQ-16
tokenizer have their sizes in that code alone; here the weights tell them.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import (
    JanusConfig,
    JanusForConditionalGeneration,
    JanusVisionConfig,
    JanusVQVAEConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

from csd_policy.models.published import Weights, check_names, count, stored_weights
from csd_policy.models.transformer import load_checkpoint
from csd_policy.models.vq16 import published_name as vq_name
from csd_policy.models.vq16 import vq_sizes

MODEL_TYPE = "multi_modality"
FILES = ("model.safetensors", "pytorch_model.bin")  # the release has the second
TOWER, TOKENIZER = "vision_model.vision_tower.", "gen_vision_model."
UNUSED = re.compile(r"\.attn_pool\.|\.codebook_used$|\.rotary_emb\.inv_freq$")
HEADS = 16  # of both SigLIP towers of the release; drawing does not use them
BEGIN_IMAGE, PAD = "<begin_of_image>", "<\uff5c\u2581pad\u2581\uff5c>"
USER, ASSISTANT = "<|User|>", "<|Assistant|>"
FIELDS = {  # of config.json, under ``params`` but for the language model
    "language_config": ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    "vision_config": ("image_size",),
    "aligner_config": ("depth", "n_embed"),
    "gen_vision_config": ("image_token_size", "n_embed"),
    "gen_aligner_config": ("depth", "n_embed"),
    "gen_head_config": ("n_embed",),
}
RENAMED = (  # beginnings of names: transformers' and the release's
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    ("model.generation_embeddings.", "gen_embed."),
    ("model.generation_aligner.", "gen_aligner."),
    ("model.generation_head.proj_out.", "gen_head.output_mlp_projector."),
    ("model.generation_head.", "gen_head."),
    ("model.aligner.", "aligner."),
    ("model.vision_model.embeddings.patch_embedding.", f"{TOWER}patch_embed.proj."),
    ("model.vision_model.embeddings.position_embedding.weight", f"{TOWER}pos_embed"),
    ("model.vision_model.post_layernorm.", f"{TOWER}norm."),
    ("model.vision_model.encoder.layers.", f"{TOWER}blocks."),
)


def published_name(name: str) -> str:
    """The release's name of a weight of ``JanusForConditionalGeneration``."""
    if name.startswith("model.vqmodel."):
        return TOKENIZER + vq_name(name.removeprefix("model.vqmodel."))
    name = next(new + name[len(old) :] for old, new in RENAMED if name.startswith(old))
    if name.startswith(("gen_aligner.", "aligner.")):
        name = re.sub(r"\.hidden_layers\.(\d+)", lambda m: f".layers.{2 * int(m[1]) + 2}", name)
        return name.replace(".fc1.", ".layers.0.")
    if name.startswith(TOWER):
        name = re.sub(r"\.self_attn\.[qkv]_proj\.", ".attn.qkv.", name)
        name = name.replace(".self_attn.projection_layer.", ".attn.proj.")
        name = name.replace(".layer_norm", ".norm")
    return name


def _rename(weights: Weights, config: JanusConfig, source: str) -> Weights:
    """Weights by transformers' names; ValueError with those that are missing or unknown."""
    with torch.device("meta"):
        network: Any = JanusForConditionalGeneration(config)
    theirs = {name: published_name(name) for name in network.state_dict()}
    found = [name for name in weights if not UNUSED.search(name)]
    check_names(found, theirs.values(), f"{source}, whose config.json is deepseek-ai's,")
    state = {name: weights[old] for name, old in theirs.items()}
    for name, old in theirs.items():
        if old.endswith("pos_embed"):
            state[name] = state[name].flatten(0, -2)  # [1, patches, D]
        elif ".attn.qkv." in old:
            state[name] = state[name].chunk(3)["qkv".index(name.split(".self_attn.")[1][0])]
    return state


def _fields(published: Mapping[str, Any], source: str) -> dict[str, Any]:
    """What is read of the release's config.json; ValueError with a field that it lacks."""
    found: dict[str, Any] = {}
    for part, fields in FIELDS.items():
        params = published.get(part, {})
        params = params if part == "language_config" else params.get("params", {})
        for field in fields:
            if field not in params:
                raise ValueError(
                    f"config.json of {source} lacks {field} of {part}, expected that of Janus-Pro"
                )
            found[f"{part}.{field}"] = params[field]
    return found


def _config(published: Mapping[str, Any], weights: Weights, source: str) -> JanusConfig:
    """The config of the release in the terms of transformers."""
    fields = _fields(published, source)
    told = [f"{TOWER}patch_embed.proj.weight", f"{TOWER}blocks.0.mlp.fc1.weight"]
    if not set(told) <= set(weights):
        check_names(weights, [*weights, *told], source)
    patches, hidden = (weights[name] for name in told)
    vision = JanusVisionConfig(
        hidden_size=len(patches),
        num_hidden_layers=count(weights, re.escape(TOWER) + r"blocks\.(\d+)\."),
        num_attention_heads=HEADS,
        image_size=fields["vision_config.image_size"],
        patch_size=patches.shape[-1],
        mlp_ratio=len(hidden) / len(patches),
        projection_dim=fields["aligner_config.n_embed"],
        depth=fields["aligner_config.depth"],
    )
    sizes = vq_sizes(weights, source, TOKENIZER) | {
        "embed_dim": fields["gen_vision_config.n_embed"],
        "num_embeddings": fields["gen_vision_config.image_token_size"],
        "projection_dim": fields["gen_aligner_config.n_embed"],
        "num_hidden_layers": fields["gen_aligner_config.depth"],
        "image_token_embed_dim": fields["gen_head_config.n_embed"],
    }
    text = {k: v for k, v in published["language_config"].items() if not k.startswith("_")}
    return JanusConfig(
        text_config=LlamaConfig(**text),
        vision_config=vision,
        vq_config=JanusVQVAEConfig(**sizes),
        tie_word_embeddings=False,
    )


def load_release(source: str, dtype: torch.dtype, **options: Any) -> Any:
    """A ``JanusForConditionalGeneration`` with the release's weights, in evaluation mode.

    Args:
        source: folder, or hub id such as ``deepseek-ai/Janus-Pro-1B``; with safetensors or
            pytorch_model.bin, in one file or several.
        dtype: of the network.
        options: of ``from_pretrained``.

    Raises:
        ValueError: config.json is of another model, or weights are missing, unknown, or do not fit.
    """
    published, _ = PretrainedConfig.get_config_dict(source)
    _fields(published, source)  # before much is read
    weights = stored_weights(source, FILES)
    config = _config(published, weights, source)
    state = _rename(weights, config, source)
    cls = JanusForConditionalGeneration
    return load_checkpoint(cls, source, dtype, state, config=config, **options)


class ReleasePrompts:
    """Token ids of prompts, as the release's example code writes them.

    Args:
        source: folder or hub id with tokenizer.json.
        vocab_size: of the network.

    Raises:
        ValueError: the tokenizer lacks a token of the release.
    """

    def __init__(self, source: str, vocab_size: int) -> None:
        self._tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(source)
        names = self._tokenizer.get_vocab()
        bos = self._tokenizer.bos_token
        if bos is None:
            raise ValueError(f"tokenizer_config.json of {source} lacks bos_token")
        for token in (bos, USER, ASSISTANT, BEGIN_IMAGE, PAD):
            if not names.get(token, vocab_size) < vocab_size:
                raise ValueError(
                    f"tokenizer.json of {source} has the id {names.get(token)} for {token!r}, "
                    f"expected one below vocab_size {vocab_size}"
                )
        self._begin, self.pad = names[bos], names[PAD]

    def ids(self, prompt: str) -> Tensor:
        """Token ids, int64 ``[P]``: begin of sentence first, begin of image last."""
        text = f"{USER}: {prompt.strip()}\n\n{ASSISTANT}:{BEGIN_IMAGE}"
        words = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return torch.tensor([self._begin, *words])
