"""The sandbox for chat templates: they can reach and change nothing, and `*` and `**` make nothing of absurd size."""

from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

MARKS = ("\ufdd0", "\ufdd1")
"""Written around what a template marks with `{% generation %}`. Unicode assigns them to no character."""
_MOST_BITS = 100_000  # of an integer
_MOST_REPEATED = 10_000_000  # characters or elements


class UnstatedToken(jinja2.Undefined):
    """A special token that no file states: it may be asked about, but not printed."""

    def __str__(self) -> str:
        name = self._undefined_name
        raise jinja2.UndefinedError(f"it prints {name}, which tokenizer_config.json does not state (null: none)")


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox for one template; jinja2 itself bounds `range`.

    Attributes:
      has_marks: whether the template marks answers with `{% generation %}`.
    """

    intercepted_binops = frozenset({"*", "**"})
    has_marks = False

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            is_absurd = bits > _MOST_BITS
        else:
            repeated, times = (right, left) if isinstance(left, int) else (left, right)
            is_sized = isinstance(repeated, str | list | tuple) and isinstance(times, int)
            is_absurd = is_sized and len(repeated) * times > _MOST_REPEATED
        if is_absurd:
            raise SecurityError(f"it asks for a text or a number of absurd size with {operator}")
        return super().call_binop(context, operator, left, right)


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
        return f"{MARKS[0]}{caller()}{MARKS[1]}"
