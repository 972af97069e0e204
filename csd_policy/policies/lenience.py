"""Rules that raise or scale the ratio q/p by a constant, or by a function of the window's place."""

import torch
from torch import Tensor

from csd_policy.candidates import Candidates
from csd_policy.policies.base import AcceptancePolicy, check_range


class Addition(AcceptancePolicy):
    """Add a constant to the ratio.

    b(x) = min(1, q(x)/p(x) + eps). After Yin et al. (arXiv 2411.00841), in the form that CSD
    (arXiv 2606.27829, appendix A) compares with.

    Args:
        eps: 0 or more; CSD uses 0.1 (Lumina-mGPT) and 0.4 (Janus-Pro-7B).

    Example:
        >>> Addition()
        Addition(eps=0.1)
    """

    exact_at = {"eps": 0.0}
    strength = "eps"

    def __init__(self, eps: float = 0.1) -> None:
        check_range("eps", eps, 0)
        self.eps = eps

    def accept_prob(self, c: Candidates) -> Tensor:
        return c.ratio + self.eps


class Amplify(AcceptancePolicy):
    """Multiply the ratio: lenience.

    b(x) = min(1, k q(x)/p(x)). Lenience 1/k of Leviathan et al. (arXiv 2211.17192, appendix A.5);
    "UniformRSD" in Cool-SD (arXiv 2601.09212).

    Args:
        k: 1 or more; CSD compares with 1.3 (Lumina-mGPT) and 4 (Janus-Pro-7B).

    Example:
        >>> Amplify()
        Amplify(k=1.3)
    """

    exact_at = {"k": 1.0}
    strength = "k"

    def __init__(self, k: float = 1.3) -> None:
        check_range("k", k, 1)
        self.k = k

    def accept_prob(self, c: Candidates) -> Tensor:
        return self.k * c.ratio


class CoolSD(AcceptancePolicy):
    """Relax the first drafts of the window and tighten towards its end.

    b(x) = min(1, w_i q(x)/p(x)) with w_i = delta exp(-nu i - mu), i the draft's place in the window
    from 0. Cool-SD (arXiv 2601.09212), there with a trained drafter. Where w_i < 1 it is stricter
    than the exact rule; the residual max(0, q - p b) is the paper's.

    Args:
        delta: 0 or more; 1.1 to 2 in the paper.
        nu: decay per place, 0 or more; 0.7 in the paper.
        mu: constant offset of the exponent, 0 or more.

    Example:
        >>> CoolSD()
        CoolSD(delta=1.1, nu=0.7, mu=0.0)
    """

    may_veto = True
    exact_at = {"delta": 1.0, "nu": 0.0, "mu": 0.0}
    strength = "delta"

    def __init__(self, delta: float = 1.1, nu: float = 0.7, mu: float = 0.0) -> None:
        check_range("delta", delta, 0)
        check_range("nu", nu, 0)
        check_range("mu", mu, 0)
        self.delta, self.nu, self.mu = delta, nu, mu

    def accept_prob(self, c: Candidates) -> Tensor:
        place = c.index.to(c.q_all.dtype)
        finite = c.ratio.clamp(max=torch.finfo(c.q_all.dtype).max)  # weights can underflow to 0
        return self.delta * torch.exp(-self.nu * place - self.mu) * finite


class EntropyAware(AcceptancePolicy):
    """Relax where the target is certain, tighten where it is not: the opposite sign of CSD's.

    Accept if q/p > (H / scale) (1/2 + (1 - H / spread) (u - 1/2)), u uniform, H the entropy of q in
    nats. After ARsample (arXiv 2510.09012), whose formula is not published in full and whose code
    of the acceptance is not released: this is a reading of its text, with its constants 8 and 16.
    Solved for u (a step at 1/2 where H reaches ``spread``) this is

    b(x) = 1/2 + (scale q(x) / (p(x) H) - 1/2) / (1 - H / spread), clamped to [0, 1].

    Args:
        scale: nats at which the threshold has the mean of the exact rule's, above 0.
        spread: nats at which the threshold no longer varies, above 0.

    Example:
        >>> EntropyAware()
        EntropyAware(scale=8.0, spread=16.0)
    """

    may_veto = True
    strength = "scale"

    def __init__(self, scale: float = 8.0, spread: float = 16.0) -> None:
        check_range("scale", scale, 1e-6)
        check_range("spread", spread, 1e-6)
        self.scale, self.spread = scale, spread

    def accept_prob(self, c: Candidates) -> Tensor:
        tiny = torch.finfo(c.q_all.dtype).tiny
        relaxed = (self.scale * c.ratio / c.entropy.clamp(min=tiny)).clamp(max=1e6)
        slope = 1 / (1 - c.entropy / self.spread).clamp(min=1e-6)
        return 0.5 + (relaxed - 0.5) * slope
