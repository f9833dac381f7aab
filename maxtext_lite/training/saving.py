"""Saving and verification of checkpoints: Orbax writes them, they are hashed, and only then do they get their name.

Each process hashes its share of the files that Orbax has written; once all checksums are there, the first process makes
the checkpoint count.
"""

import concurrent.futures
import contextlib
import errno
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from maxtext_lite.config.bucket import is_bucket, names_below, remove_objects, storage_errors
from maxtext_lite.config.errors import UserError, WriteError, cannot_write, value_text
from maxtext_lite.config.phases import phases
from maxtext_lite.config.whole_file import DAMAGED, DELETED, UNFINISHED, to_disk
from maxtext_lite.parallel import Tree, exchange, on_first_host

FORMAT = 5
"""Of a checkpoint; one of another format is refused, but for its parameters."""

_CHECKSUMS = re.compile(r"sha256\.\d+-of-(\d+)")
_LAST_LINE = "# sha256 of the lines above: "
_OWNER = re.compile(r"(?:ocdbt\.)?process_(\d+)")
_DISK_ERRORS = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE,
    errno.ENOENT, errno.EMFILE, errno.ENOMEM, errno.ETIMEDOUT,
)  # fmt: skip
_TIMEOUT_SECONDS = 1200  # for the slowest process to reach a barrier
_SLICE_BYTES = 1 << 20


# ---- When a checkpoint counts ------------------------------------------------------------------


class DiskStore:
    """Checkpoints in a directory of a file system: each is written under another name and renamed when complete."""

    def unfinished_path(self, directory: Path) -> Path:
        """Where a checkpoint is written before it becomes `directory`."""
        return directory.with_name(UNFINISHED + directory.name)

    def prepare(self, directory: Path) -> None:
        """Removes what an earlier attempt to write this checkpoint left."""
        directory.parent.mkdir(parents=True, exist_ok=True)
        for path in directory.parent.glob(f"{UNFINISHED}{directory.name}*"):  # Orbax appends .orbax-...
            shutil.rmtree(path)

    def flush(self, directory: Path, names: Iterable[str]) -> None:
        """Syncs files and the folders that name them to the disk, to survive a power cut."""
        files = [directory / name for name in names]
        folders = {folder for file in files for folder in file.parents if folder.is_relative_to(directory)}
        with concurrent.futures.ThreadPoolExecutor() as threads:
            list(threads.map(to_disk, [*files, *folders]))

    def commit(self, directory: Path) -> None:
        """Publishes a written checkpoint, replacing any existing one."""
        if directory.exists():
            self.remove(directory)
        self.unfinished_path(directory).rename(directory)
        to_disk(directory.parent)

    def remove(self, directory: Path) -> None:
        """Deletes a checkpoint; it is renamed first, so a half-deleted one never counts."""
        deleted = directory.with_name(DELETED + directory.name)
        if deleted.exists():
            shutil.rmtree(deleted)
        shutil.rmtree(directory.rename(deleted))

    def quarantine(self, directory: Path) -> Path:
        """Renames a damaged checkpoint, replacing an earlier one of its step; returns its new name."""
        aside = directory.with_name(DAMAGED + directory.name)
        if aside.exists():
            shutil.rmtree(aside)
        return directory.rename(aside)

    def remove_leftovers(self, parent: Path) -> None:
        """Creates the directory of checkpoints, and removes what a killed process left half-written or half-deleted."""
        parent.mkdir(parents=True, exist_ok=True)
        for path in parent.iterdir():
            if path.name.startswith((UNFINISHED, DELETED)) or ".orbax-checkpoint-tmp" in path.name:
                shutil.rmtree(path)


