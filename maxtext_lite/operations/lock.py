"""The lease of a run directory, so that only one run at a time writes there.

A lease is a file `lease/NUMBER.json` in the run directory, which its holder renews by touching it. A process that finds
every lease dead adds one with the next number, which the storage grants to only one process. It then looks again, and
withdraws if a new lease has appeared that it does not know to be dead. So no process removes a lease that may be alive,
and of all processes that find the same dead lease, at any speed, one gets the directory.

On its holder's machine a lease is dead when the process is. Elsewhere it is dead after missed renewals, by the clock of
the file server or bucket.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid  # pyright: ignore[reportUnusedImport]  (used on macOS alone)
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from maxtext_lite.config import UserError
from maxtext_lite.config.bucket import file_system, is_bucket, storage_errors
from maxtext_lite.config.errors import full_text, value_text, writing
from maxtext_lite.config.phases import phases
from maxtext_lite.parallel import value_of_host
from maxtext_lite.training.starting_over import LEASE

_MOST_BYTES = 10_000


class LeaseFile(NamedTuple):
    """A lease as it was read; after a renewal, or replaced by another of the same name, it is unequal.

    Attributes:
      version: differs from that of any other file of this name; in a bucket each renewal changes it too.
      renewed_ns: by the clock of the storage.
    """

    name: str
    text: bytes
    version: str
    renewed_ns: int


def lease_files(directory: Path) -> LeaseFiles:
    """The files of a directory of leases."""
    return _InBucket(directory) if is_bucket(directory) else LeaseFiles(directory)


class LeaseFiles:
    """The files of a directory. Methods raise OSError; FileNotFoundError if a file is missing."""

    def __init__(self, directory: Path):
        self._directory = directory

    def found(self) -> list[LeaseFile]:
        """All files, of any name."""
        found, paths = list[LeaseFile](), list[Path]()
        with contextlib.suppress(FileNotFoundError):  # the last holder removes the directory
            paths = list(self._directory.iterdir())
        for path in paths:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                about = path.stat()
                text = b"" if path.is_dir() else path.read_bytes()[:_MOST_BYTES]
                found.append(LeaseFile(path.name, text, str(about.st_ino), about.st_mtime_ns))
        return found

    def make(self, name: str, text: bytes) -> None:
        """Makes a file; raises FileExistsError if there is one of this name."""
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / name
        try:
            with path.open("xb", buffering=0) as file:
                try:
                    file.write(text)
                except OSError:
                    path.unlink(missing_ok=True)
                    raise
        except FileExistsError:  # another has this lease
            raise
        except OSError:  # the disk is full
            with contextlib.suppress(OSError):
                self._directory.rmdir()
            raise

    def read(self, name: str) -> bytes:
        """The content of a file."""
        return (self._directory / name).read_bytes()

    def renew(self, name: str) -> None:
        """Marks an existing file as still held."""
        os.utime(self._directory / name)

    def remove(self, name: str) -> None:
        """Removes a file, if it exists."""
        (self._directory / name).unlink(missing_ok=True)

    def now_ns(self) -> int:
        """The time by the clock of the storage."""
        with tempfile.NamedTemporaryFile(dir=self._directory, prefix=".now-") as probe:
            os.utime(probe.name)
            return Path(probe.name).stat().st_mtime_ns

    def close(self) -> None:
        """Removes the directory; raises OSError if it is not empty."""
        self._directory.rmdir()


class _InBucket(LeaseFiles):
    """Objects in a bucket, created on condition that none of their name exists, and renewed by a change of metadata."""

    def __init__(self, directory: Path):
        super().__init__(directory)
        self._system, self._root = file_system(directory)

    def found(self) -> list[LeaseFile]:
        found: list[LeaseFile] = []
        with storage_errors(self._directory):
            listed: list[dict[str, Any]] = self._system.find(self._root, detail=True).values()
            for about in listed:
                with contextlib.suppress(FileNotFoundError):
                    name, text = about["name"].rpartition("/")[2], self._system.cat_file(about["name"])
                    version = f"{about['generation']} {about['metageneration']}"
                    found.append(LeaseFile(name, text[:_MOST_BYTES], version, _nanoseconds(about)))
        return found

    def make(self, name: str, text: bytes) -> None:
        with storage_errors(self._directory):
            self._system.pipe_file(f"{self._root}/{name}", text, mode="create")

    def read(self, name: str) -> bytes:
        with storage_errors(self._directory):
            return self._system.cat_file(f"{self._root}/{name}")

    def renew(self, name: str) -> None:
        with storage_errors(self._directory):
            self._system.setxattrs(f"{self._root}/{name}", renewed="yes")

    def remove(self, name: str) -> None:
        with storage_errors(self._directory), contextlib.suppress(FileNotFoundError):
            self._system.rm_file(f"{self._root}/{name}")

    def now_ns(self) -> int:
        probe = f".now-{os.getpid()}"
        with storage_errors(self._directory):
            self._system.pipe_file(f"{self._root}/{probe}", b"-")
            now_ns = _nanoseconds(self._system.info(f"{self._root}/{probe}"))
        self.remove(probe)
        return now_ns

    def close(self) -> None:
        """Nothing: a bucket has no directories."""


def _nanoseconds(about: dict[str, Any]) -> int:
    return int(about["mtime"].timestamp() * 1e9)


RENEWAL_SECONDS = 10.0
MISSED_RENEWALS = 9
"""Missed renewals after which a lease of another machine is dead."""

_POLL_SECONDS = 0.5
_NAME = re.compile(r"(\d{1,18})\.json")
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)  # the last is how a network file system says it


@dataclasses.dataclass(frozen=True)
class Holder:
    """The holder of a lease.

    Attributes:
      host: the machine's name, for people.
      process_id, started: the process, and its start in the operating system's own unit.
      machine: the scope of `process_id`: the machine since its last boot, and the container; "" if unknown.
      since: UTC time at which it took the lease.
      token: unique to this holder.
    """

    host: str
    process_id: int
    started: str
    machine: str
    since: str
    token: str

    @classmethod
    def this_process(cls) -> Holder:
        """This process, with a new token."""
        since = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        started = _started(os.getpid())
        machine = _machine() if started else ""
        return cls(socket.gethostname(), os.getpid(), started, machine, since, secrets.token_hex(8))

    @classmethod
    def from_json(cls, text: bytes) -> Holder | None:
        """The holder that a lease names; None if the file is damaged or not written yet."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            return None
        kinds = {field.name: field.type for field in dataclasses.fields(cls)}
        if not isinstance(values, dict) or {name: type(x).__name__ for name, x in values.items()} != kinds:
            return None
        return cls(**values)

    def is_alive(self) -> bool | None:
        """Whether the process runs; None if that cannot be known here."""
        if not self.machine or self.machine != _machine():
            return None
        try:
            os.kill(self.process_id, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:  # another user's process, whose start may be hidden
            started = _started(self.process_id)
            return started == self.started if started else None
        return _started(self.process_id) == self.started

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
        self._run_directory, self._directory = run_directory, run_directory / LEASE
        self._renewal_seconds = renewal_seconds
        self.error: UserError | None = None
        self._patience = renewal_seconds * MISSED_RENEWALS
        self._files = lease_files(self._directory)
        self._seen: dict[str, tuple[LeaseFile, float]] = {}  # of other machines, and since when unchanged
        self._name: str | None = None  # of the lease that is held
        self._text = b""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def attempt(self) -> str | None:
        """Takes the lease, unless its holder may be alive.

        Returns:
          None once it is held; otherwise the reason to wait and try again, "" for a momentary one.
        Raises:
          UserError: a live process holds it, or the directory cannot be written.
        """
        with writing(self._directory):
            dead = set(self._found())
            try:
                waits = next((why for why in map(self._why_to_wait, dead) if why is not None), None)
            except FileNotFoundError:  # its holder has just released it, with the directory
                waits = ""
            if waits is not None:
                return waits
            name = f"{1 + max((_number(found) for found in dead), default=0)}.json"
            text = json.dumps(dataclasses.asdict(Holder.this_process())).encode()
            try:
                self._files.make(name, text)
            except (FileExistsError, FileNotFoundError):  # taken by another; released, with the directory
                if not self._says(name, text):
                    return ""  # else a retried request found the lease that its first try had made
            # From now on everyone sees our lease. Whoever looked earlier has left one that we see, or will see ours.
            if not {found for found in self._found() if found.name != name} <= dead:
                self._files.remove(name)
                return ""
            for found in dead:
                self._files.remove(found.name)
        self._name, self._text = name, text
        self._thread.start()
        return None

    def check(self) -> None:
        """Renews the lease.

        Raises:
          UserError: another process has it, or its file is gone.
        """
        assert self._name is not None, "check() of a lease that is not held"
        try:
            ours = self._files.read(self._name) == self._text
            if ours:
                self._files.renew(self._name)
        except OSError as error:
            ours = error.errno not in _GONE  # a file system that does not answer has not granted it to another either
        if not ours:
            holders = list[Holder | None]()
            with contextlib.suppress(OSError):  # their directory is gone as well
                holders = [Holder.from_json(found.text) for found in self._found() if found.name != self._name]
            taken = f"was taken over by {holders[0]}" if holders and holders[0] else "is gone"
            raise UserError(
                f"the lease of {self._run_directory} {taken}: this process did not renew it for a while, as when it "
                "was suspended, or its file was removed. It stops here and writes nothing more."
            )

    def release(self) -> None:
        """Releases the directory to the next run."""
        self._ended.set()
        if self._name is None:
            return
        self._thread.join()
        with contextlib.suppress(OSError):  # the next process finds this one ended
            if self._files.read(self._name) == self._text:
                self._files.remove(self._name)
            self._files.close()  # unless another process waits there

    def _renew(self) -> None:
        while not self._ended.wait(self._renewal_seconds):
            try:
                self.check()
            except UserError as error:
                self.error = error
                return

    def _says(self, name: str, text: bytes) -> bool:
        """Whether a lease exists with this text."""
        with contextlib.suppress(FileNotFoundError):
            return self._files.read(name) == text
        return False

    def _found(self) -> list[LeaseFile]:
        """The leases in the directory."""
        return [found for found in self._files.found() if _NAME.fullmatch(found.name)]

    def _why_to_wait(self, found: LeaseFile) -> str | None:
        """None if a lease is dead, else the reason to wait.

        Raises:
          UserError: it is alive.
        """
        holder = Holder.from_json(found.text)
        alive = holder.is_alive() if holder else None
        seen, since = self._seen.setdefault(found.name, (found, time.monotonic()))
        if alive or (alive is None and seen != found):
            raise UserError(
                f"{full_text(self._run_directory)} is in use: {holder or 'a process that has not said who it is'}, "
                "writes there, and two runs in one directory would destroy each other's checkpoints. Use another "
                "run_name, or stop that process first."
            )
        age = self._files.now_ns() / 1e9 - found.renewed_ns / 1e9
        if alive is False or max(age, time.monotonic() - since) > self._patience:
            return None
        return (
            f"waiting for {holder or 'a process that has not said who it is'}, which may still write "
            f"{self._run_directory}: it last said so {max(age, 0):.0f} seconds ago, and counts as dead after "
            f"{self._patience:g}"
        )


def hold(run_directory: Path, say: Callable[[str], None]) -> Lease | None:
    """The lease of a run directory, on the first host; None on the others. Makes the directory. All hosts call it.

    Waits while the holder is on another machine and may be dead, until that is certain.

    Raises:
      UserError: on the first host, if another run has the directory.
    """
    lease = Lease(run_directory) if jax.process_index() == 0 else None
    said = ""
    while True:
        waits: str | None = value_of_host(0, lease.attempt() if lease else None)
        if waits is None:
            return lease
        if waits and not said:
            say(waits)
            said = waits
        phases.advance()  # to wait for a lease is no hang
        time.sleep(_POLL_SECONDS)


def _number(found: LeaseFile) -> int:
    return int(found.name.partition(".")[0])


def _started(process_id: int) -> str:
    """The start of a process in the operating system's own unit; "" if it does not run or cannot be seen."""
    try:
        # The name may contain anything. After it comes the state, and 19 fields later the start in clock ticks.
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except OSError:
        if Path("/proc/self/stat").exists():
            return ""
    command = ["ps", "-o", "stat=", "-o", "lstart=", "-p", str(process_id)]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"})
    except OSError:
        return ""
    state, _, started = listed.stdout.strip().partition(" ")
    return "" if state.startswith("Z") else started.strip()


def _machine() -> str:
    """The machine since its last boot, and the container; "" if process ids cannot be tied to one."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        # macOS has no containers, and its `ps` prints the date of a start.
        return f"{socket.gethostname()} {uuid.getnode():x}" if sys.platform == "darwin" else ""
