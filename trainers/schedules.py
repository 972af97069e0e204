"""Learning-rate factors as functions of the step, for ``LambdaLR``."""

import math
from collections.abc import Callable


def warmup_then_linear(warmup: int, total: int) -> Callable[[int], float]:
    """Linear rise to 1 over ``warmup`` steps, then linear fall to 0 at ``total``."""
    return lambda step: min((step + 1) / warmup, max(0.0, 1 - step / total))


def warmup_then_cosine(warmup: int, total: int, floor: float = 0.02) -> Callable[[int], float]:
    """Linear rise to 1 over ``warmup`` steps, then half a cosine down to ``floor`` at ``total``."""

    def factor(step: int) -> float:
        fall = 0.5 * (1 + math.cos(math.pi * min(step / total, 1.0)))
        return min((step + 1) / warmup, floor + (1 - floor) * fall)

    return factor
