"""Files that are made once and read by every later start: the cache, and indices beside the data."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from maxtext_lite.config import UserError
from maxtext_lite.config.errors import writing
from maxtext_lite.config.json_file import check_file, is_directory, read_object, user_path

CACHE_VARIABLE = "MAXTEXT_LITE_CACHE"
"""The environment variable that names the cache directory; by default ~/.cache/maxtext_lite."""
ABOUT = "index.json"
"""The file of an index that is written last: sizes of the other files, and facts about the rows."""


def cache_directory(kind: str) -> Path:
    """The cache directory of this kind of file; it need not exist."""
    return user_path(os.environ.get(CACHE_VARIABLE, "") or "~/.cache/maxtext_lite") / kind


@contextlib.contextmanager
def locked(entry: Path) -> Iterator[None]:
    """Exclusive access to a directory of the cache among processes that ask for it this way; waits for the others.

    Raises:
      OSError: the lock file, next to the directory, cannot be written.
    """
    entry.parent.mkdir(parents=True, exist_ok=True)
    with entry.with_suffix(".lock").open("ab") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def file_sha256(file: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def token_dtype(vocab_size: int) -> str:
    """The smallest dtype for the ids of a vocabulary."""
    return "uint16" if vocab_size <= 2**16 else "int32"


def map_array(file: Path, dtype: str = "<i8") -> np.ndarray:
    """The numbers in a file, read when they are accessed; pickled as the name of the file."""
    if file.stat().st_size == 0:
        return np.zeros(0, dtype)  # nothing can be mapped
    mapped = np.memmap(file, dtype, mode="r").view(_Mapped)
    mapped.made_of = (file, dtype)
    return mapped


Arrays = dict[str, np.ndarray]
"""Arrays by name, or parts of them that follow those before."""


def join_parts(parts: Iterable[Arrays]) -> Arrays:
    """The whole arrays, in memory."""
    found: dict[str, list[np.ndarray]] = {}
    for part in parts:
        for name, values in part.items():
            found.setdefault(name, []).append(values)
    return {name: np.concatenate(values) for name, values in found.items()}


def write_parts(directory: Path, parts: Iterable[Arrays]) -> None:
    """Writes the whole arrays to a file each, `NAME.i64` for `map_array` if it has such numbers, otherwise NAME."""
    with contextlib.ExitStack() as files:
        opened: dict[str, BinaryIO] = {}
        for part in parts:
            for name, values in part.items():
                if name not in opened:
                    suffix = ".i64" if values.dtype == np.int64 else ""
                    opened[name] = files.enter_context((directory / f"{name}{suffix}").open("wb"))
                opened[name].write(values.tobytes())  # numpy's tofile is silent about a full disk


class _Mapped(np.memmap):
    made_of: tuple[Path, str] | None = None  # None: a part of a mapped array, or computed from one

    def __reduce__(self) -> Any:
        return (map_array, self.made_of) if self.made_of else np.asarray(self).__reduce__()


@dataclasses.dataclass(frozen=True)
class IndexPlace:
    """The place of a dataset's indices.

    Attributes:
      beside: a directory for them beside the data; it need not exist.
      fingerprint: fingerprint of the data.
    """

    beside: Path
    fingerprint: str

    def get(
        self,
        name: str,
        write: Callable[[Path], dict[str, Any]],
    ) -> Path:
        """The directory of an index, which is made if it does not exist.

        Args:
          write: fills a directory; returns facts for `ABOUT`.
        Raises:
          UserError: it can be written neither beside the data nor into the cache, or is incomplete.
        """
        name = f"{name}-{self.fingerprint[:16]}"
        cache = cache_directory("rows")
        for place in (self.beside, cache):
            if is_directory(place / name):
                return _checked(place / name)
        places = (self.beside, *self.beside.parents)
        existing = next(place for place in places if is_directory(place))
        index = (self.beside if os.access(existing, os.W_OK) else cache) / name
        with writing(index.parent):
            return make_directory(index, write)


def stored_arrays(
    place: IndexPlace | None,
    name: str,
    parts: Iterator[Arrays],
) -> list[np.ndarray]:
    """The whole arrays of int64 of an index, in the order of the first part.

    Args:
      place: where they are kept, or made if they are not there; None: in memory.
    Raises:
      UserError: as in `IndexPlace.get`.
    """
    if place is None:
        return [*join_parts(parts).values()]
    first = next(parts)

    def write(directory: Path) -> dict[str, Any]:
        write_parts(directory, itertools.chain([first], parts))
        return {}

    index = place.get(name, write)
    return [map_array(index / f"{each}.i64") for each in first]


def make_directory(final: Path, write: Callable[[Path], dict[str, Any]]) -> Path:
    """A directory that appears under its name only when it is complete, even if several processes make it at once.

    Args:
      write: as in `IndexPlace.get`.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    try:
        about = write(making)
        sizes = {path.name: path.stat().st_size for path in making.iterdir()}
        (making / ABOUT).write_text(json.dumps({"bytes": sizes} | about) + "\n")
        making.chmod(0o755)
        for path in making.iterdir():
            with path.open("rb+") as opened:
                os.fsync(opened.fileno())
        try:
            making.rename(final)
        except OSError:
            if not is_directory(final):  # otherwise another process was first, with the same index
                raise
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return final


def _checked(index: Path) -> Path:
    for name, size in read_object(index / ABOUT)["bytes"].items():
        file = index / name
        check_file(file)
        if file.stat().st_size != size:
            raise UserError(f"{file} has {file.stat().st_size:,} bytes, not {size:,}: delete {index} to remake it.")
    return index
