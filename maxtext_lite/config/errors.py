"""How the user is told what is wrong: key, value, rule, nearest legal value."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import cast


class UserError(Exception):
    """The user's config or data is wrong; commands print one `error:` line per problem and exit with code 2.

    Attributes:
      problems: one sentence or two for each problem, in the form of style.md.
    """

    problems: tuple[str, ...]

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type["UserError"], tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)


def number_text(value: int | float | Fraction) -> str:
    """`value` as a config file would hold it: 16, 0.25, 1e-08, or 1/3 where no decimal is exact."""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    fraction = Fraction(value)
    twos = fives = 0
    rest = fraction.denominator
    while rest % 2 == 0:
        rest, twos = rest // 2, twos + 1
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    decimals = max(twos, fives)
    if rest != 1 or decimals > 12:
        return str(fraction)
    if decimals == 0:
        return str(fraction.numerator)
    scaled = str(abs(fraction.numerator) * 10**decimals // fraction.denominator).rjust(decimals + 1, "0")
    return f"{'-' if fraction < 0 else ''}{scaled[:-decimals]}.{scaled[-decimals:]}"


def value_text(value: object) -> str:
    """Any config value as a message shows it: true, null, 0.25, or the text itself, on one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float | Fraction):
        return number_text(value)
    if isinstance(value, Mapping):
        entries = cast("Mapping[object, object]", value).items()
        return "{" + ", ".join(f"{name}: {value_text(entry)}" for name, entry in entries) + "}"
    # A line break would end the message.
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in str(value))


def any_of(texts: Sequence[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def nearest_clause(values: Sequence[object]) -> str:
    """The end of a refusal, ` Nearest that work: 2 or 4.`; nothing where no value is known to work."""
    if not values:
        return ""
    texts = list(dict.fromkeys(value_text(value) for value in values))
    return f" Nearest that work{'s' if len(texts) == 1 else ''}: {any_of(texts)}."


@dataclass(frozen=True)
class Refusal:
    """One thing that is wrong, and what would be right.

    Attributes:
      key: the key that it is about; "" where it is about a file or an argument.
      message: key, value and rule.
      nearest: legal values of the key; or texts `key=value ...` of those that would have to change.
    """

    key: str
    message: str
    nearest: tuple[object, ...] = ()

    def __str__(self) -> str:
        return self.message + nearest_clause(self.nearest)


class WrongKind(ValueError):
    """A value is not of its key's kind; `nearest` holds values that are. The message lacks key and value."""

    def __init__(self, rule: str, nearest: Sequence[object] = ()) -> None:
        self.nearest = tuple(nearest)
        super().__init__(rule)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The clause ` Did you mean 'x'?`, or nothing where no known name is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean '{near[0]}'?" if near else ""
