"""The types of the keys about profiles and experiment trackers."""

import difflib
import importlib.util
import re
from dataclasses import dataclass
from typing import Annotated, cast

from pydantic import BeforeValidator

from maxtext_lite.config.errors import UserError, WrongType, install_text, value_text

TRACKERS = ("tensorboard", "wandb", "mlflow")
_RANGE = re.compile(r"([0-9]{1,9})-([0-9]{1,9})\Z")
_MOST_STEPS = 2**31 - 1


@dataclass(frozen=True)
class TracedSteps:
    """The steps that the profiler traces.

    Attributes:
      count: the number of steps after each start of the run, where no range is given.
      steps: the first and the last step of the run to trace; None: `count` applies.
    """

    count: int = 0
    steps: tuple[int, int] | None = None

    @classmethod
    def of(cls, value: int | str) -> "TracedSteps":
        """The steps named by a value of `profiler_steps`."""
        if isinstance(value, int):
            return cls(value)
        first, last = map(int, value.split("-"))
        return cls(steps=(first, last))

    def last_from(self, step: int, steps_here: int, first_here: int) -> int | None:
        """The last step of the trace that begins at this step; None: none begins.

        Args:
          steps_here: the position of this step among those of the process, from 1.
          first_here: the position of the step at which a trace of `count` steps begins.
        """
        if self.steps is not None:
            first, last = self.steps
            begins = step == first or (steps_here == 1 and first < step <= last)  # as after a restart within the range
            return last if begins else None
        return step + self.count - 1 if self.count and steps_here == first_here else None


def _traced_steps(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_STEPS:
        return value
    found = _RANGE.match(value) if isinstance(value, str) else None
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise WrongType("is neither a number of steps nor a range such as 100-104.", [0])
    return value


def _tracker_names(value: object) -> str:
    """Comma-separated names, from a list or from such text."""
    if isinstance(value, str):  # on the command line, a list for a key of text arrives as text
        value = [each.strip() for each in value.strip().removeprefix("[").removesuffix("]").split(",") if each.strip()]
    if not isinstance(value, list):
        raise WrongType("is not a list of names.")
    names = cast("list[object]", value)
    for name in names:
        if name not in TRACKERS:
            near = difflib.get_close_matches(str(name), TRACKERS, n=1)
            raise WrongType(f"has {value_text(name, 40)}, which is none of {', '.join(TRACKERS)}.", near)
    if len(set(names)) < len(names):
        raise WrongType("names one twice.", [",".join(dict.fromkeys(map(str, names)))])
    return ",".join(map(str, names))


StepsToTrace = Annotated[int | str, BeforeValidator(_traced_steps)]
"""A number of steps, or a range of the run's steps such as 100-104."""
TrackerNames = Annotated[str, BeforeValidator(_tracker_names)]
"""Some of `TRACKERS`, comma-separated; may be given as a list."""


def tracker_names(log_to: str) -> list[str]:
    """The names in `log_to`."""
    return [name for name in log_to.split(",") if name]


def require_trackers(log_to: str) -> None:
    """Raises a UserError if a tracker in `log_to` is not installed."""
    extras = [name for name in tracker_names(log_to) if name != "tensorboard"]
    if missing := [name for name in extras if importlib.util.find_spec(name) is None]:
        raise UserError(f"log_to={name} needs {name}: {install_text(name)}." for name in missing)
