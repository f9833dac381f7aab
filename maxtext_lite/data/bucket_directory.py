"""A directory in a bucket, whose objects are listed, read and written whole through fsspec."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxtext_lite.config import UserError
from maxtext_lite.config.bucket import file_system, reaching
from maxtext_lite.config.json_file import path_below


@dataclasses.dataclass(frozen=True)
class BucketDirectory:
    """Everything below a path in a bucket. Methods raise UserError if the store refuses or has no such object.

    Attributes:
      key: what messages call the path.
      url: the path without a trailing slash.
    """

    key: str
    url: str

    def __getstate__(self) -> dict[str, str]:
        return {"key": self.key, "url": self.url}  # another process opens its own connections

    @functools.cached_property
    def _opened(self) -> tuple[Any, str]:
        return file_system(self.url, self.key)

    def _names(self, names: Sequence[str]) -> list[str]:
        return [f"{self._opened[1]}/{name}" for name in names]

    def listed(self) -> dict[str, tuple[int, str]]:
        """(bytes, the store's tag of the content) of each object by its name below the path; {} if there is none."""
        system, root = self._opened
        with reaching(self.url, self.key):
            found = system.find(root, detail=True, withdirs=False)
        start = len(root) + 1
        return {name[start:]: (each["size"], str(each.get("etag") or each.get("ETag"))) for name, each in found.items()}

    def read(self, name: str) -> bytes:
        """The content of an object."""
        with reaching(f"{self.url}/{name}", self.key):
            return self._opened[0].cat_file(*self._names([name]))

    def read_parts(self, names: Sequence[str], starts: Sequence[int], stops: Sequence[int]) -> list[bytes]:
        """Bytes `start` to `stop - 1` of each object, many read at once."""
        with reaching(self.url, self.key):
            return self._opened[0].cat_ranges(self._names(names), list(starts), list(stops), on_error="raise")

    def fetch(self, name: str, to: Path) -> None:
        """Copies an object to a file."""
        with reaching(f"{self.url}/{name}", self.key):
            self._opened[0].get_file(*self._names([name]), str(to))

    def fetch_all(self, names: Sequence[str], to: Path) -> None:
        """Copies objects, many at once, to files of the same names below a directory, out of which no name may lead."""
        files = [str(path_below(to, name, self.url)) for name in names]
        with reaching(self.url, self.key):
            self._opened[0].get(self._names(names), files)

    def create(self, name: str, content: bytes) -> None:
        """Writes an object, unless it exists already."""
        try:
            with reaching(f"{self.url}/{name}", self.key):
                self._opened[0].pipe_file(*self._names([name]), content, mode="create")
        except UserError:
            if name not in self.listed():
                raise

    def upload(self, file: Path, name: str) -> None:
        """Copies a file to an object, which appears once it is complete."""
        with reaching(f"{self.url}/{name}", self.key):
            self._opened[0].put_file(str(file), *self._names([name]))
            size = self._opened[0].info(*self._names([name]))["size"]
        if size != file.stat().st_size:
            raise UserError(f"{self.url}/{name} has {size:,} bytes, not the {file.stat().st_size:,} that were written.")

    def remove(self, names: Sequence[str]) -> None:
        """Removes objects."""
        with reaching(self.url, self.key):
            self._opened[0].rm(self._names(names)) if names else None
