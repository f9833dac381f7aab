"""Log-probabilities that parameters give to the tokens of a batch: those of the old policy, or of the reference."""

# pyright: reportUnknownMemberType=false
# jax declares some of its functions in part.

from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp

from maxtext_lite.models.decoder import Params
from maxtext_lite.parallel import (
    constrain,
    in_context_order,
    in_token_order,
    over_replicas,
    sharding,
    tree_shardings,
)
from maxtext_lite.training.gradients import TRAIN_BATCH_AXES
from maxtext_lite.training.loss import head_inputs, token_losses
from maxtext_lite.training.state import StepParts

_NEEDED = ("tokens", "targets", "segments", "positions", "weights")


def make_log_probabilities(parts: StepParts, temperature: float) -> Callable[[Params, dict[str, jax.Array]], jax.Array]:
    """The jitted function (params, batch) -> log-probabilities of the targets, float32 [A, B, T]; 0 without a target.

    They lie where the batch does, and their tokens are in its order. One micro-batch is computed at a time.

    Args:
      temperature: the policy is the softmax of the logits divided by it. `params` are all of the decoder's, as
        `Decoder.joined` gives them; of the batch's arrays [A, B, T] only those of pre-training are looked at.
    """
    decoder, mesh = parts.decoder, parts.mesh

    def of_rows(params: Params, rows: dict[str, jax.Array]) -> jax.Array:
        x_BTD = decoder.hidden(params, rows["tokens"], rows["segments"], rows["positions"])
        x_BTD, head_DV = head_inputs(decoder, params, x_BTD)
        tiles, soft_cap = parts.config.num_vocab_tiling, decoder.shape.final_soft_cap
        nll_BT = token_losses(x_BTD, head_DV, rows["targets"], tiles, soft_cap, temperature)
        return jnp.where(rows["weights"] > 0, -nll_BT, 0)

    by_replica = over_replicas(of_rows, mesh.shape["data"], rows=(1,))

    def log_probabilities(params: Params, batch: dict[str, jax.Array]) -> jax.Array:
        batch = in_context_order({name: batch[name] for name in _NEEDED}, TRAIN_BATCH_AXES)
        cast_params = decoder.cast(params)

        def of_micro_batch(rows: dict[str, jax.Array]) -> jax.Array:
            # As in the loop over a step's micro-batches: weights are gathered where they are used.
            here, rows = jax.lax.optimization_barrier((cast_params, rows))
            found_RBT = by_replica(here, rows)
            return constrain(found_RBT.reshape(-1, found_RBT.shape[-1]), TRAIN_BATCH_AXES[1:])

        return in_token_order(cast(jax.Array, jax.lax.map(of_micro_batch, batch)), TRAIN_BATCH_AXES)

    where = sharding(mesh, TRAIN_BATCH_AXES)
    return jax.jit(log_probabilities, in_shardings=(tree_shardings(mesh, decoder.axes), where), out_shardings=where)
