"""The form of refusals: key, value, rule, nearest legal value; and the nearest legal numbers."""

import contextlib
import difflib
import functools
import json
import math
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import cast

_MOST_BITS = 256
_LONGEST_NAME = 100
_WILDCARD = re.compile(r"[*?!\[]")
_AMBIGUOUS = re.compile(r"^['\"\[]|^(?:~|null|Null|NULL)$|, | or |\s#|(^|\s)\w+=")


class UserError(Exception):
    """The user's config or data is wrong; commands print one `error:` line per problem and exit with code 2.

    Attributes:
      problems: one or two sentences for each problem.
    """

    problems: tuple[str, ...]

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type["UserError"], tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)


class WriteError(UserError):
    """A file or directory cannot be written."""


def number_text(value: int | float | Fraction) -> str:
    """`value` as in a config file: 16, 0.25, 1e-08, or 1/3 where no float is exact."""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    exact = Fraction(value)
    if exact.denominator == 1 or abs(exact) > 10**15:
        return str(exact)
    decimal = repr(float(exact))
    return decimal if Fraction(decimal) == exact else str(exact)


def short_text(value: int | Fraction) -> str:
    """A number for reading: exact while it is short."""
    text = number_text(value)
    return text if len(text) <= 10 else rounded_text(float(value))


def rounded_text(value: float, digits: int = 4) -> str:
    """A number for reading, rounded to `digits` digits, or to a whole number if that has more, up to 15."""
    return f"{value:.0f}" if 10**digits - 0.5 <= abs(value) < 1e15 else f"{value:.{digits}g}"


_LOGIN = re.compile(r"(?:(?<=http)|(?<=https))://[^/?#\s]*@|://[^/?#\s:]*:[^/?#\s]*@")  # but not abfs://CONTAINER@
_SIGNATURE = re.compile(r"([?&][\w-]*(?:signature|credential|token|secret|password|key|sig)=)[^&\s]*", re.IGNORECASE)


def full_text(value: object) -> str:
    """Any config value as in a config file, on one line: true, null, 0.25, or the text itself."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:  # Python does not print all its digits
        return f"{Decimal(value):.6e}"
    if isinstance(value, int | float | Fraction):
        return number_text(value)
    if isinstance(value, Mapping):
        entries = cast("Mapping[object, object]", value).items()
        return "{" + ", ".join(f"{_entry_name(name)}: {full_text(entry)}" for name, entry in entries) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(full_text(entry) for entry in cast("Sequence[object]", value)) + "]"
    # A line break would end the message, and a control character can do anything to a terminal.
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in without_secrets(str(value)))


def _entry_name(name: object) -> str:
    """A name in a mapping, in quotes where YAML needs them."""
    if isinstance(name, str) and _WILDCARD.search(name):
        return json.dumps(name, ensure_ascii=False)
    return full_text(name)


def without_secrets(text: str) -> str:
    """A text with *** in place of each address's name, password and signature.

    This is what messages, logs and the files of a run contain; a resumed run needs the secrets again.
    """
    if "://" not in text:
        return text
    return _SIGNATURE.sub(r"\1***", _LOGIN.sub("://***@", text))


def value_text(value: object, most: int = 120) -> str:
    """`full_text` for a message: of more than `most` characters, the first ones and the number of them all."""
    text = value if isinstance(value, str) else full_text(value)
    shown = full_text(text[: most + 1])
    if len(shown) <= most:
        return shown
    return f"{shown[: most // 2]}... ({len(text):,} characters)"


def setting_text(value: object) -> str:
    """A value as it follows `key=`, in full: text in quotes where it could be taken for something else."""
    if value is None:
        return "{}"
    text = full_text(value)
    if not isinstance(value, str) or (text == value == value.strip() and not _AMBIGUOUS.search(value)):
        return text
    return json.dumps(value, ensure_ascii=False)


def settings_of(keys: Mapping[str, object]) -> list[str]:
    """Keys and their values as the `key=value` words of a command line."""
    return [f"{key}={setting_text(value)}" for key, value in keys.items()]


_LONGEST_LINE = 4000


def sanitize_for_terminal(problem: str) -> str:
    """A problem as one line for a terminal: control characters escaped, and shortened if it is very long.

    Every message that quotes the command line or a file passes through here.
    """
    line = full_text(" ".join(problem.split("\n")))
    return line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE // 2]}[...]{line[-_LONGEST_LINE // 2 :]}"


def install_text(extra: str) -> str:
    """The command that installs an extra, for a message: from a clone, because no index has the package."""
    return f"pip install -e '.[{extra}]' in your clone"


def bytes_text(size: int) -> str:
    """A number of bytes for reading: 1.5 GB (1e9 bytes), 3.2 MB or 0.4 kB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size / 1e3:.1f} kB"


