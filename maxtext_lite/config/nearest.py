"""The nearest legal numbers below and above a wrong one."""

import functools
import math
from collections.abc import Iterable
from fractions import Fraction

Number = int | Fraction

_LARGEST_TRIED = 50_000


@functools.lru_cache(maxsize=256)
def divisors(whole: int) -> tuple[int, ...]:
    """Positive divisors of `whole`, ascending: all for up to 31 bits; beyond that, pairs with one of at most 50,000."""
    small = [number for number in range(1, min(math.isqrt(whole), _LARGEST_TRIED) + 1) if whole % number == 0]
    large = [whole // number for number in small]
    return tuple(sorted({*small, *large}))


def around(values: Iterable[Number], value: Number) -> list[Number]:
    """The nearest of `values` below and above `value`, as far as there are any."""
    values = sorted(values)
    below = [each for each in values if each < value]
    above = [each for each in values if each > value]
    return below[-1:] + above[:1]


def divisors_around(whole: int, value: Number) -> list[Number]:
    """The nearest divisors of `whole` below and above `value`, as numbers of its type."""
    return around(map(type(value), divisors(whole)), value)


def multiples_around(unit: Number, value: Number, offset: int = 0) -> list[Number]:
    """The nearest positive multiples of `unit` below and above `value`, plus `offset`."""
    times = Fraction(value) / unit
    numbers = (math.ceil(times) - 1, max(math.floor(times) + 1, 1))
    return [number * unit + offset for number in numbers if number > 0]
