"""A rule that a config breaks, and the nearest values that the rule allows."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import cast

from pydantic import ValidationError

from maxtext_lite.config.errors import Refusal, any_of, setting_text, value_text
from maxtext_lite.config.keys import Config

Change = Mapping[str, object]
"""New values of some keys, or of num_devices and num_hosts."""

Number = int | Fraction


@dataclass(frozen=True)
class Violation(Refusal):
    """A rule that the config breaks.

    Attributes:
      key: the key that the message names.
      message: key, value and rule in one or two sentences, without the values that would work. It also names every
        other key that the rule reads.
      nearest: what the rule allows, nearest first: values of the key, or a Change of others. Other rules may forbid
        them.
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


_LARGEST_TRIED = 50_000


@functools.lru_cache(maxsize=256)
def divisors(whole: int) -> tuple[int, ...]:
    """Positive divisors of `whole`, ascending: all for up to 31 bits; beyond that, pairs with one of at most 50,000."""
    small = [number for number in range(1, min(math.isqrt(whole), _LARGEST_TRIED) + 1) if whole % number == 0]
    return tuple(sorted({*small, *(whole // number for number in small)}))


def around(values: Iterable[Number], value: Number) -> list[Number]:
    """The nearest of `values` below and above `value`, as far as there are any."""
    values = [*values]
    below = [each for each in values if each < value]
    above = [each for each in values if each > value]
    return [*([max(below)] if below else []), *([min(above)] if above else [])]


def divisors_around(whole: int, value: Number) -> list[Number]:
    """The nearest divisors of `whole` below and above `value`, as numbers of its type."""
    return around(map(type(value), divisors(whole)), value)


def multiples_around(unit: Number, value: Number, offset: int = 0) -> list[Number]:
    """The nearest positive multiples of `unit` below and above `value`, plus `offset`."""
    times = Fraction(value) / unit
    numbers = (math.ceil(times) - 1, max(math.floor(times) + 1, 1))
    return [number * unit + offset for number in numbers if number > 0]


def changed_config(config: Config, change: Change) -> Config:
    """The config with new values of some keys.

    Raises:
      ValidationError: a value is not of its key's type.
    """
    return type(config).model_validate({**dict(config), **change})


def suggest(violations: Callable[[Change], Iterable[Violation]], wrong: Sequence[Refusal] = ()) -> list[Refusal]:
    """One refusal for each wrong value and each broken rule, with up to two of the nearest values that work.

    A value works if no rule is broken that was kept. Where none of them does, the message says what the rule alone
    allows, and the refusal after it what else is to be changed.

    Args:
      violations: the rules that are broken after a change; raises ValidationError where it is not of the keys' types.
      wrong: values that are not of their keys' types, with similar ones and, as the last, the default, which
        `violations` takes in their place.
    """
    present = [*violations({})]
    broken = {violation.name for violation in present}

    def broken_after(change: Change) -> set[str] | None:
        try:
            return {violation.name for violation in violations(change)}
        except ValidationError:
            return None

    def near(refusal: Refusal, kept: set[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The changes that work and those that the rule alone allows, at most two each, as texts."""
        work: list[Change] = []
        allowed: list[Change] = []
        for each in refusal.nearest:
            change = cast("Change", each) if isinstance(each, Mapping) else {refusal.key: each}
            names = broken_after(change)
            if names is not None:
                allowed.append(change)
                if names <= kept:
                    work.append(change)
        return _texts(refusal, work[:2]), _texts(refusal, allowed[:2])

    found = [replace(each, nearest=near(each, broken)[0][: max(len(each.nearest) - 1, 1)]) for each in wrong]
    for violation in present:
        work, allowed = near(violation, broken - {violation.name})
        also = f" This rule alone allows {any_of(allowed)}." if allowed and not work else ""
        found.append(Refusal(violation.key, f"{violation.message}{also}", work))
    return found


def _texts(refusal: Refusal, changes: Sequence[Change]) -> tuple[str, ...]:
    """The changes as text: bare values where all are of the key that the message begins with."""
    is_bare = refusal.message.startswith(f"{refusal.key}=") and all([*each] == [refusal.key] for each in changes)
    found: list[str] = []
    for change in changes:
        values = {key: setting_text(value) for key, value in change.items()}
        text = values[refusal.key] if is_bare else " ".join(f"{key}={value}" for key, value in values.items())
        found.append(text or f"{refusal.key}=")
    return tuple(found)
