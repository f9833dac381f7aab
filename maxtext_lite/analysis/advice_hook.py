"""What a run's noise scale says about its batch, printed at the end of the run."""

from collections.abc import Callable

from maxtext_lite.analysis.laws import batch_size_advice, laws_beside
from maxtext_lite.training.arrays import Record
from maxtext_lite.training.checkpoint import TrainProgress
from maxtext_lite.training.hooks import Hook
from maxtext_lite.training.run import TrainingRun
from maxtext_lite.training.state import TrainState


class AdviceHook(Hook):
    """Advises on the batch size at the end of a run that has measured its noise scale."""

    def start(self, run: TrainingRun, state: TrainState, counts: TrainProgress, say: Callable[[str], None]) -> None:
        self._run = run
        self._newest: Record = {}

    def written(self, record: Record) -> None:
        if record.get("gradient_noise_scale") is not None:
            self._newest = record

    def saved(self) -> str:
        config, plan, newest = self._run.config, self._run.plan, self._newest
        if not newest or plan.rl is not None:
            return ""
        advice = batch_size_advice(
            newest["gradient_noise_scale"], newest["gradient_noise_scale_error"], newest["global_batch_to_train"]
        )
        if config.objective != "pretrain":
            return advice
        _, examples = plan.length.end_after(newest["step"], newest["examples_seen"])
        return f"{advice}\n{laws_beside(config, examples * config.max_target_length)}"
