"""The law that the loop gives with a relaxed policy, by enumeration instead of sampling.

Written for a ``TableModel`` without the loop's code: one image at a time, all outcomes of a pass
with their probabilities. What a policy answers is asked of the policy.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from csd_policy.drafts import DraftStrategy, Independent, MaximalCoupling
from csd_policy.policies import AcceptancePolicy, Exact
from csd_policy.risk import Canvas
from csd_policy.testing.contract import make_candidates
from csd_policy.testing.tables import TableModel, table_laws
from csd_policy.types import DecodeConfig

Law = npt.NDArray[np.float64]
Draft = tuple[
    int, int | None
]  # token, and the previous code + 1 of the law it follows; None: fresh


def own_law(
    model: TableModel, policy: AcceptancePolicy, draft: DraftStrategy, config: DecodeConfig
) -> Law:
    """The law of whole images that decoding with ``policy`` gives, ``[V^N]``, exactly.

    Raises:
        ValueError: a budget, forced slots, a start other than random, a draft strategy other than
            ``Independent`` and ``MaximalCoupling``, or a policy that needs noise or hidden states.
    """
    for name, found, expected in (
        ("tv_budget", config.tv_budget, None),
        ("draft", type(draft), (Independent, MaximalCoupling)),
        ("start", draft.start, "random"),
        ("forced slots", len(model.code_of_slot) - len(model.table[0]), 0),
        ("needs", set(policy.needs) - {"risk"}, set()),
    ):
        if found != expected and not (isinstance(expected, tuple) and found in expected):
            raise ValueError(f"{name} is {found}, expected {expected}: own_law cannot enumerate it")
    laws = table_laws(model, config).numpy()
    rules = Rules(model, policy.bind(model), config, laws)
    walk = _Enumeration(laws, rules, config.window - 1, isinstance(draft, MaximalCoupling))
    first = walk.mean_over(0, 0, [walk.fresh()] * walk.places(0))
    return first.flatten()


@dataclass
class Rules:
    """Acceptance and residual of a policy by place, as tables that are filled when asked.

    ``laws`` ``[N, V + 1, V]`` are the target's, by position and previous code + 1.
    """

    model: TableModel
    policy: AcceptancePolicy
    config: DecodeConfig
    laws: Law
    known: dict[tuple[int, int, int, int | None, int], tuple[Law, Law]] = field(
        default_factory=dict
    )

    def __call__(self, index: int, position: int, draft: Draft, before: int) -> tuple[Law, Law]:
        """Acceptance ``[V]`` and the law of the redraw ``[V]`` at place ``index`` of the window.

        ``before`` is the previous code + 1 that the target's law is conditioned on.
        """
        token, law = draft
        key = index, position, token if law is None else -1, law, before
        if key not in self.known:
            self.known[key] = self._ask(index, position, self.law_of(position, draft), before, law)
        return self.known[key]

    def law_of(self, position: int, draft: Draft) -> Law:
        """The law ``[V]`` that a draft follows."""
        token, law = draft
        size = self.laws.shape[-1]
        given: Law = np.eye(size)[token] if law is None else self.laws[position, law]
        return given

    def _ask(
        self, index: int, position: int, p: Law, before: int, law: int | None
    ) -> tuple[Law, Law]:
        rows, columns = self.model.grid
        q = self.laws[position, before]
        fields = {
            "fresh": torch.tensor([[[law is None]]]),
            "row": torch.tensor([[[position // columns]]]),
            "column": torch.tensor([[[position % columns]]]),
            "index": torch.tensor([[[index]]]),
        }
        if self.policy.risk is not None:
            tokens = torch.zeros(1, rows * columns, dtype=torch.int64)
            canvas = Canvas.of(tokens, torch.zeros(1).long(), self.model, [""])
            risk = self.policy.risk.risk(canvas)
            fields["risk"] = risk[:, position : position + 1, None].double()
        c = make_candidates(
            torch.from_numpy(p)[None, None], torch.from_numpy(q)[None, None], **fields
        ).whole()
        strict = law is None and not self.policy.exact and not self.config.relax_fresh
        policy = Exact() if strict else self.policy
        residual = policy.residual(c)[0, 0].numpy()
        mass = residual.sum()
        return policy.acceptance(c)[0, 0].numpy(), residual / mass if mass > 0 else q


@dataclass
class _Enumeration:
    laws: Law
    rules: Rules
    drafts: int  # L
    coupled: bool
    done: dict[tuple[int, int, tuple[Draft, ...]], Law] = field(default_factory=dict)

    @property
    def codes(self) -> int:
        return len(self.laws)

    def places(self, position: int) -> int:
        """Drafts of a window whose first one is at ``position``, without those beyond the end."""
        return min(self.drafts, self.codes - position)

    def fresh(self) -> list[tuple[float, Draft]]:
        """Outcomes of a position that no pass has seen."""
        size = self.laws.shape[-1]
        return [(1 / size, (token, None)) for token in range(size)]

    def mean_over(
        self, position: int, last: int, choices: Sequence[list[tuple[float, Draft]]]
    ) -> Law:
        """Law of the codes from ``position`` on, ``[V, ..., V]``, averaged over the drafts."""
        total = np.zeros([self.laws.shape[-1]] * (self.codes - position))
        for picked in itertools.product(*choices):
            share = float(np.prod([weight for weight, _ in picked]))
            if share > 0:
                total += share * self.rest(position, last, tuple(draft for _, draft in picked))
        return total

    def rest(self, position: int, last: int, drafts: tuple[Draft, ...]) -> Law:
        """Law of the codes from ``position`` on; ``last`` is the code before + 1, 0 for none."""
        if position == self.codes:
            return np.ones(())
        key = position, last, drafts
        if key not in self.done:
            self.done[key] = self._one_pass(position, last, drafts)
        return self.done[key]

    def _one_pass(self, position: int, last: int, drafts: tuple[Draft, ...]) -> Law:
        out = np.zeros([self.laws.shape[-1]] * (self.codes - position))
        before = [last] + [token + 1 for token, _ in drafts]  # what each place's law sees
        reached = 1.0
        for j, draft in enumerate(drafts):
            b, redraw = self.rules(j, position + j, draft, before[j])
            self._add(out, reached * (1 - b[draft[0]]), redraw, j, position, drafts, before)
            reached *= b[draft[0]]
        end = len(drafts)
        if position + end < self.codes:
            bonus = self.laws[position + end, before[end]]
            self._add(out, reached, bonus, end, position, drafts, before)
        else:
            out[tuple(token for token, _ in drafts)] += reached
        return out

    def _add(
        self, out: Law, weight: float, law: Law, j: int, position: int,
        drafts: tuple[Draft, ...], before: list[int],
    ) -> None:  # fmt: skip
        """Commit ``j`` drafts and one token of ``law``, redraw the rest, and go on."""
        if weight <= 0:
            return
        choices = list(self._tail(j + 1, position, drafts, before))
        for token in np.flatnonzero(law).tolist():
            at = tuple([x for x, _ in drafts[:j]] + [token])
            out[at] += weight * law[token] * self.mean_over(position + j + 1, token + 1, choices)

    def _tail(
        self, start: int, position: int, drafts: tuple[Draft, ...], before: list[int]
    ) -> Iterator[list[tuple[float, Draft]]]:
        """Outcomes of each draft of the next window, whose first one was at place ``start``."""
        for place in range(start, start + self.places(position + start)):
            if place > self.drafts:
                yield self.fresh()
                continue
            q = self.laws[position + place, before[place]]
            redrawn = q
            if self.coupled and place < len(drafts):
                token, p = drafts[place][0], self.rules.law_of(position + place, drafts[place])
                kept = min(1.0, q[token] / p[token])
                rest = np.maximum(q - p, 0)
                rest = rest / rest.sum() if rest.sum() > 0 else q
                redrawn = (1 - kept) * rest + kept * np.eye(len(q))[token]
            yield [(float(redrawn[x]), (x, before[place])) for x in range(len(q))]