class BucketStore:
    """Checkpoints in a bucket. Nothing can be renamed there: one counts unless an object beside it marks it."""

    def unfinished_path(self, directory: Path) -> Path:
        """The checkpoint's own directory."""
        return directory

    def prepare(self, directory: Path) -> None:
        """Marks a checkpoint as unfinished, and removes an earlier one."""
        with storage_errors(directory):
            _mark(directory, UNFINISHED).write_bytes(b"-")
            remove_objects(directory)
            _mark(directory, DAMAGED).unlink(missing_ok=True)

    def flush(self, directory: Path, names: Iterable[str]) -> None:
        """Nothing: an object is stored once it is written."""

    def commit(self, directory: Path) -> None:
        """Publishes a written checkpoint."""
        with storage_errors(directory):
            _mark(directory, UNFINISHED).unlink()

    def remove(self, directory: Path) -> None:
        """Deletes a checkpoint; it is marked first, so a half-deleted one never counts."""
        with storage_errors(directory):
            _mark(directory, DELETED).write_bytes(b"-")
            remove_objects(directory)
            _mark(directory, DELETED).unlink()

    def quarantine(self, directory: Path) -> Path:
        """Marks a damaged checkpoint; returns the mark."""
        with storage_errors(directory):
            _mark(directory, DAMAGED).write_bytes(b"-")
        return _mark(directory, DAMAGED)

    def remove_leftovers(self, parent: Path) -> None:
        """Removes what a killed process left half-written or half-deleted."""
        with storage_errors(parent):
            for path in [*parent.iterdir()] if parent.exists() else ():
                for mark in (UNFINISHED, DELETED):
                    if path.name.startswith(mark):
                        remove_objects(path.with_name(path.name.removeprefix(mark)))
                        path.unlink()


def _mark(directory: Path, mark: str) -> Path:
    return directory.with_name(mark + directory.name)


def store_of(path: Path) -> DiskStore | BucketStore:
    """How checkpoints at this path are published and deleted."""
    return BucketStore() if is_bucket(path) else DiskStore()


# ---- Checksums ---------------------------------------------------------------------------------


class Damaged(Exception):
    """A checkpoint file differs from what was written; says which one and how."""


def write_checksums(directory: Path, process: int, num_processes: int) -> None:
    """Writes the checksums of a process's share: the files that Orbax named after it; the first process adds the rest.

    The share follows from names alone, so no process need see what another has just written.
    """
    own = [name for name in _files(directory) if _owner(name, num_processes) == process]
    lines = "".join(f"{digest}  {name}\n" for name, digest in _hash_files(directory, own).items())
    text = f"{lines}{_LAST_LINE}{hashlib.sha256(lines.encode()).hexdigest()}\n"
    file = directory / f"sha256.{process}-of-{num_processes}"
    with storage_errors(file):
        file.write_text(text)
    store_of(directory).flush(directory, [*own, file.name])


def read_checksums(directory: Path) -> dict[str, str]:
    """The checksum of each file of a checkpoint, by name.

    Raises:
      Damaged: those of a process are missing or changed.
      OSError: they cannot be read now.
    """
    with _finding_damage(directory, directory.name):
        counts = [found[1] for path in directory.iterdir() if (found := _CHECKSUMS.fullmatch(path.name))]
    if not counts:
        raise Damaged("its checksums are missing")
    digests: dict[str, str] = {}
    num_processes = int(counts[0])
    for process in range(num_processes):
        name = f"sha256.{process}-of-{num_processes}"
        with _finding_damage(directory / name, name):
            text = (directory / name).read_bytes().decode(errors="replace")
        lines, _, digest = text.rpartition(_LAST_LINE)
        if digest != hashlib.sha256(lines.encode()).hexdigest() + "\n":
            raise Damaged(f"{name} is not as it was written")
        own = {file: digest for digest, _, file in (line.partition("  ") for line in lines.splitlines())}
        if any(_owner(file, num_processes) != process for file in own):
            raise Damaged(f"{name} is that of another process")
        digests |= own
    return digests


def find_damage(directory: Path, digests: Mapping[str, str]) -> str | None:
    """The first of these files that is damaged, and how; None if all are as they were written.

    Raises:
      OSError: a file cannot be read now.
    """
    try:
        found = _hash_files(directory, digests)
    except Damaged as problem:
        return str(problem)
    return next((f"{name} is not as it was written" for name in digests if found[name] != digests[name]), None)


