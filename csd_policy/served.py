"""Whether the loop can serve a policy under given settings."""

from csd_policy.policies.base import AcceptancePolicy
from csd_policy.types import DecodeConfig

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
