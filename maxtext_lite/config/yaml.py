"""YAML 1.2 (core schema) to Python values: 1e-3 is a number, on/off/yes/no are text, 0o17 is octal."""

import re
from dataclasses import dataclass
from typing import Any, cast

import yaml

from maxtext_lite.config.errors import value_text

# PyYAML's parser without the rules of YAML 1.1 for plain scalars.
_CoreLoader: Any = type("_CoreLoader", (yaml.SafeLoader,), {"yaml_implicit_resolvers": {}})
_PATTERNS: dict[str, re.Pattern[str]] = {}
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
    _PATTERNS[_tag] = re.compile(rf"(?:{_pattern})\Z")
    _CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _PATTERNS[_tag], _first)

_TAG_PREFIX = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class YamlValue:
    """One value of a YAML document.

    Attributes:
      value: the Python value (None, bool, int, float, str, list or dict).
      text: the text of a scalar as written (unquoted); None for a list or a mapping.
      texts: a list or a mapping with the text of each scalar in place of its value; None for a scalar.
    """

    value: object
    text: str | None
    texts: object = None


def parse_value(text: str) -> YamlValue:
    """The YAML 1.2 value of `text`, as on the right of `key=value`; empty text is null.

    Raises:
      ValueError: it is not YAML.
    """
    node = _compose(text)
    return YamlValue(None, "") if node is None else _value_of(node)


def is_one_scalar(text: str) -> bool:
    """Whether `text` is a scalar and nothing that YAML leaves out of its value: no comment, tag or anchor.

    Raises:
      ValueError: it is not YAML.
    """
    node = _compose(text)
    if not isinstance(node, yaml.ScalarNode):
        return False
    whole = text[node.start_mark.index : node.end_mark.index] if node.style in ("'", '"') else node.value
    return text.strip() == whole


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
    _check_tag(node)
    entries: list[tuple[str, YamlValue]] = []
    for key_node, value_node in cast("list[tuple[yaml.Node, yaml.Node]]", node.value):
        if not isinstance(key_node, yaml.ScalarNode):
            raise ValueError(f"has a key that is not a word{_where(key_node)}")
        entries.append((str(key_node.value), _value_of(value_node)))
    return entries


def _compose(text: str) -> yaml.Node | None:
    try:
        return cast("yaml.Node | None", _CoreLoader(text).get_single_node())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        raise ValueError(f"is not YAML ({error.problem or error.context}{where})") from error
    except yaml.YAMLError as error:
        raise ValueError(f"is not YAML ({str(error).splitlines()[0]})") from error
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def _where(node: yaml.Node) -> str:
    return f" (line {node.start_mark.line + 1})"


def _value_of(node: yaml.Node) -> YamlValue:
    try:
        return _value(node)
    except RecursionError:
        raise ValueError(f"is nested too deeply, or contains itself{_where(node)}") from None


def _value(node: yaml.Node) -> YamlValue:
    if isinstance(node, yaml.ScalarNode):
        return YamlValue(_scalar(node), str(node.value))
    _check_tag(node)
    if isinstance(node, yaml.SequenceNode):
        items = [_value(item) for item in cast("list[yaml.Node]", node.value)]
        return YamlValue([item.value for item in items], None, [_as_written(item) for item in items])
    entries: dict[str, YamlValue] = {}
    for key, value in cast("list[tuple[yaml.Node, yaml.Node]]", node.value):
        if not isinstance(key, yaml.ScalarNode):
            raise ValueError(f"has a key that is not a word{_where(key)}")
        if key.value in entries:
            raise ValueError(f"has the key '{value_text(key.value, 40)}' twice{_where(key)}")
        entries[key.value] = _value(value)
    values = {name: entry.value for name, entry in entries.items()}
    return YamlValue(values, None, {name: _as_written(entry) for name, entry in entries.items()})


def _as_written(value: YamlValue) -> object:
    return value.texts if value.text is None else value.text


def _scalar(node: yaml.ScalarNode) -> object:
    text, kind = str(node.value), str(node.tag).removeprefix(_TAG_PREFIX)
    if kind in _PATTERNS and not _PATTERNS[kind].match(text):
        raise ValueError(f"has the tag !!{kind} before a value that is not one{_where(node)}")
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        try:
            return int(text, base)
        except ValueError:
            raise ValueError(f"has a number of {len(text):,} digits{_where(node)}") from None
    if kind == "float":
        return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
    if kind == "str":
        return text
    raise ValueError(_unknown_tag(node))


def _check_tag(node: yaml.Node) -> None:
    if node.tag.removeprefix(_TAG_PREFIX) != ("map" if isinstance(node, yaml.MappingNode) else "seq"):
        raise ValueError(_unknown_tag(node))


def _unknown_tag(node: yaml.Node) -> str:
    return f"has the tag {value_text(node.tag)}, which means nothing here{_where(node)}"
