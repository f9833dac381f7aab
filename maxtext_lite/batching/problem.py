"""One refusal with the changes that might mend it; `mend` tries them and names those that do."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

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


_MOST_TRIED = 64


def divisors(whole: int) -> list[int]:
    """All positive divisors of `whole`, ascending."""
    small = [number for number in range(1, math.isqrt(whole) + 1) if whole % number == 0]
    return sorted({*small, *(whole // number for number in small)})


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
