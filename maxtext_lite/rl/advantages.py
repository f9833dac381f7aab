"""Advantages: how much better a response is than the others to its prompt."""

from typing import Literal

import numpy as np

_LEAST_DEVIATION = 1e-4
"""Added to the standard deviation that divides rewards."""


def group_advantages(reward_N: np.ndarray, num_generations: int, scale: Literal["group", "none"]) -> np.ndarray:
    """Advantages of responses, float32 [N]: their rewards less the mean of their group.

    Computed in double precision; exactly 0 in a group whose rewards are all equal.

    Args:
      reward_N: float64, in consecutive groups of `num_generations` responses to one prompt.
      scale: group: divided by the group's sample standard deviation (over n - 1) + 1e-4; none: not divided.
    Raises:
      ValueError: the rewards are not whole groups.
    Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.2; not divided: Liu et al. 2025, arXiv:2503.20783.
    """
    groups = _groups(reward_N, num_generations)
    above = groups - groups.mean(axis=1, keepdims=True)
    # The mean of equal numbers may be off by their last bit.
    above[_is_equal(groups)] = 0
    if scale == "group":
        variance = np.square(above).sum(axis=1, keepdims=True) / max(num_generations - 1, 1)
        above /= np.sqrt(variance) + _LEAST_DEVIATION
    return above.ravel().astype(np.float32)


def equal_groups_fraction(reward_N: np.ndarray, num_generations: int) -> float:
    """The fraction of groups whose rewards are all equal: nothing is learned from them."""
    return float(_is_equal(_groups(reward_N, num_generations)).mean())


def _groups(reward_N: np.ndarray, num_generations: int) -> np.ndarray:
    """[groups, num_generations], float64."""
    if num_generations < 1 or reward_N.ndim != 1 or not reward_N.size or reward_N.size % num_generations:
        raise ValueError(f"rewards of shape {reward_N.shape} are not whole groups of {num_generations}")
    return reward_N.astype(np.float64).reshape(-1, num_generations)


def _is_equal(groups: np.ndarray) -> np.ndarray:
    return np.all(groups == groups[:, :1], axis=1)