def check(directory: Path, items: Collection[str] = ()) -> str | None:
    """The first damage of a checkpoint; None if its files are as they were written. All hosts call it.

    Args:
      items: the items that will be read; empty: all.
    Raises:
      UserError: the hosts do not see the same files, or one cannot read them now.
    """
    digests: dict[str, str] = {}
    problem = None
    try:
        with _readable(directory):
            digests = read_checksums(directory)
    except Damaged as error:
        problem = str(error)
    contents = hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()
    views = exchange([problem, contents])
    for host, view in enumerate(views):
        if view != views[0]:
            raise UserError(
                f"host {host} does not see the same files in {directory} as host 0. All hosts of a run need "
                "base_output_directory on a file system that they share."
            )
    if problem is None:
        needed = sorted(name for name in digests if not items or "/" not in name or name.partition("/")[0] in items)
        share = needed[jax.process_index() :: jax.process_count()]
        with _readable(directory):
            problem = find_damage(directory, {name: digests[name] for name in share})
    return next((each for each in exchange(problem) if each is not None), None)


def _files(directory: Path) -> list[str]:
    """The names of a checkpoint's files, in order, without its checksums."""
    return [name for name in names_below(directory) if not _CHECKSUMS.fullmatch(name)]


def _owner(name: str, num_processes: int) -> int:
    named = [int(match[1]) for part in Path(name).parts if (match := _OWNER.fullmatch(part))]
    return named[0] if named and named[0] < num_processes else 0


def _hash_files(directory: Path, names: Collection[str]) -> dict[str, str]:
    """The checksum of each file. Threads hash several at once, because hashlib releases Python's lock."""

    def hash_file(name: str) -> str:
        with _finding_damage(directory / name, name), (directory / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with concurrent.futures.ThreadPoolExecutor() as threads:
        return dict(zip(names, threads.map(hash_file, names), strict=True))


@contextlib.contextmanager
def _finding_damage(path: Path, name: str) -> Generator[None]:
    """Raises Damaged if the file that the block reads is gone, or on a broken disk."""
    try:
        with storage_errors(path):
            yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise Damaged(f"{name} is missing") from None
    except OSError as error:
        if error.errno != errno.EIO or is_bucket(path):  # of a bucket it is any refusal
            raise
        raise Damaged(f"{name} cannot be read: {error.strerror}") from None


@contextlib.contextmanager
def _readable(directory: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename or directory} cannot be read: {error.strerror or error}. Retry once it can be read."
        ) from None


# ---- Writing and reading -----------------------------------------------------------------------


def _handlers() -> dict[str, Any]:
    """Orbax's handler of each item of a checkpoint: it warns of items that have none."""
    state = ocp.StandardCheckpointHandler
    arrays = {item: state() for item in ("params", "average", "update_state", "unfinished")}
    return {**arrays, "about": ocp.JsonCheckpointHandler()}


