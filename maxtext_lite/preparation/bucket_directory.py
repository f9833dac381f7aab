"""A directory in a bucket; lists, reads and writes whole objects through fsspec."""

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

    @property
    def _system(self) -> Any:
        return self._opened[0]

    def _path(self, name: str) -> str:
        return f"{self._opened[1]}/{name}"

    def listed(self) -> dict[str, tuple[int, str]]:
        """(bytes, the store's content tag) of each object, by its name below the path; {} without any."""
        root = self._path("")
        with reaching(self.url, self.key):
            found = self._system.find(self._opened[1], detail=True, withdirs=False)
        listed: dict[str, tuple[int, str]] = {}
        for path, about in found.items():
            listed[path[len(root) :]] = (about["size"], str(about.get("etag") or about.get("ETag")))
        return listed

    def read(self, name: str) -> bytes:
        """The content of an object."""
        with reaching(f"{self.url}/{name}", self.key):
            return self._system.cat_file(self._path(name))

    def read_parts(self, names: Sequence[str], starts: Sequence[int], stops: Sequence[int]) -> list[bytes]:
        """Bytes `start` to `stop - 1` of each object, many read at once."""
        paths = [self._path(name) for name in names]
        with reaching(self.url, self.key):
            return self._system.cat_ranges(paths, list(starts), list(stops), on_error="raise")

    def fetch(self, name: str, to: Path) -> None:
        """Copies an object to a file."""
        with reaching(f"{self.url}/{name}", self.key):
            self._system.get_file(self._path(name), str(to))

    def fetch_all(self, names: Sequence[str], to: Path) -> None:
        """Copies objects, many at once, to files of the same names below a directory; no name may lead out of it."""
        files = [str(path_below(to, name, self.url)) for name in names]
        with reaching(self.url, self.key):
            self._system.get([self._path(name) for name in names], files)

    def create(self, name: str, content: bytes) -> None:
        """Writes an object, unless it exists already."""
        try:
            with reaching(f"{self.url}/{name}", self.key):
                self._system.pipe_file(self._path(name), content, mode="create")
        except UserError:
            if name not in self.listed():
                raise

    def upload(self, file: Path, name: str) -> None:
        """Copies a file to an object, which appears once it is complete."""
        with reaching(f"{self.url}/{name}", self.key):
            self._system.put_file(str(file), self._path(name))
            size = self._system.info(self._path(name))["size"]
        if size != file.stat().st_size:
            raise UserError(f"{self.url}/{name} has {size:,} bytes, not the {file.stat().st_size:,} that were written.")

    def remove(self, names: Sequence[str]) -> None:
        """Removes objects."""
        if names:
            with reaching(self.url, self.key):
                self._system.rm([self._path(name) for name in names])
