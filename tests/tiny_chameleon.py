"""Small random checkpoints of Lumina-mGPT and Anole.

Vocab ids of Lumina-mGPT 2.0 are those of its release. In the others those of the codes are
shuffled, so that an offset in place of the names gives other tokens.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_models import sharpen, word_tokenizer
from tiny_vqgan import LEVELS, VQ, tiny_vqgan
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import ChameleonConfig, ChameleonForConditionalGeneration, PreTrainedTokenizerFast
from transformers.models.chameleon.configuration_chameleon import ChameleonVQVAEConfig

HEADS, KEY_HEADS, RANKS = 4, 2, 2
WORDS = ["Generate", "an", "image", "of", "according", "to", "the", "following", "prompt:"]
WORDS += [f"w{i}" for i in range(20)]


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
    return [*special, *names, *sides, *WORDS]


def qwen_like_tokenizer() -> PreTrainedTokenizerFast:
    """Names of Lumina-mGPT 2.0 by the vocab ids of its release; those of sides are shuffled."""
    ids = {word: i for i, word in enumerate(["<unk>", "<image>", *WORDS])}
    ids |= {"<|endoftext|>": 151643, "<|im_end|>": 151645, "<reserved08706>": 152000}
    ids |= {"<racm3:break>": 151665, "<eoss>": 151666, "<reserved08799>": 151670}
    ids |= {f"<reserved{8800 + n:05d}>": 151700 + 7 * n % 50 for n in range(1, 49)}
    inner = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>", unk_token="<unk>"
    )


def tiny_chameleon(folder: Path, kind: str, codes: int = 64, seed: int = 0) -> Path:
    """A release in its own layout, and in ``hf`` as transformers has it.

    Norms of Lumina-mGPT are ``[ranks, head_dim]`` and it has no pixel decoder, version 2.0 no VQGAN
    at all; Anole has 4x4 codes.

    Args:
        folder: where to.
        kind: ``lumina``, ``lumina2`` or ``anole``.
        codes: of the codebook; 16384 of ``lumina2``.
        seed: of the weights.
    """
    torch.manual_seed(seed)
    if kind == "lumina2":
        tokenizer = qwen_like_tokenizer()
    else:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=word_tokenizer(["<s>", "<pad>", "</s>"], tiny_vocabulary(codes)),
            bos_token="<s>", pad_token="<pad>", unk_token="<unk>",
        )  # fmt: skip
    names = tokenizer.get_vocab()
    config = ChameleonConfig(
        vocab_size=171520 if kind == "lumina2" else len(names), hidden_size=32,
        intermediate_size=64, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS, model_parallel_size=RANKS, swin_norm=kind == "anole",
        pad_token_id=1, bos_token_id=0, vocabulary_map=names,
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
    tokenizer.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    if kind == "lumina2":
        state = {n: w for n, w in state.items() if not n.startswith("model.vqmodel.")}
    if kind != "anole":
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**written, "mask_image_logits": False}))
        state |= {n: w[:: len(w) // RANKS].clone() for n, w in norms.items()}
    else:
        state |= {f"model.vqmodel.{n}": w for n, w in tiny_vqgan(codes).items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder
