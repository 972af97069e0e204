"""Settings and results. What a policy sees is in ``candidates``, what happened in ``trace``.

Axis letters of every docstring: B images, W window slots, L = W-1 drafts, V codebook size, N codes
of an image, K candidate tokens (1 or V), D hidden size. Symbols: ``p`` draft law, ``q`` target law,
``tv`` their total variation, ``entropy`` that of q in nats, ``b`` acceptance probability.
"""

import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import Tensor

from csd_policy.trace import Trace

if TYPE_CHECKING:
    from PIL.Image import Image

    from csd_policy.models.base import ImageTokenModel


SpentTV = Literal["exact", "estimate"]


@dataclass(frozen=True)
class DecodeConfig:
    """How to decode. None for a sampling setting means the model's own default.

    Args:
        window: W, slots per forward pass, 1 or more; 1 is plain AR.
        guidance_scale: 0 or more; 1 is no guidance (and one row per image), 0 the unconditional
            law.
        temperature: 0 or more; 0 is greedy.
        top_k: 0 or more; 0 keeps every token.
        top_p: in (0, 1]; 1 keeps every token.
        tv_budget: most spent TV per image, 0 or more; None is no bound.
        relax_fresh: let a relaxed policy judge drafts that no pass has seen (for studies).
        spent_tv: ``exact`` sums over all V tokens; ``estimate`` takes b - min(1, q/p) at the
            drafted token, whose mean is the same and which costs nothing, for large codebooks. Not
            for policies that can be stricter than the exact rule or have a residual of their own,
            and not with a budget.
    """

    window: int = 16
    guidance_scale: float | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    tv_budget: float | None = None
    relax_fresh: bool = False
    spent_tv: SpentTV = "exact"

    def __post_init__(self) -> None:
        checks = {
            "window": (_whole(self.window, 1), "a whole number, 1 or more"),
            "guidance_scale": (_within(self.guidance_scale, 0), "0 or more, and finite"),
            "temperature": (_within(self.temperature, 0), "0 or more, and finite"),
            "top_k": (
                self.top_k is None or _whole(self.top_k, 0),
                "a whole number, 0 (no filter) or more",
            ),
            "top_p": (_within(self.top_p, 0, 1) and self.top_p != 0, "in (0, 1]"),
            "tv_budget": (_within(self.tv_budget, 0), "0 or more, and finite"),
            "spent_tv": (self.spent_tv in get_args(SpentTV), "exact or estimate"),
        }
        for name, (valid, expected) in checks.items():
            if not valid:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected {expected}")
        if self.spent_tv == "estimate" and self.tv_budget is not None:
            raise ValueError(
                f"tv_budget is {self.tv_budget} with an estimate of spent TV, expected spent_tv "
                "exact: an estimate looks at the drafted token, and cannot bound anything"
            )

    def resolved(self, defaults: "SamplingDefaults") -> "DecodeConfig":
        """This configuration with the model's defaults where nothing was set."""
        unset = {k: v for k, v in asdict(defaults).items() if getattr(self, k) is None}
        return replace(self, **unset)


def _whole(value: object, low: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= low


def _within(value: float | None, low: float, high: float = float("inf")) -> bool:
    return value is None or (low <= value <= high and value != float("inf"))


@dataclass(frozen=True)
class SamplingDefaults:
    """Sampling settings of a model's own release."""

    guidance_scale: float = 1.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True)
class Stats:
    """What a call of ``generate`` cost.

    Attributes:
        forward_passes: passes until each image was complete, without the prefill, with those of
            its preview if there was one.
        tokens_per_pass: codes per forward pass of each image.
        spent_tv: summed spent TV of each image.
        batch_passes: passes of the whole batch, the largest of ``forward_passes``.
        seconds: wall time of the whole batch by part: ``prefill``, ``forward`` (the model),
            ``verification`` (laws, policy, draws, commit, redraft), ``preview`` and ``risk`` if the
            policy has a risk map, ``rest``, and ``total``.
        preview_passes: those passes of each image that drew its preview.
    """

    forward_passes: list[int]
    tokens_per_pass: list[float]
    spent_tv: list[float]
    batch_passes: int
    seconds: dict[str, float]
    preview_passes: list[int]


@dataclass(frozen=True)
class DecodeResult:
    """Pictures and how they came about.

    Attributes:
        tokens: codebook ids in raster order, int64 ``[B, N]`` on the CPU.
        trace: per code, see ``Trace``.
        stats: costs, see ``Stats``.
        prompts, seeds: what was asked for, one per image.
        config: the settings used, the model's defaults filled in.
        policy, draft: what decided, as text that makes them again.
        others: if asked for, and after a replay, codes that could have been committed instead,
            int64 ``[B, N]`` each, on the CPU: ``alternative``, another draw from the law of the
            draft that was verified; ``correction``, what the exact rule commits where it rejects
            that draft. Where there was no draft (a bonus), both are draws from the target's law.
    """

    tokens: Tensor
    trace: Trace
    stats: Stats
    prompts: Sequence[str]
    seeds: Sequence[int]
    config: DecodeConfig
    policy: str
    draft: str
    model: "ImageTokenModel" = field(repr=False)
    others: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @cached_property
    def images(self) -> "list[Image]":
        """PIL pictures, decoded at the first use."""
        return self.model.decode(self.tokens)

    def record(self) -> dict[str, Any]:
        """Settings as plain data, for a results file."""
        return {
            "model": self.model.name,
            "model_options": dict(self.model.options),
            "policy": self.policy,
            "draft": self.draft,
            "decode": asdict(self.config),
        }


def check_seeds(prompts: Sequence[str], seeds: Sequence[int | None] | None) -> list[int]:
    """One seed per prompt, the missing ones drawn from the system; ValueError if any is wrong."""
    if isinstance(prompts, str) or len(prompts) == 0:
        raise ValueError(f"prompts is {prompts!r}, expected a list of at least one text")
    seeds = [None] * len(prompts) if seeds is None else list(seeds)
    if len(seeds) != len(prompts):
        raise ValueError(f"{len(seeds)} seeds for {len(prompts)} prompts, expected one per prompt")
    for seed in seeds:
        if seed is not None and not (isinstance(seed, int) and 0 <= seed < 2**63):
            raise ValueError(f"seed is {seed!r}, expected an integer in [0, 2^63) or None")
    return [secrets.randbelow(2**63) if seed is None else seed for seed in seeds]
