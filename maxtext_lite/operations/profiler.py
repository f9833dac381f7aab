"""Profiler traces of the configured steps, and on demand."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import jax

from maxtext_lite.config import UserError
from maxtext_lite.config.bucket import is_bucket
from maxtext_lite.config.errors import WriteError
from maxtext_lite.config.keys import TracedSteps
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


class ProfileHook(Hook):
    """Traces steps of a run, on the first host."""

    def __init__(self) -> None:
        self._profile: Profile | None = None

    def start(self, run: TrainingRun, state: TrainState, counts: TrainProgress, say: Callable[[str], None]) -> None:
        if run.is_first:
            demands = None if is_bucket(run.directory) else run.directory
            self._profile = Profile(run.files.directory, TracedSteps.of(run.config.profiler_steps), demands)
        self._before = counts.step

    def before_step(self, step: int) -> None:
        if self._profile:
            self._profile.before_step(step, step - self._before)

    def after_last_step(self) -> None:
        if self._profile:
            self._profile.close()

    def close(self) -> None:
        with contextlib.suppress(UserError):  # after the last step no trace is left
            self.after_last_step()


class Profile:
    """Traces of a few steps, for TensorBoard's profile plugin and xprof.

    Args:
      directory: of the run; traces are written into `tensorboard` there.
      asked: the steps of `profiler_steps`.
      demands: the directory in which a file `profile` asks for a trace, of the number of steps in it or 3; None: none.
    """

    def __init__(self, directory: Path, asked: TracedSteps, demands: Path | None):
        self._directory, self._asked = directory / "tensorboard", asked
        self._demand = None if demands is None else demands / ON_DEMAND
        self._last: int | None = None  # the last step of the current trace
        self._looked = 0.0

    def before_step(self, step: int, steps_here: int) -> None:
        """Starts or ends a trace before a step, which is the `steps_here`-th of this process, from 1."""
        if self._last is not None and step > self._last:
            self.close()
        if self._last is None:
            last = self._asked.last_from(step, steps_here, FIRST_STEP) or self._demanded(step)
            if last is not None:
                self._last = last
                jax.profiler.start_trace(str(self._directory))

    def close(self) -> None:
        """Ends the current trace, if there is one, and writes it.

        Raises:
          WriteError: it cannot be written.
        """
        if self._last is not None:
            self._last = None
            try:
                jax.profiler.stop_trace()
            except jax.errors.JaxRuntimeError as error:  # XLA writes the file
                if str(self._directory) not in str(error):
                    raise
                raise WriteError(f"{self._directory} cannot be written: {error}.") from None

    def _demanded(self, step: int) -> int | None:
        """The last step of a trace demanded since the last look, at most one look per second; None without a demand."""
        if self._demand is None or time.monotonic() - self._looked < _LOOK_SECONDS:
            return None
        self._looked = time.monotonic()
        with contextlib.suppress(OSError):
            text = self._demand.read_text(encoding="utf-8", errors="replace").strip()
            self._demand.unlink()
            is_number = text.isdecimal() and len(text) <= _MOST_DIGITS and int(text) > 0
            return step + (int(text) if is_number else STEPS_ON_DEMAND) - 1
        return None
