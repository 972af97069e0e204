"""Speculative Jacobi decoding: the one loop that every policy and every draft strategy plugs into.

Algorithm (SJD, arXiv 2410.01699, with a policy in place of the exact rule). Each image repeats, at
its own pace, until its slots are full:

1. draft    the window: the last committed token and L = W-1 drafts
2. forward  one pass gives the target's law q behind each of the W slots
3. verify   accept drafts up to the first rejection: u < b(x), u uniform, b from the policy
4. commit   the accepted drafts and one more token: after a rejection one from the residual, else a
            bonus from the last q; redraw the rest of the window for the next pass
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from csd_policy.drafts import DraftStrategy, Gumbel, Independent
from csd_policy.models.base import ImageTokenModel
from csd_policy.policies import AcceptancePolicy, Exact, TVGate
from csd_policy.redraft import Redrafter
from csd_policy.risk.guide import RiskGuide
from csd_policy.rows import Keep, Rows
from csd_policy.sampling import Noise, target_law
from csd_policy.served import check_faults, check_given, check_kinds, check_served, check_window
from csd_policy.timing import PhaseTimer
from csd_policy.types import DecodeConfig, DecodeResult, check_seeds
from csd_policy.verify import Verifier

OTHERS = ("alternative", "correction")  # what a replay keeps of each code, see ``Rows``
PREVIEW_POLICY = TVGate(delta=0.8)  # of the picture that a risk map looks at before the real one


class JacobiDecoder:
    """Decodes pictures speculatively with one model, one policy and one draft strategy.

    Args:
        model: see ``ImageTokenModel``.
        policy: when to accept a draft; default ``Exact()``.
        draft: how to redraw what was not verified; default ``Independent()``.
        config: window, sampling and budget, see ``DecodeConfig``.

    Raises:
        ValueError: the policy needs something that nothing provides.

    Example:
        >>> decoder = JacobiDecoder(model, policy=CSD(delta=0.35), draft=Gumbel())  # doctest: +SKIP
        >>> decoder.generate(["two cats on blue plain"], seeds=[0]).images[0]  # doctest: +SKIP
    """

    def __init__(
        self,
        model: ImageTokenModel,
        policy: AcceptancePolicy | None = None,
        draft: DraftStrategy | None = None,
        config: DecodeConfig | None = None,
    ) -> None:
        policy, draft = policy or Exact(), draft or Independent()
        check_kinds(policy, draft)
        self._record = {"policy": repr(policy), "draft": repr(draft)}
        self.model, self.policy, self.draft = model, policy.bind(model), draft
        self.config = (config or DecodeConfig()).resolved(model.defaults)
        check_served(self.policy, self.config)
        self._slots = len(model.code_of_slot)
        check_window(self.config.window, self._slots, model.name)
        asked = self.policy.risk is not None and self.policy.risk.alternatives
        self._others = OTHERS[:1] if asked else ()
        self._verify = Verifier(self.policy, self.config, model.grid[1], self._slots)
        # windows reach over the last slot; the places there hold no code
        overhang = torch.full((2 * self.config.window,), -1, device=model.device)
        self._code_of_slot = torch.cat([model.code_of_slot, overhang])
        self._codes_before = torch.nn.functional.pad((self._code_of_slot >= 0).cumsum(0), (1, 0))
        self._redraft = Redrafter(draft, self._code_of_slot, self._codes_before, model.grid[1])

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int | None] | None = None,
        on_pass: Callable[[int, list[int]], None] | None = None,
        others: bool = False,
    ) -> DecodeResult:
        """Draw one picture per prompt.

        Args:
            prompts: B texts.
            seeds: one per prompt, each in [0, 2^63) or None; None is drawn and recorded.
            on_pass: called after each pass with its number and the slots committed per image.
            others: keep in ``others`` of the result what could have been committed instead.

        Raises:
            ValueError: no prompts, a prompt that the model cannot read, a wrong seed, or a
                law or an acceptance probability that is not finite (names pass, image, position).
        """
        chosen = check_seeds(prompts, seeds)
        self.model.check_prompts(prompts)
        return self._draw(prompts, chosen, OTHERS if others else (), on_pass)

    @torch.inference_mode()
    def replay(
        self, prompts: Sequence[str], tokens: Tensor, seeds: Sequence[int | None] | None = None
    ) -> DecodeResult:
        """Commit the codes of given pictures, and record what draft and target said on the way.

        A draft is accepted if it is the given code, which is committed behind the last one that is.
        The pictures of an exact rule and its seeds take the very passes that made them. The result
        has ``others``.

        Args:
            prompts: B texts.
            tokens: codebook ids in raster order, int64 ``[B, N]``.
            seeds: of the drafts, as in ``generate``.

        Raises:
            ValueError: as in ``generate``, and if ``tokens`` has another shape or other ids.
        """
        chosen = check_seeds(prompts, seeds)
        check_given(tokens, len(prompts), self.model)
        self.model.check_prompts(prompts)
        return self._draw(prompts, chosen, OTHERS, given=tokens.to(self.model.device))

    def _draw(
        self, prompts: Sequence[str], seeds: list[int], others: tuple[str, ...],
        on_pass: Callable[[int, list[int]], None] | None = None, given: Tensor | None = None,
    ) -> DecodeResult:  # fmt: skip
        timer = PhaseTimer(self.model.device)
        noise = Noise(torch.tensor(seeds, device=self.model.device), self.model.num_codes)
        with timer("preview"):
            preview = self._preview(prompts, noise)
        others = others or self._others
        rows, number = self._decode(prompts, noise, timer, others, preview, on_pass, given)
        before = [0] * len(seeds) if preview is None else preview.passes.tolist()
        return DecodeResult(
            tokens=rows.tokens[:, :-1].cpu(),
            trace=rows.to_trace(),
            stats=rows.to_stats(number, timer.totals(), before),
            prompts=list(prompts),
            seeds=seeds,
            config=self.config,
            **self._record,
            model=self.model,
            others=rows.to_others() if others == OTHERS else {},
        )

    def _decode(
        self, prompts: Sequence[str], noise: Noise, timer: PhaseTimer, others: tuple[str, ...],
        preview: Rows | None = None, on_pass: Callable[[int, list[int]], None] | None = None,
        given: Tensor | None = None,
    ) -> tuple[Rows, int]:  # fmt: skip
        """The finished rows, and the passes of the batch."""
        guided, window = self.config.guidance_scale != 1, self.config.window
        with timer("prefill"):
            state = self.model.prefill(prompts, guided, window)
        rows = self._start(noise, others, given)
        risk, codes = self.policy.risk, (self._code_of_slot, self._codes_before)
        guide = RiskGuide(risk, self.model, prompts, preview, *codes) if risk else None
        number, done = 0, [0]
        while min(done) < self._slots:
            number += 1
            if guide is not None:
                with timer("risk"):
                    guide(number, rows)
            self._step(state, rows, noise, timer)
            # the one host read of a pass: progress and faults of all rows
            done, faults = torch.stack([rows.done, rows.fault]).tolist()
            check_faults(faults, rows, number, prompts, self.policy)
            if on_pass is not None:
                on_pass(number, done)
        return rows, number

    def _start(self, noise: Noise, others: tuple[str, ...], given: Tensor | None) -> Rows:
        grid, drafts = self.model.grid, self.config.window - 1
        dtype = torch.promote_types(self.model.dtype, torch.float32)
        keep = Keep(
            laws=self.draft.start.startswith("sample"),
            risk=self.policy.risk is not None,
            others=others,
        )
        rows = Rows.empty(noise, drafts, grid[0] * grid[1], dtype, keep)
        rows.given = given
        self._redraft.start(rows, noise)
        return rows

    def _step(self, state: Any, rows: Rows, noise: Noise, timer: PhaseTimer) -> None:
        """One pass over every row; finished rows stay as they are. No host reads, fixed shapes."""
        # 1. draft: the window is slots done-1 (the last committed token) to done+L-1
        window = torch.arange(self.config.window, device=rows.done.device)
        slots = rows.done[:, None] - 1 + window
        codes = torch.cat([rows.last[:, None], rows.drafts], dim=1)
        # 2. forward: hidden state and logits behind each slot
        with timer("forward"):
            embeddings = self.model.embed(state, codes, slots)
            hidden = self.model.forward(state, embeddings, slots)
            logits = self.model.head(hidden)
        with timer("verification"):
            # 3. verify: the laws behind the window are those of slots done to done+L
            position = self._code_of_slot[slots + 1]
            q = target_law(logits, self.config)
            verdict = self._verify(rows, q, hidden[: len(q)], position, noise)
            if rows.given is not None:
                verdict = verdict.following(rows.given, rows.drafts, position)
            # 4. commit, and redraw the rest of the window
            committed = rows.commit(verdict, position, self._slots, q)
            self._redraft(rows, q, committed, noise)

    def _preview(self, prompts: Sequence[str], noise: Noise) -> Rows | None:
        """A fast picture of each prompt with random numbers of its own, if the risk map asks."""
        if self.policy.risk is None or self.policy.risk.source != "preview":
            return None
        config = replace(self.config, tv_budget=None, spent_tv="estimate")
        decoder = JacobiDecoder(self.model, PREVIEW_POLICY, Gumbel(), config)
        timer = PhaseTimer(self.model.device)
        return decoder._decode(prompts, noise.derived(), timer, self._others)[0]
