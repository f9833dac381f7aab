"""Saving and verification of checkpoints: Orbax writes them, they are hashed, and only then do they get their name.

Once Orbax has finished a checkpoint, each process adds the checksums of its share of the files; once all checksums are
written, the first process makes the checkpoint count (see `saving`).
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
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping
from pathlib import Path
from traceback import walk_tb
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from maxtext_lite.config.bucket import is_bucket, names_below, remove_objects, storage_errors
from maxtext_lite.config.errors import UserError, WriteError, bytes_text, cannot_write, value_text
from maxtext_lite.config.json_file import path_below
from maxtext_lite.config.phases import phases
from maxtext_lite.config.whole_file import DAMAGED, DELETED, UNFINISHED, to_disk, write_whole
from maxtext_lite.parallel import Tree, exchange, on_first_host

_PART = re.compile(r"sha256\.(\d{1,6})-of-([1-9]\d{0,5})")
_LAST_LINE = "# sha256 of the lines above: "
_OWNER = re.compile(r"(?:ocdbt\.)?process_(\d{1,6})")
_LOST = (errno.EIO, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)  # on a disk; in a bucket EIO is any refusal
_THREADS = min(8, os.cpu_count() or 1)


class Damaged(Exception):
    """A checkpoint file that differs from what was written; says which one and how."""


@contextlib.contextmanager
def finding_damage(path: Path, name: str) -> Generator[None]:
    """A block that reads a file of a checkpoint, which messages call `name`.

    Raises:
      Damaged: it is gone, or the disk cannot read it.
      OSError: it cannot be read now, by this process or over this network, and may be whole.
    """
    try:
        with storage_errors(path):
            yield
    except FileNotFoundError:
        raise Damaged(f"{name} is missing") from None
    except OSError as error:
        if is_bucket(path) or error.errno not in _LOST:
            raise
        raise Damaged(f"{name} cannot be read: {error.strerror or error}") from None


def part_name(process: int, num_processes: int) -> str:
    """The name of the file with the checksums of one process, which also states the number of such files."""
    return f"sha256.{process}-of-{num_processes}"


def write_part(directory: Path, process: int, num_processes: int) -> int:
    """Writes the checksums of a process's share: the files that Orbax named after it; the first process adds the rest.

    The share follows from names alone, so no process need see what another has just written. On a file system, all of
    it is on the disk afterwards: a power cut then takes no part of a checkpoint that counts.

    Returns:
      The number of bytes hashed.
    """
    own = [name for name in _files(directory) if _owner(name, num_processes) == process]
    digests = _digests(directory, own, syncs=not is_bucket(directory))
    hashed = sum(size for _, size in digests.values())
    lines = [f"{digest}  {name}\n" for name, (digest, _) in digests.items()]
    text = "".join(lines)
    text += _LAST_LINE + hashlib.sha256(text.encode()).hexdigest() + "\n"
    part = directory / part_name(process, num_processes)
    if is_bucket(directory):
        with storage_errors(part):
            part.write_text(text)
    else:
        write_whole(part, text)
        for folder in {parent for name in own for parent in (directory / name).relative_to(directory).parents}:
            to_disk(directory / folder)
    return hashed


def read_manifest(directory: Path) -> dict[str, str] | None:
    """The checksum of each file of a checkpoint by name; None if the checkpoint has no checksums.

    Raises:
      Damaged: the part of a process is missing, changed, or that of another process.
      OSError: see `finding_damage`.
    """
    with finding_damage(directory, directory.name):
        parts = {path.name: path for path in directory.iterdir() if _PART.fullmatch(path.name)}
    if not parts:
        return None
    num_processes = max(int(name.rpartition("-")[2]) for name in parts)
    digests: dict[str, str] = {}
    for process in range(num_processes):
        name = part_name(process, num_processes)
        if name not in parts:
            raise Damaged(f"{name} is missing")
        part = _read_part(parts[name])
        if any(_owner(file, num_processes) != process for file in part):
            raise Damaged(f"{name} is that of another process")
        digests |= part
    return digests


def damage(
    directory: Path, digests: Mapping[str, str], *, share: int = 0, num_shares: int = 1
) -> tuple[str | None, int]:
    """The first damaged file in a share of a checkpoint's files, None if all are whole; and the number of bytes hashed.

    Args:
      digests: of the files to check, by name.
    Raises:
      OSError: see `finding_damage`.
    """
    own = sorted(digests)[share::num_shares]
    try:
        found = _digests(directory, own)
    except Damaged as problem:
        return str(problem), 0
    changed = (f"{name} is not as it was written" for name in own if found[name][0] != digests[name])
    return next(changed, None), sum(size for _, size in found.values())


def in_items(digests: Mapping[str, str], items: Collection[str]) -> dict[str, str]:
    """The checksums of the files of these items of a checkpoint, and of files that belong to no item."""
    return {name: digest for name, digest in digests.items() if "/" not in name or name.partition("/")[0] in items}


def _read_part(path: Path) -> dict[str, str]:
    try:
        with finding_damage(path, path.name):
            text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise Damaged(f"{path.name} cannot be read: it is not UTF-8 text") from None
    lines, mark, digest = text.rpartition(_LAST_LINE)
    if not mark or digest != hashlib.sha256(lines.encode()).hexdigest() + "\n":
        raise Damaged(f"{path.name} is not as it was written")
    digests = {name: digest for digest, _, name in (line.partition("  ") for line in lines.splitlines())}
    for name in digests:
        try:
            path_below(path.parent, name, path.name)
        except UserError as error:
            raise Damaged(str(error).rstrip(".")) from None
    return digests


def _files(directory: Path) -> list[str]:
    """The names of a checkpoint's files without those of its checksums, in order."""
    return [name for name in names_below(directory) if not _PART.match(name)]  # even while one is being written


