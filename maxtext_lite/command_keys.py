"""Keys of the commands that take no config: `key=value` words and a class of keys."""

from collections.abc import Collection, Sequence
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError

from maxtext_lite.cli import ArgumentParser, run_path
from maxtext_lite.config import UserError, parse_value
from maxtext_lite.config.hints import key_hint, override_hint
from maxtext_lite.config.types import wrong_value


def model_arguments(parser: ArgumentParser, kind: type[BaseModel], directory_help: str) -> None:
    """Adds the directory of a model and `key=value` words for the keys of `kind`."""
    parser.add_argument("directory", type=run_path, help=directory_help)
    key_arguments(parser, kind)


def key_arguments(parser: ArgumentParser, kind: type[BaseModel]) -> None:
    """Adds `key=value` words for the keys of `kind`, as `overrides`."""
    parser.keys = lambda: kind.model_fields
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=", ".join(kind.model_fields))


Keys = TypeVar("Keys", bound=BaseModel)


def parse_keys(
    kind: type[Keys], words: Sequence[str], *, texts: Collection[str], paths: Collection[str] = (), example: str
) -> tuple[Keys, list[str]]:
    """The keys of a command that takes no config, from key=value words; of several for a key, the last wins.

    Args:
      texts: keys whose value is the text as it is, not YAML.
      paths: keys whose value is a path or a list of paths.
      example: a command, for the message about a word without `=`.
    Returns:
      The keys, and the problems of words that give no value, to which the caller adds its own.
    Raises:
      UserError: a value is not of its key's type; with every problem so far.
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            hint = override_hint([word], kind.model_fields)
            problems.append(f"'{word}' is not of the form key=value.{hint} Example: {example}")
        elif key not in kind.model_fields:
            problems.append(f"unknown key '{key}' (command line).{key_hint(key, kind.model_fields)}")
        else:
            try:
                values[key] = text if key in texts else _paths(text) if key in paths else _plain(text)
            except ValueError as error:
                problems.append(f"{key}={text} {error}.")
    try:
        return kind.model_validate(values), problems
    except ValidationError as error:
        first = {detail["loc"][0]: detail for detail in reversed(error.errors())}  # of each key
        raise UserError(problems + [str(wrong_value(kind, detail)) for detail in reversed(first.values())]) from None


def _plain(text: str) -> object:
    """The YAML value of a text; the text itself if YAML would drop a part of it, as from `x #1`."""
    value = parse_value(text)
    is_part = isinstance(value.value, str) and value.text != text.strip() and text[0] not in "'\""
    return text if is_part else value.value


def _paths(text: str) -> object:
    """A list of paths, null, or a path. Texts such as 2024, *.txt, `x: y.txt` and `x #1.txt` are paths."""
    if text.strip() in ("", "~", "null"):
        return None
    try:
        value = parse_value(text).value
    except ValueError:
        return text
    is_list_or_quoted = isinstance(value, list) or text[0] in "'\""
    return cast("object", value) if is_list_or_quoted else text
