import math

import pytest

from maxtext_lite.reporting.scales import Scale, long_number, short_number, value_scale


def test_pixels_by_hand():
    assert Scale(0, 10, 100, 200).pixel(2.5) == 125
    assert Scale(1, 100, 0, 10, is_log=True).pixel(10) == 5
    assert Scale(1, 100, 0, 10, is_log=True).pixel(-3) == 0, "what has no logarithm lies at the bottom"


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 50_000, [0, 10_000, 20_000, 30_000, 40_000, 50_000]),
        (4.4, 5.9, [4.5, 5.0, 5.5]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_ticks_are_round(low, high, ticks):
    assert Scale(low, high, 0, 1).ticks() == pytest.approx(ticks)


@pytest.mark.parametrize("high", [1e-7, 3e-4, 0.7, 1.0, 40, 12_345, 9.9e11])
@pytest.mark.parametrize("low", [0.0, 0.4])
def test_there_are_three_to_eight_ticks_within_the_axis(low, high):
    ticks = Scale(low * high, high, 0, 1).ticks()
    assert 3 <= len(ticks) <= 8
    assert all(low * high * 0.999 <= tick <= high * 1.001 for tick in ticks)


@pytest.mark.parametrize(("low", "high"), [(1e-6, 1e3), (0.5, 60), (512, 65536), (1e-5, 2.0)])
def test_a_logarithmic_axis_has_round_ticks_too(low, high):
    ticks = Scale(low, high, 0, 1, is_log=True).ticks()
    assert 2 <= len(ticks) <= 8
    assert all(low <= tick <= high for tick in ticks)
    assert all(f"{tick:e}"[0] in "125" for tick in ticks)


def test_the_axis_holds_all_values_and_is_logarithmic_over_wide_ranges_only():
    def scale(values, **options):
        return value_scale(values, start=0, end=1, **({"from_zero": True, "may_be_log": True} | options))

    assert not scale([1, 49]).is_log
    assert scale([1, 50]).is_log
    assert not scale([0, 50]).is_log
    assert not scale([1, 50], may_be_log=False).is_log
    assert scale([3, 9]).low == 0
    assert scale([3, 9], from_zero=False).low > 2
    for values in ([-2, 5], [0, 0], [7, 7], [], [1e-9, 1e9]):
        for from_zero in (True, False):
            found = scale(values, from_zero=from_zero)
            assert found.low < found.high
            assert all(found.low <= value <= found.high for value in values)
            assert all(math.isfinite(found.pixel(value)) for value in values)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.003, "0.003"), (5e-6, "5e-06"), (12.5, "12.5"), (999, "999"), (50_000, "50k"), (999_999, "1M"),
     (3.2e6, "3.2M"), (-1500, "-1.5k"), (2e9, "2G"), (1.5e12, "1.5T")],
)  # fmt: skip
def test_short_numbers(value, text):
    assert short_number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(12_345_678, "12,345,678"), (4.0, "4"), (2.345678, "2.3457"), (123_456.78, "123,456.8")]
)
def test_long_numbers(value, text):
    assert long_number(value) == text
