"""Guesses at what the user meant: another key, key=value in another notation, another file."""

import functools
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from maxtext_lite.config.errors import did_you_mean, value_text
from maxtext_lite.config.json_file import is_there, user_path
from maxtext_lite.config.yaml import parse_mapping

_WORDS = re.compile(r"-{0,2}([A-Za-z][\w-]*)[\s:=]*(\S*)")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE_SUFFIX = re.compile(r"\.[a-z]+\d?$")


@functools.cache
def keys_elsewhere() -> dict[str, str | None]:
    """Our key for each name in another framework."""
    table = parse_mapping(Path(__file__).with_name("elsewhere.yml").read_text(encoding="utf-8"))
    return {name: key.text for name, key in table}


def _key_meant(name: str, known: Collection[str]) -> str | None:
    """The key that a name certainly means: the same but for case and dashes, or its name in another framework."""
    plain = name.lower().replace("-", "_")
    key = plain if plain in known else keys_elsewhere().get(plain)
    return key if key in known else None


def key_hint(name: str, known: Collection[str]) -> str:
    """The clause ` Did you mean 'x'?` about an unknown key; empty where no key is similar."""
    meant = _key_meant(name, known)
    return f" Did you mean '{meant}'?" if meant else did_you_mean(name, known)


def override_meant(words: Sequence[str], known: Collection[str]) -> str:
    """`steps=5` for words such as `--steps=5`, `steps:5`, `--steps 5` and `steps 5`; "" where no key is meant."""
    found = _WORDS.match(" ".join(words[:3]))
    key = found and _key_meant(found[1], known)
    if not found or not key:
        return ""
    is_value = found[2] and "=" not in found[2] and not found[2].startswith("--")
    return f"{key}={found[2] if is_value else 'VALUE'}"


def override_hint(words: Sequence[str], known: Collection[str]) -> str:
    """The clause ` Did you mean 'steps=5'?`, or empty text."""
    meant = override_meant(words, known)
    return f" Did you mean '{value_text(meant)}'?" if meant else ""


def missing_file(name: str, namer: str, shipped: Sequence[str], directory: Path = Path()) -> str:
    """The problem with a missing config file, and which one may be meant.

    Args:
      namer: the file whose `base` it is; "": it was named on the command line.
      directory: of the namer, from which the name is looked up.
    """
    named_by = f" (base of {namer})" if namer else ""
    beside = sorted((directory / user_path(name)).parent.glob("*.y*ml"))
    files = [str(Path(name).parent / file.name) for file in beside]
    same = [file for file in files if Path(file).stem == Path(name).stem]
    hint = did_you_mean(name, same) or did_you_mean(name, [*files, *shipped])
    return f"no config file '{value_text(name)}'{named_by}.{hint}"


def no_directory(path: str, key: str) -> str:
    """Refuses a path that does not exist and suggests others; "" if it is empty, exists or is in a bucket."""
    place = user_path(path)
    if not path or "://" in path or is_there(place):
        return ""
    beside = [each.name for each in place.parent.glob("*") if each.is_dir()]
    hint = hub_hint(path) or did_you_mean(place.name, beside)
    return f"{key}={value_text(path)}: there is no directory {value_text(str(place.absolute()))}.{hint}"


def hub_hint(path: str, *options: str) -> str:
    """How to download `path` from the Hugging Face hub, as a clause; empty if it cannot be an id there.

    Args:
      options: of `hf download`, such as --repo-type dataset.
    """
    place = user_path(path)
    if not _HUB_ID.fullmatch(path) or _FILE_SUFFIX.search(path) or any(place.parent.glob("*/config.yml")):
        return ""
    command = " ".join(["hf download", path, *options, "--local-dir", path])
    return f" If it is on the Hugging Face hub, download it first: {command}"
