"""What the loop checks: policies and settings before the first pass, numbers behind each."""

from collections.abc import Sequence

import torch
from torch import Tensor

from csd_policy.drafts import DraftStrategy
from csd_policy.models.base import ImageTokenModel
from csd_policy.policies.base import AcceptancePolicy
from csd_policy.rows import Rows
from csd_policy.types import DecodeConfig

MOST_WINDOW = 256  # of images with fewer slots than this

PROVIDED = frozenset({"hidden", "noise"})  # what the loop offers to a policy without a risk map


def check_served(policy: AcceptancePolicy, config: DecodeConfig) -> None:
    """Raise ValueError if the policy needs what nothing provides, or if a setting does not fit."""
    provided = PROVIDED if policy.risk is None else PROVIDED | {"risk"}
    if missing := policy.needs - provided:
        hint = " (a risk map, see csd_policy.risk)" if "risk" in missing else ""
        raise ValueError(f"{policy!r} needs {sorted(missing)}, which nothing provides{hint}")
    seen = policy.risk is not None and policy.risk.source == "drafts"
    if seen and (policy.exact or config.spent_tv != "estimate"):
        raise ValueError(
            f"the risk map of {policy!r} looks at the drafts: no law is exact then, and "
            f"spent TV an estimate; spent_tv is {config.spent_tv!r}, expected 'estimate' "
            "and a policy that does not claim to be exact"
        )
    estimated = config.spent_tv == "estimate" and not policy.exact
    if estimated and (policy.may_veto or not policy.best_residual):
        raise ValueError(
            f"spent_tv is 'estimate', which does not hold for {policy!r}, expected 'exact'"
            ": the policy can be stricter than the exact rule, or has a residual of its own"
        )


def check_kinds(policy: AcceptancePolicy, draft: DraftStrategy) -> None:
    """Raise ValueError if one of them is something else."""
    for given, kind in ((policy, AcceptancePolicy), (draft, DraftStrategy)):
        if not isinstance(given, kind):
            raise ValueError(f"{given!r} is no {kind.__name__}, expected an object of one")


def check_window(window: int, slots: int, name: str) -> None:
    """Raise ValueError if a window is larger than an image of the model ``name``."""
    if window > (most := max(MOST_WINDOW, slots)):
        raise ValueError(
            f"window is {window}, expected at most {most}: an image of {name} has {slots} slots"
        )


def check_given(tokens: Tensor, images: int, model: ImageTokenModel) -> None:
    """Raise ValueError if ``tokens`` are not the codes of that many images of the model."""
    shape = [images, model.grid[0] * model.grid[1]]
    if list(tokens.shape) != shape or tokens.dtype != torch.int64:
        raise ValueError(
            f"tokens are {tokens.dtype} {list(tokens.shape)}, expected torch.int64 {shape}"
        )
    model.check_codes(tokens)


def check_faults(
    faults: Sequence[int], rows: Rows, number: int, prompts: Sequence[str], policy: AcceptancePolicy
) -> None:
    """Raise ValueError if a law was not finite in pass ``number``; ``faults`` as in ``Rows``."""
    for i, position in enumerate(faults):
        if position < rows.tokens.shape[1] - 1:
            raise ValueError(
                f"pass {number}, image {i} ({prompts[i]!r}), position {position}: the target's "
                f"law or the acceptance probability of {policy!r} is not a finite number"
            )
