"""The data that flows through the framework: settings, candidates, traces, results.

Axis letters of every docstring: B images, W window slots, L = W-1 drafts, V codebook size, N codes
of an image, K candidate tokens (1 or V), D hidden size. Symbols: ``p`` draft law, ``q`` target law,
``tv`` their total variation, ``entropy`` that of q in nats, ``b`` acceptance probability.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from csd_policy.sampling import draw

if TYPE_CHECKING:
    from PIL.Image import Image

    from csd_policy.models.base import ImageTokenModel

ACCEPTED, RESAMPLED, BONUS = 0, 1, 2  # how a token was committed
HOW = ("accepted", "resampled", "bonus")


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
    """

    window: int = 16
    guidance_scale: float | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    tv_budget: float | None = None
    relax_fresh: bool = False

    def __post_init__(self) -> None:
        checks = {
            "window": (self.window >= 1, "1 or more"),
            "guidance_scale": (_within(self.guidance_scale, 0), "0 or more, and finite"),
            "temperature": (_within(self.temperature, 0), "0 or more, and finite"),
            "top_k": (self.top_k is None or self.top_k >= 0, "0 (no filter) or more"),
            "top_p": (_within(self.top_p, 0, 1) and self.top_p != 0, "in (0, 1]"),
            "tv_budget": (_within(self.tv_budget, 0), "0 or more, and finite"),
        }
        for name, (valid, expected) in checks.items():
            if not valid:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected {expected}")

    def resolved(self, defaults: "SamplingDefaults") -> "DecodeConfig":
        """This configuration with the model's defaults where nothing was set."""
        unset = {k: v for k, v in asdict(defaults).items() if getattr(self, k) is None}
        return replace(self, **unset)


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
class Candidates:
    """What a policy sees of the L drafts under verification; properties are computed when used.

    Attributes:
        p_all: law of the draft, ``[B, L, V]`` probabilities.
        q_all: law of the target, ``[B, L, V]`` probabilities.
        drafted: the drafted tokens, int64 ``[B, L]`` in [0, V).
        fresh: bool ``[B, L, 1]``, True where no pass has seen the draft (its ``p`` is one-hot).
        row, column: place of the draft in the grid, int64 ``[B, L, 1]``.
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

    @cached_property
    def tokens(self) -> Tensor:
        """The candidate tokens, int64 ``[B, L, K]``."""
        if self.every_token:
            return torch.arange(self.q_all.shape[-1], device=self.q_all.device).expand_as(
                self.q_all
            )
        return self.drafted[..., None]

    @cached_property
    def p(self) -> Tensor:
        """Draft probability of each candidate, ``[B, L, K]`` in [0, 1]."""
        return self.p_all if self.every_token else self.p_all.gather(-1, self.tokens)

    @cached_property
    def q(self) -> Tensor:
        """Target probability of each candidate, ``[B, L, K]`` in [0, 1]."""
        return self.q_all if self.every_token else self.q_all.gather(-1, self.tokens)

    @cached_property
    def ratio(self) -> Tensor:
        """q/p, ``[B, L, K]`` in [0, inf]; +inf where p = 0 < q, 0 where both are 0."""
        return torch.where(self.q > 0, self.q / self.p, 0.0)

    @cached_property
    def support(self) -> Tensor:
        """How many tokens have q > 0, ``[B, L, 1]``, same dtype as q."""
        return (self.q_all > 0).to(self.q_all.dtype).sum(-1, keepdim=True)

    @cached_property
    def target_draw(self) -> Tensor:
        """The target's own draw, argmax of log q + G, int64 ``[B, L, 1]``; needs ``noise``."""
        if self.noise is None:
            raise ValueError("target_draw needs the policy to declare needs = {'noise'}")
        return draw(self.q_all, self.noise)[..., None]

    def whole(self) -> "Candidates":
        """The same drafts with every token as a candidate (K = V)."""
        return self if self.every_token else replace(self, every_token=True)

    def at(self, index: Tensor) -> "Candidates":
        """One draft per image (L = 1); ``index`` int64 ``[B]`` in [0, L)."""

        def pick(x: Tensor) -> Tensor:
            where = index.view(-1, 1, *(1,) * (x.ndim - 2)).expand(-1, 1, *x.shape[2:])
            return x.gather(1, where)

        given = {f.name: getattr(self, f.name) for f in fields(self)}
        picked: dict[str, Any] = {k: pick(v) for k, v in given.items() if isinstance(v, Tensor)}
        return replace(self, **picked)