def counted(count: int, what: str) -> str:
    """`1 file`, `2 files`."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def any_of(texts: Sequence[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def nearest_clause(values: Sequence[object]) -> str:
    """The end of a refusal, ` Nearest that work: 2 or 4.`; empty where no value is known to work."""
    if not values:
        return ""
    texts = list(dict.fromkeys(value if isinstance(value, str) else setting_text(value) for value in values))
    return f" Nearest that work{'s' if len(texts) == 1 else ''}: {any_of(texts)}."


@dataclass(frozen=True)
class Refusal:
    """A validation error with suggested values.

    Attributes:
      key: the key with the wrong value; "" for a file or an argument.
      message: key, value and rule.
      nearest: what the rule allows, nearest first: values of the key, or settings of other keys by name.
    """

    key: str
    message: str
    nearest: tuple[object, ...] = ()

    def __str__(self) -> str:
        if not self.key:
            return self.message + nearest_clause(self.nearest)
        begin = f"{self.key}="
        changes = [
            cast("Mapping[str, object]", each) if isinstance(each, Mapping) else {self.key: each}
            for each in self.nearest[:2]
        ]
        texts = [" ".join(settings_of(change)) for change in changes]
        if self.message.startswith(begin) and all([*change] == [self.key] for change in changes):
            texts = [text.removeprefix(begin) or text for text in texts]
        return self.message + nearest_clause(texts)


def refuse(config: object, key: str, rule: str, *nearest: object) -> Refusal:
    """The refusal of a key's value.

    Args:
      rule: the words that follow `key=value` in the message, without the full stop.
      nearest: as in Refusal.
    """
    return Refusal(key, f"{key}={value_text(getattr(config, key))} {rule}.", nearest)


def refuse_unused(config: object, plain: Mapping[str, object], reason: str, *others: object) -> Refusal | None:
    """Refuses the first key that is not at its plain value, because other values have no effect.

    Args:
      plain: the value that each key must have.
      reason: the words that follow `key=value` in the message.
      others: what else the rule allows.
    """
    for key, usual in plain.items():
        if getattr(config, key) != usual:
            return refuse(config, key, reason, usual, *others)
    return None


class WrongType(ValueError):
    """A value is not of its key's type; `nearest` are values that are. The message lacks key and value."""

    def __init__(self, rule: str, nearest: Sequence[object] = ()) -> None:
        self.nearest = tuple(nearest)
        super().__init__(rule)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The clause ` Did you mean 'x'?`; empty where no known name is similar."""
    near = difflib.get_close_matches(name[:_LONGEST_NAME], list(known), n=1)
    return f" Did you mean '{near[0]}'?" if near else ""


@contextlib.contextmanager
def writing(path: str | Path) -> Generator[None]:
    """A context to write `path` in.

    Raises:
      WriteError: in place of an OSError: the disk is full, the file system is read-only, `path` is a directory, ...
    """
    try:
        yield
    except OSError as error:
        raise WriteError(cannot_write(path, error)) from None


def cannot_write(path: str | Path, error: OSError) -> str:
    """The sentence about what could not be written, and why."""
    named = error.filename2 or error.filename or path  # of two, the second is written
    return f"{full_text(str(named))} cannot be written: {error.strerror or error}."


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
