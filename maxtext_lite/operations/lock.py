"""The lease of a run directory: only one run at a time writes there.

A lease is a file `lease/NUMBER.json` in the run directory, which its holder renews by touching it. A process that finds
every lease dead adds one with the next number, which the storage grants to only one process. It then looks again, and
withdraws if a new lease has appeared that it does not know to be dead. So no process removes a lease that may be alive,
and of all processes that find the same dead lease, at any speed, one gets the directory.

The holder also locks a temporary file, which shows at once on its machine whether it lives. Elsewhere it is dead after
missed renewals.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple

import jax

from maxtext_lite.config import UserError
from maxtext_lite.config.bucket import file_system, is_bucket, storage_errors
from maxtext_lite.config.errors import full_text, value_text, writing
from maxtext_lite.config.phases import phases
from maxtext_lite.parallel import value_of_host
from maxtext_lite.training.run_files import LEASE

RENEWAL_SECONDS = 10.0
MISSED_RENEWALS = 9
"""How many missed renewals make another machine's lease dead."""

_POLL_SECONDS = 0.5


class LeaseFile(NamedTuple):
    """A lease as it was read; `version` changes with each renewal."""

    text: bytes
    version: str


class _OnDisk:
    """The files of a directory of leases."""

    def __init__(self, directory: Path):
        self._directory = directory

    def found(self) -> dict[str, LeaseFile]:
        """All leases by name."""
        found: dict[str, LeaseFile] = {}
        paths: list[Path] = []
        with contextlib.suppress(FileNotFoundError):
            paths = [path for path in self._directory.iterdir() if path.suffix == ".json" and path.stem.isdecimal()]
        for path in paths:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                about = path.stat()
                found[path.name] = LeaseFile(path.read_bytes(), f"{about.st_ino} {about.st_mtime_ns}")
        return found

    def make(self, name: str, text: bytes) -> None:
        """Makes a file; raises FileExistsError if there is one of this name."""
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._directory / name).open("xb") as file:
            file.write(text)

    def renew(self, name: str) -> None:
        """Marks a file as still held."""
        os.utime(self._directory / name)

    def remove(self, name: str) -> None:
        """Removes a file, and the directory if it is the last."""
        (self._directory / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._directory.rmdir()


class _InBucket(_OnDisk):
    """Objects in a bucket, created on condition that none of their name exists, and renewed by a change of metadata."""

    def __init__(self, directory: Path):
        super().__init__(directory)
        self._system, self._root = file_system(directory)

    def found(self) -> dict[str, LeaseFile]:
        found: dict[str, LeaseFile] = {}
        with storage_errors(self._directory):
            for about in self._system.find(self._root, detail=True).values():
                with contextlib.suppress(FileNotFoundError):
                    version = f"{about['generation']} {about['metageneration']}"
                    name = about["name"].rpartition("/")[2]
                    found[name] = LeaseFile(self._system.cat_file(about["name"]), version)
        return found

    def make(self, name: str, text: bytes) -> None:
        with storage_errors(self._directory):
            self._system.pipe_file(f"{self._root}/{name}", text, mode="create")

    def renew(self, name: str) -> None:
        with storage_errors(self._directory):
            self._system.setxattrs(f"{self._root}/{name}", renewed="yes")

    def remove(self, name: str) -> None:
        with storage_errors(self._directory), contextlib.suppress(FileNotFoundError):
            self._system.rm_file(f"{self._root}/{name}")


@dataclasses.dataclass(frozen=True)
class Holder:
    """The holder of a lease.

    Attributes:
      host: the machine's name, for people.
      since: UTC time at which it took the lease.
      lock_file: on its machine, the file that it locks while it lives.
    """

    host: str
    process_id: int
    since: str
    lock_file: str

    @classmethod
    def from_json(cls, text: bytes) -> Holder | None:
        """The holder that a lease names; None if the file is not written yet."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return None

    def is_alive(self) -> bool | None:
        """Whether the process runs; None if that cannot be known here."""
        try:
            with open(self.lock_file, "rb") as file:  # noqa: PTH123
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return None
        return False

    def __str__(self) -> str:
        return f"process {self.process_id} on host {value_text(self.host)}, since {value_text(self.since)}"


class Lease:
    """The hold of one process on a run directory, or its attempts to get it.

    Args:
      renewal_seconds: seconds between renewals, for every holder.
    Attributes:
      error: of a renewal in the background that found the lease lost.
    """

    def __init__(self, run_directory: Path, *, renewal_seconds: float = RENEWAL_SECONDS):
        self._run_directory = run_directory
        self._directory = run_directory / LEASE
        self._renewal_seconds = renewal_seconds
        self._files = _InBucket(self._directory) if is_bucket(self._directory) else _OnDisk(self._directory)
        self._first_seen: dict[str, tuple[LeaseFile, float]] = {}  # of other processes, and when
        self._name: str | None = None  # of the lease that is held
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._lock_file: IO[bytes] | None = None
        self._text = b""
        self.error: UserError | None = None

    def attempt(self) -> str | None:
        """Takes the lease, unless its holder may be alive.

        Returns:
          None once it is held; otherwise the reason to wait and try again, "" for a momentary one.
        Raises:
          UserError: a live process holds it, or the directory cannot be written.
        """
        with writing(self._directory):
            dead = self._files.found()
            for name, file in dead.items():
                reason = self._reason_to_wait(name, file)
                if reason is not None:
                    return reason
            if self._lock_file is None:
                self._lock_file = tempfile.NamedTemporaryFile(prefix="maxtext_lite-", suffix=".lock")  # noqa: SIM115
                fcntl.flock(self._lock_file, fcntl.LOCK_EX)
                since = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
                holder = Holder(socket.gethostname(), os.getpid(), since, self._lock_file.name)
                self._text = json.dumps(dataclasses.asdict(holder)).encode()
            last = max((int(name.removesuffix(".json")) for name in dead), default=0)
            name = f"{last + 1}.json"
            try:
                self._files.make(name, self._text)
            except (FileExistsError, FileNotFoundError):  # taken by another; released, with the directory
                return ""
            # From now on everyone sees our lease. Whoever looked earlier has left one that we see, or will see ours.
            others = self._files.found()
            others.pop(name, None)
            if not others.items() <= dead.items():
                self._files.remove(name)
                return ""
            for other in dead:
                self._files.remove(other)
        self._name = name
        self._thread.start()
        return None

    def check(self) -> None:
        """Renews the lease.

        Raises:
          UserError: another process has it, or its file is gone.
        """
        assert self._name is not None, "check() of a lease that is not held"
        try:
            found = self._files.found()
            if self._is_ours(found):
                self._files.renew(self._name)
                return
        except FileNotFoundError:
            found = {}
        except OSError:  # a file system that does not answer has not granted it to another either
            return
        holders = [Holder.from_json(file.text) for name, file in found.items() if name != self._name]
        taken = f"was taken over by {holders[0]}" if holders and holders[0] else "is gone"
        raise UserError(
            f"the lease of {self._run_directory} {taken}: this process was suspended, or the lease's file was removed. "
            "It exits without writing."
        )

    def release(self) -> None:
        """Releases the directory to the next run."""
        self._ended.set()
        if self._name is not None:
            self._thread.join()
            with contextlib.suppress(OSError):  # the next process finds this one ended
                if self._is_ours(self._files.found()):
                    self._files.remove(self._name)
        if self._lock_file is not None:
            self._lock_file.close()

    def _is_ours(self, found: dict[str, LeaseFile]) -> bool:
        return self._name in found and found[self._name].text == self._text

    def _renew(self) -> None:
        while not self._ended.wait(self._renewal_seconds):
            try:
                self.check()
            except UserError as error:
                self.error = error
                return

    def _reason_to_wait(self, name: str, file: LeaseFile) -> str | None:
        """None if a lease is dead.

        Raises:
          UserError: it is alive.
        """
        holder = Holder.from_json(file.text)
        alive = holder.is_alive() if holder else None
        first_seen, since = self._first_seen.setdefault(name, (file, time.monotonic()))
        who = holder or "an unidentified process"
        if alive or (alive is None and file != first_seen):
            raise UserError(
                f"{full_text(self._run_directory)} is in use: {who}, writes there. Use another run_name, or stop that "
                "process first."
            )
        patience = self._renewal_seconds * MISSED_RENEWALS
        if alive is False or time.monotonic() - since > patience:
            return None
        return f"waiting for {who}, which counts as dead after {patience:g} seconds without a renewal"


def hold(run_directory: Path, say: Callable[[str], None]) -> Lease | None:
    """Creates a run directory and takes its lease on the first host; None on the others. All hosts call it.

    Waits while the holder is on another machine and may be dead, until that is certain.

    Raises:
      UserError: on the first host, if another run has the directory.
    """
    lease = Lease(run_directory) if jax.process_index() == 0 else None
    has_said = False
    while True:
        reason: str | None = value_of_host(0, lease.attempt() if lease else None)
        if reason is None:
            return lease
        if reason and not has_said:
            say(reason)
            has_said = True
        phases.advance()  # to wait for a lease is no hang
        time.sleep(_POLL_SECONDS)
