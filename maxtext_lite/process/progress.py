"""How far each process of a run has come, and which of them hold up the others."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

Phase = Literal["start-up", "compile", "reading", "step", "rollout", "save", "evaluation", "end"]
"""What a process does; "end" is after the last of it."""

COMPUTES: tuple[Phase, ...] = ("start-up", "compile")
"""Phases that may take any time as long as the process computes: nobody knows how long XLA compiles."""

FACTOR = 4
"""A phase hangs when it takes this many times its longest so far; before there is a longest, the least limit."""

EXIT_HANGS = 76
ENDS_WELL = (0, 75)
_MOST_NAMED = 8


class Stamp(NamedTuple):
    """A process as it describes itself to the others.

    Attributes:
      step: of the phase; 0 before the first.
      position: what it has come past, a count that is the same for all at the same place in the program.
      seconds: since the phase began or got on, less those in which it computes, where it may.
      limit: of `seconds`.
      beat: a count that grows as long as the process runs.
      code: at the end its exit code.
    """

    host: str
    phase: Phase
    step: int
    position: int
    seconds: float
    limit: float
    beat: int
    code: int = 0

    @property
    def has_ended(self) -> bool:
        """Whether the others need not wait for it."""
        return self.phase == "end"

    @property
    def has_failed(self) -> bool:
        """Whether it has ended, and the others cannot go on."""
        return self.has_ended and self.code not in ENDS_WELL

    @property
    def where(self) -> str:
        """`reading of step 7`."""
        of = " " if self.phase == "step" else " of step "
        return self.phase + (f"{of}{self.step}" if self.step else "")


class Verdict(NamedTuple):
    """Why a run ends that does not move, as all its processes say it.

    Attributes:
      text: without `error: `.
      code: the exit code of all.
    """

    text: str
    code: int = EXIT_HANGS


class Seen(NamedTuple):
    """The newest stamp of a process, None where it has set none; and for how long there has been no newer one."""

    stamp: Stamp | None
    seconds: float


def limit_of(longest: float | None, least: float) -> float:
    """Seconds that a phase may take.

    Args:
      longest: it has taken so far in this run; None: it has not been done yet, such as a first step, which is long.
    """
    return FACTOR * least if longest is None else max(least, FACTOR * longest)


def judge(seen: Mapping[int, Seen], *, silent_after: float, grace: float) -> Verdict | None:
    """Whether a run moves: None; else who holds it up.

    It does not where a process has been silent for too long, or has failed, or where all that are the furthest behind
    have been so for longer than they may. Those that are further wait for them.

    Args:
      silent_after: seconds after which a process that sets no stamp is stopped or dead.
      grace: seconds in which the others of one that has failed may fail alike.
    """
    if silent := _silent(seen, silent_after):
        return Verdict(silent)
    for i, (stamp, seconds) in seen.items():
        if stamp and stamp.has_failed and seconds > grace:
            return _failure(i, stamp)
    if any(stamp is None for stamp, _ in seen.values()):
        return None  # one has yet to come
    at_work = {i: (stamp, seconds) for i, (stamp, seconds) in seen.items() if stamp and not stamp.has_ended}
    last = min((stamp.position for stamp, _ in at_work.values()), default=0)
    behind = {i: (stamp, stamp.seconds + more) for i, (stamp, more) in at_work.items() if stamp.position == last}
    if not behind or not all(seconds > stamp.limit for stamp, seconds in behind.values()):
        return None
    if silent := _silent(seen, grace):  # and so do not merely hang
        return Verdict(silent)
    said = [f"{_name(i, stamp)} in {stamp.where} for {seconds:.0f} s" for i, (stamp, seconds) in behind.items()]
    rest = "; the others wait" if len(behind) < len(seen) else ""
    limit = min(stamp.limit for stamp, _ in behind.values())
    return Verdict(f"nothing moves: {_listed(said)}, more than {limit:.0f} s{rest}")


def coordinator_lost(stamp: Stamp | None) -> Verdict:
    """Where process 0, without which the others know nothing of each other, is gone or stopped."""
    if stamp and stamp.has_failed:
        return _failure(0, stamp)
    last = f", last in {stamp.where}" if stamp and not stamp.has_ended else ""
    return Verdict(f"{_name(0, stamp)} does not answer{last}")


def _failure(process: int, stamp: Stamp) -> Verdict:
    return Verdict(f"{_name(process, stamp)} has failed with exit code {stamp.code}", stamp.code)


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
