"""Rules that keep the target's law, whatever the draft was."""

import torch
from torch import Tensor

from csd_policy.candidates import Candidates
from csd_policy.policies.base import AcceptancePolicy


class Exact(AcceptancePolicy):
    """Accept with min(1, q/p): lossless speculative sampling.

    b(x) = min(1, q(x) / p(x)), residual norm(max(0, q - p)). Leviathan et al. 2023 (arXiv
    2211.17192), Chen et al. 2023 (arXiv 2302.01318); on Jacobi drafts SJD, Teng et al. (arXiv
    2410.01699).

    Example:
        >>> Exact()
        Exact()
    """

    exact = True
    exact_at = {}

    def accept_prob(self, c: Candidates) -> Tensor:
        return c.ratio


class JacobiMatch(AcceptancePolicy):
    """Accept as often as a fresh draw from the target would repeat the draft: Jacobi decoding.

    b(x) = q(x), residual norm(q (1 - p)): the law of plain Jacobi decoding under sampling, which
    keeps a draft if the target, sampled anew, gives the same token (JD in CSD, arXiv 2606.27829,
    Table 1). Lossless, and below the exact rule everywhere.

    Example:
        >>> JacobiMatch()
        JacobiMatch()
    """

    exact, may_veto = True, True

    def accept_prob(self, c: Candidates) -> Tensor:
        return c.q


class ExactMatch(AcceptancePolicy):
    """Accept a draft if the target itself draws that token: the AR picture, in fewer passes.

    b(x) = 1 if x = argmax(log q + G), else 0; after a rejection that argmax is committed. Each
    committed token is then the draw that window 1 makes with the same noise, so that the picture is
    that of AR with the same seed at any window and with any draft strategy. The law is the
    target's over the noise; for given noise it is one token, and spent TV is 0 by declaration. The
    comparison of greedy speculative decoding, with the noise of sampling fixed ("Gumbel sharing",
    arXiv 2510.24211, uses the same noise for drafts).

    Example:
        >>> ExactMatch()
        ExactMatch()
    """

    exact, may_veto = True, True
    needs = frozenset({"noise"})

    def accept_prob(self, c: Candidates) -> Tensor:
        return (c.tokens == c.target_draw).to(c.q.dtype)

    def residual(self, c: Candidates) -> Tensor:
        return torch.zeros_like(c.q_all).scatter(-1, c.target_draw, 1.0)

    def spent_tv(self, c: Candidates, b: Tensor) -> Tensor:
        return torch.zeros_like(b[..., 0])
