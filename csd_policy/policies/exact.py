"""The exact rule of speculative sampling."""

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
