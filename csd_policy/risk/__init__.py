"""Risk maps: where in a picture an error would be seen."""

from csd_policy.risk.base import FixedRisk, RiskMap

__all__ = ["FixedRisk", "RiskMap"]
