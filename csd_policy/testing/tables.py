"""Models and laws small enough to enumerate."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from csd_policy.decoder import JacobiDecoder
from csd_policy.drafts import DraftStrategy
from csd_policy.models.base import ImageTokenModel
from csd_policy.policies import AcceptancePolicy
from csd_policy.sampling import guide, law
from csd_policy.types import DecodeConfig


class TableModel(ImageTokenModel):
    """A model whose logits are a table, so that every joint law can be enumerated.

    Args:
        logits: ``[N, V + 1, V]``: position, previous code + 1 (0: none), next code.
        uncond_logits: the same for the unconditional branch; None is ``logits``.
        grid: (rows, columns) with rows * columns = N; None is (1, N).
        row_ends: put a forced token behind each row; the code after it sees no previous code.
        codebook: code vectors ``[V, C]`` for policies that look at them.

    Prompts are ignored, and there are no pictures.
    """

    def __init__(
        self,
        logits: Tensor,
        uncond_logits: Tensor | None = None,
        grid: tuple[int, int] | None = None,
        row_ends: bool = False,
        codebook: Tensor | None = None,
    ) -> None:
        codes, previous, size = logits.shape
        rows, columns = grid or (1, codes)
        if previous != size + 1 or rows * columns != codes:
            raise ValueError(
                f"logits are {tuple(logits.shape)} with grid {(rows, columns)}, "
                "expected [N, V + 1, V] with N = rows * columns"
            )
        uncond = logits if uncond_logits is None else uncond_logits
        if uncond.shape != logits.shape:
            raise ValueError(
                f"uncond_logits are {tuple(uncond.shape)}, logits {tuple(logits.shape)}"
            )
        self.name, self.grid, self.num_codes = "table", (rows, columns), size
        self.codebook, self.dtype = codebook, logits.dtype
        self.table = torch.stack([logits, uncond])  # [2, N, V + 1, V]
        number = torch.arange(codes, device=logits.device).view(rows, columns)
        if row_ends:
            number = torch.nn.functional.pad(number, (0, 1), value=-1)
        self.code_of_slot = number.flatten()

    def prefill(self, prompts: Sequence[str], guided: bool, window: int) -> Any:
        return 2 if guided else 1  # branches

    def embed(self, state: Any, codes: Tensor, slots: Tensor) -> Tensor:
        """Branch, number of the next code, index of the previous one: ``[B, W, 3]``."""
        padded = torch.nn.functional.pad(self.code_of_slot, (1, 0), value=-1)
        held = padded[(slots + 1).clamp(max=len(padded) - 1)]
        following = padded[(slots + 2).clamp(max=len(padded) - 1)].clamp(min=0)
        previous = torch.where(held >= 0, codes + 1, 0)
        return torch.stack([torch.zeros_like(slots), following, previous], -1).to(torch.float64)

    def forward(self, state: Any, embeddings: Tensor, slots: Tensor) -> Tensor:
        if state == 1:
            return embeddings
        return torch.cat([embeddings, embeddings + embeddings.new_tensor([1.0, 0.0, 0.0])])

    def head(self, hidden: Tensor) -> Tensor:
        branch, following, previous = hidden.long().unbind(-1)
        return self.table[branch, following, previous]

    def decode(self, tokens: Tensor) -> Any:
        raise ValueError("a TableModel has no pictures")


def random_table(seed: int, codes: int = 3, size: int = 4, scale: float = 2.0) -> Tensor:
    """Logits for a ``TableModel``, ``[codes, size + 1, size]``, normal with deviation ``scale``."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(codes, size + 1, size, generator=generator)


def table_laws(model: TableModel, config: DecodeConfig) -> Tensor:
    """The target's law by position and previous code + 1, fp64 ``[N, V + 1, V]``."""
    c = config.resolved(model.defaults)
    assert c.guidance_scale is not None and c.temperature is not None
    assert c.top_k is not None and c.top_p is not None
    both = model.table.double()
    logits = guide(both.flatten(0, 1), c.guidance_scale) if c.guidance_scale != 1 else both[0]
    return law(logits.view(both.shape[1:]), c.temperature, c.top_k, c.top_p)


def joint_law(model: TableModel, config: DecodeConfig) -> Tensor:
    """The law of whole images under AR sampling, fp64 ``[V^N]``, first code most significant."""
    q = table_laws(model, config)
    codes = model.code_of_slot
    starts = codes[(codes >= 0) & (torch.nn.functional.pad(codes, (1, 0), value=-1)[:-1] < 0)]
    joint = torch.ones(1, dtype=torch.float64)
    for number in range(len(q)):
        step = q[number, :1] if number in starts else q[number, 1:]
        joint = (joint.view(-1, len(step), 1) * step).flatten()
    return joint


def image_counts(
    model: TableModel,
    policy: AcceptancePolicy,
    draft: DraftStrategy,
    config: DecodeConfig,
    runs: int = 200_000,
    first_seed: int = 0,
) -> tuple[Tensor, float]:
    """How often each image was decoded in ``runs``, int64 ``[V^N]``, and the mean spent TV."""
    decoder = JacobiDecoder(model, policy, draft, config)
    result = decoder.generate([""] * runs, list(range(first_seed, first_seed + runs)))
    codes = result.tokens.shape[1]
    place = model.num_codes ** torch.arange(codes - 1, -1, -1)
    counts = torch.bincount(result.tokens @ place, minlength=model.num_codes**codes)
    return counts, sum(result.stats.spent_tv) / runs


def law_error(
    model: TableModel,
    policy: AcceptancePolicy,
    draft: DraftStrategy,
    config: DecodeConfig,
    runs: int = 200_000,
    first_seed: int = 0,
) -> float:
    """Total variation between the histogram of ``runs`` decoded images and the enumerated law.

    Sampling alone gives about sqrt(V^N / (2 pi runs)).
    """
    counts, _ = image_counts(model, policy, draft, config, runs, first_seed)
    return float((counts / runs - joint_law(model, config)).abs().sum() / 2)
