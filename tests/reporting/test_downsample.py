import random

import pytest

from maxtext_lite.reporting.downsample import Bucket, at_middles, changes, downsample, make_buckets, running_median


@pytest.mark.parametrize(("num_rows", "most"), [(0, 5), (1, 5), (5, 5), (6, 5), (17, 5), (200_000, 500), (999, 500)])
def test_buckets_cover_every_row_once_and_are_equal_but_for_one(num_rows, most):
    buckets = make_buckets(num_rows, most)
    rows = [row for bucket in buckets for row in range(bucket.first, bucket.end)]
    assert rows == list(range(num_rows))
    assert len(buckets) == min(num_rows, most)
    sizes = {bucket.end - bucket.first for bucket in buckets}
    assert len(sizes) == 0 or max(sizes) - min(sizes) <= 1


def test_few_rows_stay_as_they_are():
    column = [3.0, None, 1.0]
    points = downsample(column, make_buckets(3, 10))
    assert (points.mean, points.low, points.high) == (column, column, column)
    assert points.is_exact


def test_a_bucket_has_the_mean_and_the_extremes_of_its_values():
    points = downsample([1.0, 5.0, None, 3.0, None, None], [Bucket(0, 4), Bucket(4, 6)])
    assert (points.mean, points.low, points.high) == ([3.0, None], [1.0, None], [5.0, None])
    assert not points.is_exact


def test_one_spike_among_200_000_steps_survives():
    rng = random.Random(0)
    column = [rng.random() for _ in range(200_000)]
    column[123_456], column[7] = 99.0, -99.0
    points = downsample(column, make_buckets(len(column), 500))
    assert len(points.mean) == 500
    assert max(value for value in points.high if value is not None) == 99.0
    assert min(value for value in points.low if value is not None) == -99.0


def test_error_bars_widen_the_extremes_and_not_the_mean():
    points = downsample([2.0, 4.0], [Bucket(0, 2)], low=[1.0, 3.5], high=[3.0, 4.5])
    assert (points.mean, points.low, points.high) == ([3.0], [1.0], [4.5])


def test_the_middle_row_stands_for_a_bucket():
    assert at_middles([10, 11, 12, 13, 14], [Bucket(0, 3), Bucket(3, 5)]) == [11, 13]


def test_changes_are_found_across_missing_values():
    assert changes({"a": [None, 8, 8, None, 16, 16, 8]}, "a") == [4, 6]
    assert changes({}, "a") == []


def test_a_running_median_takes_five_values_or_a_twentieth_and_leaves_gaps():
    assert running_median([1.0, 9.0, 2.0, None, 3.0]) == [2.0, 2.0, 2.5, None, 2.5]
    column = [float(place % 2) for place in range(200)]
    assert running_median(column)[100] == 1.0  # of places 95 to 105, six are odd
    assert running_median([]) == []
