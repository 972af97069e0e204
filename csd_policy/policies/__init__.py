"""Acceptance policies, one family a file."""

from csd_policy.policies.base import AcceptancePolicy
from csd_policy.policies.csd import CSD, EntropyOnly, KLGate, TVGate
from csd_policy.policies.exact import Exact, ExactMatch, JacobiMatch
from csd_policy.policies.gsd import GSD
from csd_policy.policies.lantern import LANTERN
from csd_policy.policies.lenience import Addition, Amplify, CoolSD, EntropyAware
from csd_policy.policies.wrappers import Blend, RiskGated, Veto

__all__ = [
    "CSD",
    "GSD",
    "LANTERN",
    "AcceptancePolicy",
    "Addition",
    "Amplify",
    "Blend",
    "CoolSD",
    "EntropyAware",
    "EntropyOnly",
    "Exact",
    "ExactMatch",
    "JacobiMatch",
    "KLGate",
    "RiskGated",
    "TVGate",
    "Veto",
]
