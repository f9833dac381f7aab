"""goodput.json: over all starts of a run, what its time went to. Imports no jax."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

STEP = "step"


@dataclasses.dataclass(frozen=True)
class Start:
    """One start of a run.

    Attributes:
      began, ended: in seconds since 1970; the end is when it was last heard of.
      first_step, last_step: it went on after the one, and did those up to the other.
      kept_step: those up to here count; later starts did the others again.
      seconds: by phase.
    """

    began: float
    ended: float
    first_step: int
    last_step: int
    kept_step: int
    seconds: Mapping[str, float]

    @property
    def useful(self) -> float:
        """Seconds of steps that count."""
        done = self.last_step - self.first_step
        return self.seconds.get(STEP, 0.0) * (self.kept_step - self.first_step) / done if done else 0.0

    def before(self, step: int) -> "Start":
        """As a later start leaves it, which goes on after this step."""
        return dataclasses.replace(self, kept_step=max(self.first_step, min(self.kept_step, step)))


def spent(starts: Sequence[Start]) -> dict[str, float]:
    """Seconds of a run by what they went to, which add up to the time from its first start to now.

    `training` is of steps that count, `repeated` of those that were done again later; `down` lies between starts, and
    between the last that was heard of one and its end.
    """
    found = {"training": sum(start.useful for start in starts)}
    for start in starts:
        for phase, seconds in start.seconds.items():
            name, more = (phase, seconds) if phase != STEP else ("repeated", seconds - start.useful)
            found[name] = found.get(name, 0.0) + more
    if starts:
        found["down"] = starts[-1].ended - starts[0].began - sum(found.values())
    return {name: max(seconds, 0.0) for name, seconds in found.items()}


def goodput(starts: Sequence[Start]) -> float | None:
    """The share of a run's time that went to steps that count; None before it has taken any time."""
    seconds = spent(starts)
    total = sum(seconds.values())
    return seconds["training"] / total if total else None


def goodput_text(starts: Sequence[Start]) -> str:
    """A sentence on it."""
    seconds, share = spent(starts), goodput(starts)
    if share is None:
        return ""
    rest = sorted(((s, name) for name, s in seconds.items() if name != "training" and s >= 0.05), reverse=True)
    other = ", ".join(f"{name} {s:,.1f}" for s, name in rest) or "nothing"
    count = f"{len(starts)} start" + ("" if len(starts) == 1 else "s")
    return (
        f"goodput {share:.1%}: {seconds['training']:,.1f} s of {sum(seconds.values()):,.1f} in {count} went to steps "
        f"that count; the others, in seconds: {other}"
    )


def starts_of(found: Any) -> list[Start]:
    """The starts in a goodput.json that has been read; none where it is damaged."""
    try:
        return [Start(**each) for each in found["starts"]]
    except (KeyError, TypeError):
        return []
