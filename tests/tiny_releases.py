"""Small random checkpoints with the files, names and configs of the original releases."""

import base64
import json
from pathlib import Path
from typing import Any

import torch
from release_names import EMU3_VISION, JANUS_RELEASE, JANUS_UNUSED, LLAMA, expand
from safetensors.torch import load_file, save_file
from tiny_emu3 import CODES
from tiny_models import sharpen, tiny_janus, word_tokenizer
from torch import Tensor
from transformers import (
    Emu3ForCausalLM,
    Emu3TextConfig,
    Emu3VQVAE,
    Emu3VQVAEConfig,
    PreTrainedTokenizerFast,
)

BOS, EOS, PAD = (
    f"<\uff5c{word}\uff5c>"
    for word in ("begin\u2581of\u2581sentence", "end\u2581of\u2581sentence", "\u2581pad\u2581")
)
JANUS_TOKENS = [BOS, EOS, PAD, "<begin_of_image>", "<|User|>", "<|Assistant|>"]
JANUS_SIZES = {"layer": 2, "block": 1, "deblock": 2, "level": 5, "most": 4}
EMU3_SIZES = {"time": 2, "block": 1, "deblock": 2, "level": 4, "finer": 3}
MERGES = ["w1", "w2", " w", " w1", "*2", "*6", "de", "e\u0301"]  # tokens besides single bytes


def save(weights: dict[str, Tensor], folder: Path, stem: str, parts: int = 1) -> None:
    """``stem`` is model.safetensors or pytorch_model.bin; several parts get an index."""
    weights = {name: weight.contiguous() for name, weight in weights.items()}
    head, _, tail = stem.partition(".")
    file_of = {}
    for i in range(parts):
        file = stem if parts == 1 else f"{head}-{i + 1:05d}-of-{parts:05d}.{tail}"
        part = {name: weights[name] for name in list(weights)[i::parts]}
        file_of |= dict.fromkeys(part, file)
        if tail == "bin":
            torch.save(part, folder / file)
        else:
            save_file(part, folder / file, {"format": "pt"})
    if parts > 1:
        (folder / f"{stem}.index.json").write_text(
            json.dumps({"metadata": {"total_size": 0}, "weight_map": file_of})
        )


def janus_weights(converted: Path) -> dict[str, Tensor]:
    """Weights of a checkpoint of transformers by deepseek-ai's names, and a head of their own."""
    ours = load_file(converted / "model.safetensors")
    ours["lm_head.weight"] = torch.randn(512, 64)
    names = expand(JANUS_RELEASE, **JANUS_SIZES)
    weights = {published: ours.pop(name) for published, name in names.items()}
    for name in weights:
        if ".qkv." in name:
            other = [names[name].replace("q_proj", f"{part}_proj") for part in "kv"]
            weights[name] = torch.cat([weights[name], *(ours.pop(part) for part in other)])
    weights["vision_model.vision_tower.pos_embed"].unsqueeze_(0)
    assert not ours  # the table names each weight
    return weights | {name: torch.randn(2, 2) for name in expand(JANUS_UNUSED)}


def janus_config() -> dict[str, Any]:
    """The config.json of deepseek-ai/Janus-Pro-1B at the sizes of ``tiny_janus``."""
    projector = {"depth": 2, "n_embed": 64, "projector_type": "mlp_gelu"}
    return {
        "architectures": ["MultiModalityCausalLM"],
        "model_type": "multi_modality",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1",
        "aligner_config": {
            "cls": "MlpProjector", "model_type": "aligner", "params": projector | {"input_dim": 32}
        },
        "gen_aligner_config": {
            "cls": "MlpProjector", "model_type": "gen_aligner",
            "params": projector | {"input_dim": 8},
        },
        "gen_head_config": {
            "cls": "vision_head", "model_type": "gen_head",
            "params": {"image_token_embed": 64, "image_token_size": 512, "n_embed": 64},
        },
        "gen_vision_config": {
            "cls": "VQ-16", "model_type": "gen_vision",
            "params": {"image_token_size": 512, "n_embed": 8},
        },
        "language_config": {
            "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 4096,
            "model_type": "llama", "num_attention_heads": 4, "num_hidden_layers": 2,
            "num_key_value_heads": 4, "torch_dtype": "bfloat16", "vocab_size": 512,
        },
        "vision_config": {
            "cls": "CLIPVisionTower", "model_type": "vision",
            "params": {"image_size": 64, "model_name": "siglip_large_patch16_384",
                       "select_feature": "same", "select_layer": -1},
        },
    }  # fmt: skip


