"""The trace of a few steps, which TensorBoard's profile plugin shows."""

from pathlib import Path

import jax

from maxtext_lite.training.failures import Failures

FIRST_STEP = 3
"""The first that is traced, of those that this process makes: the two before it compile and fill caches."""


class Profile:
    """Traces `num_steps` steps from the third of this process on; 0: none.

    Args:
      directory: of TensorBoard's files.
      failures: are told of a trace that cannot be written.
    """

    def __init__(self, directory: Path, num_steps: int, failures: Failures):
        self._directory, self._num_steps, self._failures = directory, num_steps, failures
        self._is_tracing = False

    def before_step(self, steps_here: int) -> None:
        """Call it before each step, whose number of those of this process is `steps_here`, from 1 on."""
        if steps_here == FIRST_STEP and self._num_steps:
            jax.profiler.start_trace(str(self._directory))
            self._is_tracing = True
        elif steps_here == FIRST_STEP + self._num_steps:
            self.close()

    def close(self) -> None:
        """Ends a trace that is under way and writes it."""
        if self._is_tracing:
            self._is_tracing = False
            with self._failures.of_writing(self._directory):
                jax.profiler.stop_trace()
