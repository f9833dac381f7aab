"""The reward functions in the package. Like any reward function, they take lists and return a number per response.

Each returns 1 or 0, or None for a pair that it cannot judge because its line lacks a suitable answer.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

_NUMERAL = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
# A minus after a letter, a digit or a bracket is subtraction: 12-5 ends in 5.
_NUMBER = re.compile(
    rf"(?:(?<![\w.)\]}}])(?P<sign>[-+]))?(?:\$ ?(?P<after>[-+])?)?(?P<whole>{_NUMERAL})"
    r"(?P<exponent>[eE][-+]?[0-9]+(?!\w))?"
    rf"(?: ?/ ?(?P<parts>{_NUMERAL}))?"
)
# After these a sign may be apart from its number: x = - 5. After a line break it would begin an item of a list.
_SIGN_APART = re.compile(r"(\A|[=<>\u2264\u2265\u2248({\[,:;]|\\approx|(?<![\w)\]}])\$) *([-+]) +(?=[$\\.0-9])")
_SPACED_GROUPS = re.compile(r"(?<![\w.,/])[1-9][0-9]{0,2}([ \u00a0\u2009\u202f])[0-9]{3}(?:\1[0-9]{3})*(?![0-9])")
_FRACTION = re.compile(
    r"(?:(?<![\w.,])([0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)\s*)?\\[dt]?frac\s*(?:\{([^{}\\]*)\}|([0-9]))\s*(?:\{([^{}\\]*)\}|([0-9]))"
)
_HALF = r"\s*(?:\{(?:[^{}]|\{[^{}]*\})*\}|\S)"
_OTHER_FRACTION = re.compile(rf"\\[dt]?frac{_HALF}{_HALF}")
_PART = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:/[0-9]*[1-9][0-9]*)?")
_MIXED = re.compile(
    r"(?<![\w.,/])([0-9]{1,3}(?:,[0-9]{3}){1,4}|[0-9]{1,15}) ([0-9]{1,15})/([0-9]{1,15})(?![\w/]|[.,][0-9])"
)
_SIGNS = ("-", "+")
_IN_NUMBERS = tuple("0123456789.,")
_UNREADABLE = " 1/0"
_PLAIN = (("\\$", "$"), ("\\%", "%"), ("{,}", ","), ("\\,", ""), ("\\!", ""), ("\\:", " "), ("\\;", " "), ("\\ ", " "),
          ("~", " "), ("\u2212", "-"), ("\u2013", "-"))  # fmt: skip
_MOST_DIGITS = 1000  # of a numeral, and the largest exponent; Python parses no integer of more than 4300 digits


def shipped(name: str, *, pattern: str) -> Callable[..., list[float | None]]:
    """The shipped function with this name.

    Args:
      pattern: the regular expression of `format`.
    Raises:
      ImportError: it needs a package that is not installed.
      KeyError: there is none with this name.
    """
    if name == "format":
        return format_of(pattern)
    if name == "math_verify":
        # Imported here too: a run without it is refused at its start.
        importlib.import_module("math_verify")
    return {"exact_answer": exact_answer, "numeric_answer": numeric_answer, "math_verify": math_verify}[name]


def exact_answer(completions: Sequence[str], answer: Sequence[object]) -> list[float | None]:
    """Whether the response equals the answer, apart from surrounding whitespace."""
    return [
        float(completion.strip() == right.strip()) if isinstance(right, str) else None
        for completion, right in zip(completions, answer, strict=True)
    ]


def numeric_answer(completions: Sequence[str], answer: Sequence[object]) -> list[float | None]:
    """Whether the response's number (`number_in`) equals the answer's exactly."""
    rewards: list[float | None] = []
    for completion, right in zip(completions, answer, strict=True):
        due = number_in(right) if isinstance(right, str) else None
        rewards.append(None if due is None else float(number_in(completion) == due))
    return rewards


def format_of(pattern: str) -> Callable[..., list[float | None]]:
    """A reward function: whether a whole response, line breaks included, matches a regular expression."""
    expression = re.compile(pattern, re.DOTALL)

    def format(completions: Sequence[str]) -> list[float | None]:
        return [float(expression.fullmatch(completion) is not None) for completion in completions]

    return format


def math_verify(completions: Sequence[str], answer: Sequence[object]) -> list[float | None]:
    """Whether the package math-verify finds the response's expression equal to the answer's."""
    library: Any = importlib.import_module("math_verify")
    rewards: list[float | None] = []
    for completion, right in zip(completions, answer, strict=True):
        # math-verify finds LaTeX between dollars, which answers often lack.
        due: Any = (library.parse(right) or library.parse(f"${right}$")) if isinstance(right, str) else []
        rewards.append(float(library.verify(due, library.parse(completion))) if due else None)
    return rewards


def number_in(text: str) -> Fraction | None:
    r"""The number that is the result of a text; None if it has none.

    It is the first number after the last "####"; failing that, the last one in the last \boxed{}; failing that, the
    last one of all. Numbers may have signs, commas or spaces before groups of three digits and decimals, and may be
    fractions a/b or \frac{a}{b}, also after a whole number as in 3 1/2; $ and % are ignored. There is none if it is
    divided by 0 or has too many digits.
    """
    _, marked, after = text.rpartition("####")
    if marked:
        found = _numbers(after)
        return _number(found[0]) if found else None
    boxed = _last_boxed(text)
    found = _numbers(text if boxed is None else boxed)
    return _number(found[-1]) if found else None


def _last_boxed(text: str) -> str | None:
    _, marked, after = text.rpartition("\\boxed{")
    if not marked:
        return None
    depth = 1
    for place, letter in enumerate(after):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return after[:place]
    return after  # the text ends inside the box


def _numbers(text: str) -> list[re.Match[str]]:
    """All numbers of a text, as matches of `_NUMBER`."""
    for written, plain in _PLAIN:
        text = text.replace(written, plain)
    text = _SIGN_APART.sub(r"\1 \2", text)
    text = _SPACED_GROUPS.sub(lambda match: match[0].replace(match[1], ","), text)
    before = None
    while before != text:  # fractions within fractions: the inner ones first
        before = text
        text = _FRACTION.sub(_divided, text)
    text = _MIXED.sub(_mixed, _OTHER_FRACTION.sub(_UNREADABLE, text))
    return list(_NUMBER.finditer(text))


def _divided(match: re.Match[str]) -> str:
    """A fraction of LaTeX as a/b, with the whole number before it; `_UNREADABLE` if it is no number."""
    whole, *halves = match.groups()
    whole = (whole or "").replace(",", "")
    parts = [half.replace(",", "").strip() for half in halves if half is not None]
    if max(map(len, [whole, *parts])) > _MOST_DIGITS or not all(map(_PART.fullmatch, parts)):
        return _UNREADABLE
    above, below = map(Fraction, parts)
    before = match.string[: match.start()].rstrip()[-1:]
    is_negative = below != 0 and above / below < 0
    if below == 0 or (is_negative and (whole or before in _SIGNS)) or (not whole and before in _IN_NUMBERS):
        return _UNREADABLE
    total = Fraction(whole or 0) + above / below
    return f"{'' if before in (*_SIGNS, '$') else ' '}{total.numerator}/{total.denominator}"


def _mixed(match: re.Match[str]) -> str:
    """A whole number and a proper fraction, such as 1,003 1/2, as a/b; anything else unchanged."""
    whole, above, below = (int(part.replace(",", "")) for part in match.groups())
    return f"{whole * below + above}/{below}" if 0 < above < below else match[0]


def _number(match: re.Match[str]) -> Fraction | None:
    exponent = match["exponent"] or "e0"
    if len(match[0]) > _MOST_DIGITS or abs(int(exponent[1:])) > _MOST_DIGITS:
        return None
    above = Fraction(match["whole"].replace(",", "") + exponent)
    below = Fraction((match["parts"] or "1").replace(",", ""))
    if below == 0:
        return None
    is_negative = (match["sign"] == "-") != (match["after"] == "-")
    return (-above if is_negative else above) / below
