"""Draft strategies: how the positions behind the first rejection are guessed for the next pass.

A strategy returns tokens together with the law they now follow given all earlier positions. Storing
any other law breaks exactness without a visible sign.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from csd_policy.parameters import Parametrized
from csd_policy.sampling import Noise, Purpose, draw


@dataclass(frozen=True)
class Tail:
    """Positions that a pass computed a law for and did not commit.

    Attributes:
        q: the target's law given the present drafts before it, ``[B, L, V]``.
        position: code number, int64 ``[B, L]``; the noise is keyed by it.
        passes: passes of each row so far, int64 ``[B, 1]``.
        noise: the random numbers of the batch.
    """

    q: Tensor
    position: Tensor
    passes: Tensor
    noise: Noise


class DraftStrategy(Parametrized, ABC):
    """Redraws unverified positions; ``exact`` strategies keep the loop lossless."""

    exact = True

    @abstractmethod
    def redraw(self, tail: Tail) -> tuple[Tensor, Tensor]:
        """Tokens int64 ``[B, L]`` and the law ``[B, L, V]`` that they follow."""

    def fresh(self, position: Tensor, noise: Noise) -> Tensor:
        """First drafts of positions that no pass has seen, int64 ``[B, L]``: uniformly random.

        The loop gives them a one-hot law, so that the exact rule accepts with q(x) (SJD,
        arXiv 2410.01699). ``position`` int64 ``[B, L]`` is the code number.
        """
        return noise.token(Purpose.FRESH, position)


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
