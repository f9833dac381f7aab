"""YAML 1.2 (core schema) to Python values: 1e-3 is a number, on/off/yes/no are text, 0o17 is octal."""

import contextlib
import re
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import yaml

from maxtext_lite.config.errors import value_text

_SCALARS = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}
"""The plain scalars of YAML 1.2 that are not text; the first pattern that matches counts."""


class _Loader(yaml.SafeLoader):
    """PyYAML's loader with the scalars of YAML 1.2, which refuses a mapping with a key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        for name, count in Counter(str(key.value) for key, _ in node.value).items():
            if count > 1:
                problem = f"has the key '{value_text(name, 40)}' twice"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep=deep)

    def construct_whole(self, node: yaml.ScalarNode) -> int:
        """The integer of a scalar; YAML 1.1 does not know its octal prefix."""
        return int(node.value, {"0o": 8, "0x": 16}.get(node.value[:2], 10))


_Loader.yaml_implicit_resolvers = {}
_resolving: Any = _Loader  # PyYAML has no types here
for _tag, _pattern in _SCALARS.items():
    _resolving.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), None)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_whole)


@dataclass(frozen=True)
class YamlValue:
    """One value of a YAML document.

    Attributes:
      value: the Python value (None, bool, int, float, str, list or dict).
      text: the text of a scalar as written (unquoted); None for a list or a mapping.
    """

    value: object
    text: str | None


def parse_value(text: str) -> YamlValue:
    """The YAML 1.2 value of `text`, as on the right of `key=value`; empty text is null.

    Raises:
      ValueError: it is not YAML.
    """
    with _explained_errors():
        loader = _Loader(text)
        node = loader.get_single_node()
        return YamlValue(None, "") if node is None else _value(loader, node)


def parse_mapping(text: str) -> list[tuple[str, YamlValue]]:
    """The entries of a YAML mapping in order, duplicates included; an empty document has none.

    Raises:
      ValueError: it is not YAML, or not a mapping.
    """
    with _explained_errors():
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return []
        if not isinstance(node, yaml.MappingNode):
            raise ValueError("is not a list of `key: value` lines")
        return [(str(key.value), _value(loader, value)) for key, value in node.value]


def _value(loader: Any, node: yaml.Node) -> YamlValue:
    text = node.value if isinstance(node, yaml.ScalarNode) else None
    return YamlValue(loader.construct_object(node, deep=True), text)


@contextlib.contextmanager
def _explained_errors() -> Generator[None]:
    """Raises a ValueError with the place in place of PyYAML's own errors."""
    try:
        yield
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        raise ValueError(f"is not YAML ({error.problem or error.context}{where})") from error
    except yaml.YAMLError as error:
        raise ValueError(f"is not YAML ({str(error).splitlines()[0]})") from error
    except RecursionError:
        raise ValueError("is nested too deeply") from None
