"""Study where a drafted token may be accepted: relaxed speculative decoding of AR image models."""

from csd_policy.candidates import Candidates
from csd_policy.decoder import JacobiDecoder
from csd_policy.models import ImageTokenModel, load_model
from csd_policy.policies import AcceptancePolicy
from csd_policy.risk import RiskMap
from csd_policy.trace import Trace
from csd_policy.types import DecodeConfig, DecodeResult

__version__ = "0.1.0"
__all__ = [
    "AcceptancePolicy",
    "Candidates",
    "DecodeConfig",
    "DecodeResult",
    "ImageTokenModel",
    "JacobiDecoder",
    "RiskMap",
    "Trace",
    "load_model",
]
