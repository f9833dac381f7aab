"""The log-probabilities of a batch's tokens under given parameters, those of the old policy or of the reference."""

from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp

from maxtext_lite.parallel import (
    Params,
    constrain,
    in_context_order,
    in_token_order,
    over_replicas,
    sharding,
    tree_shardings,
)
from maxtext_lite.training.arrays import Rows
from maxtext_lite.training.gradients import TRAIN_BATCH_AXES
from maxtext_lite.training.outputs import forward
from maxtext_lite.training.state import StepParts

_NEEDED = ("tokens", "targets", "segments", "positions", "weights")


def make_log_probabilities(parts: StepParts, temperature: float) -> Callable[[Params, dict[str, jax.Array]], jax.Array]:
    """The jitted function (params, batch) -> log-probabilities of the targets, float32 [A, B, T]; 0 without a target.

    The result has the batch's sharding and token order; one micro-batch is computed at a time. `params` are all of the
    decoder's, as `Decoder.joined` gives them; of the batch's arrays [A, B, T] only those of pre-training are read.

    Args:
      temperature: divides the logits; the policy is their softmax.
    """
    decoder, mesh = parts.decoder, parts.mesh

    def of_rows(params: Params, rows: Rows) -> jax.Array:
        nll_BT = forward(decoder, params, rows, parts.config).nll(rows["targets"], temperature)
        return jnp.where(rows["weights"] > 0, -nll_BT, 0)

    by_replica = over_replicas(of_rows, mesh.shape["data"], rows=(1,))

    def log_probabilities(params: Params, batch: Rows) -> jax.Array:
        batch = in_context_order({name: batch[name] for name in _NEEDED}, TRAIN_BATCH_AXES)
        cast_params = decoder.cast(params)

        def of_micro_batch(rows: Rows) -> jax.Array:
            # Weights are gathered where they are used, as in `gradients.GradientLoop.added`.
            here, rows = jax.lax.optimization_barrier((cast_params, rows))
            found_RBT = by_replica(here, rows)
            return constrain(found_RBT.reshape(-1, found_RBT.shape[-1]), TRAIN_BATCH_AXES[1:])

        return in_token_order(cast(jax.Array, jax.lax.map(of_micro_batch, batch)), TRAIN_BATCH_AXES)

    where = sharding(mesh, TRAIN_BATCH_AXES)
    return jax.jit(log_probabilities, in_shardings=(tree_shardings(mesh, decoder.axes), where), out_shardings=where)
