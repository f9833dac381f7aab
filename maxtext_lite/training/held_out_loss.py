"""The exact held-out loss: each held-out example counts once, whatever the batch size and the mesh."""

from collections.abc import Callable, Iterable, Iterator
from typing import cast

import jax
from jax.stages import Wrapped

from maxtext_lite.data import ExampleSource, MixtureSource, named_sources
from maxtext_lite.data.feed import DeviceBatch, evaluation_batches
from maxtext_lite.parallel import Params, Tree, sharding
from maxtext_lite.process.watchdog import watchdog
from maxtext_lite.training.arrays import Record
from maxtext_lite.training.failures import raise_unread
from maxtext_lite.training.metrics import evaluation_text
from maxtext_lite.training.objective import ScoredObjective
from maxtext_lite.training.run import TrainingRun
from maxtext_lite.training.state import TrainState
from maxtext_lite.training.step import EVAL_BATCH_AXES, make_eval_step


def scores_of(
    eval_step: Wrapped, params: Params, batches: Iterable[DeviceBatch], between: Callable[[], None] = lambda: None
) -> Iterator[Tree]:
    """The scores of each batch, on the host.

    Args:
      eval_step: made by `step.make_eval_step`.
      between: called before each batch.
    Raises:
      UnreadError: after the last batch, if a host could not read all rows; on all hosts.
    """
    problem = None
    for batch in batches:
        watchdog.advance()
        between()
        problem = problem or batch.problem
        yield jax.device_get(eval_step(params, batch.arrays))
    raise_unread(problem)


class HeldOutLoss:
    """A run's loss over its held-out examples, or over the first `eval_steps` batches; see `loop.Evaluation`."""

    before_first_step = False

    def __init__(self, run: TrainingRun[ExampleSource]):
        self._run, self._objective = run, cast(ScoredObjective, run.parts.objective)
        self._eval_step = make_eval_step(run.parts)

    def of(self, state: TrainState, step: int, between: Callable[[], None]) -> tuple[Record, str]:
        """See `loop.Evaluation`."""
        del step
        run = self._run
        assert run.eval_source is not None
        where = sharding(run.mesh, EVAL_BATCH_AXES)
        params = run.decoder.joined(state.model_params, state.frozen)
        scores: dict[str, list[Tree]] = {}
        for name, source in named_sources(run.eval_source).items():
            with evaluation_batches(source, run.plan, sharding=where, eval_steps=run.config.eval_steps) as batches:
                scores[name] = list(scores_of(self._eval_step, params, batches, between))
        found: Record = {**self._objective.evaluation([each for of_source in scores.values() for each in of_source])}
        text = evaluation_text(found)
        if isinstance(run.eval_source, MixtureSource):
            found["eval_losses"] = {
                name: self._objective.evaluation(each)["eval_loss"] for name, each in scores.items()
            }
            text += "".join(f"  {name} {loss:.4f}" for name, loss in found["eval_losses"].items())
        return found, text
