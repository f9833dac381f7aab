"""Prepared datasets in buckets: fetched into the cache once, and checked against the manifest."""

import concurrent.futures
import hashlib
import json
import shutil
from pathlib import Path

from maxtext_lite.config import UserError
from maxtext_lite.config.bucket import any_path, bucket_scheme, is_bucket
from maxtext_lite.config.errors import counted, full_text, writing
from maxtext_lite.config.json_file import user_path
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
from maxtext_lite.preparation.bucket_directory import BucketDirectory

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
