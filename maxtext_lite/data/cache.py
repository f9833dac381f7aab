"""Files that are made once: the directory for them, and a lock."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from maxtext_lite.config.json_file import user_path

CACHE_VARIABLE = "MAXTEXT_LITE_CACHE"
"""The environment variable that names the cache directory; by default ~/.cache/maxtext_lite."""


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
