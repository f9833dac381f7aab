"""The files that data come from: found by path, glob or shipped name, read as text or line by line as JSON."""

from __future__ import annotations

import glob
import gzip
import json
import pathlib
import zlib
from collections.abc import Iterator
from typing import Any

from maxtext_lite.config import UserError, packaged_directory, packaged_file

TEXT_SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz")
"""Files that are read; a directory's other files are not looked at."""


def find_files(key: str, path: str) -> list[tuple[str, pathlib.Path]]:
    """(name for messages, file) of each file of a path, a glob or the name of a shipped text, in the order of names.

    Args:
      key: what messages call the path.
    Raises:
      UserError: there is none, or one is of another kind.
    """
    suffixes = ", ".join(TEXT_SUFFIXES)
    place = pathlib.Path(path).expanduser()
    if place.is_dir():
        everything = f"{glob.escape(str(place))}/**"
        files = [(str(file), file) for file in _matches(everything) if file.name.endswith(TEXT_SUFFIXES)]
        if not files:
            raise UserError(f"{key}={path!r} is a directory without a {suffixes} file.")
    elif place.is_file():
        files = [(path, place)]
    elif glob.has_magic(path):
        files = [(str(file), file) for file in _matches(str(place))]
        if not files:
            raise UserError(f"{key}={path!r} matches no file.")
    else:
        files = [(path, _packaged_text(key, path))]
    for name, _ in files:
        if not name.endswith(TEXT_SUFFIXES):
            raise UserError(f"{key}={path!r}: cannot read {name!r}. The files are {suffixes}.")
    return files


def _matches(pattern: str) -> list[pathlib.Path]:
    # Not pathlib's glob: it takes hidden files (.ipynb_checkpoints) for the user's, and no absolute pattern.
    names = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
    return [path for path in map(pathlib.Path, names) if path.is_file()]


def _packaged_text(key: str, path: str) -> pathlib.Path:
    packaged = packaged_file("assets", path)
    if packaged is not None:
        return packaged
    names = (file.name for file in packaged_directory("assets").iterdir() if file.name.endswith(TEXT_SUFFIXES))
    raise UserError(
        f"{key}={path!r}: there is no such file or directory in {str(pathlib.Path.cwd())!r}, "
        f"nor among the texts that ship with the package ({', '.join(sorted(names))})."
    )


def read_text(name: str, file: pathlib.Path) -> str:
    """The file's UTF-8 text, decompressed, without a byte-order mark; line ends as they are.

    Raises:
      UserError: it cannot be read, or is something else.
    """
    try:
        content = file.read_bytes()
        if name.endswith(".gz"):
            content = gzip.decompress(content)
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 text (byte {error.start}: {error.reason}).") from error
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{name}: cannot be read ({error}).") from error


def json_lines(name: str, text: str, *, wanted: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The JSON object on each line that is not blank, after where it stands, as "file:line".

    Args:
      wanted: what an object has, for messages.
    Raises:
      UserError: a line is not a JSON object.
    """
    # Split at newlines only: str.splitlines would also split at U+2028, which JSON allows inside a string.
    for line_number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{name}:{line_number}"
        try:
            value = json.loads(line)
        except ValueError as error:
            reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            raise UserError(f"{where}: not JSON ({reason}).") from error
        if not isinstance(value, dict):
            raise UserError(f"{where}: not a JSON object with {wanted}.")
        yield where, value


def check_unicode(where: str, key: str, text: str) -> None:
    """Refuses half a surrogate pair, which JSON can spell and no encoding can.

    Raises:
      UserError: the text holds one.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f'{where}: "{key}" is not valid Unicode ({error.reason}).') from error
