"""The train step of a batch that arrives in chunks."""

import jax
import jax.numpy as jnp

from maxtext_lite.parallel import sharding
from maxtext_lite.training.arrays import Metrics, Rows
from maxtext_lite.training.gradients import (
    TRAIN_BATCH_AXES,
    StepGradients,
    accumulate_micro_batches,
    correct_expected,
    count_rows,
    rows_of_batch,
    sum_over_replicas,
    zero_gradients,
    zero_gradients_shardings,
)
from maxtext_lite.training.optimizer import Schedule
from maxtext_lite.training.state import StepContext, TrainState, state_shardings
from maxtext_lite.training.step import apply_gradients


class ChunkedStep:
    """The train step of a batch that arrives in chunks: `start`, `add` for each chunk, then `update`, all jitted.

    Attributes:
      start: () -> StepGradients before the first chunk.
      add: (state, sums, batch) -> sums plus those of a chunk, whose arrays are [A, B, T], of any A and B; the sums
        passed in are donated, the state is not.
      update: (state, sums) -> (state, metrics) as in `make_train_step`, after the last chunk; the state passed in is
        donated. Gradients cross the data axis here, and only here. The sums, one float32 number per gradient, are not
        donated: drop them before the next step.
    Args:
      expected: the objective's expected count for the whole step. It divides the chunks' losses in place of the actual
        count; `update` corrects for it.
    """

    def __init__(self, parts: StepContext, schedule: Schedule, *, expected: int):
        assert parts.local is None
        expected_R = jnp.full(parts.num_replicas, expected, jnp.float32)

        def add(state: TrainState, sums: StepGradients, batch: Rows) -> StepGradients:
            loss_scale = parts.optimizer.loss_scale(state.opt_state)
            rows = rows_of_batch(parts, batch)
            sums = accumulate_micro_batches(
                parts, sums, state.params, state.frozen, rows, expected_R, loss_scale=loss_scale
            )
            return sums._replace(counts=jax.tree.map(jnp.add, sums.counts, count_rows(parts, rows)))

        def update(state: TrainState, sums: StepGradients) -> tuple[TrainState, Metrics]:
            step = sum_over_replicas(parts, sums, expected_R, parts.optimizer.loss_scale(state.opt_state))
            step = correct_expected(step, expected_R[0], step.counts[parts.objective.divisor])
            return apply_gradients(parts, schedule, state, step)

        shardings = state_shardings(parts)
        of_sums = zero_gradients_shardings(parts)
        of_batch = sharding(parts.mesh, TRAIN_BATCH_AXES)
        self.start = jax.jit(lambda: zero_gradients(parts), out_shardings=of_sums)
        self.add = jax.jit(add, donate_argnums=1, in_shardings=(shardings, of_sums, of_batch), out_shardings=of_sums)
        # Donating the sums would gain nothing: no result has their shape, with its dim for replicas.
        self.update = jax.jit(
            update,
            donate_argnums=0,
            in_shardings=(shardings, of_sums),
            out_shardings=(shardings, sharding(parts.mesh)),
        )