def _owner(name: str, num_processes: int) -> int:
    named = [int(match[1]) for part in Path(name).parts if (match := _OWNER.fullmatch(part))]
    return named[0] if named and named[0] < num_processes else 0


def _digests(directory: Path, names: Collection[str], *, syncs: bool = False) -> dict[str, tuple[str, int]]:
    """The checksum and size of each file; threads hash several at once, as hashlib releases Python's lock."""
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
        found = threads.map(lambda name: _digest(directory / name, name, syncs), names)
        return dict(zip(names, found, strict=True))


def _digest(path: Path, name: str, syncs: bool) -> tuple[str, int]:
    with finding_damage(path, name), path.open("rb") as file:
        if syncs:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest(), file.tell()


def unfinished_path(directory: Path) -> Path:
    """The directory in which a checkpoint is written before it becomes `directory`."""
    return directory if is_bucket(directory) else directory.with_name(UNFINISHED + directory.name)


def prepare_unfinished(directory: Path) -> None:
    """Prepares to write a checkpoint that does not count yet, and removes the remains of an earlier attempt."""
    if is_bucket(directory):
        with storage_errors(directory):
            _mark(directory, UNFINISHED)
            remove_objects(directory)
            _unmark(directory, DAMAGED)
        return
    unfinished = unfinished_path(directory)
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
    unfinished_path(directory).rename(directory)
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


def quarantine(directory: Path) -> Path:
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


FORMAT = 4
"""Of a checkpoint; one of another format is refused, but for its parameters."""

_TIMEOUT_SECONDS = 1200  # for the slowest process to reach a barrier
_ENVIRONMENT = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE,
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT,
)  # fmt: skip
_VANISHED = re.compile(r'NOT_FOUND: .* local file "([^"]+)"', re.DOTALL)  # as TensorStore says it
_SLICE_BYTES = 1 << 20


def _handlers() -> dict[str, Any]:
    """Orbax's handler of each item of a checkpoint: it warns of items that have none."""
    state = ocp.StandardCheckpointHandler
    return {"params": state(), "update_state": state(), "unfinished": state(), "about": ocp.JsonCheckpointHandler()}


class Saver:
    """Writes one checkpoint at a time in the background. All hosts call its methods.

    Args:
      before: called on the first host, in the background, before a checkpoint counts; an error prevents that.
    Attributes:
      error: of this host's part of a save.
    """

    def __init__(self, before: Callable[[], None] = lambda: None):
        _silence_orbax()
        _save_small_arrays_whole()
        self._before = before
        self._checkpointer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(**_handlers()))
        self._barrier = ocp.multihost.get_barrier_sync_fn()
        self._thread: threading.Thread | None = None
        self.error: Exception | None = None
        self._saves = 0

    def start(self, directory: Path, items: Mapping[str, Any], on_commit: Callable[[str], None]) -> None:
        """Starts to write a checkpoint, in place of an existing one; returns once its arrays are copied.

        Args:
          items: Orbax's arguments by item.
          on_commit: called on the first host, in the background, once the checkpoint has its name, with a clause on its
            size and the speed of hashing.
        Raises:
          WriteError: this or an earlier save could not be written.
        """
        self.wait()
        unfinished = unfinished_path(directory)
        on_first_host(directory.parent, lambda: prepare_unfinished(directory))
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

    def _finish(self, unfinished: Path, directory: Path, on_commit: Callable[[str], None]) -> None:
        try:
            with _writing(unfinished):
                self._checkpointer.wait_until_finished()
                process, num_processes = jax.process_index(), jax.process_count()
                began = time.perf_counter()
                hashed = write_part(unfinished, process, num_processes)
                seconds = time.perf_counter() - began
                self._sync("hashed")
                if process == 0:
                    read_manifest(unfinished)  # raises if a process's part is missing
                    self._before()
                    commit(directory)
                    on_commit(_speed(hashed, seconds, num_processes))
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
    saver.start(directory, items, on_commit=lambda _: None)
    saver.wait()
    saver.close()


class Check(NamedTuple):
    """The result of checking a checkpoint.

    Attributes:
      problem: the damaged file and its damage; None: no damage.
      summary: a clause on how much was hashed and how fast.
    """

    problem: str | None
    summary: str


