"""Advantages by hand, and against the standard library's statistics."""

import statistics

import numpy as np
import pytest

from maxtext_lite.rl.advantages import equal_groups_fraction, group_advantages


def test_by_hand():
    rewards = np.array([1.0, 0.0, 0.0, 1.0, 2.0, 2.0])
    np.testing.assert_array_equal(group_advantages(rewards, 2, "none"), [0.5, -0.5, -0.5, 0.5, 0, 0])
    scaled = 0.5 / (np.sqrt(0.5) + 1e-4)
    want = np.array([scaled, -scaled, -scaled, scaled, 0, 0], np.float32)
    np.testing.assert_array_equal(group_advantages(rewards, 2, "group"), want)
    assert group_advantages(rewards, 2, "group").dtype == np.float32


def test_groups_of_many_against_the_standard_library():
    rewards = np.random.default_rng(0).normal(100, 3, 5 * 8)
    want = []
    for group in rewards.reshape(5, 8).tolist():
        mean, deviation = statistics.fmean(group), statistics.stdev(group)
        want += [(reward - mean) / (deviation + 1e-4) for reward in group]
    np.testing.assert_allclose(group_advantages(rewards, 8, "group"), want, rtol=1e-6)


@pytest.mark.parametrize("scale", ["group", "none"])
def test_equal_rewards_are_exactly_zero_though_their_mean_is_rounded(scale):
    rewards = np.full(6, 0.1)
    assert np.any(rewards - rewards.mean()) or np.any(rewards[:3] - rewards[:3].mean())
    assert not np.any(group_advantages(rewards, 3, scale))
    assert not np.any(group_advantages(rewards, 6, scale))


@pytest.mark.parametrize("scale", ["group", "none"])
def test_the_largest_rewards_have_finite_advantages(scale):
    """The largest reward times the largest weight, in either direction."""
    found = group_advantages(np.array([1e18, -1e18, 1e18, -1e18]), 4, scale)
    assert np.isfinite(np.square(found)).all()
    assert (np.sign(found) == [1, -1, 1, -1]).all()


def test_the_fraction_of_groups_that_teach_nothing():
    assert equal_groups_fraction(np.array([1.0, 1, 0, 1, 0, 0, 3, 2]), 2) == 0.5
    assert equal_groups_fraction(np.array([1.0, 1, 0, 1]), 4) == 0
    assert equal_groups_fraction(np.full(6, 0.1), 3) == 1


def test_rewards_that_are_not_whole_groups_are_refused():
    for rewards in (np.zeros(5), np.zeros((2, 2)), np.zeros(0)):
        with pytest.raises(ValueError, match="not whole groups of 2"):
            group_advantages(rewards, 2, "none")
