"""Where a gradient that is not finite comes from: which micro-batch, which examples, which parameter first."""

# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# jax, optax and orbax declare some of their functions in part.

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_lite.training.arrays import Params, Rows, Scalar, Tree
from maxtext_lite.training.gradients import accumulate_gradients
from maxtext_lite.training.state import StepParts, TrainState

_MOST_EXAMPLES = 8


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """The culprits of a step.

    Attributes:
      micro_batch: number of the first micro-batch whose gradient is not finite, from 0.
      example_ids: ids of its examples that alone have a gradient that is not finite, the first few; all of the
        micro-batch's where none has by itself.
      parameter: first parameter, in the tree's order, whose gradient is not finite.
    """

    micro_batch: int
    example_ids: tuple[int, ...]
    parameter: str

    def __str__(self) -> str:
        ids = ", ".join(map(str, self.example_ids[:_MOST_EXAMPLES]))
        more = ", ..." if len(self.example_ids) > _MOST_EXAMPLES else ""
        return (
            f"micro-batch {self.micro_batch}, example ids {ids}{more}, first parameter whose gradient is not finite: "
            f"{self.parameter}"
        )


def find_nonfinite(
    parts: StepParts, state: TrainState, batch: Rows, example_ids: np.ndarray, *, micro_batches: int
) -> NonFinite | None:
    """Looks for the cause by taking the gradient of ever smaller parts of a step; None where every part is finite.

    Args:
      state: of the step or a later one: it leaves the parameters that it had, and so do those after it.
      batch: [A, B, T], as the step had it.
      example_ids: of the whole step; example j is in micro-batch j % micro_batches, slot j // micro_batches.
      micro_batches: those of the A that are in use.
    """
    # The simulated devices of a CPU can do only one thing at a time, and a later step may be under way.
    params, frozen = jax.block_until_ready((state.params, state.frozen))
    loss_scale = parts.optimizer.loss_scale(state.opt_state)
    step_gradients = accumulate_gradients(parts)

    @jax.jit
    def finite_leaves(
        params: Params, frozen: Params | None, batch: Rows, micro_batch: Scalar, first: Scalar, stop: Scalar
    ) -> Tree:
        slots = jnp.arange(batch["weights"].shape[1])
        kept_1B1 = ((slots >= first) & (slots < stop))[None, :, None]
        part = {name: jax.lax.dynamic_slice_in_dim(x, micro_batch, 1) for name, x in batch.items()}
        # Selected, not multiplied: what is left out may itself be no number.
        part |= {name: jnp.where(kept_1B1, part[name], jnp.zeros_like(part[name])) for name in part}
        gradients = step_gradients(params, part, None, loss_scale, frozen).gradients
        return jax.tree.map(lambda g: jnp.all(jnp.isfinite(g)), gradients)

    def bad_leaves(micro_batch: int, first: int, stop: int) -> list[str]:
        leaves = jax.tree_util.tree_leaves_with_path(
            jax.device_get(finite_leaves(params, frozen, batch, micro_batch, first, stop))
        )
        return [jax.tree_util.keystr(path, simple=True, separator=".") for path, finite in leaves if not finite]

    num_slots = batch["weights"].shape[1]
    for micro_batch in range(micro_batches):
        names = bad_leaves(micro_batch, 0, num_slots)
        if not names:
            continue
        ids = example_ids[micro_batch::micro_batches]
        found: list[int] = []
        spans = [(0, len(ids))]
        while spans and len(found) <= _MOST_EXAMPLES:  # halves, the earlier one first
            first, stop = spans.pop()
            if not bad_leaves(micro_batch, first, stop):
                continue
            if stop - first == 1:
                found.append(int(ids[first]))
            else:
                middle = (first + stop) // 2
                spans += [(middle, stop), (first, middle)]
        return NonFinite(micro_batch, tuple(found) or tuple(map(int, ids)), names[0])
    return None
