"""Advantages: how much better a response is than the others to its prompt."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

_LEAST_DEVIATION = 1e-4
"""Added to the standard deviation that divides rewards."""


def group_advantages(reward_N: np.ndarray, num_generations: int, scale: Literal["group", "none"]) -> np.ndarray:
    """Advantages of responses, float32 [N]: their rewards less the mean of their group.

    Computed in double precision; exactly 0 in a group whose rewards are all equal, and for a response without a reward,
    which has no part in the mean and the deviation of its group.

    Args:
      reward_N: float64, in consecutive groups of `num_generations` responses to one prompt; NaN without a reward.
      scale: group: divided by the group's sample standard deviation (over n - 1) + 1e-4; none: not divided.
    Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.2; not divided: Liu et al. 2025, arXiv:2503.20783.
    """
    groups = _groups(reward_N, num_generations)
    is_scored = ~np.isnan(groups)
    scored = is_scored.sum(axis=1, keepdims=True)
    mean = np.nan_to_num(groups).sum(axis=1, keepdims=True) / np.maximum(scored, 1)
    above = np.where(is_scored, groups - mean, 0)
    # The mean of equal numbers may be off by their last bit.
    above[_is_equal(groups)] = 0
    if scale == "group":
        variance = np.square(above).sum(axis=1, keepdims=True) / np.maximum(scored - 1, 1)
        above /= np.sqrt(variance) + _LEAST_DEVIATION
    return above.ravel().astype(np.float32)


def mean_deviation(reward_N: np.ndarray, num_generations: int) -> float:
    """The mean of the groups' standard deviations (over n - 1); NaN if no group has two rewards."""
    groups = _groups(reward_N, num_generations)
    deviations: list[float] = []
    for group in groups:
        scored = group[~np.isnan(group)]
        if len(scored) > 1:
            deviations.append(float(np.std(scored, ddof=1)))
    return mean_of(deviations)


def mean_of(values: Sequence[float] | np.ndarray) -> float:
    """The mean of the numbers that are not NaN; NaN if there are none."""
    found = np.asarray(values, np.float64)
    found = found[~np.isnan(found)]
    return float(np.mean(found)) if found.size else math.nan


def equal_groups_fraction(reward_N: np.ndarray, num_generations: int) -> float:
    """The fraction of groups whose rewards are all equal, or fewer than two: nothing is learned from them."""
    return float(_is_equal(_groups(reward_N, num_generations)).mean())


def _groups(reward_N: np.ndarray, num_generations: int) -> np.ndarray:
    """[groups, num_generations], float64."""
    return reward_N.astype(np.float64).reshape(-1, num_generations)


def _is_equal(groups: np.ndarray) -> np.ndarray:
    """Whether a group has no two different rewards."""
    is_scored = ~np.isnan(groups)
    lowest = np.where(is_scored, groups, np.inf).min(axis=1)
    highest = np.where(is_scored, groups, -np.inf).max(axis=1)
    return lowest >= highest
