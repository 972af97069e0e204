"""What transformers' own Chameleon class does with a release: greedy codes, and a law of codes."""

from dataclasses import dataclass
from pathlib import Path

import torch
from tiny_chameleon import code_names
from tiny_models import PROMPTS
from torch import Tensor
from transformers import ChameleonForConditionalGeneration, PreTrainedTokenizerFast


@dataclass(frozen=True)
class Written:
    """How a release writes a picture, by names of the vocabulary; ``slots`` are names or "code".

    Attributes:
        first_code: vocab id of the first code; None if the vocabulary names the codes.
    """

    text: str
    opening: list[str]
    blank: list[str]
    slots: list[str]
    begin: str = "<s>"
    first_code: int | None = None


def read(
    folder: Path, written: Written, count: int
) -> tuple[list[list[int]], list[int], list[int], list[int]]:
    """Vocab ids of PROMPTS up to slot 0, of the unconditional prompt, slots (-1) and codes."""
    names = PreTrainedTokenizerFast.from_pretrained(folder).get_vocab()
    ends = [names[n] for n in ("<reserved08706>", *written.opening)]
    prompts = []
    for prompt in PROMPTS:
        words = [names.get(w, names["<unk>"]) for w in (written.text + prompt).split()]
        prompts.append([names[written.begin], *words, *ends])
    slots = [-1 if name == "code" else names[name] for name in written.slots]
    codes = [names[n] for n in code_names(count)] if written.first_code is None else []
    codes = codes or list(range(written.first_code or 0, (written.first_code or 0) + count))
    return prompts, [names[n] for n in written.blank], slots, codes


def greedy_of_transformers(
    folder: Path, written: Written, count: int, dtype: torch.dtype, scale: float
) -> tuple[Tensor, list[int]]:
    """Codes ``[B, N]`` of ``generate``, and the vocab id of each slot, -1 for a code.

    It masks codes, unless the map of the vocabulary lacks their names.
    """
    rows, blank, slots, of_codes = read(folder, written, count)
    model = ChameleonForConditionalGeneration.from_pretrained(
        folder / "hf", dtype=dtype, vocabulary_map={"<image>": 4}
    )
    width = max(map(len, rows))
    padded = torch.tensor([[1] * (width - len(row)) + row for row in rows])
    shown = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])

    def allowed(row: int, tokens: Tensor) -> list[int]:
        slot = slots[len(tokens) - width]
        return of_codes if slot < 0 else [slot]

    found = model.generate(
        padded, attention_mask=shown, do_sample=False, guidance_scale=scale,
        negative_prompt_ids=torch.tensor([blank] * len(rows)) if scale != 1 else None,
        max_new_tokens=len(slots), prefix_allowed_tokens_fn=allowed,
    )[:, width:]  # fmt: skip
    code_of = {vocab_id: code for code, vocab_id in enumerate(of_codes)}
    codes = torch.tensor([[code_of[i] for i in row if i in code_of] for row in found.tolist()])
    return codes, [-1 if i in code_of else i for i in found[0].tolist()]


def exact_law(folder: Path, written: Written, count: int, scale: float) -> Tensor:
    """Joint law ``[V, V, V]`` of the first three codes of PROMPTS[0].

    By full forward passes without a cache.
    """
    prompts, blank, slots, of_codes = read(folder, written, count)
    vocab_ids = torch.tensor(of_codes)
    reference = ChameleonForConditionalGeneration.from_pretrained(folder / "hf")
    code_slots = [i for i, slot in enumerate(slots) if slot < 0]

    def laws(codes: Tensor) -> Tensor:  # [M, n] to [M, V]
        image = torch.tensor(slots[: code_slots[codes.shape[1]]], dtype=torch.int64)
        image = image.repeat(len(codes), 1)
        image[image < 0] = vocab_ids[codes].flatten()
        cond, uncond = (
            reference.lm_head(
                reference.model(
                    torch.cat([torch.tensor(start).expand(len(image), -1), image], 1),
                    use_cache=False,
                ).last_hidden_state[:, -1]
            )[:, vocab_ids].double()
            for start in (prompts[0], blank)
        )
        return (uncond + scale * (cond - uncond)).softmax(-1)

    with torch.no_grad():
        every = torch.arange(count)
        first = laws(torch.empty(1, 0, dtype=torch.int64))[0]
        second = laws(every[:, None])
        third = laws(torch.cartesian_prod(every, every)).view(count, count, count)
    return first[:, None, None] * second[:, :, None] * third
