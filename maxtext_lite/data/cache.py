"""Files that are made once: the directory for them, a lock, and writes that appear only when complete."""

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from maxtext_lite.config.json_file import user_path

CACHE_VARIABLE = "MAXTEXT_LITE_CACHE"
"""The environment variable that names the cache directory; by default ~/.cache/maxtext_lite."""
TEMPORARY = ".partial"
"""Suffix of files being written; any such file may be removed when nobody writes."""


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


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file that gets its name only once it is complete and on disk."""
    partial = partial_name(path)
    try:
        with partial.open("wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def partial_name(path: Path) -> Path:
    """A unique name for a file being written: a process believed dead may still be writing the same one."""
    return path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY}")
