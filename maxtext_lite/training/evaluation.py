"""The loss over held-out examples, by one jitted function."""

from collections.abc import Callable, Iterable, Iterator
from typing import cast

import jax
from jax.stages import Wrapped

from maxtext_lite.config.phases import phases
from maxtext_lite.data.feed import DeviceBatch, evaluation_batches
from maxtext_lite.parallel import (
    Params,
    Tree,
    devices_share_threads,
    in_context_order,
    sharding,
    tree_shardings,
    vmap_over_data,
)
from maxtext_lite.training.arrays import Record, Rows
from maxtext_lite.training.loss import forward
from maxtext_lite.training.metrics import evaluation_text
from maxtext_lite.training.objective import ScoredObjective
from maxtext_lite.training.run import TrainingRun
from maxtext_lite.training.state import StepContext, TrainState

EVAL_BATCH_AXES = ("global_batch", "length")


def make_eval_step(parts: StepContext) -> Wrapped:
    """The jitted function (params, batch [B, T]) -> the objective's scores of the examples, replicated.

    The objective must be a `ScoredObjective`; the scores of NEXT_TOKEN are (nll sums [B], target tokens [B]). `params`
    are all of the decoder's, as `Decoder.joined` gives them.
    """
    decoder = parts.decoder
    mesh = parts.mesh
    objective = cast(ScoredObjective, parts.objective)

    def scores(params: Params, rows: Rows) -> Tree:
        return objective.scores(forward(decoder, params, rows, parts.config), rows)

    by_replica = vmap_over_data(scores, mesh.shape["data"], rows=(1,))

    def eval_step(params: Params, batch: Rows) -> Tree:
        rows = in_context_order(objective.rows(batch, EVAL_BATCH_AXES), EVAL_BATCH_AXES)
        return jax.tree.map(lambda x_RB: x_RB.reshape(-1, *x_RB.shape[2:]), by_replica(decoder.cast(params), rows))

    return jax.jit(
        eval_step,
        in_shardings=(tree_shardings(mesh, decoder.axes), sharding(mesh, EVAL_BATCH_AXES)),
        out_shardings=sharding(mesh),
    )


def scores_of(eval_step: Wrapped, params: Params, batches: Iterable[DeviceBatch]) -> Iterator[Tree]:
    """The scores of each batch, on the host, while the devices work on the next.

    Args:
      eval_step: made by `make_eval_step`.
    """
    under_way = None
    for batch in batches:
        phases.advance()
        scores = eval_step(params, batch.arrays)
        if devices_share_threads():
            jax.block_until_ready(scores)
        if under_way is not None:
            yield jax.device_get(under_way)
        under_way = scores
    if under_way is not None:
        yield jax.device_get(under_way)


class HeldOutLoss:
    """A run's exact loss over its held-out examples, or over the first `eval_steps` batches; see `loop.Evaluation`.

    Each example counts once, whatever the batch size and the mesh.
    """

    before_first_step = False

    def __init__(self, run: TrainingRun):
        self._run = run
        self._objective = cast(ScoredObjective, run.parts.objective)
        self._eval_step = make_eval_step(run.parts)

    def evaluate(self, state: TrainState, step: int, stops: Callable[[], bool]) -> tuple[Record, str] | None:
        """The losses, over all examples and by held-out set."""
        del step
        run = self._run
        assert run.eval_source is not None
        where = sharding(run.mesh, EVAL_BATCH_AXES)
        trained = state.model_params
        if run.config.eval_parameters == "ema":
            average = jax.device_put(state.average, jax.tree.map(lambda p: p.sharding, trained))
            trained = jax.tree.map(lambda a, p: a.astype(p.dtype), average, trained)
        params = run.decoder.joined(trained, state.frozen)
        scores: dict[str, list[Tree]] = {}
        for name, source in run.eval_source.named().items():
            scores[name] = []
            with evaluation_batches(source, run.plan, sharding=where, eval_steps=run.config.eval_steps) as batches:
                for batch_scores in scores_of(self._eval_step, params, batches):
                    if stops():
                        return None
                    scores[name].append(batch_scores)
        record: Record = {**self._objective.evaluation([each for of_source in scores.values() for each in of_source])}
        text = evaluation_text(record)
        if run.eval_source.parts:
            losses = {name: self._objective.evaluation(each)["eval_loss"] for name, each in scores.items()}
            record["eval_losses"] = losses
            text += "".join(f"  {name} {loss:.4f}" for name, loss in losses.items())
        return record, text
