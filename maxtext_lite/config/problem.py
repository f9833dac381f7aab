"""One refusal with the changes that might mend it; `mend` tries them and names those that do."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import overload

Edit = Mapping[str, object]
"""New values of some keys (or of num_devices and num_hosts)."""

Edits = tuple[Sequence[Edit], Sequence[Edit]]
"""Changes to smaller and to larger values, nearest first."""


@dataclass(frozen=True)
class Problem:
    """A rule that the config breaks.

    Attributes:
      key: the key that the message names.
      message: key, value and rule; one or two sentences, without the values that would work.
      below: changes to try with values below the present one, nearest first; the first that works is named.
      above: the same with values above.
      otherwise: what to try where neither holds one that works.
      rule: name of the rule, where a key has several or it is about several keys; default: the key.
    """

    key: str
    message: str
    below: Sequence[Edit] = ()
    above: Sequence[Edit] = ()
    otherwise: Sequence[Edit] = ()
    rule: str = ""

    @property
    def identity(self) -> str:
        """The same for the same rule broken by another value."""
        return self.rule or self.key


class Later(Sequence[Edit]):
    """Changes that are made when they are first asked for: of most problems nobody does.

    Args:
      make: gives them.
    """

    def __init__(self, make: Callable[[], Iterable[Edit]]) -> None:
        self._make = make

    @functools.cached_property
    def _edits(self) -> tuple[Edit, ...]:
        return tuple(self._make())

    @overload
    def __getitem__(self, index: int) -> Edit: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Edit]: ...
    def __getitem__(self, index: int | slice) -> Edit | Sequence[Edit]:
        """One of them, or some."""
        return self._edits[index]

    def __len__(self) -> int:
        return len(self._edits)


_MOST_TRIED = 64
_LARGEST_TRIED = 50_000


def divisors(whole: int) -> list[int]:
    """Positive divisors of `whole`, ascending: all of a number of 31 bits, of a larger one those beside a small one."""
    return list(_divisors(whole))


@functools.lru_cache(maxsize=256)
def _divisors(whole: int) -> tuple[int, ...]:
    small = [number for number in range(1, min(math.isqrt(whole), _LARGEST_TRIED) + 1) if whole % number == 0]
    return tuple(sorted({*small, *(whole // number for number in small)}))


def next_to(value: int, numbers: Iterable[int]) -> tuple[int, ...]:
    """The largest of the numbers below the value, and the smallest above it, where there are such."""
    numbers = list(numbers)
    below = [number for number in numbers if number < value]
    above = [number for number in numbers if number > value]
    return (*([max(below)] if below else []), *([min(above)] if above else []))


def single_edits(key: str, values: Iterable[int | Fraction], value: int | Fraction) -> Edits:
    """Changes of one key to each of `values`: those below `value` and those above, nearest first."""
    ordered = sorted(values)
    below = [number for number in reversed(ordered) if number < value]
    above = [number for number in ordered if number > value]
    return [{key: near} for near in below[:_MOST_TRIED]], [{key: near} for near in above[:_MOST_TRIED]]


def multiples(key: str, unit: int | Fraction, value: int | Fraction, offset: int = 0) -> Edits:
    """Changes of one key to the positive multiples of `unit` below and above `value`, nearest first, plus `offset`."""
    times = value / unit
    under = math.ceil(times) - 1
    over = math.floor(times) + 1
    below = [{key: number * unit + offset} for number in range(under, max(under - _MOST_TRIED, 0), -1)]
    above = [{key: number * unit + offset} for number in range(max(over, 1), max(over, 1) + _MOST_TRIED)]
    return below, above
