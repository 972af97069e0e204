"""What rules that look at a model's codebook share."""

from collections.abc import Callable

import torch
from torch import Tensor

from csd_policy.candidates import Candidates
from csd_policy.models.base import ImageTokenModel
from csd_policy.policies.base import AcceptancePolicy

CHUNK = 2**24  # elements of the largest intermediate tensor


def on_support(
    rule: Callable[[Tensor, Tensor, Tensor], Tensor], c: Candidates, per_token: int
) -> Tensor:
    """``rule(p, q, kept)`` of many positions, ``[B, L, V]``; 0 where p = q = 0 at all of them.

    It is called in chunks, with laws ``[n, V]`` and the ids ``kept`` ``[m]`` of tokens that occur,
    and gives ``[n, m]``. ``per_token`` numbers are held for each of these.
    """
    p, q = c.p_all.flatten(0, 1), c.q_all.flatten(0, 1)
    kept = ((p > 0) | (q > 0)).any(0).nonzero()[:, 0]
    rows = max(1, CHUNK // (len(kept) * per_token))
    parts = [rule(a, b, kept) for a, b in zip(p.split(rows), q.split(rows), strict=True)]
    return torch.zeros_like(q).index_copy_(1, kept, torch.cat(parts)).view_as(c.q_all)


def codebook_of(model: ImageTokenModel, policy: AcceptancePolicy) -> Tensor:
    """The model's code vectors in fp32, ``[V, C]``; ValueError if it has none."""
    if model.codebook is None:
        raise ValueError(f"{policy!r} needs a codebook, and model {model.name} has none")
    return model.codebook.float()


def bound_to(value: Tensor | None, policy: AcceptancePolicy, size: int) -> Tensor:
    """What ``bind`` put there, for a codebook of ``size`` entries."""
    if value is None:
        raise ValueError(f"{policy!r} is not bound to a model, expected policy.bind(model)")
    if len(value) != size:
        raise ValueError(f"{policy!r} is bound to {len(value)} codes, expected {size}")
    return value
