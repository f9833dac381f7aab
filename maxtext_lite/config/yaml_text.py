"""YAML 1.2 (core schema) to Python values: 1e-3 is a number, on/off/yes/no are text, 0o17 is octal."""

import re
from dataclasses import dataclass
from typing import Any, cast

import yaml

# PyYAML's parser without its YAML 1.1 ideas of what a plain scalar is.
_CoreLoader: Any = type("_CoreLoader", (yaml.SafeLoader,), {"yaml_implicit_resolvers": {}})

for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    _CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first)

_TAG_PREFIX = "tag:yaml.org,2002:"


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
    """The YAML 1.2 value that `text` is, as on the right of `key=value`; empty text is null.

    Raises:
      ValueError: it is not YAML.
    """
    node = _compose(text)
    return YamlValue(None, "") if node is None else _value(node)


def parse_mapping(text: str) -> list[tuple[str, YamlValue]]:
    """The entries of a YAML mapping in order, duplicates included; an empty document has none.

    Raises:
      ValueError: it is not YAML, or not a mapping.
    """
    node = _compose(text)
    if node is None:
        return []
    if not isinstance(node, yaml.MappingNode):
        raise ValueError("is not a list of `key: value` lines")
    entries: list[tuple[str, YamlValue]] = []
    for key_node, value_node in cast("list[tuple[yaml.Node, yaml.Node]]", node.value):
        if not isinstance(key_node, yaml.ScalarNode):
            raise ValueError(f"has a key that is not a word{_where(key_node)}")
        entries.append((str(key_node.value), _value(value_node)))
    return entries


def _compose(text: str) -> yaml.Node | None:
    try:
        return cast("yaml.Node | None", _CoreLoader(text).get_single_node())
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        raise ValueError(f"is not YAML ({error.problem or error.context}{where})") from error
    except yaml.YAMLError as error:
        raise ValueError(f"is not YAML ({str(error).splitlines()[0]})") from error


def _where(node: yaml.Node) -> str:
    return f" (line {node.start_mark.line + 1})"


def _value(node: yaml.Node, inside: tuple[yaml.Node, ...] = ()) -> YamlValue:
    if any(node is outer for outer in inside):
        raise ValueError(f"contains itself{_where(node)}")
    if isinstance(node, yaml.ScalarNode):
        return YamlValue(_scalar(node), str(node.value))
    if isinstance(node, yaml.SequenceNode):
        return YamlValue([_value(item, (*inside, node)).value for item in cast("list[yaml.Node]", node.value)], None)
    pairs = cast("list[tuple[yaml.Node, yaml.Node]]", node.value)
    return YamlValue({str(key.value): _value(value, (*inside, node)).value for key, value in pairs}, None)


def _scalar(node: yaml.ScalarNode) -> object:
    text, tag = str(node.value), str(node.tag)
    match tag.removeprefix(_TAG_PREFIX):
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int":
            base = {"0o": 8, "0x": 16}.get(text[:2], 10)
            return int(text, base)
        case "float":
            return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
        case "str":
            return text
        case _:
            raise ValueError(f"has the tag {tag}, which means nothing here{_where(node)}")
