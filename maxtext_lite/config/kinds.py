"""The kinds of value that a key may hold. Each refuses a wrong one in the words of style.md, without the key's name."""

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer

from maxtext_lite.config.errors import WrongKind, number_text

_LARGEST_COUNT = 2**63 - 1
_RATIO = re.compile(r"([+-]?[0-9]+)/([0-9]+)\Z")


def _no_number(value: object) -> str:
    if isinstance(value, bool):
        return "is true or false, not a number."
    if value is None:
        return "is empty, not a number."
    return "is text, not a number." if isinstance(value, str) else "is a list or a mapping, not a number."


def _text(*, empty_allowed: bool, also: str = "") -> Callable[[object], object]:
    def check(value: object) -> object:
        if not isinstance(value, str):
            raise WrongKind("is not text.")
        if not empty_allowed and not value.strip():
            raise WrongKind("must not be empty.")
        if not value.translate(dict.fromkeys(map(ord, also))).isprintable():
            raise WrongKind("holds a character that cannot be printed.")
        return value

    return check


def _flag(value: object) -> object:
    if not isinstance(value, bool):
        raise WrongKind("is not true or false.", (True, False))
    return value


def _whole(minimum: int, special: int | None = None) -> Callable[[object], object]:
    """An integer of at least `minimum`, or the one below it that has a meaning of its own."""
    rule = f"must be at least {minimum}" + ("" if special is None else f", or {special}")

    def legal(value: int) -> bool:
        return value >= minimum or value == special

    def check(value: object) -> object:
        if isinstance(value, float) and math.isfinite(value):
            near = [number for number in dict.fromkeys((math.floor(value), math.ceil(value))) if legal(number)]
            raise WrongKind("is not an integer.", near or [minimum])
        if isinstance(value, bool) or not isinstance(value, int):
            raise WrongKind(_no_number(value) if not isinstance(value, float) else "is not a finite number.")
        if not legal(value):
            raise WrongKind(f"{rule}.", [minimum])
        if value > _LARGEST_COUNT:
            raise WrongKind("must be below 2**63.", [_LARGEST_COUNT])
        return value

    return check


def _real(
    minimum: float = -math.inf,
    maximum: float = math.inf,
    *,
    above: float = -math.inf,
    below: float = math.inf,
    example: float | None = None,
) -> Callable[[object], object]:
    """A finite number in [minimum, maximum] and in (above, below); `example` is what to try instead."""
    bounds = ((minimum, "at least"), (above, "above"), (maximum, "at most"), (below, "below"))
    rule = " and ".join(f"{word} {number_text(bound)}" for bound, word in bounds if math.isfinite(bound))

    def check(value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise WrongKind(_no_number(value))
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise WrongKind("is not a finite number.")
        if not (minimum <= number <= maximum and above < number < below):
            bound = minimum if number < minimum else maximum if number > maximum else example
            raise WrongKind(f"must be {rule}.", [] if bound is None else [bound])
        return number

    return check


def exact(value: object) -> Fraction:
    """The rational number that `value` writes down: 0.29 is 29/100, and the text "1/3" is a third.

    Raises:
      WrongKind: not a finite number; the message lacks the key's name.
    """
    if isinstance(value, str):
        ratio = _RATIO.match(value)
        if ratio is None or int(ratio[2]) == 0:
            raise WrongKind(_no_number(value))
        return Fraction(int(ratio[1]), int(ratio[2]))
    if isinstance(value, bool) or not isinstance(value, int | float | Fraction):
        raise WrongKind(_no_number(value))
    if isinstance(value, float):
        if not math.isfinite(value):
            raise WrongKind("is not a finite number.")
        # The shortest decimal that reads as this float is what the user wrote; its binary value is not.
        return Fraction(repr(value))
    return Fraction(value)


def _positive(special: int | None = None, meaning: str = "") -> Callable[[object], object]:
    """An exact rational above 0, or the one other value that has a meaning of its own."""
    rule = "must be above 0" + ("" if special is None else f", or {special} ({meaning})")

    def check(value: object) -> object:
        number = exact(value)
        if number <= 0 and number != special:
            raise WrongKind(f"{rule}.", [Fraction(1)])
        return number

    return check


def _serialised(value: Fraction) -> int | float | str:
    """What reads back as the same number: 16, 0.29, or a text such as "1/3" where no float is exact."""
    number = int(value) if value.denominator == 1 else float(value)
    return number if exact(number) == value else number_text(value)


_exactly = PlainSerializer(_serialised)

Text = Annotated[str, BeforeValidator(_text(empty_allowed=True))]
"""Any printable text, "" included."""
Name = Annotated[str, BeforeValidator(_text(empty_allowed=False))]
"""Printable text that is not empty."""
Lines = Annotated[str, BeforeValidator(_text(empty_allowed=False, also="\n\t"))]
"""Text that is not empty: printable, but for line breaks and tabs."""
Flag = Annotated[bool, BeforeValidator(_flag)]
"""true or false; 0, 1, yes and no are not."""
Integer = Annotated[int, BeforeValidator(_whole(-(2**63)))]
"""Any integer of 64 bits."""
Count = Annotated[int, BeforeValidator(_whole(1))]
"""An integer of at least 1."""
AtLeastTwo = Annotated[int, BeforeValidator(_whole(2))]
"""An integer of at least 2."""
CountOrZero = Annotated[int, BeforeValidator(_whole(0))]
"""An integer of at least 0."""
CountOrMinusOne = Annotated[int, BeforeValidator(_whole(1, -1))]
"""An integer of at least 1, or -1: derived or off."""
Seed = Annotated[int, BeforeValidator(_whole(0))]
"""An integer of at least 0."""
SeedOrMinusOne = Annotated[int, BeforeValidator(_whole(0, -1))]
"""A seed, or -1: none."""
Positive = Annotated[float, BeforeValidator(_real(above=0.0))]
"""A finite number above 0."""
NotNegative = Annotated[float, BeforeValidator(_real(0.0))]
"""A finite number of at least 0."""
Share = Annotated[float, BeforeValidator(_real(0.0, 1.0))]
"""A number in [0, 1]."""
PositiveShare = Annotated[float, BeforeValidator(_real(above=0.0, maximum=1.0, example=1.0))]
"""A number in (0, 1]."""
Decay = Annotated[float, BeforeValidator(_real(0.0, below=1.0, example=0.9))]
"""A number in [0, 1): the decay of a running mean."""
BelowHalf = Annotated[float, BeforeValidator(_real(0.0, below=0.5, example=0.49))]
"""A number in [0, 0.5)."""
Exact = Annotated[Fraction, BeforeValidator(_positive()), _exactly]
"""An exact rational above 0."""
ExactOrDerived = Annotated[Fraction, BeforeValidator(_positive(-1, "derived")), _exactly]
"""An exact rational above 0, or -1: derived."""
ExactOrSame = Annotated[Fraction, BeforeValidator(_positive(0, "the same as in training")), _exactly]
"""An exact rational above 0, or 0: as in training."""
ExactOrZero = Annotated[Fraction, BeforeValidator(_positive(0, "not stated")), _exactly]
"""An exact rational above 0, or 0: not stated."""
ExactOrOne = Annotated[Fraction, BeforeValidator(_positive(-1, "which means 1")), _exactly]
"""An exact rational above 0, or -1, which means 1."""
ExactOrUnlimited = Annotated[Fraction, BeforeValidator(_positive(-1, "no limit")), _exactly]
"""An exact rational above 0, or -1: no limit."""
