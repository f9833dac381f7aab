"""Axes: from values to pixels, round ticks, and numbers as text."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_LOG_FROM_RATIO = 50
_SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high` over `start` .. `end` in pixels; logarithmic where `is_log`."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def pixel(self, value: float) -> float:
        """Where a value is drawn; on a logarithmic axis one that is not above 0 is at `low`."""
        low, high, value = self.low, self.high, value
        if self.is_log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, low))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Three to eight round values within the axis."""
        if self.is_log:
            return _log_ticks(self.low, self.high)
        step = _round_step((self.high - self.low) / 7)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


def value_scale(values: Iterable[float], *, start: float, end: float, from_zero: bool, may_be_log: bool) -> Scale:
    """The axis of a chart's values, with a little room above and below.

    Args:
      from_zero: begin at 0 where all values are above it.
      may_be_log: logarithmic where all values are above 0 and the highest is 50 times the lowest or more.
    """
    found = list(values)
    low, high = min(found, default=0.0), max(found, default=1.0)
    if may_be_log and low > 0 and high / low >= _LOG_FROM_RATIO:
        room = (high / low) ** 0.04
        return Scale(low / room, high * room, start, end, is_log=True)
    if from_zero and low >= 0:
        return Scale(0.0, high * 1.06 or 1.0, start, end)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return Scale(low - room, high + room, start, end)


def _round_step(step: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is at least `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * (1 - 1e-9))


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = max(1, math.ceil(len(decades) / 6))
    factors: Sequence[int] = (1,) if math.log10(high / low) > 2 else (1, 2, 5)
    ticks = [factor * 10.0**decade for decade in decades if decade % every == 0 for factor in factors]
    return [tick for tick in ticks if low <= tick <= high]


def short_number(value: float) -> str:
    """A number in little room: 0.003, 12.5, 50k, 3.2M, 5e-06."""
    if value == 0:
        return "0"
    size = abs(value)
    if size < 1e-3 or size >= 1e15:
        return f"{value:.3g}"
    for scale, suffix in _SUFFIXES:
        if size >= scale * 0.99995:
            return f"{value / scale:.4g}{suffix}"
    return f"{value:.4g}"


def long_number(value: float) -> str:
    """A number with all digits that mean something: 12,345,678, or 2.3457."""
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 1e4 else f"{value:.5g}"
