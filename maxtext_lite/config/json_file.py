"""JSON from other programs, and the small files of a model: bounded in size, and refused by name where wrong."""

import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from maxtext_lite.config.errors import UserError, value_text

_MOST_BYTES = 2**28  # of one file; the largest published tokenizer.json has about 2**25


def parse_json(text: str, *, allow_nan: bool = False) -> Any:
    """The value of a JSON text.

    Args:
      allow_nan: NaN and Infinity, which are not JSON but written by Python, are numbers, for the caller to check.
    Raises:
      ValueError: the text is not JSON, has a key twice, or is nested deeper than Python reads; the message is a clause.
    """
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=None if allow_nan else _refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key '{value_text(name)}' occurs twice in one object")
        found[name] = value
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def user_path(text: str) -> Path:
    """The path that a user names, with ~ for a home directory where there is one."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 Path's own raises where there is none


def path_below(directory: Path, name: object, origin: object) -> Path:
    """The path below a directory of a file whose name comes from elsewhere: a bucket's listing, an index, a manifest.

    Args:
      origin: what messages call the place that the name comes from.
    Raises:
      UserError: the name is not the relative path of a file, or leads out of the directory.
    """
    parts = name.split("/") if isinstance(name, str) else [""]
    if not {"", ".", ".."}.isdisjoint(parts) or "\0" in str(name):
        raise UserError(f"{origin} names {value_text(name)}, which is not a file below it.")
    return directory / str(name)


def is_directory(path: Path) -> bool:
    """Whether a directory has this name; False for a name that is too long for any."""
    return os.path.isdir(path)  # noqa: PTH112 Path's own raises then


def is_there(path: Path) -> bool:
    """Whether anything has this name, even a broken link: such a file is refused, not ignored."""
    return os.path.lexists(path)


def check_file(path: Path) -> None:
    """Refuses anything but a regular file, before a read can block.

    Raises:
      UserError: the path is missing, a broken link, a directory, a pipe or a device.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if isinstance(error, FileNotFoundError) and path.is_symlink():
            raise UserError(f"{path} is a link to {path.readlink()}, which is not there.") from None
        raise UserError(f"{path}: {error.strerror}.") from None
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "a pipe or a device"
        raise UserError(f"{path} is {kind}, not a file.")


def read_bytes(path: Path) -> bytes:
    """The content of a file of a model.

    Raises:
      UserError: it is not a file, cannot be read, or is far larger than any such file.
    """
    check_file(path)
    try:
        with path.open("rb") as opened:
            content = opened.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}.") from None
    if len(content) > _MOST_BYTES:
        raise UserError(f"{path} has more than {_MOST_BYTES // 2**20} MiB, which no file of its kind has.")
    return content


def read_text(path: Path) -> str:
    """The text of a file of a model.

    Raises:
      UserError: as `read_bytes`, or it is not UTF-8.
    """
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}: {error.reason}).") from None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model; NaN and Infinity are numbers.

    Raises:
      UserError: as `read_text`, or it is not a JSON object.
    """
    try:
        value = parse_json(read_text(path), allow_nan=True)
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}).") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object.")
    return cast("dict[str, Any]", value)
