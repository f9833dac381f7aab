"""Prints a run's noise scale at the end of the run."""

from collections.abc import Callable

from maxtext_lite.training.arrays import Record
from maxtext_lite.training.checkpoint import TrainProgress
from maxtext_lite.training.hooks import Hook
from maxtext_lite.training.run import TrainingRun
from maxtext_lite.training.state import TrainState


class AdviceHook(Hook):
    """Compares the batch with the noise scale at the end of a run that has measured it."""

    def start(self, run: TrainingRun, state: TrainState, counts: TrainProgress, say: Callable[[str], None]) -> None:
        self._run = run
        self._last_step = counts.step + run.steps_left(counts)
        self._newest: Record = {}

    def written(self, record: Record) -> None:
        if record.get("gradient_noise_scale") is not None:
            self._newest = record

    def saved(self) -> str:
        newest = self._newest
        if newest.get("step") != self._last_step or self._run.plan.rl is not None:  # nothing after a stop
            return ""
        from maxtext_lite.analysis.laws import measured_scale  # most runs do not measure it

        measured = measured_scale(newest["gradient_noise_scale"], newest["gradient_noise_scale_error"])
        return f"{measured}, the batch {newest['global_batch_to_train']:,}; `report` says what follows"
