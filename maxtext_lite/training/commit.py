"""How a checkpoint comes to count, and ceases to: by its name.

On a file system it is written under another name and renamed; what is to go is renamed first. In a bucket, which has no
rename, it is written where it will be, and an object of the other name stands beside it for as long as it does not
count: `unfinished-500` beside 500/. What has no such object is whole, or has been damaged since.
"""

import shutil
from pathlib import Path

from maxtext_lite.config import UserError
from maxtext_lite.config.bucket import is_bucket, remove_objects, storage_errors
from maxtext_lite.config.errors import value_text

UNFINISHED, DELETED, DAMAGED = "unfinished-", "deleted-", "damaged-"
"""What the name of a directory begins with, or of an object beside it, that is no checkpoint: not one yet, not one any
more, or set aside."""


def steps_in(parent: Path) -> list[int]:
    """The steps of the checkpoints in a directory, in order.

    Raises:
      UserError: it is there, and not a directory that can be read.
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


def while_unfinished(directory: Path) -> Path:
    """Where a checkpoint is written that will be `directory`."""
    return directory if is_bucket(directory) else directory.with_name(UNFINISHED + directory.name)


def make_room(directory: Path) -> None:
    """Begins a checkpoint: nothing of an earlier attempt is left, and what is written does not count yet."""
    if is_bucket(directory):
        with storage_errors(directory):
            _mark(directory, UNFINISHED)
            remove_objects(directory)
            _unmark(directory, DAMAGED)
        return
    unfinished = while_unfinished(directory)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    for path in unfinished.parent.glob(f"{unfinished.name}*"):
        if path.name == unfinished.name or path.name.startswith(f"{unfinished.name}."):
            shutil.rmtree(path)


def commit(directory: Path) -> None:
    """A checkpoint that is written counts from now on, in the place of one that is there."""
    if is_bucket(directory):
        with storage_errors(directory):
            _unmark(directory, UNFINISHED)
        return
    if directory.exists():
        remove(directory)
    while_unfinished(directory).rename(directory)


def remove(directory: Path) -> None:
    """Deletes a checkpoint, which first ceases to count: one that is half deleted is none."""
    if is_bucket(directory):
        with storage_errors(directory):
            _mark(directory, DELETED)
            remove_objects(directory)
            _unmark(directory, DELETED)
        return
    deleted = directory.with_name(DELETED + directory.name)
    if deleted.exists():
        shutil.rmtree(deleted)
    directory.rename(deleted)
    shutil.rmtree(deleted)


def set_aside(directory: Path) -> Path:
    """Makes that nobody takes a damaged checkpoint for one; returns what says so, a directory's name or an object's."""
    aside = directory.with_name(DAMAGED + directory.name)
    if is_bucket(directory):
        with storage_errors(directory):
            _mark(directory, DAMAGED)
        return aside
    number = 1
    while aside.exists():
        number += 1
        aside = directory.with_name(f"{DAMAGED}{directory.name}-{number}")
    directory.rename(aside)
    return aside


def remove_leftovers(parent: Path) -> None:
    """Deletes what a killed process left half written or half deleted among the checkpoints of a directory."""
    with storage_errors(parent):
        for path in [*parent.iterdir()] if parent.exists() else ():
            mark = next((mark for mark in (UNFINISHED, DELETED) if path.name.startswith(mark)), None)
            if is_bucket(parent) and mark:
                remove_objects(path.with_name(path.name.removeprefix(mark)))
                path.unlink()
            elif mark or ".orbax-checkpoint-tmp" in path.name:
                shutil.rmtree(path)


def _mark(directory: Path, mark: str) -> None:
    directory.with_name(mark + directory.name).write_bytes(b"-")


def _unmark(directory: Path, mark: str) -> None:
    directory.with_name(mark + directory.name).unlink(missing_ok=True)
