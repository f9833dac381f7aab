"""The band in which losses stay: so many robust deviations above their median."""

import math
from collections.abc import Sequence

import numpy as np

WINDOW = 32
"""Losses that a step's is held against: those of the last steps."""
LEAST = 16
"""With fewer of them there is no band."""

_TO_DEVIATION = 1.4826  # of a normal distribution, from its median absolute deviation
_LEAST_DEVIATION = 0.01  # of the median: a loss that hardly moves has a band too


def band_limit(values: Sequence[float], width: float, *, least: int = LEAST) -> float:
    """What is above it has left the band: the median of the finite values and `width` robust deviations.

    A deviation is 1.4826 times the median distance from the median, and at least 1 % of that. Without `least` finite
    values there is no limit, but infinity.
    Source: Rousseeuw and Croux 1993, "Alternatives to the median absolute deviation", section 1.
    """
    finite = np.asarray([value for value in values if math.isfinite(value)], np.float64)
    if len(finite) < least:
        return math.inf
    median = np.median(finite)
    deviation = _TO_DEVIATION * np.median(np.abs(finite - median))
    return float(median + width * max(deviation, _LEAST_DEVIATION * abs(median)))
