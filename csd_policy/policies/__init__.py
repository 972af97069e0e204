"""Acceptance policies, one family a file."""

from csd_policy.policies.base import AcceptancePolicy
from csd_policy.policies.csd import CSD, EntropyOnly, TVGate
from csd_policy.policies.exact import Exact

__all__ = ["CSD", "AcceptancePolicy", "EntropyOnly", "Exact", "TVGate"]
