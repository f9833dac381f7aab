"""Profiler traces of the configured steps, and on demand."""

import contextlib
import time
from collections.abc import Callable

import jax

from maxtext_lite.config import UserError
from maxtext_lite.config.bucket import is_bucket
from maxtext_lite.config.errors import WriteError
from maxtext_lite.training.checkpoint import TrainProgress
from maxtext_lite.training.hooks import Hook
from maxtext_lite.training.run import TrainingRun
from maxtext_lite.training.state import TrainState

FIRST_STEP = 3
"""The first step of a process that is traced by default: the two before it compile and fill caches."""
ON_DEMAND = "profile"
"""A file in the run directory that anyone may create to have the next steps traced."""
STEPS_ON_DEMAND = 3
_LOOK_SECONDS = 1.0
_MOST_DIGITS = 3  # of a demand


def last_traced_step(profiler_steps: int | str, step: int, steps_here: int) -> int | None:
    """The last step of the trace that begins at this step; None: none begins.

    Args:
      profiler_steps: the number of steps after each start of the run, or a range of its steps, as 100-104.
      steps_here: the position of this step among those of the process, from 1.
    """
    if isinstance(profiler_steps, int):
        begins = profiler_steps > 0 and steps_here == FIRST_STEP
        return step + profiler_steps - 1 if begins else None
    first, last = map(int, profiler_steps.split("-"))
    begins = step == first or (steps_here == 1 and first < step <= last)  # as after a restart within the range
    return last if begins else None


class ProfileHook(Hook):
    """Traces a few steps of a run on the first host, for TensorBoard's profile plugin and xprof.

    It traces `profiler_steps`, and the next steps whenever there is a file `profile` in the run directory.
    """

    def __init__(self) -> None:
        self._is_on = False
        self._last: int | None = None  # the last step of the current trace
        self._looked = 0.0

    def start(self, run: TrainingRun, state: TrainState, counts: TrainProgress, say: Callable[[str], None]) -> None:
        self._is_on = run.is_first
        self._directory = run.files.directory / "tensorboard"
        self._profiler_steps = run.config.profiler_steps
        self._demand = None if is_bucket(run.directory) else run.directory / ON_DEMAND
        self._done_before = counts.step

    def before_step(self, step: int) -> None:
        if not self._is_on:
            return
        if self._last is not None and step > self._last:
            self.after_last_step()
        if self._last is None:
            steps_here = step - self._done_before
            self._last = last_traced_step(self._profiler_steps, step, steps_here) or self._demanded(step)
            if self._last is not None:
                jax.profiler.start_trace(str(self._directory))

    def after_last_step(self) -> None:
        """Ends the current trace, if there is one, and writes it.

        Raises:
          WriteError: it cannot be written.
        """
        if self._last is None:
            return
        self._last = None
        try:
            jax.profiler.stop_trace()
        except jax.errors.JaxRuntimeError as error:  # XLA writes the file
            if str(self._directory) not in str(error):
                raise
            raise WriteError(f"{self._directory} cannot be written: {error}.") from None

    def close(self) -> None:
        with contextlib.suppress(UserError):  # after the last step no trace is left
            self.after_last_step()

    def _demanded(self, step: int) -> int | None:
        """The last step of a trace requested since the last look; None without a request. Looks once a second at
        most."""
        if self._demand is None or time.monotonic() - self._looked < _LOOK_SECONDS:
            return None
        self._looked = time.monotonic()
        try:
            text = self._demand.read_text(encoding="utf-8", errors="replace").strip()
            self._demand.unlink()
        except OSError:
            return None
        is_number = text.isdecimal() and len(text) <= _MOST_DIGITS and int(text) > 0
        return step + (int(text) if is_number else STEPS_ON_DEMAND) - 1
