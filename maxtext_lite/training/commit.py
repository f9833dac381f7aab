"""How a checkpoint begins and ceases to count: by its name.

On a file system it is written under another name and then renamed; before deletion it is renamed again. In a bucket,
which has no rename, it is written in place, and an object of the other name marks it while it does not count:
`unfinished-500` beside 500/. A checkpoint without such a mark is complete, or was damaged later.
"""

import shutil
from pathlib import Path

from maxtext_lite.config.bucket import is_bucket, remove_objects, storage_errors
from maxtext_lite.config.whole_file import DAMAGED, DELETED, UNFINISHED, to_disk


def while_unfinished(directory: Path) -> Path:
    """The directory in which a checkpoint is written before it becomes `directory`."""
    return directory if is_bucket(directory) else directory.with_name(UNFINISHED + directory.name)


def make_room(directory: Path) -> None:
    """Prepares to write a checkpoint that does not count yet, and removes the remains of an earlier attempt."""
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
    """Makes a written checkpoint count, in place of an existing one."""
    if is_bucket(directory):
        with storage_errors(directory):
            _unmark(directory, UNFINISHED)
        return
    if directory.exists():
        remove(directory)
    while_unfinished(directory).rename(directory)
    to_disk(directory.parent)


def remove(directory: Path) -> None:
    """Deletes a checkpoint; it ceases to count first, so that a half-deleted one is never taken for a checkpoint."""
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
    """Sets a damaged checkpoint aside; returns the new directory, or in a bucket the object that marks it."""
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
    """Deletes half-written and half-deleted checkpoints that a killed process left in a directory."""
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
