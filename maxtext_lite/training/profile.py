"""Profiler traces of the configured steps, and on demand."""

import contextlib
import time
from pathlib import Path

import jax

from maxtext_lite.config.shown import TracedSteps
from maxtext_lite.training.failures import Failures

FIRST_STEP = 3
"""The first step of a process that is traced by default: the two before it compile and fill caches."""
ON_DEMAND = "profile"
"""A file in the run directory that anyone may create to have the next steps traced."""
STEPS_ON_DEMAND = 3
_LOOK_SECONDS = 1.0
_MOST_DIGITS = 3  # of a demand


class Profile:
    """Traces of a few steps, for TensorBoard's profile plugin and xprof.

    Args:
      directory: of the run; traces are written into `tensorboard` there.
      asked: the steps of `profiler_steps`.
      failures: collects a trace that cannot be written.
      demands: the directory in which a file `profile` asks for a trace, of the number of steps in it or 3; None: none.
    """

    def __init__(self, directory: Path, asked: TracedSteps, failures: Failures, demands: Path | None):
        self._directory, self._asked, self._failures = directory / "tensorboard", asked, failures
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
        """Ends the current trace, if there is one, and writes it."""
        if self._last is not None:
            self._last = None
            try:
                jax.profiler.stop_trace()
            except jax.errors.JaxRuntimeError as error:  # XLA writes the file
                if str(self._directory) not in str(error):
                    raise
                self._failures.add_unwritten(f"{self._directory} cannot be written: {error}.")

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
