"""goodput.json: how a run spent its time, over all its starts. Imports no jax."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic

STEP_PHASES = ("step", "rollout")
"""The phases of a step; in reinforcement learning its responses are sampled first."""


@dataclasses.dataclass(frozen=True)
class Start:
    """One start of a run.

    Attributes:
      began, ended: in seconds since 1970; the end is the time of its last sign of life.
      first_step, last_step: it resumed after the first one and finished the last one.
      kept_step: its steps up to this one count; later starts repeated the others.
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
        """Seconds spent on steps that count."""
        done = self.last_step - self.first_step
        return self.of_steps * (self.kept_step - self.first_step) / done if done else 0.0

    @property
    def of_steps(self) -> float:
        """Seconds spent on steps."""
        return sum(self.seconds.get(phase, 0.0) for phase in STEP_PHASES)

    def before(self, step: int) -> "Start":
        """The start after a later start has resumed after this step."""
        return dataclasses.replace(self, kept_step=max(self.first_step, min(self.kept_step, step)))


def spent(starts: Sequence[Start]) -> dict[str, float]:
    """The seconds of a run by activity, which add up to the time from its first start to now.

    `training` is for steps that count, and `repeated` for those that a later start did again; `down` is the time
    between starts, and between the last sign of life of a start and its end.
    """
    found = {"training": sum(start.useful for start in starts)}
    for start in starts:
        others = {phase: seconds for phase, seconds in start.seconds.items() if phase not in STEP_PHASES}
        for name, seconds in (others | {"repeated": start.of_steps - start.useful}).items():
            found[name] = found.get(name, 0.0) + seconds
    if starts:
        found["down"] = starts[-1].ended - starts[0].began - sum(found.values())
    return {name: max(seconds, 0.0) for name, seconds in found.items()}


def goodput_text(starts: Sequence[Start]) -> str:
    """A sentence on the goodput of a run; "" before any time has passed."""
    seconds = spent(starts)
    total = sum(seconds.values())
    if not total:
        return ""
    rest = sorted(((s, name) for name, s in seconds.items() if name != "training" and s >= 0.05), reverse=True)
    other = ", ".join(f"{name} {s:,.1f}" for s, name in rest) or "nothing"
    count = f"{len(starts)} start" + ("" if len(starts) == 1 else "s")
    training = seconds["training"]
    return (
        f"goodput {training / total:.1%}: {training:,.1f} s of {total:,.1f} in {count} were spent on steps that count; "
        f"the rest, in seconds: {other}"
    )


_STARTS = pydantic.TypeAdapter(list[Start])


def starts_of(found: Any) -> list[Start]:
    """The starts in the content of goodput.json; none where it is damaged."""
    try:
        return _STARTS.validate_python(found["starts"])
    except (KeyError, TypeError, pydantic.ValidationError):
        return []
