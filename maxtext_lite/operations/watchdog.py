"""A thread that ends this process when the run is stuck, or when another process of it has failed.

Processes publish their progress in a shared store; a lone process watches itself. Nothing here waits for the main
thread, which may hang anywhere, and no save is attempted.
"""

import contextlib
import faulthandler
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from maxtext_lite.config.phases import EXIT_HANGS, Observer, Phase
from maxtext_lite.console import complain

FACTOR = 4
"""A phase hangs after this many times its longest duration so far; a first phase, after this many least limits."""

ENDS_WELL = (0, 75)

OWN_WORDS_SECONDS = 2.0
"""How long a process has to report the same failure after another has failed."""

_MOST_NAMED = 8


class Stamp(NamedTuple):
    """The state that a process reports to the others.

    Attributes:
      step: of the phase; 0 before the first.
      position: count of places passed in the program; equal on all processes at the same place.
      seconds: without progress, as far as they count.
      limit: of `seconds`.
      beat: a count that grows while the process runs.
      code, reason: the exit code and the error message, once it has ended.
    """

    host: str
    phase: Phase
    step: int
    position: int
    seconds: float
    limit: float
    beat: int
    code: int = 0
    reason: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether it has ended; nobody need wait for it."""
        return self.phase == "end"

    @property
    def has_failed(self) -> bool:
        """Whether it has ended in a way that the others cannot survive."""
        return self.has_ended and self.code not in ENDS_WELL

    @property
    def where(self) -> str:
        """`reading of step 7`."""
        if not self.step:
            return self.phase
        return f"step {self.step}" if self.phase == "step" else f"{self.phase} of step {self.step}"


class Verdict(NamedTuple):
    """The reason why all processes of a run end, without `error: `, and their exit code."""

    text: str
    code: int = EXIT_HANGS


class Seen(NamedTuple):
    """The newest stamp of a process, None before the first, and its age in seconds."""

    stamp: Stamp | None
    age: float


def judge(seen: Mapping[int, Seen], *, silent_after: float, grace: float) -> Verdict | None:
    """None while the run moves, else the verdict that names who holds it up.

    A run is stuck if a process has been silent for too long, if one has failed, or if all processes that are furthest
    behind have exceeded their limits. Processes further ahead only wait for those.

    Args:
      silent_after: seconds without a stamp after which a process counts as stopped or dead.
      grace: seconds without a stamp after which a process that holds up the others counts as stopped or dead.
    """
    if silent := _silent(seen, silent_after):
        return Verdict(silent)
    at_work: dict[int, Stamp] = {}
    for process, (stamp, age) in seen.items():
        if stamp is None:
            continue
        if stamp.has_failed and stamp.seconds + age > OWN_WORDS_SECONDS:
            return failure(process, stamp)
        if not stamp.has_ended:
            at_work[process] = stamp._replace(seconds=stamp.seconds + age)
    if not at_work or any(stamp is None for stamp, _ in seen.values()):  # one has not joined yet
        return None
    last = min(stamp.position for stamp in at_work.values())
    behind = {process: stamp for process, stamp in at_work.items() if stamp.position == last}
    if not all(stamp.seconds > stamp.limit for stamp in behind.values()):
        return None
    if silent := _silent(seen, grace):  # they are stopped or dead, and do not merely hang
        return Verdict(silent)
    names = [f"{name(i, stamp)} in {stamp.where} for {stamp.seconds:.0f} s" for i, stamp in behind.items()]
    limit = min(stamp.limit for stamp in behind.values())
    rest = "; the others wait" if len(behind) < len(seen) else ""
    return Verdict(f"no progress: {_listed(names)}, more than {limit:.0f} s{rest}")


def failure(process: int, stamp: Stamp) -> Verdict:
    """The verdict on a failed process: all end with its exit code, and repeat its report of a hang."""
    if stamp.code == EXIT_HANGS:
        return Verdict(stamp.reason)
    reason = f": {stamp.reason}" if stamp.reason else ""
    return Verdict(f"{name(process, stamp)} has failed with exit code {stamp.code}{reason}", stamp.code)


def name(process: int, stamp: Stamp | None) -> str:
    """`process 2 on node7`."""
    coordinator = "" if process else " (coordinator)"
    return f"process {process}{coordinator}" + (f" on {stamp.host}" if stamp else "")


def _silent(seen: Mapping[int, Seen], after: float) -> str:
    texts: list[str] = []
    for process, (stamp, age) in seen.items():
        if age <= after:
            continue
        if stamp is None:
            texts.append(f"{name(process, stamp)} has not joined")
        elif not stamp.has_ended:
            texts.append(f"{name(process, stamp)} does not answer, {age:.0f} s since it was in {stamp.where}")
    return _listed(texts)


def _listed(texts: list[str]) -> str:
    more = f" and {len(texts) - _MOST_NAMED} more" if len(texts) > _MOST_NAMED else ""
    return ", ".join(texts[:_MOST_NAMED]) + more


if TYPE_CHECKING:
    from maxtext_lite.parallel.coordination import Store  # imports jax

BEAT_SECONDS = 1.0
PROCESSES_PER_BEAT = 100
"""Beyond this many the beats are further apart: each process reads the stamps of all."""

GRACE_SECONDS = 10.0
"""How long a process looks for the lost one after a failed collective, and process 0 waits for the others' end."""

