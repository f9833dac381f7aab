"""The lease of a run directory: one run at a time writes there, and says who it is.

A lease is a file `lease/NUMBER.json` of the run directory, which its holder renews by touching it. Whoever finds every
lease there dead adds one with the next number, which the storage lets only one process do, looks again, and steps
back if another lease has come that it does not know to be dead. So nobody ever removes a lease that may be alive, and
of any number that find the same dead one, at whatever speed, one holds the directory.

On the machine of its holder a lease is dead when the process is; elsewhere, when it has missed renewals, by the clock
of the file server or the bucket.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# jax, optax and orbax declare some of their functions in part.

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
import threading
import time
import uuid  # pyright: ignore[reportUnusedImport]  (only macOS asks it)
from collections.abc import Callable
from pathlib import Path

import jax

from maxtext_lite.config import UserError
from maxtext_lite.config.errors import full_text, value_text, writing
from maxtext_lite.process.watchdog import watchdog
from maxtext_lite.training.failures import Failures
from maxtext_lite.training.lease_files import LeaseFile, lease_files

DIRECTORY = "lease"
"""In the run directory, while a run writes there."""

RENEWAL_SECONDS = 10.0
MISSED_RENEWALS = 9
"""After which a lease of another machine is dead."""

_POLL_SECONDS = 0.5
_NAME = re.compile(r"(\d{1,18})\.json")
_GONE = (errno.ENOENT, errno.ESTALE)  # the second is a network file system's word for it


@dataclasses.dataclass(frozen=True)
class Holder:
    """Who holds a lease.

    Attributes:
      host: the machine's name, for people.
      process_id, started: of the process, and when it started, in what its operating system counts.
      machine: where `process_id` has a meaning: the machine since its last start, and its container; "": not known.
      since: when it took the lease, UTC.
      token: that no other holder has.
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
        """The holder that a lease names; None where it is damaged, or not written yet."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            return None
        kinds = {field.name: field.type for field in dataclasses.fields(cls)}
        if not isinstance(values, dict) or {name: type(x).__name__ for name, x in values.items()} != kinds:
            return None
        return cls(**values)

    def is_alive(self) -> bool | None:
        """Whether the process runs; None where that cannot be known here."""
        if not self.machine or self.machine != _machine():
            return None
        try:
            os.kill(self.process_id, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:  # another user's, whose start may be hidden from us
            started = _started(self.process_id)
            return started == self.started if started else None
        return _started(self.process_id) == self.started

    def __str__(self) -> str:
        return f"process {self.process_id} on host {value_text(self.host)}, since {value_text(self.since)}"


class Lease:
    """One process's hold on a run directory, or its attempts to get it.

    Args:
      failures: collects that another process took the lease over.
      renewal_seconds: between two renewals, of every holder.
    """

    def __init__(self, run_directory: Path, failures: Failures, *, renewal_seconds: float = RENEWAL_SECONDS):
        self._run_directory, self._directory = run_directory, run_directory / DIRECTORY
        self._failures, self._renewal_seconds = failures, renewal_seconds
        self._patience = renewal_seconds * MISSED_RENEWALS
        self._files = lease_files(self._directory)
        self._seen: dict[str, tuple[LeaseFile, float]] = {}  # leases of elsewhere, and since when they are as they are
        self._name: str | None = None  # of what is held
        self._text = b""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def attempt(self) -> str | None:
        """Takes the lease, unless somebody has it who may be alive.

        Returns:
          None: it is held. Else why not yet, "" for a reason that is over at once; try again.
        Raises:
          UserError: a process that is alive holds it, or the directory cannot be written.
        """
        with writing(self._directory):
            dead = set(self._found())
            for found in dead:
                if (waits := self._why_to_wait(found)) is not None:
                    return waits
            name = f"{1 + max((_number(found) for found in dead), default=0)}.json"
            text = json.dumps(dataclasses.asdict(Holder.this_process())).encode()
            try:
                self._files.make(name, text)
            except (FileExistsError, FileNotFoundError):  # another took it; another let go of it and of the directory
                if not self._says(name, text):
                    return ""  # else the answer to our first request was lost, and the second one found our own
            # Nobody looks past our lease now. Whoever had looked before left a lease, which we see, or will see ours.
            if not {found for found in self._found() if found.name != name} <= dead:
                self._files.remove(name)
                return ""
            for found in dead:
                self._files.remove(found.name)
        self._name, self._text = name, text
        self._thread.start()
        return None

    def check(self) -> bool:
        """Renews the lease; whether it is still ours. Where it is not, `failures` has it."""
        assert self._name is not None, "check() of a lease that is not held"
        try:
            ours = self._files.read(self._name) == self._text
            if ours:
                self._files.renew(self._name)
        except OSError as error:
            ours = error.errno not in _GONE  # a file system that does not answer has not given it to another either
        if not ours:
            holders = [Holder.from_json(found.text) for found in self._found() if found.name != self._name]
            taken = f"was taken over by {holders[0]}" if holders and holders[0] else "is gone"
            self._failures.add(
                f"the lease of {self._run_directory} {taken}: this process did not renew it for a while, as when it "
                "was suspended, or its file was removed. It stops here and writes nothing more."
            )
        return ours

    def release(self) -> None:
        """Lets go of the directory, for whoever comes next."""
        self._ended.set()
        if self._name is None:
            return
        self._thread.join()
        with contextlib.suppress(OSError):  # whoever comes next finds this process ended
            if self._files.read(self._name) == self._text:
                self._files.remove(self._name)
            self._files.close()  # unless somebody waits there

    def _renew(self) -> None:
        while not self._ended.wait(self._renewal_seconds):
            if not self.check():
                return

    def _says(self, name: str, text: bytes) -> bool:
        """Whether a lease is there, and has this text."""
        with contextlib.suppress(FileNotFoundError):
            return self._files.read(name) == text
        return False

    def _found(self) -> list[LeaseFile]:
        """The leases in the directory."""
        return [found for found in self._files.found() if _NAME.fullmatch(found.name)]

    def _why_to_wait(self, found: LeaseFile) -> str | None:
        """None where a lease is dead.

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


def hold(run_directory: Path, failures: Failures, say: Callable[[str], None]) -> Lease | None:
    """The lease of a run directory, which is made; held by the first host, None on the others. All hosts call it.

    It waits where a process on another machine may have died with the lease, until that shows.

    Raises:
      UserError: another run has the directory; on all hosts.
    """
    lease = Lease(run_directory, failures) if jax.process_index() == 0 else None
    said = ""
    while True:
        waits = None
        try:
            waits = lease.attempt() if lease else None
        except UserError as error:
            failures.add(" ".join(error.problems))
        if not failures.raise_together(waits is not None):
            return lease
        if waits and not said:
            say(waits)
            said = waits
        watchdog.advance()  # to wait for a lease is no hang
        time.sleep(_POLL_SECONDS)


def _number(found: LeaseFile) -> int:
    return int(found.name.partition(".")[0])


def _started(process_id: int) -> str:
    """When a process started, in what its operating system counts; "" where there is none that runs, or none to see."""
    try:
        # After the name, which may hold anything: the state, and 19 fields later the start in ticks of the machine.
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
    """The machine since its last start and, in it, the container; "" where process ids might be of another one."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        # macOS has no containers of its own, and its `ps` says the date of a start.
        return f"{socket.gethostname()} {uuid.getnode():x}" if sys.platform == "darwin" else ""
