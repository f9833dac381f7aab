"""The band of losses, by hand."""

import math

import pytest

from maxtext_lite.training.loss_band import LEAST, band_limit


@pytest.mark.parametrize(("values", "limit"), [
    # The median is 2, distances from it are 0 and 0.5 alike, and half of them are 0.25: two deviations of 1.4826 / 4.
    ([2, 2.5] * 8, 2.25 + 2 * 1.4826 * 0.25),
    # Of an odd number: median 3, distances 2, 1, 0, 1, 2 in turn, of which the median is 1. One is no number.
    ([1, 2, 3, 4, 5] * 3 + [math.nan, 3, 3], 3 + 2 * 1.4826 * 1),
    # One far away moves neither by much: median 1, distances 0 but for one.
    ([1.0] * 15 + [1e9], 1 + 2 * 0.01),
    ([-1.0] * 16, -1 + 2 * 0.01),
    ([0.0] * 16, 0.0),
    ([1.0] * 15, math.inf),
    ([1.0] * 15 + [math.inf], math.inf),
])  # fmt: skip
def test_the_band_ends_so_many_robust_deviations_above_the_median(values, limit):
    assert LEAST == 16
    assert band_limit(values, 2) == pytest.approx(limit, rel=1e-12)


def test_how_many_values_make_a_band_can_be_said():
    assert band_limit([1, 1, 1, 1], 5, least=4) == pytest.approx(1.05)
    assert band_limit([1, 1, 1], 5, least=4) == math.inf
