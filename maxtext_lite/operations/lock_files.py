"""The files of leases, on a file system or in a bucket: each is created by exactly one process."""

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from maxtext_lite.config.bucket import file_system, is_bucket, storage_errors

_MOST_BYTES = 10_000


class LeaseFile(NamedTuple):
    """A lease as it was read; after a renewal, or replaced by another of the same name, it is unequal.

    Attributes:
      version: differs from that of any other file of this name; in a bucket each renewal changes it too.
      renewed_ns: by the clock of the storage.
    """

    name: str
    text: bytes
    version: str
    renewed_ns: int


def lease_files(directory: Path) -> "LeaseFiles":
    """The files of a directory of leases."""
    return _InBucket(directory) if is_bucket(directory) else LeaseFiles(directory)


class LeaseFiles:
    """The files of a directory. Methods raise OSError; FileNotFoundError if a file is missing."""

    def __init__(self, directory: Path):
        self._directory = directory

    def found(self) -> list[LeaseFile]:
        """All files, of any name."""
        found, paths = list[LeaseFile](), list[Path]()
        with contextlib.suppress(FileNotFoundError):  # the last holder removes the directory
            paths = list(self._directory.iterdir())
        for path in paths:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                about = path.stat()
                text = b"" if path.is_dir() else path.read_bytes()[:_MOST_BYTES]
                found.append(LeaseFile(path.name, text, str(about.st_ino), about.st_mtime_ns))
        return found

    def make(self, name: str, text: bytes) -> None:
        """Makes a file; raises FileExistsError if there is one of this name."""
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / name
        try:
            with path.open("xb", buffering=0) as file:
                try:
                    file.write(text)
                except OSError:
                    path.unlink(missing_ok=True)
                    raise
        except FileExistsError:  # another has this lease
            raise
        except OSError:  # the disk is full
            with contextlib.suppress(OSError):
                self._directory.rmdir()
            raise

    def read(self, name: str) -> bytes:
        """The content of a file."""
        return (self._directory / name).read_bytes()

    def renew(self, name: str) -> None:
        """Marks an existing file as still held."""
        os.utime(self._directory / name)

    def remove(self, name: str) -> None:
        """Removes a file, if it exists."""
        (self._directory / name).unlink(missing_ok=True)

    def now_ns(self) -> int:
        """The time by the clock of the storage."""
        with tempfile.NamedTemporaryFile(dir=self._directory, prefix=".now-") as probe:
            os.utime(probe.name)
            return Path(probe.name).stat().st_mtime_ns

    def close(self) -> None:
        """Removes the directory; raises OSError if it is not empty."""
        self._directory.rmdir()


class _InBucket(LeaseFiles):
    """Objects in a bucket, created on condition that none of their name exists, and renewed by a change of metadata."""

    def __init__(self, directory: Path):
        super().__init__(directory)
        self._system, self._root = file_system(directory)

    def found(self) -> list[LeaseFile]:
        found: list[LeaseFile] = []
        with storage_errors(self._directory):
            listed: list[dict[str, Any]] = self._system.find(self._root, detail=True).values()
            for about in listed:
                with contextlib.suppress(FileNotFoundError):
                    name, text = about["name"].rpartition("/")[2], self._system.cat_file(about["name"])
                    version = f"{about['generation']} {about['metageneration']}"
                    found.append(LeaseFile(name, text[:_MOST_BYTES], version, _nanoseconds(about)))
        return found

    def make(self, name: str, text: bytes) -> None:
        with storage_errors(self._directory):
            self._system.pipe_file(f"{self._root}/{name}", text, mode="create")

    def read(self, name: str) -> bytes:
        with storage_errors(self._directory):
            return self._system.cat_file(f"{self._root}/{name}")

    def renew(self, name: str) -> None:
        with storage_errors(self._directory):
            self._system.setxattrs(f"{self._root}/{name}", renewed="yes")

    def remove(self, name: str) -> None:
        with storage_errors(self._directory), contextlib.suppress(FileNotFoundError):
            self._system.rm_file(f"{self._root}/{name}")

    def now_ns(self) -> int:
        probe = f".now-{os.getpid()}"
        with storage_errors(self._directory):
            self._system.pipe_file(f"{self._root}/{probe}", b"-")
            now_ns = _nanoseconds(self._system.info(f"{self._root}/{probe}"))
        self.remove(probe)
        return now_ns

    def close(self) -> None:
        """Nothing: a bucket has no directories."""


def _nanoseconds(about: dict[str, Any]) -> int:
    return int(about["mtime"].timestamp() * 1e9)
