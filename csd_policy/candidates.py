"""What a policy sees."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from csd_policy.sampling import draw


@dataclass(frozen=True)
class Candidates:
    """What a policy sees of the L drafts under verification; properties are computed when used.

    Attributes:
        p_all: law of the draft, ``[B, L, V]`` probabilities.
        q_all: law of the target, ``[B, L, V]`` probabilities.
        drafted: the drafted tokens, int64 ``[B, L]`` in [0, V).
        fresh: bool ``[B, L, 1]``, True where no pass has seen the draft (its ``p`` is one-hot).
        row, column: place of the draft in the grid, int64 ``[B, L, 1]``; row is negative where the
            slot holds no code.
        index: place of the draft in the window, 0 to L-1, int64 ``[B, L, 1]``.
        hidden: the target's hidden state that q was computed from, ``[B, L, D]``.
        entropy: of q in nats, ``[B, L, 1]`` in [0, log V].
        tv: total variation of p and q, ``[B, L, 1]`` in [0, 1].
        noise: exponential numbers of the target's own draw, ``[B, L, V]``, or None if not needed.
        risk: how visible an error would be, ``[B, L, 1]`` in [0, 1], or None if not needed.
        every_token: K = V if True (all tokens are candidates), K = 1 if False (the drafted ones).
    """

    p_all: Tensor
    q_all: Tensor
    drafted: Tensor
    fresh: Tensor
    row: Tensor
    column: Tensor
    index: Tensor
    hidden: Tensor
    entropy: Tensor
    tv: Tensor
    noise: Tensor | None = None
    risk: Tensor | None = None
    every_token: bool = False

    @property
    def tokens(self) -> Tensor:
        """The candidate tokens, int64 ``[B, L, K]``."""
        if self.every_token:
            return torch.arange(self.q_all.shape[-1], device=self.q_all.device).expand_as(
                self.q_all
            )
        return self.drafted[..., None]

    @property
    def p(self) -> Tensor:
        """Draft probability of each candidate, ``[B, L, K]`` in [0, 1]."""
        return self.p_all if self.every_token else self.p_all.gather(-1, self.tokens)

    @property
    def q(self) -> Tensor:
        """Target probability of each candidate, ``[B, L, K]`` in [0, 1]."""
        return self.q_all if self.every_token else self.q_all.gather(-1, self.tokens)

    @property
    def ratio(self) -> Tensor:
        """q/p, ``[B, L, K]`` in [0, inf]; +inf where p = 0 < q, 0 where both are 0."""
        return torch.where(self.q > 0, self.q / self.p, 0.0)

    @property
    def support(self) -> Tensor:
        """How many tokens have q > 0, ``[B, L, 1]``, same dtype as q."""
        return (self.q_all > 0).to(self.q_all.dtype).sum(-1, keepdim=True)

    @property
    def target_draw(self) -> Tensor:
        """The target's own draw, argmax of log q + G, int64 ``[B, L, 1]``; needs ``noise``.

        ``Gumbel`` draws drafts with the same G, so a rule that looks at this token then depends on
        the drafted one: the default residual and spent TV do not hold for it.
        """
        if self.noise is None:
            raise ValueError("target_draw needs the policy to declare needs = {'noise'}")
        return draw(self.q_all, self.noise)[..., None]

    def whole(self) -> "Candidates":
        """The same drafts with every token as a candidate (K = V)."""
        return self if self.every_token else replace(self, every_token=True)

    def where(self, mask: Tensor) -> "Candidates":
        """The n drafts at which ``mask``, bool ``[B, L]``, is True, as n images with L = 1 each."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors: dict[str, Any] = {
            k: v[mask][:, None] for k, v in given.items() if isinstance(v, Tensor)
        }
        return replace(self, **tensors)

    def at(self, index: Tensor) -> "Candidates":
        """One draft per image (L = 1); ``index`` int64 ``[B]`` in [0, L)."""

        def pick(x: Tensor) -> Tensor:
            where = index.view(-1, 1, *(1,) * (x.ndim - 2)).expand(-1, 1, *x.shape[2:])
            return x.gather(1, where)

        given = {f.name: getattr(self, f.name) for f in fields(self)}
        picked: dict[str, Any] = {k: pick(v) for k, v in given.items() if isinstance(v, Tensor)}
        return replace(self, **picked)