def check(directory: Path, items: Collection[str] = ()) -> Check:
    """Compares the files of a checkpoint with their checksums. All hosts call it, and each hashes a share.

    Args:
      items: the items that will be read; empty: all.
    Raises:
      UserError: the hosts do not see the same files, or one cannot read them now.
    """
    began = time.perf_counter()
    problem, digests = None, None
    try:
        with _readable(directory), finding_damage(directory, directory.name):
            digests = read_manifest(directory)
            if digests is None:
                problem = "its checksums are missing"
            elif not (directory / "params").is_dir():
                problem = "params is missing"
    except Damaged as error:
        problem = str(error)
    contents = None if digests is None else hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()
    views = exchange([problem, contents])
    for host, view in enumerate(views):
        if view != views[0]:
            raise UserError(
                f"host {host} does not see the same files in {directory} as host 0. All hosts of a run need "
                "base_output_directory on a file system that they share."
            )
    if problem is not None or digests is None:
        return Check(problem, "")
    read = in_items(digests, items) if items else digests
    share, num_shares = jax.process_index(), jax.process_count()
    with _readable(directory):
        own = damage(directory, read, share=share, num_shares=num_shares)
    found = exchange(own)
    problem = next((problem for problem, _ in found if problem is not None), None)
    if problem is not None:
        return Check(problem, "")
    checked = sum(size for _, size in found)
    return Check(None, f"{bytes_text(checked)} checked at {_rate(checked, time.perf_counter() - began)}")


@contextlib.contextmanager
def _readable(directory: Path) -> Generator[None]:
    """A block that reads a checkpoint; raises a UserError in place of an OSError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename or directory} cannot be read: {error.strerror or error}. Nothing is set aside: start "
            "again once it can be."
        ) from None


@contextlib.contextmanager
def _writing(directory: Path) -> Generator[None]:
    """A block that writes a checkpoint; raises a WriteError in place of errors that are not bugs of ours."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        problem = _environments(directory, error)
        if problem is None:
            raise
        raise WriteError(problem) from None


@contextlib.contextmanager
def reading(directory: Path) -> Generator[None]:
    """A block that reads a checkpoint. Ours have been compared with their checksums; those of MaxText have none.

    Raises:
      UserError: a file cannot be read, or one of a checkpoint without checksums is damaged.
    """
    try:
        with storage_errors(directory):
            yield
    except (UserError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        has_checksums = any(directory.glob("sha256.*"))
        if has_checksums and not isinstance(error, OSError) and _environments(directory, error) is None:
            raise
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]
        hint = "" if has_checksums else " It has no checksums that say which of its files is damaged."
        raise UserError(f"{directory} cannot be read ({value_text(why)}).{hint}") from None


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


def _environments(path: Path, error: BaseException) -> str | None:
    """The user's message for an error of the file system or the bucket; None for any other error."""
    if isinstance(error, OSError) and error.errno in _ENVIRONMENT:
        return cannot_write(path, error)
    if isinstance(error, Damaged):
        return f"{path}: {error}."
    # TensorStore reports the operating system's errors as text.
    text = str(error)
    known = [number for number in _ENVIRONMENT if os.strerror(number) in text]
    if known:
        return cannot_write(path, OSError(known[0], os.strerror(known[0])))
    if vanished := _VANISHED.search(text):
        return cannot_write(vanished[1], OSError(errno.ENOENT, os.strerror(errno.ENOENT)))
    theirs = isinstance(error, OSError) or re.search(r"HTTP|CURL|UNAVAILABLE|PERMISSION_DENIED", text)  # TensorStore's
    if is_bucket(path) and theirs:
        return f"{path} cannot be written: {' '.join(text.split())[:300]}."
    return None


def _speed(hashed: int, seconds: float, num_processes: int) -> str:
    each = "" if num_processes == 1 else " on each host"
    return f"{bytes_text(hashed)}{each} hashed at {_rate(hashed, seconds)}"


def _rate(hashed: int, seconds: float) -> str:
    return f"{hashed / max(seconds, 1e-9) / 1e9:.2g} GB/s"


class _NotOrbax(logging.Filter):
    """Drops records with tracebacks of Orbax's errors: it raises them too, and we report them in one line."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is shown."""
        _, error, traceback = record.exc_info or (None, None, None)
        raised_in = (frame.f_code.co_filename for frame, _ in walk_tb(traceback))
        return not any("orbax" in text for text in (record.pathname, str(error), *raised_in))


@functools.cache
def _save_small_arrays_whole() -> None:
    """Keeps Orbax from slicing small arrays over replicas: it compiles a program for each slice."""
    handler = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=_SLICE_BYTES)
    ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)


@functools.cache
def _silence_orbax() -> None:
    """Keeps Orbax's threads from printing tracebacks after one of their writes has failed."""
    for name in ("absl", "asyncio"):  # absl is Orbax's logger; asyncio complains of results that were never retrieved
        logging.getLogger(name).addFilter(_NotOrbax())
    shown = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        # Writes that end after the first failure find their event loop closed.
        if unraisable.object is not None or str(unraisable.exc_value) != "Event loop is closed":
            shown(unraisable)

    sys.unraisablehook = hook
