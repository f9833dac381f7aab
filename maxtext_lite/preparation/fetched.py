"""Datasets in buckets: their objects, and prepared datasets fetched into the cache once and checked."""

import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxtext_lite.config import UserError
from maxtext_lite.config.bucket import any_path, bucket_scheme, file_system, is_bucket, reaching
from maxtext_lite.config.errors import counted, full_text, writing
from maxtext_lite.config.json_file import path_below, user_path
from maxtext_lite.config.whole_file import TEMPORARY, write_whole
from maxtext_lite.console import complain
from maxtext_lite.data.cache import cache_directory, file_sha256, locked
from maxtext_lite.data.prepared import (
    DOCUMENTS_FILE,
    END_BYTES,
    MANIFEST_FILE,
    Manifest,
    Shard,
    manifest_of,
    size_and_ends,
)
from maxtext_lite.data.text_files import json_object


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


_FETCHED_AT_ONCE = 8


def find_prepared(key: str, path: str | Path) -> tuple[Path, Path | None]:
    """(where a prepared dataset's manifest and documents are, where its shards are if elsewhere).

    The manifest and documents of a dataset in a bucket are fetched into the cache. So are its shards, except from gs,
    where ArrayRecord reads them in place. Other processes wait meanwhile. Incomplete files are fetched again.

    Args:
      key: what messages call the path.
    Raises:
      UserError: a file is missing, unreadable or not what the manifest says; names it.
    """
    if not is_bucket(path):
        return user_path(str(path)), None
    remote = BucketDirectory(key, str(path).rstrip("/"))
    content = remote.read(MANIFEST_FILE)
    where = f"{remote.url}/{MANIFEST_FILE}"
    manifest = manifest_of(where, json_object(where, content, wanted="a manifest of prepare"))
    entry = cache_directory("buckets") / hashlib.sha256(content).hexdigest()[:32]
    in_place = bucket_scheme(path) == "gs"  # the only scheme that ArrayRecord reads
    with writing(entry), locked(entry):
        entry.mkdir(exist_ok=True)
        if in_place:
            _check_in_place(remote, manifest, entry)
        _fetch(remote, manifest, entry, () if in_place else manifest.shards)
        write_whole(entry / MANIFEST_FILE, content)
    return entry, any_path(remote.url, key) if in_place else None


def _check_in_place(remote: BucketDirectory, manifest: Manifest, entry: Path) -> None:
    """Refuses shards that the manifest does not describe, by their sizes and, unless checked before, their ends."""
    listed = remote.listed()
    _check_sizes(remote, listed, manifest.shards)
    checked = entry / f"checked-{hashlib.sha256(json.dumps([remote.url, listed]).encode()).hexdigest()[:32]}"
    if checked.exists():
        return
    names = [shard.file for shard in manifest.shards]
    sizes = [listed[name][0] for name in names]
    firsts = remote.read_parts(names, [0] * len(names), [END_BYTES] * len(names))
    lasts = remote.read_parts(names, [max(size - END_BYTES, 0) for size in sizes], sizes)
    for shard, first, last in zip(manifest.shards, firsts, lasts, strict=True):
        if shard.ends != hashlib.sha256(first + last).hexdigest():
            raise UserError(
                f"{remote.url}/{shard.file} is not the file that {MANIFEST_FILE} was written for: its ends differ."
            )
    checked.touch()


def _check_sizes(remote: BucketDirectory, listed: dict[str, tuple[int, str]], shards: tuple[Shard, ...]) -> None:
    for shard in shards:
        if shard.file not in listed:
            raise UserError(f"{remote.url}/{shard.file} is not there; {MANIFEST_FILE} lists it.")
        size = listed[shard.file][0]
        if shard.bytes != size:
            raise UserError(f"{remote.url}/{shard.file} has {size:,} bytes; {MANIFEST_FILE} says {shard.bytes:,}.")


def _fetch(remote: BucketDirectory, manifest: Manifest, entry: Path, shards: tuple[Shard, ...]) -> None:
    """Fetches the documents and these shards, unless they are here and complete."""
    if _ends_of(entry / DOCUMENTS_FILE)[0] != 8 * (manifest.documents + 1):
        _fetch_file(remote, DOCUMENTS_FILE, manifest.documents_sha256, entry)
    due = tuple(shard for shard in shards if _ends_of(entry / shard.file) != (shard.bytes, shard.ends))
    if not due:
        return
    _check_sizes(remote, remote.listed(), due)
    num_bytes = sum(shard.bytes for shard in due)
    free = shutil.disk_usage(entry).free
    if num_bytes > free:
        raise UserError(
            f"{remote.url} has {num_bytes:,} bytes to be fetched, and {full_text(entry)} has room for {free:,}."
        )
    complain(
        f"fetching {counted(len(due), 'shard')} of {remote.url}, {num_bytes:,} bytes, once, into {full_text(entry)}; "
        "the next start reads them from there"
    )
    pool = concurrent.futures.ThreadPoolExecutor(_FETCHED_AT_ONCE)
    try:
        list(pool.map(lambda shard: _fetch_file(remote, shard.file, shard.sha256, entry), due))
    finally:
        pool.shutdown(cancel_futures=True)


def _ends_of(file: Path) -> tuple[int, str]:
    try:
        return size_and_ends(file)
    except FileNotFoundError:
        return (-1, "")


def _fetch_file(remote: BucketDirectory, name: str, sha256: str, entry: Path) -> None:
    partial = entry / f"{name}{TEMPORARY}"  # no other writer: the entry is locked
    remote.fetch(name, partial)
    if sha256 not in ("", file_sha256(partial)):
        partial.unlink()
        raise UserError(
            f"{remote.url}/{name} is not the file that {MANIFEST_FILE} was written for: its SHA-256 differs."
        )
    partial.replace(entry / name)
