"""Keys whose value is a path, or a list: of the sources of a mixture, or of held-out sets."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import PurePath
from typing import Annotated, cast

from pydantic import BeforeValidator, PlainSerializer

from maxtext_lite.config.errors import WrongType, value_text
from maxtext_lite.config.field_types import (
    DataPathName,
    Exact,
    ExactOrUnlimited,
    Name,
    Section,
    data_path_text,
    from_entries,
)

_MOST_SOURCES = 1000
_TEXTS = ("path", "name")


class HeldOutEntry(Section):
    """One held-out set.

    Attributes:
      name: in metrics and messages; by default the path's last part, without suffixes.
    """

    path: DataPathName
    name: Name = "-"


class MixtureEntry(Section):
    """One source of a mixture.

    Attributes:
      weight: its share of the target tokens; only the ratios of weights matter.
      max_epochs: passes over it in the whole run; -1: any number.
      name: as of a held-out set.
    """

    path: DataPathName
    weight: Exact
    max_epochs: ExactOrUnlimited = Fraction(-1)
    name: Name = "-"


SourceEntry = HeldOutEntry | MixtureEntry


@dataclass(frozen=True)
class SourceList:
    """Sources in the order of the list."""

    entries: tuple[SourceEntry, ...]

    def __str__(self) -> str:
        """The list in JSON, which is also YAML, and reads back as the same list."""
        return json.dumps(_serialized(self), ensure_ascii=False)


@dataclass(frozen=True)
class MixtureList(SourceList):
    """The sources of a mixture."""

    entries: tuple[MixtureEntry, ...]


def name_of_path(path: str) -> str:
    """The last part of a path without suffixes, or the path where that is blank: web for data/web/ and web.jsonl.gz."""
    last = PurePath(path).name
    name = last[:1] + last[1:].split(".")[0]
    return name if name.strip() else path


def is_source_list(value: object) -> bool:
    """Whether a YAML value is meant as a list of sources; [ab] and [a.txt] are globs."""
    if not isinstance(value, list):
        return isinstance(value, dict)
    entries = cast("list[object]", value)
    return not entries or any(isinstance(entry, dict) for entry in entries)


def with_texts(sources: Sequence[object], texts: Sequence[object]) -> list[object]:
    """Sources with their texts as written, as those of keys are: the path 007 stays 007.

    Args:
      texts: the sources with the text of each scalar in place of its value.
    """

    def entry(source: object, text: object) -> object:
        if not isinstance(source, dict):
            return source
        values, written = cast("dict[str, object]", source), cast("dict[str, object]", text)
        texts = {name: written[name] for name in _TEXTS if isinstance(values.get(name), bool | int | float)}
        return values | texts

    return [entry(source, text) for source, text in zip(sources, texts, strict=True)]


@dataclass(frozen=True)
class _ListOf:
    """The check of a value that is a path or a list.

    Attributes:
      what: what the list is, for messages.
      example: an entry of it.
      needed, optional: the names that an entry has.
    """

    made: type[SourceList]
    kind: type[HeldOutEntry] | type[MixtureEntry]
    what: str
    example: str
    needed: tuple[str, ...]
    optional: tuple[str, ...]

    def __call__(self, value: object) -> object:
        if isinstance(value, SourceList):
            return cast("object", value)
        if isinstance(value, Mapping):
            raise WrongType(f"is not {self.what}: it must be a list, as [{self.example}].")
        if not isinstance(value, list):
            return data_path_text(value)
        entries = [self._entry(number, entry) for number, entry in enumerate(cast("list[object]", value), start=1)]
        _check_names(entries)
        return self.made(tuple(entries))

    def _entry(self, number: int, value: object) -> SourceEntry:
        where = f"is not {self.what}: entry {number}"
        if not isinstance(value, Mapping):
            raise WrongType(f"{where} is not a mapping, as {self.example}.")
        values = cast("Mapping[str, object]", value)
        try:
            entry = from_entries(self.kind, values, "a source", self.needed, self.optional)
        except WrongType as wrong:
            raise WrongType(f"{where} {wrong}") from None
        return entry if "name" in values else entry.model_copy(update={"name": name_of_path(entry.path)})


def _check_names(entries: Sequence[SourceEntry]) -> None:
    if not 1 <= len(entries) <= _MOST_SOURCES:
        raise WrongType(f"has {len(entries):,} sources; it must have 1 to {_MOST_SOURCES:,}.")
    names = [entry.name for entry in entries]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise WrongType(f"has two sources named {value_text(twice, 40)}: give each its own name.")


def single_path(value: str | SourceList) -> str:
    """The path that a key has as its value, where the rules have refused a list."""
    assert isinstance(value, str), "rules refuse a list of sources here"
    return value


def _serialized(value: str | SourceList) -> str | Sequence[Mapping[str, object]]:
    return value if isinstance(value, str) else [entry.model_dump() for entry in value.entries]


_MIXTURE = _ListOf(
    made=MixtureList,
    kind=MixtureEntry,
    what="a mixture",
    example="{path: web.jsonl, weight: 0.7}",
    needed=("path", "weight"),
    optional=("max_epochs", "name"),
)
_HELD_OUT = _ListOf(
    made=SourceList,
    kind=HeldOutEntry,
    what="a list of held-out sets",
    example="{path: web.jsonl, name: web}",
    needed=("path",),
    optional=("name",),
)

PathOrSources = Annotated[str | MixtureList, BeforeValidator(_MIXTURE), PlainSerializer(_serialized)]
"""A path, or a list of mappings with the keys of `MixtureEntry`."""
PathOrHeldOut = Annotated[str | SourceList, BeforeValidator(_HELD_OUT), PlainSerializer(_serialized)]
"""A path, or a list of mappings with the keys of `HeldOutEntry`."""
