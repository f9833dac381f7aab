"""The band of normal losses, which a loss spike leaves."""

import math
from collections.abc import Sequence

import numpy as np

WINDOW = 32
"""The number of last losses with which a step's loss is compared."""
LEAST_LOSSES = 16
"""With fewer losses there is no band."""

_TO_DEVIATION = 1.4826  # standard deviation over median absolute deviation, for a normal distribution
_LEAST_DEVIATION = 0.01  # relative to the median, so that a loss that hardly moves has a band too


def band_limit(values: Sequence[float], width: float, *, least: int = LEAST_LOSSES) -> float:
    """The upper end of the band of normal values: the median of the finite values plus `width` robust deviations.

    A robust deviation is 1.4826 times the median distance from the median, and at least 1 % of the median. With fewer
    than `least` finite values the limit is infinity.
    Source: Rousseeuw and Croux 1993, "Alternatives to the median absolute deviation", section 1.
    """
    finite = np.asarray([value for value in values if math.isfinite(value)], np.float64)
    if len(finite) < least:
        return math.inf
    median = np.median(finite)
    deviation = _TO_DEVIATION * np.median(np.abs(finite - median))
    return float(median + width * max(deviation, _LEAST_DEVIATION * abs(median)))
