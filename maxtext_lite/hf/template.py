"""The sandbox for chat templates: they can reach and change nothing, and ask for no text or number of absurd size."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import missing

from maxtext_lite.hf.causal import loop_over_turns

MARKS = ("\ufdd0", "\ufdd1")
"""Written around what a template marks with `{% generation %}`. Unicode assigns them to no character."""
_LARGEST = 100_000  # a width, a count of repetitions, bits of an integer; jinja2's own limit of range()
_MOST_REPEATED = 10_000_000  # characters or elements

_FILTERS = ("batch", "center", "format", "indent", "round", "slice", "tojson", "truncate", "wordwrap")
_METHODS = ("center", "expandtabs", "ljust", "rjust", "to_bytes", "zfill")
"""Those whose integers are widths or counts."""
_DIGITS = re.compile(r"\d+")
_IN_BRACES, _NESTED = re.compile(r"\{[^{}]*\}"), re.compile(r"\{[^{}]*\{")
_PERCENT = re.compile(r"%(?:\([^)]*\))?[-+ #0]*[\d*]*(?:\.[\d*]*)?")

_TURN = "turn "  # a filter that no template can spell


class TooLargeError(Exception):
    """A template asks for a text or a number of absurd size."""


class Unstated(jinja2.Undefined):
    """An undefined name: it prints nothing, but that of a special token, whose text is unknown, refuses to be printed.

    Tests like `bos_token is defined` and `if bos_token` are false, as for any undefined name.

    Attributes:
      own: the names that the template sets.
    """

    __slots__ = ()
    own: ClassVar[frozenset[str]] = frozenset()

    def __str__(self) -> str:
        name = self._undefined_name
        # A hint comes with an argument that a macro's caller left out.
        is_asked_for = self._undefined_obj is missing and self._undefined_hint is None and name not in self.own
        if is_asked_for and name is not None and name.endswith("_token"):
            raise jinja2.UndefinedError(f"it prints {name}, which tokenizer_config.json does not state (null: none)")
        return super().__str__()


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox for one template.

    Args:
      how: as for jinja2.Environment.
    Attributes:
      is_causal: whether `causal.loop_over_turns` recognizes the template.
      has_marks: whether the template marks answers with `{% generation %}`.
      at_turn: called at the beginning of each iteration of that loop, if so.
    """

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, **how: Any) -> None:
        self.is_causal = False
        self.has_marks = False
        self.at_turn: Callable[[], None] = lambda: None
        super().__init__(extensions=[_Generation, "jinja2.ext.loopcontrols"], **how)
        del self.globals["lipsum"]  # it makes text of any length
        for name in _FILTERS:
            self.add_filter(name, self.filters[name])
        self.filters[_TURN] = jinja2.pass_context(lambda *_: self.at_turn())  # never run at compile time

    def compiled(self, source: str) -> jinja2.Template:
        """The template, which calls `at_turn`.

        Raises:
          Exception: of any type, it is not a template.
        """
        parsed = self.parse(source)
        loop = loop_over_turns(parsed)
        self.is_causal = loop is not None
        if self.undefined is Unstated:
            own = frozenset(name.name for name in parsed.find_all(nodes.Name) if name.ctx == "store")
            self.undefined = type("UnstatedIn", (Unstated,), {"__slots__": (), "own": own})
        if loop is not None:
            turn = nodes.Filter(nodes.Const(0), _TURN, [], [], None, None, lineno=loop.lineno)
            loop.body.insert(0, nodes.ExprStmt(turn, lineno=loop.lineno))
        return self.from_string(parsed)

    def add_filter(self, name: str, filter_: Callable[..., Any]) -> None:
        """Adds a filter, whose widths are bounded."""
        first = int(hasattr(filter_, "jinja_pass_arg"))  # it gets the environment before its value

        @functools.wraps(filter_)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            if name == "format":
                _check_percent(str(args[0]), args[1:])
            else:
                _check_arguments((*args[first + 1 :], *kwargs.values()))
            return filter_(*args, **kwargs)

        self.filters[name] = bounded

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Returns `left operator right`, unless the result would be of absurd size."""
        del context
        if operator == "%" and isinstance(left, str):
            _check_percent(left, right if isinstance(right, tuple) else (right,))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() * abs(right), _LARGEST)
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() + right.bit_length(), _LARGEST)
        elif operator == "*":
            for text, times in ((left, right), (right, left)):
                if isinstance(text, str | bytes | list | tuple) and isinstance(times, int):
                    _check_size(len(text) * times, _MOST_REPEATED)
        return self.binop_table[operator](left, right)

    def call(self, __context: Any, __callee: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Calls a function or a method, whose widths are bounded."""
        method = getattr(__callee, "__wrapped__", __callee)
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str | bytes | int) and name in _METHODS:
            _check_arguments((*args, *kwargs.values()))
        elif isinstance(owner, str) and name in ("format", "format_map"):
            _check_braces(owner)
        return super().call(__context, __callee, *args, **kwargs)


def _check_arguments(args: Iterable[Any]) -> None:
    for value in args:
        if isinstance(value, int):
            _check_size(abs(value), _LARGEST)


def _check_percent(text: str, args: Iterable[Any]) -> None:
    """Refuses absurd widths in a format of printf's kind, or among its arguments if it takes them from there."""
    widths = " ".join(_PERCENT.findall(text))
    _check_arguments(int(digits[:20]) for digits in _DIGITS.findall(widths))
    if "*" in widths:
        _check_arguments(args)


def _check_braces(text: str) -> None:
    """Refuses absurd widths in a format of str.format's kind, and those that it takes from its arguments."""
    text = text.replace("{{", "").replace("}}", "")
    if _NESTED.search(text):
        raise TooLargeError("it formats a text with a width that is not a number")
    inside = " ".join(_IN_BRACES.findall(text))
    _check_arguments(int(digits[:20]) for digits in _DIGITS.findall(inside))


def _check_size(size: int, largest: int) -> None:
    if size > largest:
        raise TooLargeError(f"it asks for a size of {size:,}, more than the {largest:,} that any chat needs")


class _Generation(Extension):
    """`{% generation %}`, with which templates mark the answers to learn: writes MARKS around them."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Any) -> Any:
        """Parses the block as a call, in a scope of its own, as transformers does."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        self.environment.has_marks = True  # type: ignore[attr-defined]
        return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

    def marked(self, caller: Callable[[], str]) -> str:
        """The content of the block between marks."""
        return f"{MARKS[0]}{caller()}{MARKS[1]}"
