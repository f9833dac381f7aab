"""Long columns to few points: equal runs of rows, each with its mean, lowest and highest value."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from maxtext_lite.reporting.run_data import Column


@dataclass(frozen=True)
class Bucket:
    """Rows first .. end - 1; `middle` stands for them where one must."""

    first: int
    end: int

    @property
    def middle(self) -> int:
        """The row in the middle, the earlier of two."""
        return (self.first + self.end - 1) // 2


@dataclass(frozen=True)
class Points:
    """A metric over buckets: None where no row of a bucket has a value.

    Attributes:
      mean: of the values in the bucket.
      low, high: their extremes, so that a spike of one step is still seen.
    """

    mean: Column
    low: Column
    high: Column

    @property
    def is_exact(self) -> bool:
        """Whether every bucket holds a single value, so that low and high add nothing."""
        return self.low == self.mean == self.high


def make_buckets(num_rows: int, most: int) -> list[Bucket]:
    """At most `most` buckets of the rows, as equal as can be; one for each row where they are that few."""
    count = min(num_rows, most)
    ends = [(index + 1) * num_rows // count for index in range(count)]
    return [Bucket(first, end) for first, end in zip([0, *ends], ends, strict=False)]


def downsample(
    column: Column, buckets: Sequence[Bucket], *, low: Column | None = None, high: Column | None = None
) -> Points:
    """A column over buckets.

    Args:
      low, high: the ends of each row's error bar; default: the value itself.
    """
    means: list[float | None] = []
    for bucket in buckets:
        values = [value for value in column[bucket.first : bucket.end] if value is not None]
        means.append(None if not values else values[0] if len(values) == 1 else sum(values) / len(values))
    return Points(means, _extreme(min, low or column, buckets), _extreme(max, high or column, buckets))


def _extreme(function, column: Column, buckets: Sequence[Bucket]) -> list[float | None]:
    return [
        function((value for value in column[bucket.first : bucket.end] if value is not None), default=None)
        for bucket in buckets
    ]


def at_middles(column: Column, buckets: Sequence[Bucket]) -> list[float | None]:
    """The value of each bucket's middle row."""
    return [column[bucket.middle] for bucket in buckets]


def changes(columns: Mapping[str, Column], metric: str) -> list[int]:
    """The rows at which a metric differs from its last value before."""
    found: list[int] = []
    last: float | None = None
    for row, value in enumerate(columns.get(metric, ())):
        if value is None:
            continue
        if last is not None and value != last:
            found.append(row)
        last = value
    return found


def running_median(column: Column) -> list[float | None]:
    """The median of the values around each: a twentieth of them, at least 5; None where there is no value."""
    reach = max(len(column) // 40, 2)
    smooth: list[float | None] = []
    for place, value in enumerate(column):
        around = [near for near in column[max(place - reach, 0) : place + reach + 1] if near is not None]
        smooth.append(None if value is None else statistics.median(around))
    return smooth
