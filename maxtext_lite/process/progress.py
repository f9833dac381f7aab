"""How far each process of a run has come, and which of them hold up the others."""

import json
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
      seconds: since the phase began, less those in which it computes, where it may.
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
    def where(self) -> str:
        """`reading of step 7`."""
        of = " " if self.phase == "step" else " of step "
        return self.phase + (f"{of}{self.step}" if self.step else "")

    def to_json(self) -> str:
        """For the store."""
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, text: str) -> "Stamp":
        """As `to_json` wrote it."""
        return cls(**json.loads(text))


class Verdict(NamedTuple):
    """Why a run ends that does not move, as all its processes say it.

    Attributes:
      text: without `error: `.
      code: the exit code of all.
      by: the process that found it.
    """

    text: str
    code: int
    by: int

    def to_json(self) -> str:
        """For the store."""
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, text: str) -> "Verdict":
        """As `to_json` wrote it."""
        return cls(**json.loads(text))


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


def judge(seen: Mapping[int, Seen], *, silent_after: float, grace: float, by: int) -> Verdict | None:
    """Whether a run moves: None; else who holds it up.

    It does not where a process has been silent for too long, or has failed, or where all that are the furthest behind
    have been so for longer than they may. Those that are further wait for them.

    Args:
      silent_after: seconds after which a process that sets no stamp is stopped or dead.
      grace: seconds in which the others of one that has failed may fail alike.
    """
    if silent := _silent(seen, silent_after):
        return Verdict(silent, EXIT_HANGS, by)
    for i, (stamp, seconds) in seen.items():
        if stamp and _has_ended(stamp) and stamp.code not in ENDS_WELL and seconds > grace:
            return Verdict(f"{_name(i, stamp)} has failed with exit code {stamp.code}", stamp.code, by)
    at_work = {i: (each.stamp, each.seconds) for i, each in seen.items() if each.stamp and not _has_ended(each.stamp)}
    if len(at_work) < len(seen) and any(each.stamp is None for each in seen.values()):
        return None  # one has yet to come
    last = min((stamp.position for stamp, _ in at_work.values()), default=0)
    behind = {i: (stamp, stamp.seconds + more) for i, (stamp, more) in at_work.items() if stamp.position == last}
    if not behind or not all(seconds > stamp.limit for stamp, seconds in behind.values()):
        return None
    if silent := _silent(seen, grace):  # and so do not merely hang
        return Verdict(silent, EXIT_HANGS, by)
    said = [f"{_name(i, stamp)} in {stamp.where} for {seconds:.0f} s" for i, (stamp, seconds) in behind.items()]
    rest = "; the others wait" if len(behind) < len(seen) else ""
    limit = min(stamp.limit for stamp, _ in behind.values())
    return Verdict(f"nothing moves: {_listed(said)}, more than {limit:.0f} s{rest}", EXIT_HANGS, by)


def coordinator_lost(stamp: Stamp | None, by: int) -> Verdict:
    """Where process 0, without which the others know nothing of each other, is gone or stopped."""
    last = f", last in {stamp.where}" if stamp and not _has_ended(stamp) else ""
    if stamp and _has_ended(stamp) and stamp.code not in ENDS_WELL:
        return Verdict(f"{_name(0, stamp)} has failed with exit code {stamp.code}", stamp.code, by)
    return Verdict(f"{_name(0, stamp)} does not answer{last}", EXIT_HANGS, by)


def _silent(seen: Mapping[int, Seen], after: float) -> str:
    said = [
        f"{_name(i, stamp)} does not answer, {seconds:.0f} s since it was in {stamp.where}"
        if stamp
        else f"{_name(i, stamp)} has not come"
        for i, (stamp, seconds) in seen.items()
        if seconds > after and not _has_ended(stamp)
    ]
    return _listed(said)


def _has_ended(stamp: Stamp | None) -> bool:
    return stamp is not None and stamp.phase == "end"


def _name(process: int, stamp: Stamp | None) -> str:
    return f"process {process}" + (" (coordinator)" if process == 0 else "") + (f" on {stamp.host}" if stamp else "")


def _listed(said: list[str]) -> str:
    more = f" and {len(said) - _MOST_NAMED} more" if len(said) > _MOST_NAMED else ""
    return ", ".join(said[:_MOST_NAMED]) + more
