"""The progress of each process of a run, and the verdict on processes that hold up the others."""

from collections.abc import Mapping
from typing import NamedTuple

from maxtext_lite.config.phases import EXIT_HANGS, Phase

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
