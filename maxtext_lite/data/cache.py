"""Files that are made once: the directory for them, a lock, and a name that a file has only once it is whole."""

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from maxtext_lite.config.json_file import user_path

CACHE_VARIABLE = "MAXTEXT_LITE_CACHE"
"""The environment variable that names the directory for what is made once; ~/.cache/maxtext_lite without it."""
TEMPORARY = ".partial"
"""How names of files end that are being written; whatever has one may be removed when nobody writes."""


def cache_directory(kind: str) -> Path:
    """Where what is made once is kept, of this kind; it need not be there."""
    return user_path(os.environ.get(CACHE_VARIABLE, "") or "~/.cache/maxtext_lite") / kind


@contextlib.contextmanager
def alone(entry: Path) -> Iterator[None]:
    """No other process that asks looks at a directory of the cache or makes it meanwhile; it waits.

    Raises:
      OSError: the lock, beside the directory, cannot be written.
    """
    entry.parent.mkdir(parents=True, exist_ok=True)
    with entry.with_suffix(".lock").open("ab") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file that has its name only once it is whole and on the disk."""
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
    """A name for a file while it is written, of its own: a process that is thought dead may still write the same."""
    return path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY}")
