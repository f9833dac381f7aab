"""Files that appear only once they are complete: each is written under another name, which then becomes its own."""

import contextlib
import os
import stat
from collections.abc import Generator
from pathlib import Path

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


@contextlib.contextmanager
def replacing(path: Path) -> Generator[Path]:
    """A block that writes another file, which then takes this name; where the block fails, it is removed.

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
