"""Training of the AR prior: a ``LlamaForCausalLM`` over caption words and image codes."""

import copy
import json
from pathlib import Path
from typing import Any

import lightning as L
import torch
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from csd_policy.models.vq import VQConfig
from trainers.scenes import caption_words
from trainers.schedules import warmup_then_cosine

PAD, BOS, BOI, UNK = "<pad>", "<bos>", "<boi>", "<unk>"
IGNORE = -100  # target of positions without a loss


def build_tokenizer(num_codes: int = VQConfig.num_codes) -> PreTrainedTokenizerFast:
    """One vocabulary: special tokens, caption words, image codes ``<image_0000>`` onwards.

    A prompt becomes ``<bos> words <boi>``; case and articles are dropped.
    """
    words = [PAD, BOS, BOI, UNK, *caption_words(), *(f"<image_{i:04d}>" for i in range(num_codes))]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    articles = normalizers.Replace(Regex(r"\b(a|an|the) "), "")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), articles])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {BOI}",
        special_tokens=[(BOS, vocabulary[BOS]), (BOI, vocabulary[BOI])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        unk_token=UNK,
        extra_special_tokens={"boi_token": BOI},
    )


def build_model(hidden_size: int, layers: int, heads: int, intermediate: int) -> LlamaForCausalLM:
    """A randomly initialised prior over the vocabulary of ``build_tokenizer``."""
    tokenizer = build_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


class PriorTraining(L.LightningModule):
    """Next-token training of the prior on ``<bos> caption <boi> codes``.

    The loss covers the image codes only; a share of the captions is dropped, so that the same
    weights give the unconditional law for classifier-free guidance (Ho & Salimans 2022).

    Args:
        learning_rate: peak of AdamW's rate; warm-up, then cosine over ``max_steps``.
        caption_dropout: share of captions replaced by the empty one, in [0, 1).
        compile: compile the forward pass with ``torch.compile``.
        init_from: folder with ``model.safetensors`` of a trained prior to start from.
        export_to: folder that receives the Hugging Face checkpoint at the end.
    """

    def __init__(
        self,
        hidden_size: int = 256,
        layers: int = 6,
        heads: int = 4,
        intermediate: int = 768,
        learning_rate: float = 1.2e-3,
        weight_decay: float = 0.05,
        warmup_steps: int = 200,
        caption_dropout: float = 0.1,
        compile: bool = True,
        init_from: str | None = None,
        export_to: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.warmup_steps, self.caption_dropout = warmup_steps, caption_dropout
        self.export_to = export_to
        self.tokenizer = build_tokenizer()
        self.model = build_model(hidden_size, layers, heads, intermediate)
        if init_from is not None:
            self.model.load_state_dict(load_file(Path(init_from) / "model.safetensors"))
        self._losses = torch.compile(self.losses) if compile else self.losses

    def losses(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean negative log-likelihood in nats per image code; ``ids``, ``targets`` ``[B, T]``."""
        logits = self.model(input_ids=ids, use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORE)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.global_step)
        ids, targets = self._drop_captions(*batch, generator)
        loss: Tensor = self._losses(ids, targets)
        self.log("train/nats_per_token", loss, prog_bar=True)
        return loss

    def _drop_captions(
        self, ids: Tensor, targets: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Move ``<boi>`` and the codes of some rows to the front, behind ``<bos>``."""
        boi = self.tokenizer.convert_tokens_to_ids(BOI)
        draws = torch.rand(len(ids), 1, generator=generator).to(ids.device)
        dropped = draws < self.caption_dropout
        start = (ids == boi).int().argmax(1, keepdim=True)  # position of <boi>
        place = torch.arange(ids.shape[1], device=ids.device)[None]
        source = torch.where(dropped & (place >= 1), place + start - 1, place)
        inside = source < ids.shape[1]
        source = source.clamp(max=ids.shape[1] - 1)
        ids = torch.where(inside, ids.gather(1, source), self.tokenizer.pad_token_id)
        targets = torch.where(inside, targets.gather(1, source), IGNORE)
        return ids, targets

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("validation/nats_per_token", self._losses(*batch), prog_bar=True)

    def on_train_end(self) -> None:
        if self.export_to is not None:
            export_prior(self.model, self.tokenizer, Path(self.export_to))

    def configure_optimizers(self) -> Any:
        decay = [p for p in self.parameters() if p.ndim > 1]
        plain = [p for p in self.parameters() if p.ndim <= 1]
        groups = [
            {"params": decay, "weight_decay": self.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, self.learning_rate, betas=(0.9, 0.95))
        factor = warmup_then_cosine(self.warmup_steps, int(self.trainer.estimated_stepping_batches))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def export_prior(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, to: Path) -> None:
    """Write a Hugging Face folder (fp16 weights) and ``image_model.json``, the token layout."""
    to.mkdir(parents=True, exist_ok=True)
    half = LlamaForCausalLM(copy.deepcopy(model.config)).half()
    half.load_state_dict(model.state_dict())
    half.save_pretrained(to)
    tokenizer.save_pretrained(to)
    side = VQConfig().side
    layout = {
        "adapter": "csd_policy.models.emoji_scenes.EmojiScenes",
        "grid": [side, side],
        "first_image_token": tokenizer.convert_tokens_to_ids("<image_0000>"),
        "num_codes": VQConfig.num_codes,
        "guidance_scale": 3.0,
    }
    (to / "image_model.json").write_text(json.dumps(layout, indent=1) + "\n")
