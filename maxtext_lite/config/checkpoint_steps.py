"""Which checkpoints a directory has, by their names; `training.commit` gives and takes these."""

from pathlib import Path

from maxtext_lite.config.bucket import is_bucket, storage_errors
from maxtext_lite.config.errors import UserError, value_text

UNFINISHED, DELETED, DAMAGED = "unfinished-", "deleted-", "damaged-"
"""Prefixes of directories that are no checkpoints, or of the objects that mark them: not yet complete, being deleted,
or set aside."""


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
