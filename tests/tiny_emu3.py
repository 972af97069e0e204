"""A small random Emu3 with the file layout of the published checkpoint."""

import random
from pathlib import Path

import torch
from tiny_models import sharpen, word_tokenizer
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from csd_policy.models.emu3 import NEGATIVE, POSITIVE

CODES = 64
SPECIAL = ["<|extra_203|>", "<|extra_204|>", "<|endoftext|>", "<|extra_200|>", "<|extra_201|>",
           "<|image start|>", "<|image end|>", "<|image token|>", "<image>"]  # fmt: skip


def emu3_tokenizer(seed: int = 0) -> PreTrainedTokenizerFast:
    """Visual tokens in random order among words: a code's vocabulary id follows from no offset."""
    words = [f"w{i}" for i in range(10)] + ["4*6", "2*2"] + (POSITIVE + " " + NEGATIVE).split()
    words = [*dict.fromkeys(words), *(f"<|visual token {i:06d}|>" for i in range(CODES))]
    random.Random(seed).shuffle(words)
    tokenizer = word_tokenizer(SPECIAL, words)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A")  # the processor adds it
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|extra_203|>", eos_token="<|extra_204|>",
        pad_token="<|endoftext|>", unk_token="<unk>", padding_side="left",
        extra_special_tokens={
            "image_token": "<image>", "boi_token": "<|image start|>", "eoi_token": "<|image end|>",
            "image_wrapper_token": "<|image token|>", "eof_token": "<|extra_201|>",
        },
    )  # fmt: skip


def tiny_emu3(folder: Path, seed: int = 0) -> Path:
    """Emu3 with a codebook of 64, pictures of 8x8 pixels a code, and its processor."""
    from transformers import (
        Emu3Config,
        Emu3ForConditionalGeneration,
        Emu3ImageProcessor,
        Emu3Processor,
        Emu3TextConfig,
        Emu3VQVAEConfig,
        GenerationConfig,
    )

    torch.manual_seed(seed)
    tokenizer = emu3_tokenizer(seed)
    vocabulary = tokenizer.get_vocab()
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    text = Emu3TextConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=len(vocabulary), max_position_embeddings=512, **ends,
    )  # fmt: skip
    vq = Emu3VQVAEConfig(
        codebook_size=CODES, embed_dim=4, latent_channels=4, base_channels=32, num_res_blocks=1,
        channel_multiplier=[1, 1, 1, 1], attn_resolutions=[3], hidden_size=32,
    )  # fmt: skip
    model = Emu3ForConditionalGeneration(
        Emu3Config(text_config=text, vq_config=vq, vocabulary_map=vocabulary)
    )
    sharpen(model, "text_model", "lm_head")
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(folder)
    images = Emu3ImageProcessor(image_mean=[0.5] * 3, image_std=[0.5] * 3)
    Emu3Processor(images, tokenizer).save_pretrained(folder)
    return folder


def split_emu3(folder: Path, language: Path, vq: Path) -> None:
    """Write the language model of a checkpoint, with the processor, and its VQ to two folders."""
    from transformers import Emu3ForCausalLM, Emu3ForConditionalGeneration, Emu3Processor

    whole = Emu3ForConditionalGeneration.from_pretrained(folder)
    alone = Emu3ForCausalLM(whole.config.text_config)
    alone.model.load_state_dict(whole.model.text_model.state_dict())
    alone.lm_head.load_state_dict(whole.lm_head.state_dict())
    alone.save_pretrained(language)
    Emu3Processor.from_pretrained(folder).save_pretrained(language)
    whole.model.vqmodel.save_pretrained(vq)
