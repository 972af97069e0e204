"""Risk maps: where in a picture an error would be seen."""

from csd_policy.risk.base import FixedRisk, RiskMap
from csd_policy.risk.canvas import Canvas
from csd_policy.risk.ground_truth import GroundTruthRisk
from csd_policy.risk.perceptual import PerceptualRisk
from csd_policy.risk.segmentation import SegmentationRisk

__all__ = [
    "Canvas",
    "FixedRisk",
    "GroundTruthRisk",
    "PerceptualRisk",
    "RiskMap",
    "SegmentationRisk",
]
