"""Draft strategies: how the positions behind the first rejection are guessed for the next pass.

A strategy returns tokens together with the law they now follow given all earlier positions. Storing
any other law breaks exactness without a visible sign.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from csd_policy.parameters import Parametrized
from csd_policy.sampling import Noise, Purpose, draw, take
from csd_policy.starts import STARTS, Start


@dataclass(frozen=True)
class Tail:
    """Positions that a pass computed a law for and did not commit.

    Attributes:
        q: the target's law given the present drafts before it, ``[B, L, V]``.
        position: code number, int64 ``[B, L]``; the noise is keyed by it.
        passes: passes of each row so far, int64 ``[B, 1]``.
        noise: the random numbers of the batch.
        window_drafts, window_p: drafts of the pass and their laws, by place in its window.
        source: place of each position in that window, int64 ``[B, L]``; L if it had no draft.
    """

    q: Tensor
    position: Tensor
    passes: Tensor
    noise: Noise
    window_drafts: Tensor
    window_p: Tensor
    source: Tensor

    @property
    def drafts(self) -> Tensor:
        """The draft that each position had, int64 ``[B, L]``; 0 where there was none."""
        return self._of_window(self.window_drafts)

    @property
    def p(self) -> Tensor:
        """The law that ``drafts`` follow, ``[B, L, V]``; all 0 where there was none."""
        return self._of_window(self.window_p)

    def _of_window(self, x: Tensor) -> Tensor:
        return take(torch.nn.functional.pad(x, (0, 0) * (x.ndim - 2) + (0, 1)), self.source)


class DraftStrategy(Parametrized, ABC):
    """Redraws unverified positions; ``exact`` strategies keep the loop lossless.

    Args:
        start: first drafts of positions that no pass has seen: ``random``, a copy of the code
            ``left`` or ``above``, or a draw from the law there, ``sample_left`` or
            ``sample_above`` (these two keep all laws of a picture, N * V numbers). They are given a
            one-hot law, so that the exact rule accepts with q(x) (SJD, arXiv 2410.01699);
            ``uniform`` is ``random`` with the uniform law in its place, for comparison.
    """

    exact = True

    def __init__(self, start: Start = "random") -> None:
        if start not in STARTS:
            raise ValueError(f"start is {start!r}, expected one of {', '.join(STARTS)}")
        self.start = start

    @abstractmethod
    def redraw(self, tail: Tail) -> tuple[Tensor, Tensor]:
        """Tokens int64 ``[B, L]`` and the law ``[B, L, V]`` that they follow."""


class Independent(DraftStrategy):
    """Draw every unverified position anew from its law, independently in each pass.

    Speculative Jacobi decoding, Teng et al. (arXiv 2410.01699).
    """

    def redraw(self, tail: Tail) -> tuple[Tensor, Tensor]:
        noise = tail.noise.exponential(Purpose.REDRAW, tail.position, tail.passes)
        return draw(tail.q, noise), tail.q


class Gumbel(DraftStrategy):
    """Draw with one Gumbel vector per position, shared by all passes, so that tokens persist.

    x = argmax(log q + G); two laws then give the same token with probability at least
    (1 - TV) / (1 + TV). "Gumbel sharing", arXiv 2510.24211.
    """

    def redraw(self, tail: Tail) -> tuple[Tensor, Tensor]:
        noise = tail.noise.exponential(Purpose.TARGET, tail.position)
        return draw(tail.q, noise), tail.q


class MaximalCoupling(DraftStrategy):
    """Keep each draft as often as its new law allows: the exact rule, on every later position.

    A draft x ~ p is kept with probability min(1, q/p), else redrawn from norm(max(0, q - p)). It
    follows q either way, and q is what is stored (the released code stores the older p of a kept
    draft, which is not lossless). "Maximal coupling", arXiv 2510.24211; "adaptive continuation",
    arXiv 2603.18599. Two laws give the same token with probability 1 - TV, the most possible.
    """

    def redraw(self, tail: Tail) -> tuple[Tensor, Tensor]:
        chosen = tail.drafts[..., None]
        p, q = tail.p.gather(-1, chosen)[..., 0], tail.q.gather(-1, chosen)[..., 0]
        uniform = tail.noise.uniform(Purpose.COUPLE_ACCEPT, tail.position, tail.passes)
        kept = uniform * p < q
        residual = (tail.q - tail.p).clamp(min=0)
        empty = residual.sum(-1, keepdim=True) <= 0
        noise = tail.noise.exponential(Purpose.COUPLE_REDRAW, tail.position, tail.passes)
        redrawn = draw(torch.where(empty, tail.q, residual), noise)
        return torch.where(kept & (p > 0), tail.drafts, redrawn), tail.q
