"""What is complete: files that appear only once they are, and the checkpoints whose names say so.

A file is written under another name, which then becomes its own; `training.commit` gives and takes checkpoints' names.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Generator
from pathlib import Path

from maxtext_lite.config.bucket import is_bucket, storage_errors
from maxtext_lite.config.errors import UserError, value_text

TEMPORARY = ".partial"
"""Suffix of files being written; any such file may be removed when nobody writes."""


def write_whole(path: Path, content: bytes | str) -> None:
    """Writes a file that gets its name only once it is complete and on disk; a text in UTF-8.

    Raises:
      OSError: it cannot be written; an earlier file of this name stays as it was.
    """
    with replacing(path) as partial, partial.open("wb") as opened:
        opened.write(content.encode() if isinstance(content, str) else content)
        opened.flush()
        os.fsync(opened.fileno())


def to_disk(directory: Path) -> None:
    """Makes the names in a directory survive a power cut, if its file system can."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(opened)


@contextlib.contextmanager
def replacing(path: Path) -> Generator[Path]:
    """A block that writes another file, then renames it to this; if the block fails, the file is removed.

    The permissions of an earlier file of this name are kept.

    Raises:
      OSError: it cannot be written; names `path`.
    """
    partial = partial_name(path)
    try:
        yield partial
        with contextlib.suppress(OSError):  # no earlier file, or a file system without permissions
            partial.chmod(stat.S_IMODE(path.stat().st_mode))
        partial.replace(path)
    except OSError as error:
        if error.filename == str(partial):
            error.filename = str(path)  # the name that the user knows
        raise
    finally:
        partial.unlink(missing_ok=True)


def partial_name(path: Path) -> Path:
    """A unique name for a file being written: a process believed dead may still be writing the same one."""
    return path.with_name(f"{path.name}.{os.getpid()}-{os.urandom(4).hex()}{TEMPORARY}")


UNFINISHED, DELETED, DAMAGED = "unfinished-", "deleted-", "damaged-"
"""Prefixes of directories that are no checkpoints, or of the objects that mark them. They are incomplete, being
deleted, or quarantined."""


def steps_in(parent: Path) -> list[int]:
    """The steps of the checkpoints in a directory, in order.

    Raises:
      UserError: it exists, but is not a readable directory.
    """
    try:
        with storage_errors(parent):
            paths = {path.name: path for path in parent.iterdir()}
            marks = (UNFINISHED, DELETED, DAMAGED) if is_bucket(parent) else ()
            names = [name for name in paths if name.isdecimal() and str(int(name)) == name]
            names = [name for name in names if paths.keys().isdisjoint(mark + name for mark in marks)]
            return sorted(int(name) for name in names if paths[name].is_dir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{value_text(str(parent))} cannot be read: {error.strerror}.") from None