TRACE_FIELDS = {
    "pass_number": torch.int32,  # the row's pass, from 1, that committed the token
    "how": torch.int8,  # index into HOW
    "b": torch.float32,  # acceptance probability of the draft (NaN: bonus, there was none)
    "ratio": torch.float32,  # q/p of the draft (NaN: bonus)
    "uniform": torch.float32,  # the number that b was compared with (NaN: bonus)
    "entropy": torch.float32,  # of q, nats
    "tv": torch.float32,  # of p and q (NaN: bonus)
    "spent_tv": torch.float32,  # TV of the committed token's law and q
    "risk": torch.float32,  # what the policy's risk map said (NaN: it has none)
}


@dataclass(frozen=True)
class Trace:
    """What happened at each code of each image; every field is a tensor ``[B, N]``.

    See ``TRACE_FIELDS`` for dtypes and meanings. Forced tokens do not appear.
    """

    pass_number: Tensor
    how: Tensor
    b: Tensor
    ratio: Tensor
    uniform: Tensor
    entropy: Tensor
    tv: Tensor
    spent_tv: Tensor
    risk: Tensor

    @property
    def relaxed(self) -> Tensor:
        """Bool ``[B, N]``: accepted where the exact rule, with the same number, would reject."""
        return (self.how == ACCEPTED) & (self.uniform >= self.ratio)

    def row(self, i: int) -> "Trace":
        """The trace of image ``i`` alone, fields ``[1, N]``."""
        return Trace(**{name: getattr(self, name)[i : i + 1] for name in TRACE_FIELDS})

    def save(self, path: str | Path) -> None:
        """Write a safetensors file."""
        from safetensors.torch import save_file

        save_file({name: getattr(self, name).contiguous() for name in TRACE_FIELDS}, str(path))

    @classmethod
    def load(cls, path: str | Path) -> "Trace":
        """Read what ``save`` wrote; ValueError if a field is missing or of another dtype."""
        from safetensors.torch import load_file

        data = load_file(str(path))
        for name, dtype in TRACE_FIELDS.items():
            if name not in data or data[name].dtype != dtype:
                found = data[name].dtype if name in data else "missing"
                raise ValueError(f"{path}: trace field {name!r} is {found}, expected {dtype}")
        return cls(**{name: data[name] for name in TRACE_FIELDS})


@dataclass(frozen=True)
class Stats:
    """What a call of ``generate`` cost.

    Attributes:
        forward_passes: passes until each image was complete, without the prefill.
        tokens_per_pass: codes per forward pass of each image.
        spent_tv: summed spent TV of each image.
        batch_passes: passes of the whole batch, the largest of ``forward_passes``.
        seconds: wall time of the whole batch by part: ``prefill``, ``forward`` (the model),
            ``verification`` (laws, policy, draws, commit, redraft), ``rest``, and ``total``.
    """

    forward_passes: list[int]
    tokens_per_pass: list[float]
    spent_tv: list[float]
    batch_passes: int
    seconds: dict[str, float]


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

    @cached_property
    def images(self) -> "list[Image]":
        """PIL pictures, decoded at the first use."""
        return self.model.decode(self.tokens)

    def record(self) -> dict[str, Any]:
        """Settings as plain data, for a results file."""
        return {
            "model": self.model.name,
            "policy": self.policy,
            "draft": self.draft,
            "decode": asdict(self.config),
        }

    def save_record(self, path: str | Path) -> None:
        """Write ``record()``, prompts, seeds and stats as JSON."""
        data = self.record() | {
            "prompts": list(self.prompts),
            "seeds": list(self.seeds),
            "stats": asdict(self.stats),
        }
        Path(path).write_text(json.dumps(data, indent=1) + "\n")
