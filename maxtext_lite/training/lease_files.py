"""The files of leases, on a file system or in a bucket: made by one process alone, renewed, read and removed."""

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from maxtext_lite.config.bucket import file_system, is_bucket, storage_errors

_MOST_BYTES = 10_000


class LeaseFile(NamedTuple):
    """A lease as it was seen; one that is renewed, or another of its name, is not equal to it.

    Attributes:
      version: that another file of this name has not; in a bucket each renewal changes it too.
      renewed_ns: by the clock of whoever stores it.
    """

    name: str
    text: bytes
    version: str
    renewed_ns: int


class LeaseFiles(Protocol):
    """The files of leases of one run directory. Its methods raise OSError; of one that is gone, FileNotFoundError."""

    def found(self) -> list[LeaseFile]:
        """Those that are there, of any name."""
        ...

    def make(self, name: str, text: bytes) -> None:
        """Makes one; raises FileExistsError where there is one of this name."""
        ...

    def renew(self, name: str, text: bytes) -> bool:
        """Says that the holder lives; whether the text is what is there."""
        ...

    def remove(self, name: str) -> None:
        """Removes one, if it is there."""
        ...

    def now_ns(self) -> int:
        """The time by the clock of whoever stores them."""
        ...

    def close(self) -> None:
        """Removes their directory, if it is empty."""
        ...


def lease_files(directory: Path) -> LeaseFiles:
    """The files of a directory of leases, which is made."""
    return _InBucket(directory) if is_bucket(directory) else _OnDisk(directory)


class _OnDisk:
    def __init__(self, directory: Path):
        self._directory = directory

    def found(self) -> list[LeaseFile]:
        found: list[LeaseFile] = []
        for path in self._directory.iterdir() if self._directory.exists() else ():
            with contextlib.suppress(FileNotFoundError):  # let go of meanwhile
                about = path.stat()
                text = b"" if path.is_dir() else path.read_bytes()[:_MOST_BYTES]
                found.append(LeaseFile(path.name, text, str(about.st_ino), about.st_mtime_ns))
        return found

    def make(self, name: str, text: bytes) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / name
        with path.open("xb", buffering=0) as file:
            try:
                file.write(text)
            except OSError:
                path.unlink(missing_ok=True)
                raise

    def renew(self, name: str, text: bytes) -> bool:
        ours = (self._directory / name).read_bytes() == text
        if ours:
            os.utime(self._directory / name)
        return ours

    def remove(self, name: str) -> None:
        (self._directory / name).unlink(missing_ok=True)

    def now_ns(self) -> int:
        with tempfile.NamedTemporaryFile(dir=self._directory, prefix=".now-") as probe:
            os.utime(probe.name)
            return Path(probe.name).stat().st_mtime_ns

    def close(self) -> None:
        self._directory.rmdir()


class _InBucket:
    """Objects that are made on condition that there is none of their name, and renewed by a change of metadata."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._system, self._root = file_system(directory)

    def found(self) -> list[LeaseFile]:
        found: list[LeaseFile] = []
        with storage_errors(self._directory):
            listed: list[dict[str, Any]] = []
            if self._system.isdir(self._root):
                listed = self._system.ls(self._root, detail=True)
            for about in listed:
                with contextlib.suppress(FileNotFoundError):
                    text = self._system.cat_file(about["name"])[:_MOST_BYTES]
                    version = f"{about['generation']} {about['metageneration']}"
                    renewed_ns = int(about["mtime"].timestamp() * 1e9)
                    found.append(LeaseFile(about["name"].rpartition("/")[2], text, version, renewed_ns))
        return found

    def make(self, name: str, text: bytes) -> None:
        with storage_errors(self._directory):
            try:
                self._system.pipe_file(f"{self._root}/{name}", text, mode="create")
            except FileNotFoundError:
                raise OSError(f"there is no bucket {self._root.partition('/')[0]}") from None

    def renew(self, name: str, text: bytes) -> bool:
        path = f"{self._root}/{name}"
        with storage_errors(path):
            ours = self._system.cat_file(path) == text
            if ours:
                self._system.setxattrs(path, renewed="yes")  # of an object that is there alone
        return ours

    def remove(self, name: str) -> None:
        with storage_errors(self._directory), contextlib.suppress(FileNotFoundError):
            self._system.rm_file(f"{self._root}/{name}")

    def now_ns(self) -> int:
        path = f"{self._root}/.now-{os.getpid()}"
        with storage_errors(self._directory):
            self._system.pipe_file(path, b"-")
            now_ns = int(self._system.info(path)["mtime"].timestamp() * 1e9)
            self._system.rm_file(path)
        return now_ns

    def close(self) -> None:
        """Nothing: a bucket has no directories."""
