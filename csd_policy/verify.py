"""Verification: which drafts of the window are accepted, and the token behind them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from csd_policy.candidates import Candidates
from csd_policy.policies import AcceptancePolicy
from csd_policy.rows import Rows, Verdict
from csd_policy.sampling import Noise, Purpose, draw, take
from csd_policy.types import DecodeConfig


@dataclass(frozen=True)
class Verifier:
    """Applies a policy to the window of every row.

    ``columns`` of the grid and ``slots`` of an image are the model's.
    """

    policy: AcceptancePolicy
    config: DecodeConfig
    columns: int
    slots: int

    def __call__(
        self, rows: Rows, q: Tensor, hidden: Tensor, position: Tensor, noise: Noise
    ) -> Verdict:
        """Accept drafts up to the first rejection and draw the token behind them.

        ``q`` ``[B, W, V]``, ``hidden`` ``[B, W, D]``; ``position`` int64 ``[B, W]`` is the code
        number that ``q`` is the law of, -1 for a forced slot and for places beyond the end.
        """
        drafts = self.config.window - 1
        entropy = torch.special.entr(q).sum(-1, keepdim=True)
        c = self._candidates(rows, q, hidden, entropy, position, noise)
        free = position[:, :drafts] >= 0
        b, spent, exactly = self._acceptance(rows, c, free)
        uniform = noise.uniform(Purpose.ACCEPT, position[:, :drafts])
        window = torch.arange(drafts, device=q.device)
        inside = rows.done[:, None] + window < self.slots  # forced drafts are always right
        accepted = torch.where(free, uniform < b, inside).long().cumprod(1).sum(1)
        if spent is None:
            verified = (window <= accepted[:, None]) & free & ~exactly
            spent = self._spent_where(verified, c)
        extra = self._extra(c, q, exactly, accepted, position, noise)
        finite = torch.isfinite(q.sum(-1))
        finite[:, :drafts] &= torch.isfinite(b) & torch.isfinite(spent)
        fields = {
            "b": b,
            "ratio": c.ratio[..., 0],
            "uniform": uniform,
            "entropy": entropy[..., 0],
            "tv": c.tv[..., 0],
            "spent_tv": torch.where(free, spent, 0.0),
        }
        if c.risk is not None:
            fields["risk"] = c.risk[..., 0]
        others = {}
        if "alternative" in rows.others:
            weights = torch.cat([rows.p, q[:, drafts:]], 1)
            others["alternative"] = draw(weights, noise.exponential(Purpose.ALTERNATIVE, position))
        if "correction" in rows.others:
            weights = torch.cat([(q[:, :drafts] - rows.p).clamp(min=0), q[:, drafts:]], 1)
            others["correction"] = draw(weights, noise.exponential(Purpose.RESIDUAL, position))
        return Verdict(accepted, extra, finite, fields, others)

    def _candidates(
        self, rows: Rows, q: Tensor, hidden: Tensor, entropy: Tensor, position: Tensor, noise: Noise
    ) -> Candidates:
        """The drafts of the window as a policy sees them; the arguments have W places."""
        q, hidden, entropy, position = (x[:, :-1] for x in (q, hidden, entropy, position))
        columns = self.columns
        index = torch.arange(position.shape[1], device=q.device).expand_as(position)
        asked = "noise" in self.policy.needs
        return Candidates(
            p_all=rows.p,
            q_all=q,
            entropy=entropy,
            tv=(rows.p - q).abs().sum(-1, keepdim=True) / 2,
            drafted=rows.drafts,
            fresh=rows.fresh[..., None],
            row=(position // columns)[..., None],
            column=(position % columns)[..., None],
            index=index[..., None],
            hidden=hidden,
            noise=noise.exponential(Purpose.TARGET, position) if asked else None,
            risk=None if rows.risk is None else self._risk(rows.risk, position, q.dtype),
        )

    def _risk(self, risk: Tensor, position: Tensor, dtype: torch.dtype) -> Tensor:
        return risk.gather(1, position.clamp(min=0))[..., None].to(dtype)

    def _acceptance(
        self, rows: Rows, c: Candidates, free: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Acceptance of each draft, spent TV, and where the exact rule replaced the policy's.

        All ``[B, L]``. The replacement looks at the laws only, never at the drafted token: at fresh
        drafts, and from the first place where the sum of spent TV would pass the budget. Spent TV
        is None if it is to be found where drafts are verified.
        """
        if self.policy.exact:
            b = self.policy.acceptance(c)[..., 0]
            return b, torch.zeros_like(b), torch.zeros_like(free)
        exactly = rows.fresh & (not self.config.relax_fresh)
        plain = c.ratio[..., 0].clamp(max=1)
        if self.config.spent_tv == "estimate":
            b = torch.where(exactly, plain, self.policy.acceptance(c)[..., 0])
            return b, b - plain, exactly
        if self.policy.costly and self.config.tv_budget is None:
            return torch.where(exactly, plain, self.policy.acceptance(c)[..., 0]), None, exactly
        whole = c.whole()
        b = self.policy.acceptance(whole)
        spent = self.policy.spent_tv(whole, b)
        if self.config.tv_budget is not None:
            charged = torch.where(free & ~exactly, spent, 0.0)
            exactly = exactly | (rows.spent[:, None] + charged.cumsum(1) > self.config.tv_budget)
        b = torch.where(exactly, plain, take(b, c.drafted, dim=2))
        return b, torch.where(exactly, 0.0, spent), exactly

    def _spent_where(self, verified: Tensor, c: Candidates) -> Tensor:
        """Spent TV ``[B, L]`` at the ``verified`` drafts, bool ``[B, L]``, and 0 elsewhere."""
        spent = torch.zeros_like(c.tv[..., 0])
        if verified.any():
            chosen = c.where(verified).whole()
            spent[verified] = self.policy.spent_tv(chosen, self.policy.acceptance(chosen))[:, 0]
        return spent

    def _extra(
        self, c: Candidates, q: Tensor, exactly: Tensor, accepted: Tensor, position: Tensor,
        noise: Noise,
    ) -> Tensor:  # fmt: skip
        """The token behind the accepted drafts, int64 ``[B]``: from the residual, or a bonus."""
        drafts = exactly.shape[1]
        place = take(position, accepted)
        weights = take(q, accepted)
        exponential = noise.exponential(Purpose.TARGET, place)
        if drafts > 0:
            at = accepted.clamp(max=drafts - 1)
            rejected = c.at(at).whole()
            residual = self.policy.residual(rejected)[:, 0]
            plain = (rejected.q - rejected.p)[:, 0].clamp(min=0)
            residual = torch.where(take(exactly, at)[:, None], plain, residual)
            redraw = (accepted < drafts)[:, None]
            empty = residual.sum(-1, keepdim=True) <= 0
            weights = torch.where(redraw & ~empty, residual, weights)
            exponential = torch.where(
                redraw, noise.exponential(Purpose.RESIDUAL, place), exponential
            )
        return draw(weights, exponential)
