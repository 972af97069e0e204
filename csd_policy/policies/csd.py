"""Content-aware Speculative Decoding and its two halves (CSD, arXiv 2606.27829)."""

import torch
from torch import Tensor

from csd_policy.candidates import Candidates
from csd_policy.policies.base import AcceptancePolicy, check_range


class CSD(AcceptancePolicy):
    """Relax by the target's entropy where draft and target are close in total variation.

    b(x) = min(1, q(x)/p(x) + lam * H(q)) where TV(p, q) < delta, else min(1, q(x)/p(x)).
    CSD, arXiv 2606.27829, Algorithm 1.

    At the paper's lam = 0.5 the relaxation saturates wherever H is 2 nats or more, so that the rule
    is then close to ``TVGate(delta)``; ``normalize_entropy`` divides H by the log of the target's
    support.

    Args:
        lam: weight of the entropy, 0 or more; the paper uses 0.5.
        delta: relax only below this total variation, in [0, 1]; 0.35 to 0.8 in the paper.
        normalize_entropy: use H / log(number of tokens with q > 0), in [0, 1], instead of nats.

    Example:
        >>> CSD(delta=0.65)
        CSD(lam=0.5, delta=0.65, normalize_entropy=False)
    """

    exact_at = {"lam": 0.0}
    strength = "delta"

    def __init__(
        self, lam: float = 0.5, delta: float = 0.35, normalize_entropy: bool = False
    ) -> None:
        check_range("lam", lam, 0)
        check_range("delta", delta, 0, 1)
        self.lam, self.delta, self.normalize_entropy = lam, delta, normalize_entropy

    def accept_prob(self, c: Candidates) -> Tensor:
        entropy = c.entropy
        if self.normalize_entropy:
            entropy = torch.where(c.support > 1, entropy / c.support.log(), 0.0)
        return c.ratio + torch.where(c.tv < self.delta, self.lam * entropy, 0.0)


class EntropyOnly(AcceptancePolicy):
    """Relax by the target's entropy everywhere: CSD without its gate.

    b(x) = min(1, q(x)/p(x) + lam * H(q)), H in nats. CSD, arXiv 2606.27829, Table 4.

    Args:
        lam: weight of the entropy, 0 or more; 0.02 in the paper's ablation.

    Example:
        >>> EntropyOnly()
        EntropyOnly(lam=0.02)
    """

    exact_at = {"lam": 0.0}
    strength = "lam"

    def __init__(self, lam: float = 0.02) -> None:
        check_range("lam", lam, 0)
        self.lam = lam

    def accept_prob(self, c: Candidates) -> Tensor:
        return c.ratio + self.lam * c.entropy


class TVGate(AcceptancePolicy):
    """Accept every draft where draft and target are close in total variation: CSD without entropy.

    b(x) = 1 where TV(p, q) < delta, else min(1, q(x)/p(x)). The limit of CSD for large lam (of
    arXiv 2606.27829, Algorithm 1), and the ablation that tells whether the entropy matters.

    Args:
        delta: accept everything below this total variation, in [0, 1].

    Example:
        >>> TVGate()
        TVGate(delta=0.35)
    """

    exact_at = {"delta": 0.0}
    strength = "delta"

    def __init__(self, delta: float = 0.35) -> None:
        check_range("delta", delta, 0, 1)
        self.delta = delta

    def accept_prob(self, c: Candidates) -> Tensor:
        return torch.where(c.tv < self.delta, 1.0, c.ratio)
