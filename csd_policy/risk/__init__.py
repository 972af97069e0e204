"""Risk maps: where in a picture an error would be seen."""

from csd_policy.risk.base import FixedRisk, RiskMap
from csd_policy.risk.canvas import Canvas
from csd_policy.risk.ground_truth import GroundTruthRisk
from csd_policy.risk.hed import HedWatershed
from csd_policy.risk.perceptual import PerceptualRisk
from csd_policy.risk.sam import SegmentAnything, TransformersSam
from csd_policy.risk.segmentation import SegmentationRisk
from csd_policy.risk.segmenters import Felzenszwalb, Segmenter

__all__ = [
    "Canvas",
    "Felzenszwalb",
    "FixedRisk",
    "GroundTruthRisk",
    "HedWatershed",
    "PerceptualRisk",
    "RiskMap",
    "SegmentAnything",
    "SegmentationRisk",
    "Segmenter",
    "TransformersSam",
]
