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
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from maxtext_lite.config.phases import EXIT_HANGS, Observer, Phase
from maxtext_lite.console import complain
from maxtext_lite.operations.progress import (
    COMPUTES,
    ENDS_WELL,
    Seen,
    Stamp,
    Verdict,
    coordinator_lost,
    judge,
    limit_of,
)

BEAT_SECONDS = 1.0
PROCESSES_PER_BEAT = 100
"""Beyond this many the beats are further apart: each process reads the stamps of all."""

GRACE_SECONDS = 10.0
"""Time that a process looks for the lost one after a failed collective, and process 0 waits for the others to end."""

_MOST_SAID = 500  # letters of another process's error message

_VERDICT = "verdict"
_BUSY = 0.1  # of a core: the least use of a process that computes
_LAST_SECONDS = 30.0  # for last words, whose file or terminal may hang as well


class Store(Protocol):
    """Keys and values shared by the processes of a run. Without process 0 both methods may block or raise anything.

    Attributes:
      process: the number of this process.
      num_processes: of the run.
    """

    process: int
    num_processes: int

    def put(self, key: str, value: str) -> None:
        """Sets a key."""
        ...

    def all(self) -> dict[str, str]:
        """Every key and its value."""
        ...


class Watchdog(Observer):
    """The progress of this process, its knowledge of the others, and the end of all.

    Args:
      clock: seconds; `cpu`: CPU seconds of this process.
      exit: ends the process, whatever its threads do.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.process_time,
        exit: Callable[[int], object] = os._exit,
    ) -> None:
        self._clock, self._cpu, self._exit = clock, cpu, exit
        self._host = socket.gethostname()
        self._least = 0.0
        self._longest: dict[Phase, float] = {}
        self._allowed: dict[Phase, float] = {}
        self._now = self._ticked = self._cpu_at_tick = self._computed = self._began = self._longest_here = 0.0
        self._phase: Phase = "start-up"
        self._step = self._position = self._beat = self._code = 0
        self._reason = ""
        self._store: Store | None = None
        self._seen: dict[int, tuple[Stamp | None, float]] = {}
        self._answered = 0.0
        self._verdict: Verdict | None = None
        self._has_left = False
        self._crash = ""  # a clause on it, once this process has failed
        self._ending, self._wake = threading.Lock(), threading.Event()
        self._directory: Path | None = None

    @property
    def is_on(self) -> bool:
        """Whether this process is watched."""
        return self._least > 0

    def start(self, least_seconds: float) -> None:
        """Starts to watch this process, unless `least_seconds` is 0.

        Args:
          least_seconds: the least limit of every phase.
        """
        if least_seconds and not self.is_on:
            self._least, self._ticked, self._cpu_at_tick = least_seconds, self._clock(), self._cpu()
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def allow(self, phase: Phase, seconds: float) -> None:
        """Adds to the limit of a phase the time of waits in it that have limits of their own."""
        self._allowed[phase] = seconds

    def enter(self, phase: Phase, step: int = 0) -> None:
        """Reports that this process begins a phase; costs a few assignments."""
        if not self.is_on:
            return
        if (phase, step) != (self._phase, self._step):
            self._moves()
            self._longest[self._phase] = max(self._longest.get(self._phase, 0.0), self._longest_here)
            self._phase, self._step, self._longest_here = phase, step, 0.0
        self._position += 1
        if phase == "end":
            self._wake.set()

    def advance(self) -> None:
        """Reports that this process passed a place in the program, which all pass in the same order."""
        if self.is_on:
            self._moves()
            self._position += 1

    def _moves(self) -> None:
        now = self._time()
        self._longest_here = max(self._longest_here, now - self._began)
        self._began, self._computed = now, 0.0

    def write_to(self, directory: Path | None) -> None:
        """Sets the directory for stacks-PROCESS.txt; None: stacks go to stderr alone."""
        self._directory = directory

    def seconds_to_join(self, seconds: float) -> float:
        """At most half of the time without progress, so that the wait for the others ends first."""
        return min(seconds, self.stamp().limit / 2)

    def before_joining(self, process: int) -> dict[str, Any]:
        """Keeps jax from ending this process before the watchdog does."""
        from maxtext_lite.operations.watched_hosts import watched_arguments

        return watched_arguments(process, self.coordinator_is_gone)

    def after_joining(self, process: int, num_processes: int) -> None:
        """Joins the other processes through jax's store."""
        from maxtext_lite.operations.watched_hosts import CoordinationStore

        self.join(CoordinationStore(process, num_processes))

    def join(self, store: Store) -> None:
        """Joins the other processes through the store in which all publish their progress."""
        if self.is_on:
            self._answered = self._time()
            self._seen = dict.fromkeys(range(store.num_processes), (None, self._answered))
            self._store = store
            threading.Thread(target=self._tell, args=(store,), name="stamps", daemon=True).start()

    def finish(self, code: int, reason: str) -> None:
        """Reports the end of this process; if `code` is a failure, the others end with it and repeat the reason."""
        self._code, self._reason = code, reason[:_MOST_SAID]
        if self.is_on:
            self.enter("end")
            self.wait_for_the_others(max(GRACE_SECONDS, self._stale))
            self._has_left = True  # jax closes its client next
            if self._store and code not in ENDS_WELL:
                self._exit(code)  # jax would wait for the others, which end now, and abort with a stack trace

    def wait_for_the_others(self, seconds: float) -> None:
        """Waits until the others know that this process ends; process 0 waits until all end, as it serves the store."""
        deadline = self._clock() + seconds
        while self._store and self._clock() < deadline and not self._may_leave():
            time.sleep(0.05)

    def failed(self, error: BaseException) -> None:
        """Returns if no process is missing; otherwise the thread ends this one during the wait."""
        if self._store and not self._crash:
            first_line = str(error).partition("\n")[0]
            self._crash = f", which failed with {type(error).__name__}: {first_line}"[:300]
            time.sleep(max(GRACE_SECONDS, 2 * self._stale))

    def stamp(self) -> Stamp:
        """The current state of this process."""
        seconds = self._time() - self._began - self._computed
        limit = limit_of(self._longest.get(self._phase), max(self._least, self._stale))
        where = self._host, self._phase, self._step, self._position
        most = limit + self._allowed.get(self._phase, 0.0)
        return Stamp(*where, round(seconds, 1), round(most, 1), self._beat, self._code, self._reason)

    def tick(self) -> None:
        """Advances time. Time in which the whole process was suspended or starved does not count."""
        before, passed, computed = self._now, self._clock() - self._ticked, self._cpu() - self._cpu_at_tick
        self._now += min(passed, 5 * self._period)
        self._ticked += passed
        self._cpu_at_tick += computed
        if self._phase in COMPUTES and computed > _BUSY * passed:
            self._computed += self._now - before

    def exchange(self, store: Store) -> None:
        """Publishes the state of this process and reads those of the others."""
        self._beat += 1
        stamp = self.stamp()
        if self._verdict:
            store.put(_VERDICT, json.dumps(self._verdict))
            stamp = stamp._replace(phase="end", code=self._verdict.code)
        store.put(f"{store.process}", json.dumps(stamp))
        found = store.all()
        self._answered = self._time()
        if _VERDICT in found:
            self._verdict = self._verdict or Verdict(*json.loads(found[_VERDICT]))
        for process, (before, _) in self._seen.items():
            stamp = Stamp(*json.loads(found[str(process)])) if str(process) in found else None
            if stamp and (before is None or stamp.beat != before.beat):
                self._seen[process] = stamp, self._answered

    def look(self) -> Verdict | None:
        """The verdict that ends the run; None while it moves."""
        if self._verdict or self._phase == "end":
            return None if self.stamp().has_failed else self._verdict  # one that has failed leaves by itself
        grace = max(GRACE_SECONDS / 2 if self._crash else GRACE_SECONDS, self._stale)
        silent_after = grace if self._crash else max(self._least, self._stale)
        if self._store is None:
            return judge({0: Seen(self.stamp(), 0.0)}, silent_after=silent_after, grace=grace)
        now, me = self._time(), self._store.process
        silence = now - self._answered
        if me and silence > max(GRACE_SECONDS / 2, self._stale):  # the stamps of the others are stale
            return coordinator_lost(self._seen[0][0]) if silence > silent_after else None
        seen = {process: Seen(stamp, now - since) for process, (stamp, since) in self._seen.items()}
        return judge(seen, silent_after=silent_after, grace=grace)

    def coordinator_is_gone(self) -> None:
        """Ends this process, from any thread, before jax aborts it because process 0 is unreachable."""
        if self._phase == "end" or self._store is None:
            self._exit(self._code)
        else:
            self.end(self._verdict or coordinator_lost(self._seen[0][0]))

    def end(self, verdict: Verdict) -> None:
        """Prints the reason, of a stuck run also the stacks of all threads, and ends once the others know."""
        with self._ending:
            backstop = threading.Timer(_LAST_SECONDS, self._exit, (verdict.code,))
            backstop.daemon = True
            backstop.start()
            self._verdict = self._verdict or verdict
            self._wake.set()
            if verdict.code == EXIT_HANGS:
                self._report_stacks(verdict.text)
            else:
                complain(f"error: {verdict.text}")
            self.wait_for_the_others(max(GRACE_SECONDS, self._stale))
            self._exit(verdict.code)

    def _report_stacks(self, why: str) -> None:
        me = self._store.process if self._store else 0
        about = f"process {me} on {self._host} in {self.stamp().where}{self._crash}"
        text = f"error: {why}. Exit code {EXIT_HANGS}. Stacks of {about}:\n"
        with contextlib.suppress(OSError):  # stderr has no reader
            _write_stacks(2, text)
        if self._directory:
            with contextlib.suppress(OSError), (self._directory / f"stacks-{me}.txt").open("w") as file:
                _write_stacks(file.fileno(), text)

    @property
    def _period(self) -> float:
        return BEAT_SECONDS * max(1.0, len(self._seen) / PROCESSES_PER_BEAT)

    @property
    def _stale(self) -> float:
        """The age in seconds of a stamp that is late: its process and this one each exchange once in a period."""
        return 3 * self._period

    def _time(self) -> float:
        """Seconds that count, up to now."""
        return self._now + min(self._clock() - self._ticked, 5 * self._period)

    def _may_leave(self) -> bool:
        assert self._store is not None
        now, me = self._time(), self._store.process
        mine, _ = self._seen[me]
        if mine is None or not mine.has_ended:  # in the store
            return now - self._answered > 2 * self._period + 1  # it is out of reach
        late = now - 3 * self._period - 1
        return me > 0 or all(since < late or (stamp and stamp.has_ended) for stamp, since in self._seen.values())

    def _tell(self, store: Store) -> None:
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