class Saver:
    """Writes one checkpoint at a time in the background. All hosts call its methods.

    Args:
      before: called on the first host, in the background, before a checkpoint counts; an error prevents that.
    Attributes:
      error: of this host's part of a save.
    """

    def __init__(self, before: Callable[[], None] = lambda: None):
        _set_up_orbax()
        self._before = before
        self._checkpointer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(**_handlers()))
        self._barrier = ocp.multihost.get_barrier_sync_fn()
        self._thread: threading.Thread | None = None
        self.error: Exception | None = None
        self._saves = 0

    def start(self, directory: Path, items: Mapping[str, Any], on_commit: Callable[[], None]) -> None:
        """Starts to write a checkpoint, in place of an existing one; returns once its arrays are copied.

        Args:
          items: Orbax's arguments by item.
          on_commit: called on the first host, in the background, once the checkpoint has its name.
        Raises:
          WriteError: this or an earlier save could not be written.
        """
        self.wait()
        store = store_of(directory)
        unfinished = store.unfinished_path(directory)
        on_first_host(directory.parent, lambda: store.prepare(directory))
        self._saves += 1
        try:
            with _writing(unfinished):
                self._checkpointer.save(unfinished, args=ocp.args.Composite(**items), force=True)
        except Exception as error:
            self.error = error
            raise
        self._thread = threading.Thread(
            target=self._finish, args=(unfinished, directory, on_commit), name="checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Returns once the current checkpoint has its name.

        Raises:
          WriteError: this host could not write its part.
        """
        if self._thread:
            self._thread.join()
            self._thread = None
            phases.advance()
        if self.error:
            raise self.error

    def close(self) -> None:
        """Waits for the current save and ends the threads. Each host may call it alone."""
        if self._thread:
            self._thread.join()
        if not self.error:
            self._checkpointer.close()

    def _finish(self, unfinished: Path, directory: Path, on_commit: Callable[[], None]) -> None:
        try:
            with _writing(unfinished):
                self._checkpointer.wait_until_finished()
                write_checksums(unfinished, jax.process_index(), jax.process_count())
                self._sync("hashed")
                if jax.process_index() == 0:
                    read_checksums(unfinished)  # raises if a process has written elsewhere
                    self._before()
                    store_of(directory).commit(directory)
                    on_commit()
                self._sync("named")
        except Exception as error:  # noqa: BLE001 - the main thread raises it
            self.error = error

    def _sync(self, what: str) -> None:
        self._barrier(key=f"maxtext_lite_checkpoint_{self._saves}_{what}", timeout_ms=_TIMEOUT_SECONDS * 1000)


def save_alone(directory: Path, items: Mapping[str, Any]) -> None:
    """Writes one checkpoint, in place of an existing one, and returns once it is complete. All hosts call it.

    Raises:
      WriteError: it could not be written.
    """
    saver = Saver()
    saver.start(directory, items, on_commit=lambda: None)
    saver.wait()
    saver.close()


@contextlib.contextmanager
def _writing(path: Path) -> Generator[None]:
    """Raises a WriteError in place of an error of the file system or the bucket."""
    try:
        with storage_errors(path):
            yield
    except OSError as error:
        raise WriteError(cannot_write(path, error)) from None
    except Damaged as error:
        raise WriteError(f"{path}: {error}.") from None
    except ValueError as error:
        # TensorStore reports errors of the operating system and of buckets as text.
        text = str(error)
        for number in _DISK_ERRORS:
            if os.strerror(number) in text:
                raise WriteError(cannot_write(path, OSError(number, os.strerror(number)))) from None
        if is_bucket(path):
            raise WriteError(f"{path} cannot be written: {' '.join(text.split())[:300]}.") from None
        raise


@contextlib.contextmanager
def reading(directory: Path) -> Generator[None]:
    """Raises a UserError in place of an error of what reads a checkpoint in the block."""
    try:
        with storage_errors(directory):
            yield
    except (UserError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]
        raise UserError(f"{directory} cannot be read ({value_text(why)}).") from error


def _read_items(directory: Path, **items: ocp.args.CheckpointArgs) -> dict[str, Tree]:
    with reading(directory), ocp.Checkpointer(ocp.CompositeCheckpointHandler(**_handlers())) as checkpointer:
        return checkpointer.restore(directory, args=ocp.args.Composite(**items))


def read_about(directory: Path) -> dict[str, Any]:
    """The item `about` of a checkpoint: everything that is not an array."""
    return _read_items(directory, about=ocp.args.JsonRestore())["about"]


def read_arrays(directory: Path, abstract: Mapping[str, Tree]) -> dict[str, Tree]:
    """Trees of arrays of a checkpoint by item, in the shapes and shardings of `abstract`."""
    return _read_items(directory, **{item: ocp.args.StandardRestore(tree) for item, tree in abstract.items()})


def saved_shapes(directory: Path, item: str) -> dict[str, Any]:
    """Shapes and dtypes of the arrays of one item; no file of another item is read."""
    with reading(directory):
        return dict(_handlers()[item].metadata(directory / item))


@functools.cache
def _set_up_orbax() -> None:
    """Small arrays are written whole, and tracebacks of writes that failed are not printed: we report one line."""
    for name in ("absl", "asyncio"):  # absl is Orbax's logger; asyncio complains of results that were never retrieved
        logging.getLogger(name).addFilter(_is_not_of_orbax)
    # Orbax would compile a program for each slice of a small array over replicas.
    handler = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=_SLICE_BYTES)
    ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname + logging.Formatter().format(record)
