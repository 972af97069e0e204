"""Drafts for the next window: redrawn where a pass has been, first drafts behind that."""

from dataclasses import dataclass

import torch
from torch import Tensor

from csd_policy.drafts import DraftStrategy, Tail
from csd_policy.rows import Rows
from csd_policy.sampling import Noise, take
from csd_policy.starts import Known, first_drafts


@dataclass(frozen=True)
class Redrafter:
    """Applies a draft strategy to the window of every row.

    ``code_of_slot`` int64 ``[S + 2 W]`` is the model's, with -1 behind the last slot;
    ``codes_before`` how many codes lie in front of each slot; ``columns`` of the grid.
    """

    draft: DraftStrategy
    code_of_slot: Tensor
    codes_before: Tensor
    columns: int

    def start(self, rows: Rows, noise: Noise) -> None:
        """Fill the first window."""
        position = self.code_of_slot[: rows.drafts.shape[1]].expand_as(rows.drafts)
        nothing = torch.zeros_like(rows.fresh)
        tokens, p = self._first(rows, rows.drafts, nothing, position, noise)
        rows.drafts.copy_(tokens)
        rows.p.copy_(p)

    def __call__(self, rows: Rows, q: Tensor, committed: Tensor, noise: Noise) -> None:
        """Fill the next window, ``committed`` int64 ``[B]`` slots further on.

        ``q`` ``[B, W, V]`` are the laws of the pass.
        """
        drafts = rows.drafts.shape[1]
        window = torch.arange(drafts, device=q.device)
        source = committed[:, None] + window  # place in the old window that the law comes from
        seen = source <= drafts
        source = source.clamp(max=drafts)
        position = self.code_of_slot[rows.done[:, None] + window]
        laws, passes = take(q, source), rows.passes[:, None]
        tail = Tail(laws, position, passes, noise, rows.drafts, rows.p, source)
        tokens, p = self.draft.redraw(tail)
        fresh, fresh_p = self._first(rows, tokens, seen, position, noise)
        torch.where(seen, tokens, fresh, out=rows.drafts)
        torch.where(seen[..., None], p, fresh_p, out=rows.p)
        torch.logical_not(seen, out=rows.fresh)

    def _first(
        self, rows: Rows, drafts: Tensor, seen: Tensor, position: Tensor, noise: Noise
    ) -> tuple[Tensor, Tensor]:
        """First drafts and their law, ``[B, L]`` and ``[B, L, V]``, for where nothing was seen."""

        def known() -> Known:
            column = torch.where(seen & (position >= 0), position, rows.tokens.shape[1] - 1)
            tokens = rows.tokens.scatter(1, column, drafts)
            count = self.codes_before[rows.done + seen.sum(1)]
            return Known(tokens, rows.laws, count, self.columns)

        tokens = first_drafts(self.draft.start, position, noise, known)
        if self.draft.start == "uniform":
            return tokens, torch.full_like(rows.p, 1 / rows.p.shape[-1])
        return tokens, torch.zeros_like(rows.p).scatter_(-1, tokens[..., None], 1.0)
