"""The train step and the evaluation step: one jitted function each."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from maxtext_lite.config import NumericsConfig
from maxtext_lite.models import Decoder
from maxtext_lite.parallel import constrain, over_replicas, sharding, tree_shardings
from maxtext_lite.training.accumulate import GradientAccumulation
from maxtext_lite.training.loss import LossSums, next_token_loss, row_losses
from maxtext_lite.training.optimizer import Schedule
from maxtext_lite.training.state import TrainState, state_shardings

TRAIN_BATCH_AXES = ("accumulation", "global_batch", "length")
EVAL_BATCH_AXES = ("global_batch", "length")


def accumulate_gradients(decoder: Decoder, optimizer: GradientAccumulation, mesh: Mesh, config: NumericsConfig) -> Any:
    """A function (params, batch) -> (gradients, metrics) of one whole step.

    `batch` arrays are [A, B, T]. Every micro-batch's loss is divided by the number of target tokens of the whole
    step, so that gradients add up to those of one big batch whatever A, B and the masks are. Gradients are float32.
    Each replica of the `data` axis adds up its own gradients; they meet once, after the loop.
    """

    def step_gradients(params: Any, batch: dict[str, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
        target_tokens = jnp.sum(batch["weights"] > 0, dtype=jnp.int32)
        inverse_tokens = 1.0 / jnp.maximum(target_tokens, 1).astype(jnp.float32)

        def mean_loss_share(params: Any, rows: dict[str, jax.Array]) -> Any:
            loss, sums = next_token_loss(
                decoder, params, rows, z_loss_multiplier=config.z_loss_multiplier, num_tiles=config.num_vocab_tiling
            )
            return loss * inverse_tokens, jax.tree.map(lambda x: x * inverse_tokens, sums)

        def lay_out(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
            return constrain(x, ("replica", *axes))

        per_replica = over_replicas(jax.value_and_grad(mean_loss_share, has_aux=True), mesh)
        cast_params = decoder.cast(params)
        num_replicas = mesh.shape["data"]

        def micro_step(carry: Any, rows: dict[str, jax.Array]) -> tuple[Any, None]:
            accumulator, means = carry
            # Tied to the loop's rows, weights that are sharded are gathered when they are used; as constants of the
            # loop, whole embeddings would be gathered before it and kept until its end.
            micro_params, rows = jax.lax.optimization_barrier((cast_params, rows))
            (_, micro_means), gradients = per_replica(micro_params, rows)
            accumulator = optimizer.accumulate(accumulator, gradients)
            accumulator = jax.tree.map(lay_out, accumulator, decoder.axes)
            return (accumulator, jax.tree.map(jnp.add, means, micro_means)), None

        zeros = jax.tree.map(lay_out, optimizer.accumulator(params, num_replicas), decoder.axes)
        means_R = LossSums(jnp.zeros(num_replicas), jnp.zeros(num_replicas))
        (gradients, means_R), _ = jax.lax.scan(micro_step, (zeros, means_R), batch)
        gradients = jax.tree.map(lambda g, axes: constrain(jnp.sum(g, axis=0), axes), gradients, decoder.axes)
        means = jax.tree.map(jnp.sum, means_R)
        metrics = {"loss": means.nll, "target_tokens": target_tokens}
        if config.z_loss_multiplier:
            metrics["z_loss"] = config.z_loss_multiplier * means.log_partition_squared
        return gradients, metrics

    return step_gradients


def make_train_step(
    decoder: Decoder, optimizer: GradientAccumulation, mesh: Mesh, *, config: NumericsConfig, schedule: Schedule
) -> Any:
    """The jitted function (state, batch) -> (state, metrics); the state passed in is given up.

    `batch` holds tokens, targets, segments, positions (int32) and weights (float32), each [A, B, T].
    Metrics are replicated scalars: loss, target_tokens, grad_norm (before clipping), param_norm (after the update),
    learning_rate and, where there is one, z_loss.
    """
    step_gradients = accumulate_gradients(decoder, optimizer, mesh, config)

    def train_step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, dict[str, jax.Array]]:
        gradients, metrics = step_gradients(state.params, batch)
        updates, opt_state = optimizer.finish(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics |= {
            "grad_norm": optax.tree.norm(gradients),
            "param_norm": optax.tree.norm(params),
            "learning_rate": schedule(state.opt_state.gradient_step),
        }
        return TrainState(params, opt_state, state.step + 1), metrics

    shardings = state_shardings(decoder, optimizer, mesh)
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(shardings, sharding(mesh, TRAIN_BATCH_AXES)),
        out_shardings=(shardings, sharding(mesh)),
    )


def make_eval_step(decoder: Decoder, mesh: Mesh, config: NumericsConfig) -> Any:
    """The jitted function (params, batch [B, T]) -> (nll sums [B], target tokens [B]), on every device."""

    def losses(params: Any, rows: dict[str, jax.Array]) -> Any:
        return row_losses(decoder, params, rows, num_tiles=config.num_vocab_tiling)

    def eval_step(params: Any, batch: dict[str, jax.Array]) -> Any:
        return jax.tree.map(lambda x_RB: x_RB.reshape(-1), over_replicas(losses, mesh)(decoder.cast(params), batch))

    return jax.jit(
        eval_step,
        in_shardings=(tree_shardings(mesh, decoder.axes), sharding(mesh, EVAL_BATCH_AXES)),
        out_shardings=sharding(mesh),
    )
