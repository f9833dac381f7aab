"""Chat templates from elsewhere, in a sandbox: they can reach and change nothing, and a count bounds their work.

A template is a program. Its work is charged against a budget proportional to the input that it renders: each iteration
of a loop for its expressions and text, and each operation for its operands, before it makes anything of them. A
template that would run for days, or fill the memory with text, is refused after the same number of operations
everywhere.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sized
from typing import Any, ClassVar

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, missing
from jinja2.visitor import NodeTransformer

from maxtext_lite.data.causal import loop_over_turns

_WORK = 5_000_000  # for any rendering; one turn of a conversation takes a few hundred
_WORK_FOR_EACH = 1000  # for each character of the turns, so that nested loops over turns are no problem
_FOR_EACH, _FOR_CALLS = 3, 30  # per inspected element and per call, in characters
_MOST_BITS = 100_000  # of an integer
_DEEPEST = 100  # nested lists; Python's own recursion limit kills a process silently
_LONGEST = 2**18  # characters of a template; the longest that models come with have a tenth of that

# Filters that look only at the length of their first argument, or at its elements one by one.
_SHALLOW = {
    "attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map", "random", "reject",
    "rejectattr", "reverse", "select", "selectattr", "slice",
}  # fmt: skip
_IN_BRACES, _NESTED = re.compile(r"\{[^{}]*\}"), re.compile(r"\{[^{}]*\{")
_PERCENT = re.compile(r"%(?:\([^)]*\))?[-+ #0]*[\d*]*(?:\.[\d*]*)?")


class TooMuchWorkError(Exception):
    """A template has used up its budget, or requests something that would."""


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


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox for one template that counts the template's work.

    Args:
      how: as for jinja2.Environment.
    Attributes:
      is_causal: whether `causal.loop_over_turns` recognizes the template.
      at_turn: called at the beginning of each iteration of that loop, if so.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **how: Any) -> None:
        self._left = _WORK
        self.is_causal = False
        self.at_turn: Callable[[], None] = lambda: None
        super().__init__(finalize=self.weighed, extensions=[_Generation, "jinja2.ext.loopcontrols"], **how)
        del self.globals["lipsum"]  # it makes text of any length
        self.filters = {name: self._charged(name, each) for name, each in self.filters.items()}
        self.tests = {name: self._charged_test(name, each) for name, each in self.tests.items()}
        # Filters that templates cannot name. Those that take the context are never run at compile time.
        self.filters[_SPEND] = jinja2.pass_context(lambda _, amount: self.spend(amount))
        self.filters[_WEIGH] = jinja2.pass_context(lambda _, value: self.weighed(value))
        self.filters[_TURN] = jinja2.pass_context(lambda *_: self.at_turn())
        self.filters[_LENGTH] = jinja2.pass_context(lambda _, value: self.sized(value))

    def compiled(self, source: str) -> jinja2.Template:
        """The template, instrumented to count its work and call `at_turn`.

        Raises:
          TooMuchWorkError: it is far longer than any template.
          Exception: of any type, it is not a template.
        """
        if len(source) > _LONGEST:
            raise TooMuchWorkError(f"it has {len(source):,} characters, more than {_LONGEST:,}")
        parsed = self.parse(source)
        loop = loop_over_turns(parsed)
        self.is_causal = loop is not None
        if self.undefined is Unstated:
            own = frozenset(name.name for name in parsed.find_all(nodes.Name) if name.ctx == "store")
            self.undefined = type("UnstatedIn", (Unstated,), {"__slots__": (), "own": own})
        parsed = _Counting().visit(parsed)
        if loop is not None:
            loop.body.insert(0, nodes.ExprStmt(_through(_TURN, nodes.Const(0)), lineno=loop.lineno))
        return self.from_string(parsed)

    def add_filter(self, name: str, filter_: Callable[..., Any]) -> None:
        """Adds a filter whose work is counted too."""
        self.filters[name] = self._charged(name, filter_)

    def allow(self, characters: int) -> None:
        """Starts the budget of a rendering whose turns have `characters` characters."""
        self._left = _WORK + _WORK_FOR_EACH * characters

    def spend(self, amount: int) -> None:
        """Takes an amount of work off the budget.

        Raises:
          TooMuchWorkError: the budget is exhausted.
        """
        self._left -= amount
        if self._left < 0:
            raise TooMuchWorkError("it does more work than any chat needs, or writes a longer text")

    def weighed(self, value: Any) -> Any:
        """The value, after charging its size: the characters of text, everything inside a collection."""
        if isinstance(value, str):
            self.spend(1 + len(value))
            return value
        level = [value]
        for _ in range(_DEEPEST):
            inside = list[Any]()
            for each in level:
                self.spend(_FOR_EACH + (len(each) if isinstance(each, Sized) else 0))
                if isinstance(each, Mapping):
                    inside += [*each.keys(), *each.values()]
                elif isinstance(each, Collection) and not isinstance(each, str | bytes):
                    inside += each
                elif isinstance(each, Namespace):
                    raise TooMuchWorkError("it writes a namespace")
            if not inside:
                return value
            level = inside
        raise TooMuchWorkError(f"it nests lists more than {_DEEPEST} deep")

    def sized(self, value: Any) -> Any:
        """The value, after charging only its length."""
        self.spend(1 + (len(value) if isinstance(value, Sized) else 0))
        return value

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """See SandboxedEnvironment: `left operator right`, unless that is too much work."""
        del context
        if operator == "+" and type(left) is str and type(right) is str:  # the bulk of what chat templates do
            self.spend(len(left) + len(right))
            return left + right
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MOST_BITS:
                raise TooMuchWorkError("it makes a number of more digits than any chat needs")
        elif operator == "*":
            self.spend(_amount(left) * _amount(right))
        elif operator == "%" and isinstance(left, str):
            self._charge_percent(left, right if isinstance(right, tuple) else (right,))
        for operand in (left, right):
            if not isinstance(operand, int | float):
                self.weighed(operand)
        return self.binop_table[operator](left, right)

    def _charge_percent(self, form: str, given: Iterable[Any]) -> None:
        """Charges the widths in a format with %, including those passed as arguments."""
        widths = " ".join(_PERCENT.findall(form))
        self.spend(sum(int(digits[:20]) for digits in re.findall(r"\d+", widths)))
        if "*" in widths:
            self.spend(sum(abs(each) for each in given if isinstance(each, int)))

    def call(self, __context: Any, __callee: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """See SandboxedEnvironment: charges a call for its arguments, and a method for its object."""
        owner = getattr(getattr(__callee, "__wrapped__", __callee), "__self__", None)
        given = [*args, *kwargs.values()]
        if isinstance(owner, str | bytes | list | tuple | int | float | dict):
            name = __callee.__name__
            if name == "join" and args:
                args = given = (list(args[0]), *args[1:])
            self._charge_method(name, owner, given)
        else:
            self.spend(_FOR_CALLS + sum(len(each) for each in given if isinstance(each, Sized)))
            if not isinstance(__callee, Macro):  # a macro's body is charged for what it does with its arguments
                self.weighed(given)
        return super().call(__context, __callee, *args, **kwargs)

    def _charge_method(self, name: str, owner: Any, given: Iterable[Any]) -> None:
        numbers = sum(abs(each) for each in given if isinstance(each, int))
        before = self._left
        for each in given:
            self.weighed(each)
        weight, size = before - self._left, _amount(owner) if isinstance(owner, Sized) else 1
        self.spend(size)
        if name in ("format", "format_map") and isinstance(owner, str):
            inside = " ".join(_IN_BRACES.findall(owner))
            self.spend(sum(int(digits[:20]) for digits in re.findall(r"\d+", inside)))
            self.spend(numbers if _NESTED.search(owner) else 0)
        elif name == "join":
            self.spend(size * weight)
        elif name in ("replace", "translate", "expandtabs"):
            self.spend(size * (weight + numbers))
        elif isinstance(owner, str | bytes | int):
            self.spend(numbers)

    def _charged(self, name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
        first = int(hasattr(filter_, "jinja_pass_arg"))  # it gets the environment or the context before its value

        @functools.wraps(filter_)
        def charged(*args: Any, **kwargs: Any) -> Any:
            value = args[first] if len(args) > first else ""
            others = [*args[first + 1 :], *kwargs.values()]
            if isinstance(value, Iterable) and not isinstance(value, Collection) and name in ("join", "sum"):
                value = list(value)
                args = (*args[:first], value, *args[first + 1 :])
            more = sum(map(_amount, others))
            if name in _SHALLOW:
                self.spend(1 + (len(value) if isinstance(value, Sized) else 0) + more)
                self.weighed(others)
            else:
                before = self._left
                self.weighed(value)
                # A filter turns each part of its value into at most that part and all other arguments.
                self.spend((before - self._left) * more)
            if name == "format":
                self._charge_percent(str(value), others)
            return filter_(*args, **kwargs)

        return charged

    def _charged_test(self, name: str, test: Callable[..., Any]) -> Callable[..., Any]:
        first = int(hasattr(test, "jinja_pass_arg"))

        @functools.wraps(test)
        def charged(*args: Any) -> Any:
            self.weighed(args[first if name == "in" else first + 1 :])
            return test(*args)

        return charged


def _amount(value: Any) -> int:
    """The factor, or number of elements, by which an argument can lengthen a result."""
    if isinstance(value, bool) or value is None:
        return 0
    if isinstance(value, int):
        return abs(value)
    return len(value) if isinstance(value, Sized) else 1


_SPEND, _WEIGH, _LENGTH, _TURN = "spend ", "weigh ", "length ", "turn "  # no template can spell the blanks


class _Counting(NodeTransformer):
    """Instruments a template to count its work."""

    def visit_For(self, node: nodes.For | nodes.Macro) -> nodes.For | nodes.Macro:
        """Charges each iteration of a loop, and each call of a macro, for its body."""
        self.generic_visit(node)
        node.body.insert(0, _charge(node))
        return node

    visit_Macro = visit_For

    def visit_Concat(self, node: nodes.Concat) -> nodes.Concat:
        """Charges `~` before it makes text."""
        self.generic_visit(node)
        node.nodes = [each if isinstance(each, nodes.Const) else _through(_WEIGH, each) for each in node.nodes]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:
        """Charges slices, which copy, and keys, which are hashed."""
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _through(_LENGTH, node.node)
        elif not isinstance(node.arg, nodes.Const):
            node.arg = _through(_WEIGH, node.arg)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:
        """Charges the keys of a dictionary, which are hashed."""
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _through(_WEIGH, node.key)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        """Charges comparisons of two values that may both be long, and searches for or in such a value."""
        self.generic_visit(node)
        if not isinstance(node.expr, nodes.Const) and any(operand.op in ("in", "notin") for operand in node.ops):
            node.expr = _through(_WEIGH, node.expr)
        for operand in node.ops:
            both = not isinstance(node.expr, nodes.Const) and not isinstance(operand.expr, nodes.Const)
            if both or operand.op in ("in", "notin"):
                operand.expr = _through(_WEIGH, operand.expr)
        return node


def _charge(node: nodes.For | nodes.Macro) -> nodes.ExprStmt:
    """The statement that charges for the expressions and text of a body."""
    text = sum(len(data.data) for each in node.body for data in each.find_all(nodes.TemplateData))
    size = sum(1 for each in node.body for _ in each.find_all(nodes.Node))
    return nodes.ExprStmt(_through(_SPEND, nodes.Const(1 + size + text)), lineno=node.lineno)


def _through(name: str, value: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


class _Generation(Extension):
    """`{% generation %}`, with which templates mark the answers to learn; its content is rendered as it stands."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Any) -> Any:
        """See Extension."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
