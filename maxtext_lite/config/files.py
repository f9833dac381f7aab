"""Config files, shipped with maxtext_lite or the user's: where they are, their bases, and their values."""

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args, get_origin

from maxtext_lite.config.errors import Refusal, value_text
from maxtext_lite.config.hints import missing_file
from maxtext_lite.config.json_file import user_path
from maxtext_lite.config.schema import field_of
from maxtext_lite.config.source_list import MixtureList, SourceList, with_texts
from maxtext_lite.config.yaml_text import YamlValue, parse_mapping

ROOT_FILE = "base.yml"
"""The base of every config."""
RUN_FILE = "config.yml"
"""The name of the config of a run directory, which has every key."""
LARGEST_FILE = 2**22
"""Bytes of a config, which PyYAML reads in 20 s; 1000 sources with paths of 600 characters take half of it."""

_PACKAGE = Path(__file__).resolve().parent.parent
_MOST_NAMED = 20
_NO_BASE = object()
_MODELS = "models/"


class Origin(str):
    """Where a value comes from, as messages call it.

    Attributes:
      is_default: from configs/base.yml or a file of configs/models/, as shipped: the user left the key open.
      is_architecture: from the config.json of a Hugging Face directory.
    """

    is_default: bool
    is_architecture: bool

    def __new__(cls, text: str, *, is_default: bool = False, is_architecture: bool = False) -> "Origin":
        origin = super().__new__(cls, text)
        origin.is_default, origin.is_architecture = is_default, is_architecture
        return origin


@dataclass(frozen=True)
class Layer:
    """The values from one source; later layers win.

    Attributes:
      origin: the name of the source in messages.
      values: by key; a key that takes text has the text of a scalar as it is written, so run_name=007 stays 007.
      shipped: the path below configs/ of a shipped file; "" for other sources.
    """

    origin: Origin
    values: dict[str, object]
    shipped: str = ""


def packaged_directory(kind: Literal["configs", "assets"]) -> Path:
    """The directory of the shipped files: inside the package, or beside it in a checkout."""
    inside = _PACKAGE / kind
    return inside if inside.is_dir() else _PACKAGE.parent / kind


def packaged_file(kind: Literal["configs", "assets"], name: str) -> Path | None:
    """The shipped file `name`, with or without `configs/` in front; None where there is no such file."""
    directory = packaged_directory(kind)
    for relative in (name, name.removeprefix(f"{kind}/")):
        path = directory / relative
        if is_file(path) and path.resolve().is_relative_to(directory.resolve()):
            return path
    return None


