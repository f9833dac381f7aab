"""A rule that a config breaks, and the values that the rule would allow."""

import bisect
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from maxtext_lite.config.errors import Refusal, value_text
from maxtext_lite.config.keys import Config

Change = Mapping[str, object]
"""New values of some keys, or of num_devices and num_hosts."""

Sides = tuple[Iterable[Change], Iterable[Change]]
"""Changes to smaller and to larger values, nearest first."""

Number = int | Fraction


@dataclass(frozen=True)
class Violation(Refusal):
    """A rule that the config breaks.

    Attributes:
      key: the key that the message names.
      message: key, value and rule in one or two sentences, without the values that would work. It also names every
        other key that the rule reads.
      nearest: what the rule allows, nearest first: a value of the key, a Change of others, or (`one_of`, `divisors_of`,
        `multiples`) numbers on either side of the present one. Other rules may forbid them.
      rule: name of the rule, the same for every value of the key; default: the key.
    """

    rule: str = ""

    @property
    def name(self) -> str:
        """Identifies the rule, whichever value breaks it."""
        return self.rule or self.key


def violates(config: Config, key: str, rule: str, *nearest: object) -> Violation:
    """The violation of a rule by the value of one key.

    Args:
      rule: the words that follow `key=value` in the message, without the full stop.
      nearest: as in Violation.
    """
    return Violation(key, f"{key}={value_text(getattr(config, key))} {rule}.", nearest)


def unused(config: Config, plain: Mapping[str, object], reason: str, *others: object) -> Violation | None:
    """The violation of the first key whose value is not the plain one, where no other value has an effect.

    Args:
      plain: the value that each key must have.
      reason: the words that follow `key=value` in the message.
      others: what else the rule allows.
    """
    for key, usual in plain.items():
        if getattr(config, key) != usual:
            return violates(config, key, reason, usual, *others)
    return None


_MOST_NEAR = 64
_LARGEST_TRIED = 50_000


@functools.lru_cache(maxsize=256)
def divisors(whole: int) -> tuple[int, ...]:
    """Positive divisors of `whole`, ascending: all for up to 31 bits; beyond that, pairs with one of at most 50,000."""
    small = [number for number in range(1, min(math.isqrt(whole), _LARGEST_TRIED) + 1) if whole % number == 0]
    return tuple(sorted({*small, *(whole // number for number in small)}))


def one_of(key: str, values: Iterable[Number], value: Number) -> Callable[[], Sides]:
    """Changes of one key to each of `values`."""

    def sides() -> Sides:
        ordered = sorted(values)
        below = reversed(ordered[: bisect.bisect_left(ordered, value)][-_MOST_NEAR:])
        above = ordered[bisect.bisect_right(ordered, value) :][:_MOST_NEAR]
        return [{key: near} for near in below], [{key: near} for near in above]

    return sides


def divisors_of(key: str, whole: int, value: Number) -> Callable[[], Sides]:
    """Changes of one key to each of the divisors of `whole`, as numbers of the value's type."""
    return lambda: one_of(key, map(type(value), divisors(whole)), value)()


def multiples(key: str, unit: Number, value: Number, offset: int = 0) -> Callable[[], Sides]:
    """Changes of one key to the positive multiples of `unit` below and above `value`, plus `offset`."""

    def sides() -> Sides:
        times = Fraction(value) / unit
        under, over = math.ceil(times) - 1, max(math.floor(times) + 1, 1)
        return (
            ({key: number * unit + offset} for number in range(under, max(under - _MOST_NEAR, 0), -1)),
            ({key: number * unit + offset} for number in range(over, over + _MOST_NEAR)),
        )

    return sides
