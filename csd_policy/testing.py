"""Tools for tests, here and in users' own packages: enumerable models and the contract of a policy."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from csd_policy.models.base import ImageTokenModel
from csd_policy.types import Candidates


class TableModel(ImageTokenModel):
    """A model whose logits are a table, so that every joint law can be enumerated.

    Args:
        logits: ``[N, V + 1, V]``: position, previous code + 1 (0: none), next code.
        uncond_logits: the same for the unconditional branch; None is ``logits``.
        grid: (rows, columns) with rows * columns = N; None is (1, N).
        row_ends: put a forced token behind each row; the code after it sees no previous code.

    Prompts are ignored, and there are no pictures.
    """

    def __init__(
        self,
        logits: Tensor,
        uncond_logits: Tensor | None = None,
        grid: tuple[int, int] | None = None,
        row_ends: bool = False,
    ) -> None:
        codes, previous, size = logits.shape
        rows, columns = grid or (1, codes)
        if previous != size + 1 or rows * columns != codes:
            raise ValueError(
                f"logits are {tuple(logits.shape)} with grid {(rows, columns)}, "
                "expected [N, V + 1, V] with N = rows * columns"
            )
        uncond = logits if uncond_logits is None else uncond_logits
        if uncond.shape != logits.shape:
            raise ValueError(f"uncond_logits are {tuple(uncond.shape)}, logits {tuple(logits.shape)}")
        self.name, self.grid, self.num_codes = "table", (rows, columns), size
        self.codebook, self.dtype = None, logits.dtype
        self.table = torch.stack([logits, uncond])  # [2, N, V + 1, V]
        number = torch.arange(codes, device=logits.device).view(rows, columns)
        if row_ends:
            number = torch.nn.functional.pad(number, (0, 1), value=-1)
        self.code_of_slot = number.flatten()

    def prefill(self, prompts: Sequence[str], guided: bool, window: int) -> Any:
        return 2 if guided else 1  # branches

    def embed(self, state: Any, codes: Tensor, slots: Tensor) -> Tensor:
        """Branch, number of the next code and index of the previous one, as numbers ``[B, W, 3]``."""
        padded = torch.nn.functional.pad(self.code_of_slot, (1, 0), value=-1)
        held = padded[(slots + 1).clamp(max=len(padded) - 1)]
        following = padded[(slots + 2).clamp(max=len(padded) - 1)].clamp(min=0)
        previous = torch.where(held >= 0, codes + 1, 0)
        return torch.stack([torch.zeros_like(slots), following, previous], -1).to(torch.float64)

    def forward(self, state: Any, embeddings: Tensor, slots: Tensor) -> Tensor:
        if state == 1:
            return embeddings
        return torch.cat([embeddings, embeddings + embeddings.new_tensor([1.0, 0.0, 0.0])])

    def head(self, hidden: Tensor) -> Tensor:
        branch, following, previous = hidden.long().unbind(-1)
        return self.table[branch, following, previous]

    def decode(self, tokens: Tensor) -> Any:
        raise ValueError("a TableModel has no pictures")


def make_candidates(
    p: Tensor, q: Tensor, drafted: Tensor | None = None, **fields: Any
) -> Candidates:
    """Candidates (K = 1) for laws ``p`` and ``q`` ``[B, L, V]``, for tests of a policy's arithmetic.

    ``drafted`` defaults to token 0; everything else can be given by name (see ``Candidates``).
    """
    batch, drafts, _ = q.shape
    zeros = torch.zeros(batch, drafts, 1, dtype=torch.int64)
    index = torch.arange(drafts).expand(batch, drafts)[..., None]
    defaults = {
        "fresh": torch.zeros(batch, drafts, 1, dtype=torch.bool),
        "row": zeros,
        "column": index,
        "index": index,
        "hidden": torch.zeros(batch, drafts, 1, dtype=q.dtype),
        "entropy": torch.special.entr(q).sum(-1, keepdim=True),
        "tv": (p - q).abs().sum(-1, keepdim=True) / 2,
    }
    tokens = zeros[..., 0] if drafted is None else drafted
    return Candidates(p_all=p, q_all=q, drafted=tokens, **(defaults | fields))
