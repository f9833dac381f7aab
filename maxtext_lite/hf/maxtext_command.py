"""What a command line of MaxText states, with the files that it names."""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from maxtext_lite.config import UserError, packaged_directory, parse_value
from maxtext_lite.config.errors import value_text
from maxtext_lite.config.json_file import read_text
from maxtext_lite.config.load import keys_twice
from maxtext_lite.config.yaml import YamlValue, parse_mapping
from maxtext_lite.hf.maxtext import (
    Origin,
    Values,
    keys_without_part_in,
    maxtext_defaults,
    maxtext_table,
    reason_without_effect,
)

_MOST_BASES = 16
_SECTIONS = ("dpo", "lora")  # of MaxText's keys, whose keys are unique without them
_OLD_NAMES = {"cosine_learning_rate_final_fraction": "learning_rate_final_fraction"}  # of versions before 0.2


@dataclass
class StatedKeys:
    """MaxText's keys as files and a command line state them, and the origins of those that come from files."""

    values: Values = field(default_factory=Values)
    origins: dict[str, Origin] = field(default_factory=dict[str, Origin])

    def add(self, key: str, stated: YamlValue, origin: Origin | None = None) -> None:
        """Adds a key, or the keys of a section: dpo.dpo_beta is dpo_beta. 007 stays text for a text key."""
        if key in _SECTIONS and isinstance(stated.value, Mapping):
            for part, value in stated.value.items():
                self.add(str(part), YamlValue(value, None), origin)
            return
        section, _, rest = key.partition(".")
        key = rest if section in _SECTIONS and rest else key
        key = _OLD_NAMES.get(key, key)
        value = stated.value
        default = maxtext_defaults().get(key)
        if isinstance(value, str) and re.fullmatch(r"[-+]?\d[\d_]*", value):
            value = int(value)  # 10_000, which is text in YAML 1.2
        if stated.text and isinstance(default, str):
            value = stated.text
        if value == "None":
            value = None
        if origin in ("base", "defaults") and key not in self.values and key in maxtext_defaults() and value == default:
            return
        self.values[key] = value
        self.origins.pop(key, None)
        if origin is not None:
            self.origins[key] = origin


def read_command(command: Sequence[str], words: Sequence[str]) -> StatedKeys:
    """The keys of the file and of the files it is based on, and of the command line, which wins.

    Args:
      command: what precedes the words, such as `python3 -m MaxText.train`.
      words: a file or none, then key=value.
    Raises:
      UserError: a file cannot be read, or a word is not key=value.
    """
    found = StatedKeys()
    if words and "=" not in words[0]:
        _read_file(found, words[0])
        words = words[1:]
    else:
        trainers = maxtext_table()["trainers"]
        for word in command:
            for key, value in trainers.get(word.rpartition(".")[2], {}).items():
                found.add(key, YamlValue(value, None), "file")
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise UserError(f"'{value_text(word)}' is not of the form key=value.")
        try:
            found.add(key, parse_value(text))
        except ValueError as error:
            raise UserError(f"{key}={value_text(text)} {error}.") from None
    for key in keys_without_part_in(found.values):
        if found.origins.get(key) == "defaults":
            del found.values[key]
    return found


def _read_file(found: StatedKeys, name: str, depth: int = 0) -> None:
    if depth > _MOST_BASES:
        raise UserError(f"{value_text(name)} is the base_config of itself.")
    path = Path(name)
    ours = packaged_directory("configs") / "base.yml"  # found when a MaxText command is given in our checkout
    if path.name == "base.yml" and (not path.exists() or path.resolve() == ours.resolve()):
        return  # MaxText's own file of defaults
    try:
        stated = parse_mapping(sys.stdin.read() if name == "-" else read_text(path))
    except ValueError as error:
        raise UserError(f"{value_text(name)} {error}.") from None
    if twice := keys_twice(stated, value_text(name)):
        raise UserError(twice)
    entries = dict(stated)
    base = entries["base_config"].text if "base_config" in entries else ""
    if base:  # relative to its own directory or one above, or in MaxText's `configs` there
        folders = [place for folder in path.absolute().parents for place in (folder, folder / "configs")]
        above = next((folder / base for folder in folders if (folder / base).is_file()), path.parent / base)
        _read_file(found, str(above), depth + 1)
    origin: Origin = "base" if depth else "file"
    if not base and (depth or path.name == "base.yml"):
        origin = "defaults"
    for key, value in entries.items():
        if origin != "defaults" or reason_without_effect(key) is None:  # most keys of MaxText's file have no effect
            found.add(key, value, origin)