def tiny_janus_release(folder: Path, stem: str = "pytorch_model.bin", parts: int = 1) -> Path:
    """Janus-Pro as deepseek-ai publishes it, and in ``hf`` with the same weights."""
    converted = tiny_janus(folder / "hf")
    save(janus_weights(converted), folder, stem, parts)
    (folder / "config.json").write_text(json.dumps(janus_config()))
    tokenizer = word_tokenizer(JANUS_TOKENS, [":", *(f"w{i}" for i in range(400))])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, unk_token="<unk>",
        additional_special_tokens=JANUS_TOKENS[3:],
    ).save_pretrained(folder)  # fmt: skip
    return folder


def emu3_files(folder: Path) -> int:
    """Write emu3.tiktoken and emu3_vision_tokens.txt; returns the number of tokens."""
    tokens = [bytes([i]) for i in range(256)] + [text.encode() for text in MERGES]
    lines = (base64.b64encode(token) + b" %d" % i for i, token in enumerate(tokens))
    (folder / "emu3.tiktoken").write_bytes(b"\n".join(lines) + b"\n")
    vision = ["<|image token|>", "<|image start|>", "<|image end|>"]
    vision += [f"<|visual token {code:06d}|>" for code in range(CODES)]
    (folder / "emu3_vision_tokens.txt").write_text("\n".join(vision) + "\n")
    return len(tokens) + 208 + len(vision)


def tiny_emu3_release(folder: Path, parts: int = 2) -> tuple[Emu3ForCausalLM, Emu3VQVAE]:
    """BAAI/Emu3-Gen in ``language``, its vision tokenizer in ``vq``; the same in transformers."""
    torch.manual_seed(0)
    for name in ("language", "vq"):
        (folder / name).mkdir(parents=True)
    sizes = {
        "vocab_size": emu3_files(folder / "language"), "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    text = Emu3TextConfig(**sizes, rope_parameters={"rope_type": "default", "rope_theta": 5e4})
    language = Emu3ForCausalLM(text).eval()
    sharpen(language, "layers", "lm_head", "embed_tokens")
    weights = language.state_dict()
    assert set(weights) == set(expand(LLAMA, layer=2))
    save(weights, folder / "language", "model.safetensors", parts)
    config = sizes | {
        "architectures": ["Emu3ForCausalLM"], "model_type": "Emu3", "rope_theta": 5e4,
        "auto_map": {"AutoModelForCausalLM": "modeling_emu3.Emu3ForCausalLM"},
        "rope_scaling": None, "image_area": 518400, "pretraining_tp": 1, "attention_dropout": 0.1,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "language/config.json").write_text(json.dumps(config))
    vision = Emu3VQVAE(Emu3VQVAEConfig(
        codebook_size=CODES, embed_dim=4, latent_channels=4, base_channels=32, num_res_blocks=1,
        channel_multiplier=[1, 1, 1, 1], attn_resolutions=[3], hidden_size=32,
    )).eval()  # fmt: skip
    ours = vision.state_dict()
    names = expand(EMU3_VISION, **EMU3_SIZES)
    assert set(names.values()) == set(ours)
    published = {old: ours[new] for old, new in names.items()}
    for name, weight in published.items():
        if ".attn" in name and weight.ndim == 2:
            published[name] = weight[:, :, None, None]  # 1x1 convolutions
    save(published, folder / "vq", "model.safetensors")
    config = {
        "architectures": ["Emu3VisionVQModel"], "model_type": "Emu3VisionVQ", "ch": 32,
        "ch_mult": [1, 1, 1, 1], "codebook_size": CODES, "double_z": False, "dropout": 0.0,
        "embed_dim": 4, "in_channels": 3, "num_res_blocks": 1, "out_channels": 3, "z_channels": 4,
        "temporal_downsample_factor": 4, "attn_resolutions": [3], "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "vq/config.json").write_text(json.dumps(config))
    return language, vision
