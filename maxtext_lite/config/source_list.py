"""A key whose value is a path, or a list of the sources of a mixture."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import PurePath
from typing import Annotated, Any, cast

from pydantic import BeforeValidator, PlainSerializer, ValidationError

from maxtext_lite.config.errors import WrongType, did_you_mean, value_text
from maxtext_lite.config.field_types import DataPathName, Exact, ExactOrUnlimited, Name, Section, data_path_text

MIXABLE = ("text", "array_record", "megatron", "sft")
"""The values of dataset_type whose sources may be mixed."""

_MOST_SOURCES = 1000


class MixtureEntry(Section):
    """One source of a mixture.

    Attributes:
      weight: of its target tokens among those of all sources; only the ratios count.
      max_epochs: passes over it in the whole run; -1: any number.
      name: in metrics and messages; by default its path's, without directories and suffixes.
    """

    path: DataPathName
    weight: Exact
    max_epochs: ExactOrUnlimited = Fraction(-1)
    name: Name = "-"


_NEEDED = ("path", "weight")


@dataclass(frozen=True)
class SourceList:
    """The sources of a mixture, in the order in which they are listed."""

    entries: tuple[MixtureEntry, ...]

    def __str__(self) -> str:
        """YAML, and JSON, that reads back as the same list."""
        return json.dumps(_serialised(self), ensure_ascii=False)


def name_of_path(path: str) -> str:
    """The last part of a path, without suffixes: web for data/web/ and for web.jsonl.gz."""
    last = PurePath(path).name
    return last[:1] + last[1:].split(".")[0] if last else path


def is_source_list(value: object) -> bool:
    """Whether a value that YAML reads is meant to be a list of sources; [ab] and [a.txt] are globs."""
    if not isinstance(value, list):
        return isinstance(value, dict)
    entries = cast("list[object]", value)
    return not entries or any(isinstance(entry, dict) for entry in entries)


def _checked(value: object) -> object:
    if isinstance(value, SourceList):
        return value
    if isinstance(value, Mapping):
        raise WrongType("is no mixture: it must be a list, as [{path: web.jsonl, weight: 0.7}].")
    if not isinstance(value, list):
        return data_path_text(value)
    entries = [_entry(number, entry) for number, entry in enumerate(cast("list[object]", value), start=1)]
    if not 1 <= len(entries) <= _MOST_SOURCES:
        raise WrongType(f"has {len(entries):,} sources; it must have 1 to {_MOST_SOURCES:,}.")
    names = [entry.name for entry in entries]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise WrongType(f"has two sources named {value_text(twice, 40)}: give each a name of its own.")
    return SourceList(tuple(entries))


def _entry(number: int, value: object) -> MixtureEntry:
    where = f"is no mixture: entry {number}"
    if not isinstance(value, Mapping):
        raise WrongType(f"{where} is not a mapping, as {{path: web.jsonl, weight: 0.7}}.")
    values = cast("Mapping[str, Any]", value)
    known = list(MixtureEntry.model_fields)
    for name in values:
        if name not in known:
            shown = value_text(name, 40)
            raise WrongType(f"{where} has {shown}; it may have {', '.join(known)}.{did_you_mean(str(name), known)}")
    for name in _NEEDED:
        if name not in values:
            raise WrongType(f"{where} lacks {name}, which every source needs.")
    try:
        entry = MixtureEntry.model_validate(dict(values))
    except ValidationError as error:
        wrong = error.errors()[0]
        said = wrong["msg"].removeprefix("Value error, ")
        raise WrongType(f"{where} has a {wrong['loc'][0]} that {said}") from None
    return entry if "name" in values else entry.model_copy(update={"name": name_of_path(entry.path)})


def single_path(value: str | SourceList) -> str:
    """The path that a key holds, where rules have refused a list."""
    assert isinstance(value, str), "rules refuse a list of sources here"
    return value


def _serialised(value: str | SourceList) -> str | Sequence[Mapping[str, object]]:
    return value if isinstance(value, str) else [entry.model_dump() for entry in value.entries]


PathOrSources = Annotated[str | SourceList, BeforeValidator(_checked), PlainSerializer(_serialised)]
"""A path, or a list of mappings with the keys of `MixtureEntry`."""
