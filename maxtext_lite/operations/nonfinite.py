"""The origin of a non-finite gradient: its micro-batch, its examples and its first parameter."""

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_lite.config.phases import phases
from maxtext_lite.parallel import Params, Tree
from maxtext_lite.training.arrays import Rows, Scalar
from maxtext_lite.training.gradients import step_gradients
from maxtext_lite.training.state import StepContext, TrainState

_MOST_EXAMPLES = 8


def origin_of_nonfinite(
    parts: StepContext, state: TrainState, batch: Rows, example_ids: np.ndarray, *, micro_batches: int
) -> str:
    """A clause on the origin, found by bisection: the gradients of ever smaller parts of a step.

    It names the first micro-batch with a non-finite gradient, the first few of its examples whose own gradient is not
    finite (all of them where no single one's is), and the first parameter in the tree's order with one.

    Args:
      state: of the step or a later one; it still has the step's parameters, as no later step changes them.
      batch: [A, B, T], that of the step.
      example_ids: of the whole step; example j is in micro-batch j % micro_batches, slot j // micro_batches.
      micro_batches: those of the A that are in use.
    """
    # The simulated devices of a CPU run one program at a time, and a later step may be running.
    params, frozen = jax.block_until_ready((state.params, state.frozen))
    loss_scale = parts.optimizer.loss_scale(state.opt_state)

    @jax.jit
    def finite_leaves(
        params: Params, frozen: Params | None, batch: Rows, micro_batch: Scalar, first: Scalar, stop: Scalar
    ) -> Tree:
        slots = jnp.arange(batch["weights"].shape[1])
        kept_1B1 = ((slots >= first) & (slots < stop))[None, :, None]
        part = {name: jax.lax.dynamic_slice_in_dim(x, micro_batch, 1) for name, x in batch.items()}
        # Selected, not multiplied: the values to exclude may be NaN.
        part |= {name: jnp.where(kept_1B1, part[name], jnp.zeros_like(part[name])) for name in part}
        gradients = step_gradients(parts, params, part, None, loss_scale, frozen).gradients
        return jax.tree.map(lambda g: jnp.all(jnp.isfinite(g)), gradients)

    def bad_leaves(micro_batch: int, first: int, stop: int) -> list[str]:
        phases.advance()
        leaves = jax.tree_util.tree_leaves_with_path(
            jax.device_get(finite_leaves(params, frozen, batch, micro_batch, first, stop))
        )
        return [jax.tree_util.keystr(path, simple=True, separator=".") for path, finite in leaves if not finite]

    phases.enter("compile")
    num_slots = batch["weights"].shape[1]
    for micro_batch in range(micro_batches):
        names = bad_leaves(micro_batch, 0, num_slots)
        if not names:
            continue
        ids = example_ids[micro_batch::micro_batches]
        found: list[int] = []
        spans = [(0, len(ids))]
        while spans and len(found) <= _MOST_EXAMPLES:  # the earlier half first
            first, stop = spans.pop()
            if not bad_leaves(micro_batch, first, stop):
                continue
            if stop - first == 1:
                found.append(int(ids[first]))
            else:
                middle = (first + stop) // 2
                spans += [(middle, stop), (first, middle)]
        shown = found or ids.tolist()
        more = ", ..." if len(shown) > _MOST_EXAMPLES else ""
        return (
            f"micro-batch {micro_batch}, example ids {', '.join(map(str, shown[:_MOST_EXAMPLES]))}{more}, first "
            f"parameter whose gradient is not finite: {names[0]}"
        )
    return "each part of it is finite by itself"