COMPUTES: tuple[Phase, ...] = ("start-up", "compile")
"""Phases without a limit while the process computes: XLA's compile time is unpredictable."""

_MOST_SAID = 500  # letters of another process's error message
_BUSY = 0.1  # of a core: the least use of a process that computes
_LAST_SECONDS = 30.0  # for last words, whose file or terminal may hang as well


class Watchdog(Observer):
    """The progress of this process, its knowledge of the others, and the end of all.

    Args:
      clock: seconds; `cpu`: CPU seconds of this process.
      exit: ends the process, whatever its threads do.
    """

    _least = 0.0
    _directory: Path | None = None
    _now = _ticked = _cpu_at_tick = 0.0
    # This process.
    _phase: Phase = "start-up"
    _step = _position = _beat = _code = 0
    _idle = _longest_here = 0.0  # seconds without progress: now, and at most in this phase of this step
    _reason = _crash = ""
    # The others.
    _store: "Store | None" = None
    _answered = 0.0
    _verdict: Verdict | None = None
    _has_left = False

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.process_time,
        exit: Callable[[int], object] = os._exit,
    ) -> None:
        self._clock = clock
        self._cpu = cpu
        self._exit = exit
        self._host = socket.gethostname()
        self._longest: dict[Phase, float] = {}
        self._allowed: dict[Phase, float] = {}
        self._seen: dict[int, tuple[Stamp | None, float]] = {}  # of all processes
        self._ending = threading.Lock()
        self._wake = threading.Event()

    def start(self, least_seconds: float, directory: Path | None = None) -> None:
        """Starts to watch this process.

        Args:
          least_seconds: the least limit of every phase.
          directory: for stacks-PROCESS.txt; None: stacks go to stderr alone.
        """
        self._least = least_seconds
        self._directory = directory
        self._ticked = self._clock()
        self._cpu_at_tick = self._cpu()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def allow(self, phase: Phase, seconds: float) -> None:
        """Adds to the limit of a phase the time of waits in it that have limits of their own."""
        self._allowed[phase] = seconds

    def enter(self, phase: Phase, step: int = 0) -> None:
        """Reports that this process begins a phase."""
        if (phase, step) == (self._phase, self._step):
            self._position += 1
            return
        self.advance()
        self._longest[self._phase] = max(self._longest.get(self._phase, 0.0), self._longest_here)
        self._longest_here = 0.0
        self._phase = phase
        self._step = step

    def advance(self) -> None:
        """Reports that this process reached a point in the program that all reach in the same order."""
        self._longest_here = max(self._longest_here, self._idle)
        self._idle = 0.0
        self._position += 1

    def before_joining(self, process: int) -> dict[str, Any]:
        """Keeps jax from ending this process before the watchdog does."""
        from maxtext_lite.parallel.coordination import HEARTBEAT_SECONDS, call_if_coordinator_goes

        if process:
            call_if_coordinator_goes(self.coordinator_is_gone)
        return {"heartbeat_timeout_seconds": HEARTBEAT_SECONDS}

    def after_joining(self, process: int, num_processes: int) -> None:
        """Joins the other processes through jax's store."""
        from maxtext_lite.parallel.coordination import Store

        self.join(Store(process, num_processes))

    def join(self, store: "Store") -> None:
        """Joins the other processes through the store where all publish their progress."""
        self._answered = self._now
        self._seen = dict.fromkeys(range(store.num_processes), (None, self._now))
        self._store = store
        threading.Thread(target=self._publish, args=(store,), name="stamps", daemon=True).start()

    def finish(self, code: int, reason: str) -> None:
        """Reports the end of this process; if `code` is a failure, the others end with it and repeat the reason."""
        self._code = code
        self._reason = reason[:_MOST_SAID]
        self.enter("end")
        self._let_the_others_know()
        self._has_left = True  # jax closes its client next
        if self._store and code not in ENDS_WELL:
            self._exit(code)  # jax would wait for the others, which end now, and abort with a stack trace

    def failed(self, error: BaseException) -> None:
        """Returns if no process is missing; otherwise the thread ends this one during the wait."""
        if self._store and not self._crash:
            first_line = str(error).partition("\n")[0]
            self._crash = f", which failed with {type(error).__name__}: {first_line}"[:300]
            time.sleep(max(GRACE_SECONDS, 2 * self._stale))

    def stamp(self) -> Stamp:
        """The current state of this process."""
        least = max(self._least, self._stale)
        longest = self._longest.get(self._phase)
        limit = FACTOR * least if longest is None else max(least, FACTOR * longest)  # the first of a kind may compile
        limit += self._allowed.get(self._phase, 0.0)
        where = self._host, self._phase, self._step, self._position
        return Stamp(*where, round(self._idle, 1), round(limit, 1), self._beat, self._code, self._reason)

    def tick(self) -> None:
        """Advances time, without periods when the whole process was suspended or starved."""
        passed = self._clock() - self._ticked
        computed = self._cpu() - self._cpu_at_tick
        self._ticked += passed
        self._cpu_at_tick += computed
        counted = min(passed, 5 * self._period)
        self._now += counted
        if not (self._phase in COMPUTES and computed > _BUSY * passed):
            self._idle += counted

    def exchange(self, store: "Store") -> None:
        """Publishes the state of this process and reads those of the others."""
        self._beat += 1
        stamp = self.stamp()
        if self._verdict:
            stamp = stamp._replace(phase="end", code=self._verdict.code, reason=self._verdict.text)
        store.put(f"{store.process}", json.dumps(stamp))
        found = store.all()
        self._answered = self._now
        for process, (before, _) in self._seen.items():
            stamp = Stamp(*json.loads(found[str(process)])) if str(process) in found else None
            if stamp and (before is None or stamp.beat != before.beat):
                self._seen[process] = stamp, self._now

    def look(self) -> Verdict | None:
        """The verdict that ends the run; None while it moves."""
        if self._phase == "end":  # it leaves by itself
            return None
        grace = max(GRACE_SECONDS / 2 if self._crash else GRACE_SECONDS, self._stale)
        silent_after = grace if self._crash else max(self._least, self._stale)
        if self._store is None:
            return judge({0: Seen(self.stamp(), 0.0)}, silent_after=silent_after, grace=grace)
        silence = self._now - self._answered
        if self._store.process and silence > max(GRACE_SECONDS / 2, self._stale):  # the stamps of the others are stale
            return self._coordinator_lost() if silence > silent_after else None
        seen = {process: Seen(stamp, self._now - since) for process, (stamp, since) in self._seen.items()}
        return judge(seen, silent_after=silent_after, grace=grace)

    def coordinator_is_gone(self) -> None:
        """Ends this process, from any thread, before jax aborts it because process 0 is unreachable."""
        if self._phase == "end" or self._store is None:
            self._exit(self._code)
        else:
            self.end(self._coordinator_lost())

    def end(self, verdict: Verdict) -> None:
        """Prints the reason, and for a stuck run the stacks of all threads; ends once the others know."""
        with self._ending:
            backstop = threading.Timer(_LAST_SECONDS, self._exit, (verdict.code,))
            backstop.daemon = True
            backstop.start()
            self._verdict = verdict
            self._wake.set()
            if verdict.code == EXIT_HANGS:
                self._report_stacks(verdict.text)
            else:
                complain(f"error: {verdict.text}")
            self._let_the_others_know()
            self._exit(verdict.code)

    def _coordinator_lost(self) -> Verdict:
        """The verdict when process 0, through which the others know of each other, is gone or stopped."""
        stamp, _ = self._seen[0]
        if stamp and stamp.has_failed:
            return failure(0, stamp)
        last = f", last in {stamp.where}" if stamp and not stamp.has_ended else ""
        return Verdict(f"{name(0, stamp)} does not answer{last}")

    def _report_stacks(self, why: str) -> None:
        process = self._store.process if self._store else 0
        about = f"process {process} on {self._host} in {self.stamp().where}{self._crash}"
        text = f"error: {why}. Exit code {EXIT_HANGS}. Stacks of {about}:\n"
        with contextlib.suppress(OSError):  # stderr has no reader
            _write_stacks(2, text)
        if self._directory:
            with contextlib.suppress(OSError), (self._directory / f"stacks-{process}.txt").open("w") as file:
                _write_stacks(file.fileno(), text)

    def _let_the_others_know(self) -> None:
        """Waits until the others end too or have read that this process ends; process 0 ends the store."""
        if self._store is None:
            return
        self._wake.set()
        last = self._clock() + self._stale
        while self._clock() < last and not all(stamp and stamp.has_ended for stamp, _ in self._seen.values()):
            time.sleep(0.1)
        if self._store.process == 0:  # jax aborts a process whose coordination service ends before it does
            time.sleep(2 * self._period)

    @property
    def _period(self) -> float:
        return BEAT_SECONDS * max(1.0, len(self._seen) / PROCESSES_PER_BEAT)

    @property
    def _stale(self) -> float:
        """Seconds after which a stamp is late: its process and this one each exchange once in a period."""
        return 3 * self._period

    def _publish(self, store: "Store") -> None:
        while not self._has_left:
            with contextlib.suppress(Exception):  # the time without an answer is what counts
                self.exchange(store)
            self._wake.wait(self._period)
            if self._wake.is_set():  # at the end, when the others wait for it
                time.sleep(0.1)

    def _watch(self) -> None:
        while True:
            time.sleep(self._period / 2)
            self.tick()
            if verdict := self.look():
                self.end(verdict)


def _write_stacks(file: int, text: str) -> None:
    os.write(file, text.encode())
    faulthandler.dump_traceback(file, all_threads=True)


watchdog = Watchdog()
"""The watchdog of this process; a command starts it, an import never does."""
