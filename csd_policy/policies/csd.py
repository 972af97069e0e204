"""Content-aware Speculative Decoding and its parts (CSD, arXiv 2606.27829)."""

from typing import Literal, get_args

import torch
from torch import Tensor

from csd_policy.candidates import Candidates
from csd_policy.policies.base import AcceptancePolicy, check_range

Gate = Literal["tv", "kl", "reverse_kl"]


def divergence(gate: Gate, c: Candidates) -> Tensor:
    """How far the draft is from the target, ``[B, L, 1]``, 0 or more; the KL forms in nats.

    ``kl`` is KL(p || q), draft against target, ``reverse_kl`` is KL(q || p); +inf where a token of
    the first has no probability under the second. CSD, Table 4, does not spell them out.
    """
    if gate == "tv":
        return c.tv
    first, second = (c.p_all, c.q_all) if gate == "kl" else (c.q_all, c.p_all)
    terms = torch.special.xlogy(first, first) - torch.special.xlogy(first, second)
    nats: Tensor = terms.sum(-1, keepdim=True).clamp(min=0)
    return nats


def _check_gate(gate: str, delta: float) -> None:
    if gate not in get_args(Gate):
        raise ValueError(f"gate is {gate!r}, expected one of {', '.join(get_args(Gate))}")
    check_range("delta", delta, 0, 1 if gate == "tv" else float("inf"))


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
        gate: what ``delta`` bounds: ``tv``, or in nats ``kl`` = KL(p || q), ``reverse_kl`` =
            KL(q || p), the ablation of Table 4 (delta 0.4 there).

    Example:
        >>> CSD(delta=0.65)
        CSD(lam=0.5, delta=0.65, normalize_entropy=False, gate='tv')
    """

    exact_at = {"lam": 0.0}
    strength = "delta"

    def __init__(
        self,
        lam: float = 0.5,
        delta: float = 0.35,
        normalize_entropy: bool = False,
        gate: Gate = "tv",
    ) -> None:
        check_range("lam", lam, 0)
        _check_gate(gate, delta)
        self.lam, self.delta, self.normalize_entropy, self.gate = (
            lam,
            delta,
            normalize_entropy,
            gate,
        )

    def accept_prob(self, c: Candidates) -> Tensor:
        entropy = c.entropy
        if self.normalize_entropy:
            entropy = torch.where(c.support > 1, entropy / c.support.log(), 0.0)
        near = divergence(self.gate, c) < self.delta
        return c.ratio + torch.where(near, self.lam * entropy, 0.0)


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


class KLGate(AcceptancePolicy):
    """Accept every draft where draft and target are close in Kullback-Leibler divergence.

    b(x) = 1 where KL(p || q) < delta, or KL(q || p) if ``reverse``, else min(1, q(x)/p(x)): the
    KL gates of CSD (arXiv 2606.27829, Table 4) without entropy.

    Args:
        delta: accept everything below this divergence in nats, 0 or more.
        reverse: use KL(q || p), target against draft.

    Example:
        >>> KLGate()
        KLGate(delta=0.4, reverse=False)
    """

    exact_at = {"delta": 0.0}
    strength = "delta"

    def __init__(self, delta: float = 0.4, reverse: bool = False) -> None:
        check_range("delta", delta, 0)
        self.delta, self.reverse = delta, reverse

    def accept_prob(self, c: Candidates) -> Tensor:
        near = divergence("reverse_kl" if self.reverse else "kl", c) < self.delta
        return torch.where(near, 1.0, c.ratio)
