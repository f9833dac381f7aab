"""The progress of each process of a run, and the verdict on processes that hold up the others."""

from collections.abc import Mapping
from typing import NamedTuple

from maxtext_lite.config.phases import EXIT_HANGS, Phase

COMPUTES: tuple[Phase, ...] = ("start-up", "compile")
"""Phases without a limit while the process computes: nobody knows how long XLA compiles."""

FACTOR = 4
"""A phase hangs after this many times its longest duration so far, or this many least limits if it is the first."""

ENDS_WELL = (0, 75)

OWN_WORDS_SECONDS = 2.0
"""Time that a process has, after another has failed, to report the same failure itself."""

_MOST_NAMED = 8


class Stamp(NamedTuple):
    """The state of a process, as it tells the others.

    Attributes:
      step: of the phase; 0 before the first.
      position: count of places passed in the program; equal on all processes at the same place.
      seconds: since the phase began or last advanced; in the phases of COMPUTES without those spent computing.
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
        """Whether it has ended, so that nobody need wait for it."""
        return self.phase == "end"

    @property
    def has_failed(self) -> bool:
        """Whether it has ended in a way that the others cannot survive."""
        return self.has_ended and self.code not in ENDS_WELL

    @property
    def where(self) -> str:
        """`reading of step 7`."""
        of = " " if self.phase == "step" else " of step "
        return self.phase + (f"{of}{self.step}" if self.step else "")


class Verdict(NamedTuple):
    """The reason why all processes of a run end.

    Attributes:
      text: the message without `error: `.
      code: the exit code of all.
    """

    text: str
    code: int = EXIT_HANGS


class Seen(NamedTuple):
    """The newest stamp of a process, None before the first, and its age in seconds."""

    stamp: Stamp | None
    seconds: float


def limit_of(longest: float | None, least: float) -> float:
    """Seconds that a phase may take.

    Args:
      longest: its longest duration in this run; None for the first of its kind, which may compile.
    """
    return FACTOR * least if longest is None else max(least, FACTOR * longest)


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
    for i, (stamp, seconds) in seen.items():
        if stamp and stamp.has_failed and stamp.seconds + seconds > OWN_WORDS_SECONDS:
            return _failure(i, stamp)
    if any(stamp is None for stamp, _ in seen.values()):
        return None  # one has not joined yet
    at_work = {i: (stamp, seconds) for i, (stamp, seconds) in seen.items() if stamp and not stamp.has_ended}
    last = min((stamp.position for stamp, _ in at_work.values()), default=0)
    behind = {i: (stamp, stamp.seconds + more) for i, (stamp, more) in at_work.items() if stamp.position == last}
    if not behind or not all(seconds > stamp.limit for stamp, seconds in behind.values()):
        return None
    if silent := _silent(seen, grace):  # they are stopped or dead, and do not merely hang
        return Verdict(silent)
    said = [f"{_name(i, stamp)} in {stamp.where} for {seconds:.0f} s" for i, (stamp, seconds) in behind.items()]
    rest = "; the others wait" if len(behind) < len(seen) else ""
    limit = min(stamp.limit for stamp, _ in behind.values())
    return Verdict(f"no progress: {_listed(said)}, more than {limit:.0f} s{rest}")


def coordinator_lost(stamp: Stamp | None) -> Verdict:
    """The verdict when process 0, through which the others know of each other, is gone or stopped."""
    if stamp and stamp.has_failed:
        return _failure(0, stamp)
    last = f", last in {stamp.where}" if stamp and not stamp.has_ended else ""
    return Verdict(f"{_name(0, stamp)} does not answer{last}")


def _failure(process: int, stamp: Stamp) -> Verdict:
    reason = f": {stamp.reason}" if stamp.reason else ""
    return Verdict(f"{_name(process, stamp)} has failed with exit code {stamp.code}{reason}", stamp.code)


def _silent(seen: Mapping[int, Seen], after: float) -> str:
    said = [
        f"{_name(i, stamp)} does not answer, {seconds:.0f} s since it was in {stamp.where}"
        if stamp
        else f"{_name(i, stamp)} has not come"
        for i, (stamp, seconds) in seen.items()
        if seconds > after and not (stamp and stamp.has_ended)
    ]
    return _listed(said)


def _name(process: int, stamp: Stamp | None) -> str:
    return f"process {process}" + (" (coordinator)" if process == 0 else "") + (f" on {stamp.host}" if stamp else "")


def _listed(said: list[str]) -> str:
    more = f" and {len(said) - _MOST_NAMED} more" if len(said) > _MOST_NAMED else ""
    return ", ".join(said[:_MOST_NAMED]) + more