def is_file(path: Path) -> bool:
    """Whether there is such a file; False for a name that no file system accepts."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def find_config(name: str, namer: Path | None = None) -> Path | None:
    """A config file: beside the file that names it or in the working directory, otherwise among the shipped ones."""
    candidate = user_path(name) if namer is None else namer.parent / user_path(name)
    itself = namer is not None and is_file(candidate) and candidate.resolve() == namer.resolve()
    shipped = packaged_file("configs", name)
    if is_file(candidate) and not (itself and shipped not in (None, namer)):
        return candidate
    return shipped


def find_model(name: str) -> Path | None:
    """The file of a `model_name`: the shipped one, otherwise configs/models/NAME.yml of the working directory."""
    file = f"configs/{_MODELS}{name}.yml"
    return packaged_file("configs", file) or find_config(file)


def shipped_configs() -> list[str]:
    """The paths below configs/ of all shipped files."""
    directory = packaged_directory("configs")
    return sorted(file.relative_to(directory).as_posix() for file in directory.rglob("*.yml"))


def read_layer(path: Path, named: str, problems: list[Refusal]) -> Layer:
    """The values of a file.

    Args:
      named: the file as the user named it.
      problems: gains what is wrong with the file.
    """
    directory, resolved = packaged_directory("configs").resolve(), path.resolve()
    shipped = resolved.relative_to(directory).as_posix() if resolved.is_relative_to(directory) else ""
    is_default = shipped == ROOT_FILE or shipped.startswith(_MODELS)
    origin = Origin(shipped or value_text(named), is_default=is_default)
    values, wrong = _read_shipped(resolved, origin) if shipped else _read(path, origin)
    problems.extend(wrong)
    return Layer(origin, dict(values), shipped)


@functools.lru_cache(maxsize=8)
def _read_shipped(path: Path, origin: str) -> tuple[dict[str, object], list[Refusal]]:
    return _read(path, origin)


def _read(path: Path, origin: str) -> tuple[dict[str, object], list[Refusal]]:
    try:
        size = path.stat().st_size
        if size > LARGEST_FILE:
            return {}, [Refusal("", f"{origin} has {size:,} bytes; a config has at most {LARGEST_FILE:,}.")]
        entries = parse_mapping(path.read_text(encoding="utf-8"))
        if path.name == RUN_FILE and not entries:
            why = (
                "has no keys, as if it had been cut short; that of a run has all. The run's own command writes it again"
            )
            return {}, [Refusal("", f"{origin} {why}.")]
    except OSError as error:
        return {}, [Refusal("", f"{origin}: {error.strerror}.")]
    except UnicodeDecodeError:
        return {}, [Refusal("", f"{origin} is not UTF-8 text.")]
    except ValueError as error:
        return {}, [Refusal("", f"{origin} {error}.")]
    values = {key: plain_value(key, value) for key, value in entries}
    return values, [Refusal("", message) for message in keys_twice(entries, origin)]


def keys_twice(entries: Sequence[tuple[str, YamlValue]], origin: str) -> list[str]:
    """The problems with the keys that occur several times in a file."""
    twice = [key for key, count in Counter(key for key, _ in entries).items() if count > 1]
    return first_of([f"key '{value_text(key)}' occurs twice in {origin}. Keep one of them." for key in twice], origin)


def takes_text(key: str) -> bool:
    """Whether the value of a key is text."""
    field = field_of(key)
    is_text = field is not None and (field.annotation is str or get_origin(field.annotation) is Literal)
    return is_text or may_list_sources(key)


def may_list_sources(key: str) -> bool:
    """Whether the value of a key may be a list of sources."""
    field = field_of(key)
    return field is not None and any(kind in get_args(field.annotation) for kind in (SourceList, MixtureList))


def plain_value(key: str, value: YamlValue) -> object:
    """The value of a key in a Layer."""
    sources = value.value
    if may_list_sources(key) and isinstance(sources, list):
        return with_texts(cast("list[object]", sources), cast("list[object]", value.texts))
    is_null = value.value is None and value.text != ""  # as written: null or ~
    return value.text if takes_text(key) and value.text is not None and not is_null else value.value


def first_of(messages: Sequence[str], origin: str) -> list[str]:
    """The first of many messages about one source, and the number of further ones."""
    more = len(messages) - _MOST_NAMED
    return [*messages[:_MOST_NAMED], *([f"{origin} has {more:,} more of these."] if more > 0 else [])]


def file_layers(name: str | None, problems: list[Refusal]) -> list[Layer]:
    """The layers of a file and its bases, the lowest first, which is always the shipped configs/base.yml."""
    layers: list[Layer] = []
    root = packaged_directory("configs") / ROOT_FILE
    if name is None:
        return [read_layer(root, ROOT_FILE, problems)]
    seen: dict[Path, str] = {}
    namer: Path | None = None
    by = ""
    while True:
        path = find_config(name, namer)
        if path is None:
            directory = Path() if namer is None else namer.parent
            problems.append(Refusal("", missing_file(name, by, shipped_configs(), directory)))
            break
        layer = read_layer(path, name if namer is None else str(namer.parent / user_path(name)), problems)
        if path.resolve() in seen:
            first = seen[path.resolve()]
            message = f"base: {value_text(name)} in {by} leads back to {first}: files may not be each other's base."
            problems.append(Refusal("", message))
            break
        seen[path.resolve()] = layer.origin
        base = layer.values.pop("base", _NO_BASE)
        layers.insert(0, layer)
        if base is _NO_BASE:
            break
        if not isinstance(base, str):
            problems.append(Refusal("", f"base: {value_text(base)} in {layer.origin} is not the name of a file."))
            break
        name, namer, by = base, path, layer.origin
    if not layers or layers[0].shipped != ROOT_FILE:
        layers.insert(0, read_layer(root, ROOT_FILE, problems))
    return layers
