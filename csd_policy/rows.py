"""The state of a batch while it is decoded: one row an image, fixed shapes, updated in place."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from csd_policy.sampling import Noise, take
from csd_policy.trace import ACCEPTED, BONUS, RESAMPLED, TRACE_FIELDS, Trace
from csd_policy.types import Stats


@dataclass(frozen=True)
class Verdict:
    """What verification found.

    ``accepted`` drafts int64 ``[B]`` in front and the ``extra`` token ``[B]`` behind them;
    ``finite`` bool ``[B, W]``; ``fields`` of the trace, ``[B, L]`` each (``entropy`` ``[B, W]``);
    ``others`` int64 ``[B, W]`` each, those that ``Rows`` keeps.
    """

    accepted: Tensor
    extra: Tensor
    finite: Tensor
    fields: dict[str, Tensor]
    others: dict[str, Tensor]

    def following(self, given: Tensor, drafts: Tensor, position: Tensor) -> "Verdict":
        """This verdict, if the codes ``given`` ``[B, N]`` are the ones to commit.

        Drafts are accepted as long as they are those codes; ``drafts`` ``[B, L]`` and ``position``
        ``[B, W]`` as in ``Rows``.
        """
        wanted = given.gather(1, position.clamp(min=0))
        right = (drafts == wanted[:, :-1]) | (position[:, :-1] < 0)
        accepted = right.long().cumprod(1).sum(1)
        return replace(self, accepted=accepted, extra=take(wanted, accepted))


@dataclass(frozen=True)
class Keep:
    """What the rows of a batch hold for those who ask; see ``Rows``."""

    laws: bool = False
    risk: bool = False
    others: tuple[str, ...] = ()


@dataclass
class Rows:
    """The state of a batch.

    Attributes:
        done: committed slots, int64 ``[B]``.
        passes: passes of each row so far, int64 ``[B]``.
        last: the last committed code, int64 ``[B]``.
        drafts, p, fresh: the drafts of slots ``done`` onwards, int64 ``[B, L]``, the law that they
            follow ``[B, L, V]``, and whether no pass has seen them, bool ``[B, L]``.
        spent: summed spent TV, ``[B]``.
        tokens, trace: ``[B, N + 1]``; what belongs nowhere is written to column N.
        laws: the target's law at each code, ``[B, N + 1, V]``, or None if nothing asks for it.
        risk: what the policy's risk map said of each code, fp32 ``[B, N]`` in [0, 1], or None.
        others: codes that could have been committed instead, int64 ``[B, N + 1]`` each, those that
            are asked for: ``alternative``, another draw from the law of the draft that was verified
            at each code; ``correction``, what the exact rule commits where it rejects that draft;
            both a draw from the target's law if there was no draft.
        fault: the first code number whose law or acceptance is not finite, int64 ``[B]``, N if
            none.
        given: the codes to commit in a replay, int64 ``[B, N]``, else None.
    """

    done: Tensor
    passes: Tensor
    last: Tensor
    drafts: Tensor
    p: Tensor
    fresh: Tensor
    spent: Tensor
    tokens: Tensor
    trace: dict[str, Tensor]
    fault: Tensor
    laws: Tensor | None
    risk: Tensor | None
    others: dict[str, Tensor]
    given: Tensor | None = None

    @classmethod
    def empty(cls, noise: Noise, drafts: int, codes: int, dtype: torch.dtype, keep: Keep) -> "Rows":
        """Rows before the first pass; ``p`` is still zero, and any risk is 1."""
        batch, device = len(noise.seeds), noise.seeds.device

        def integers(*shape: int) -> Tensor:
            return torch.zeros(batch, *shape, dtype=torch.int64, device=device)

        trace = {
            name: torch.full(
                (batch, codes + 1),
                torch.nan if kind.is_floating_point else -1,
                dtype=kind,
                device=device,
            )
            for name, kind in TRACE_FIELDS.items()
        }
        return cls(
            done=integers(),
            passes=integers(),
            last=integers(),
            drafts=integers(drafts),
            p=torch.zeros(batch, drafts, noise.size, dtype=dtype, device=device),
            fresh=torch.ones(batch, drafts, dtype=torch.bool, device=device),
            spent=torch.zeros(batch, dtype=dtype, device=device),
            tokens=integers(codes + 1),
            trace=trace,
            fault=torch.full((batch,), codes, dtype=torch.int64, device=device),
            laws=torch.zeros(batch, codes + 1, noise.size, dtype=dtype, device=device)
            if keep.laws
            else None,
            risk=torch.ones(batch, codes, device=device) if keep.risk else None,
            others={name: integers(codes + 1) for name in keep.others},
        )

    def commit(self, verdict: Verdict, position: Tensor, slots: int, q: Tensor) -> Tensor:
        """Append accepted drafts and the extra token; slots that each row gained, int64 ``[B]``.

        Args:
            position: code number behind each window slot, int64 ``[B, W]``, -1 if it holds none.
            slots: S, where a row is finished.
            q: the target's law behind each window slot, ``[B, W, V]``.
        """
        width, nowhere = position.shape[1], self.tokens.shape[1] - 1
        window = torch.arange(width, device=position.device)
        self.passes += self.done < slots
        committed = torch.minimum(verdict.accepted + 1, slots - self.done)
        is_extra = window == verdict.accepted[:, None]
        padded = torch.nn.functional.pad(self.drafts, (0, 1))
        tokens = torch.where(is_extra, verdict.extra[:, None], padded)
        how = torch.where(is_extra, torch.where(window == width - 1, BONUS, RESAMPLED), ACCEPTED)
        kept = (window < committed[:, None]) & (position >= 0)
        column = torch.where(kept, position, nowhere)
        self.tokens.scatter_(1, column, tokens)
        for name, other in verdict.others.items():
            self.others[name].scatter_(1, column, other)
        self._record(verdict, how, column)
        if self.laws is not None:
            inside = torch.where(position >= 0, position, nowhere)
            self.laws.scatter_(1, inside[..., None].expand_as(q), q)
        broken = torch.where(kept & ~verdict.finite, position, nowhere).amin(1)
        torch.minimum(self.fault, broken, out=self.fault)
        self.spent += (verdict.fields["spent_tv"] * kept[:, :-1]).sum(1)
        self.last = torch.where(
            committed > 0, take(tokens, (committed - 1).clamp(min=0)), self.last
        )
        self.done += committed
        return committed

    def _record(self, verdict: Verdict, how: Tensor, column: Tensor) -> None:
        found = verdict.fields | {"draft": self.drafts}
        fields = {}
        for name, value in found.items():  # a bonus has no draft
            nothing = {"spent_tv": 0.0, "draft": -1}.get(name, torch.nan)
            behind = column.shape[1] - value.shape[1]
            fields[name] = torch.nn.functional.pad(value, (0, behind), value=nothing)
        fields["how"] = how
        fields["pass_number"] = self.passes[:, None].expand_as(column)
        for name, value in fields.items():
            self.trace[name].scatter_(1, column, value.to(TRACE_FIELDS[name]))

    def to_trace(self) -> Trace:
        """The finished trace on the CPU, without the spare column."""
        return Trace(**{name: value[:, :-1].cpu() for name, value in self.trace.items()})

    def to_stats(self, number: int, seconds: dict[str, float], before: list[int]) -> Stats:
        """Counts of the finished rows; ``number`` passes of the batch, ``before`` of a preview."""
        passes = [a + b for a, b in zip(before, self.passes.tolist(), strict=True)]
        rate = [(self.tokens.shape[1] - 1) / n for n in passes]
        return Stats(passes, rate, self.spent.tolist(), number + max(before), seconds, before)

    def to_others(self) -> dict[str, Tensor]:
        """``others`` of the finished rows on the CPU, without the spare column."""
        return {name: value[:, :-1].cpu() for name, value in self.others.items()}
