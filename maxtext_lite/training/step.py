"""The train step and the evaluation step: one jitted function each."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from maxtext_lite.config import NumericsConfig
from maxtext_lite.models import Decoder
from maxtext_lite.parallel import constrain, in_context_order, over_replicas, per_replica, sharding, tree_shardings
from maxtext_lite.training.accumulate import GradientAccumulation
from maxtext_lite.training.interleaved import InterleavedStep
from maxtext_lite.training.local_updates import LocalUpdates
from maxtext_lite.training.loss import AUXILIARY_METRICS, LossSums
from maxtext_lite.training.objective import NEXT_TOKEN, Objective
from maxtext_lite.training.optimizer import Progress, Schedule
from maxtext_lite.training.preference import PREFERENCE_METRICS
from maxtext_lite.training.state import TrainState, gradient_shardings, state_shardings

TRAIN_BATCH_AXES = ("accumulation", "global_batch", "length")
EVAL_BATCH_AXES = ("global_batch", "length")


class StepGradients(NamedTuple):
    """What the micro-batches of a step add up to.

    With local updates every leaf has a leading dim R, one entry for each replica and its own count; otherwise all stand
    for the whole step.

    Attributes:
      gradients: of the mean loss, float32.
      loss: its mean over what the objective counts: target tokens, of which it is the nll, or pairs; z_loss and aux
        likewise, before their multipliers.
      num_counted: that count, int32.
      target_tokens: int32.
      examples: rows that hold an example, int32.
      group_squares: sum over groups of W / w |G|^2, where a group is one replica's part of one micro-batch, w its
        count, W that of the step, and G its part of `gradients`; 0 where there is one group.
      groups: groups that count something, int32.
    """

    gradients: Any
    loss: jax.Array
    z_loss: jax.Array
    aux: dict[str, jax.Array]
    num_counted: jax.Array
    target_tokens: jax.Array
    examples: jax.Array
    group_squares: jax.Array
    groups: jax.Array


class _Sums(NamedTuple):
    """The loop's carry: gradients [R, ...], and per replica what `StepGradients` says, [R]."""

    gradients: Any
    losses: LossSums
    group_squares: jax.Array
    groups: jax.Array


def accumulate_gradients(
    decoder: Decoder,
    optimizer: GradientAccumulation,
    mesh: Mesh,
    config: NumericsConfig,
    local: LocalUpdates | None = None,
    objective: Objective = NEXT_TOKEN,
) -> Any:
    """A function (params, batch, num_micro_batches=None, loss_scale=None, frozen=None) -> StepGradients of one step.

    Gradients are those of `params`; `frozen` is what else the decoder has (see `TrainState`).

    `batch` arrays are [A, B, T]; only the first `num_micro_batches` (None: all; may be traced) of the A are looked at,
    so that the accumulation may change without another executable. Every micro-batch's loss is divided by the count
    of the whole step, target tokens or what else the objective counts, so that gradients add up to those of one big
    batch whatever A, B and the masks are. Each replica of the `data` axis adds up its own gradients in float32; they
    meet once, after the loop, in `grad_dtype`. With local updates they do not meet: each replica has parameters and a
    count of its own. With the pipeline schedule 1f1b the loop is over ticks instead of micro-batches, and adds up to
    the same.
    """
    num_replicas = local.num_replicas if local else mesh.shape["data"]

    def loss_share(params: Any, frozen: Any, factor: jax.Array, rows: dict[str, jax.Array]) -> Any:
        params = decoder.joined(params, frozen)
        x_BTD, aux = decoder.hidden_and_aux(params, rows["tokens"], rows["segments"], rows["positions"])
        return objective.loss(decoder, params, x_BTD, aux, rows, factor, config)

    differentiate = over_replicas(
        jax.value_and_grad(loss_share, has_aux=True), num_replicas, own=(0, 2) if local else (2,), rows=(3,)
    )

    pipeline = decoder.pipeline
    interleaved = None
    if pipeline and pipeline.schedule == "1f1b":
        interleaved = InterleavedStep(decoder, config, num_replicas, objective, own_params=local is not None)

    def per_replica_sum(x_AB: jax.Array) -> jax.Array:
        """[A, B] -> [R]."""
        return over_replicas(lambda x_BA: jnp.sum(x_BA, dtype=jnp.int32), num_replicas, rows=(0,))(x_AB.T)

    def lay_out(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        return constrain(x, ("replica", *axes))

    trained_axes = decoder.trained(decoder.axes)
    abstract_trained = decoder.trained(decoder.abstract_params)

    def step_gradients(
        params: Any,
        batch: dict[str, jax.Array],
        num_micro_batches: Any = None,
        loss_scale: jax.Array | None = None,
        frozen: Any = None,
    ) -> StepGradients:
        batch = in_context_order(objective.rows(batch, TRAIN_BATCH_AXES), TRAIN_BATCH_AXES)
        has_example_AB = batch["segments"][..., 0] > 0
        examples_R = per_replica_sum(has_example_AB.astype(jnp.int32)) // objective.rows_per_example
        counts_R = {name: per_replica_sum(x_AB) for name, x_AB in objective.counts(batch).items()}
        counted_R = counts_R[objective.divisor]
        whole_R = counted_R if local else jnp.broadcast_to(jnp.sum(counted_R), num_replicas)
        whole_R = jnp.maximum(whole_R, 1).astype(jnp.float32)
        factor_R = 1.0 / whole_R if loss_scale is None else loss_scale / whole_R
        whole = decoder.cast(decoder.joined(params, frozen))
        cast_params, cast_frozen = decoder.trained(whole), decoder.frozen(whole)
        # Where pieces of several micro-batches are under way at once, only replicas have gradients of their own.
        num_groups = num_replicas * (1 if interleaved else batch["weights"].shape[0])

        def micro_step(index: Any, sums: _Sums) -> _Sums:
            rows = {name: jax.lax.dynamic_index_in_dim(x, index, keepdims=False) for name, x in batch.items()}
            # Tied to the loop's rows, weights that are sharded are gathered when they are used; as constants of the
            # loop, whole embeddings would be gathered before it and kept until its end.
            micro_params, micro_frozen, rows = jax.lax.optimization_barrier((cast_params, cast_frozen, rows))
            (_, losses), gradients = differentiate(micro_params, micro_frozen, factor_R, rows)
            sums = added(sums, gradients, losses)
            return with_groups(sums, gradients, per_replica_sum(objective.counts(rows)[objective.divisor][None]))

        def added(sums: _Sums, gradients: Any, losses: LossSums) -> _Sums:
            accumulator = optimizer.accumulate(sums.gradients, gradients)
            accumulator = jax.tree.map(lay_out, accumulator, trained_axes)
            return sums._replace(gradients=accumulator, losses=jax.tree.map(jnp.add, sums.losses, losses))

        def with_groups(sums: _Sums, gradients: Any, group_R: jax.Array) -> _Sums:
            """With one more group in each replica."""
            if local or num_groups == 1:
                return sums
            share_R = group_R / whole_R
            squares_R = sum(_squares_by_replica(g) for g in optimizer.slopes(gradients))
            group_squares = jnp.where(group_R > 0, squares_R / jnp.maximum(share_R, 1e-30), 0.0)
            groups = (group_R > 0).astype(jnp.int32)
            return sums._replace(group_squares=sums.group_squares + group_squares, groups=sums.groups + groups)

        zeros_R = jnp.zeros(num_replicas)
        zeros = jax.tree.map(lay_out, optimizer.accumulator(abstract_trained, num_replicas), trained_axes)
        start = _Sums(zeros, objective.zeros(decoder, zeros_R), zeros_R, jnp.zeros(num_replicas, jnp.int32))
        end = batch["weights"].shape[0] if num_micro_batches is None else num_micro_batches
        if interleaved is None:
            sums = jax.lax.fori_loop(0, end, micro_step, start)
        else:
            sums = interleaved.all_ticks(cast_params, cast_frozen, factor_R, batch, end, start=start, added=added)
            sums = with_groups(sums, sums.gradients, counted_R)

        def meet(x_R: jax.Array) -> jax.Array:
            return x_R if local else jnp.sum(x_R, axis=0)

        gradients = optimizer.map_slopes(lambda g: g.astype(config.grad_dtype), sums.gradients)
        gradients = jax.tree.map(meet, gradients)
        if local:
            gradients = jax.tree.map(lay_out, gradients, trained_axes)
        else:  # each where it is used: with ZeRO-1, a replica receives its share only
            gradients = jax.lax.with_sharding_constraint(gradients, gradient_shardings(decoder, optimizer, mesh))
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
        counts = jax.tree.map(meet, counts_R)
        result = StepGradients(
            gradients,
            meet(sums.losses.nll),
            meet(sums.losses.log_partition_squared),
            jax.tree.map(meet, sums.losses.aux),
            counts[objective.divisor],
            counts["target_tokens"],
            meet(examples_R),
            meet(sums.group_squares),
            meet(sums.groups),
        )
        return result if loss_scale is None else _unscaled(result, loss_scale, optimizer)

    return step_gradients


def _squares_by_replica(gradient: jax.Array) -> jax.Array:
    """Sum of squares over all dims but the first, in float32."""
    return jnp.sum(jnp.square(gradient.astype(jnp.float32)), axis=tuple(range(1, gradient.ndim)))


def _unscaled(sums: StepGradients, loss_scale: jax.Array, optimizer: GradientAccumulation) -> StepGradients:
    """Without the loss scale, a scalar or [R]."""

    def divide(x: jax.Array) -> jax.Array:
        return x / loss_scale.reshape(loss_scale.shape + (1,) * (x.ndim - loss_scale.ndim))

    return sums._replace(
        gradients=optimizer.map_slopes(divide, sums.gradients),
        loss=divide(sums.loss),
        z_loss=divide(sums.z_loss),
        aux=jax.tree.map(divide, sums.aux),
        group_squares=divide(divide(sums.group_squares)),
    )


def make_train_step(
    decoder: Decoder,
    optimizer: GradientAccumulation,
    mesh: Mesh,
    *,
    config: NumericsConfig,
    schedule: Schedule,
    local: LocalUpdates | None = None,
    objective: Objective = NEXT_TOKEN,
) -> Any:
    """The jitted function (state, batch, num_micro_batches=None) -> (state, metrics); the state passed in is given up.

    `batch` holds tokens, targets, segments, positions (int32) and weights (float32), each [A, B, T], and what else the
    objective needs. A step whose gradient is not finite, or that has no target, leaves parameters, optimizer state and
    schedule as they are: it is `skipped`.

    Metrics are replicated scalars: loss, target_tokens, grad_norm (before clipping), param_norm (of what is trained,
    after the update), learning_rate, skipped, groups and group_squares (see `noise`) and, where there are any, z_loss,
    loss_scale and the objective's own. With local updates each is [R], one value for each replica, which also skips for
    itself, and nothing crosses the data axis: `summarise` and `make_synchronise` do.
    """
    step_gradients = accumulate_gradients(decoder, optimizer, mesh, config, local, objective)

    def update(params: Any, opt_state: optax.MultiStepsState, progress: Progress, step: StepGradients) -> Any:
        grad_norm = optax.tree.norm(optimizer.slopes(step.gradients))
        finite = jnp.isfinite(grad_norm) & jnp.isfinite(step.loss)
        applied = finite & (step.num_counted > 0)
        new_progress = progress.plus(step.examples, step.target_tokens)
        learning_rate = schedule(opt_state.gradient_step + 1, new_progress)
        if optimizer.over_data:
            params = jax.lax.with_sharding_constraint(params, gradient_shardings(decoder, optimizer, mesh))
        new_params, new_opt_state = optimizer.finish(step.gradients, opt_state, params, learning_rate)
        new = (new_params, new_opt_state, new_progress)
        params, opt_state, progress = jax.tree.map(
            lambda new, old: jnp.where(applied, new, old), new, (params, opt_state, progress)
        )
        metrics = {
            "loss": step.loss,
            "target_tokens": step.target_tokens,
            "grad_norm": grad_norm,
            "param_norm": optax.tree.norm(params),
            "learning_rate": learning_rate,
            "skipped": ~applied,
            "groups": step.groups,
            "group_squares": step.group_squares,
        }
        if config.z_loss_multiplier:
            metrics["z_loss"] = config.z_loss_multiplier * step.z_loss
        metrics |= objective.metrics(step.aux, step.num_counted, config)
        if optimizer.loss_scaling:
            metrics["loss_scale"] = optimizer.loss_scale(opt_state)
            skip_state: Any = opt_state.skip_state
            opt_state = opt_state._replace(skip_state=optimizer.loss_scaling.next(skip_state, finite))
        return params, opt_state, progress, metrics

    if local:
        update = over_replicas(update, local.num_replicas, own=(0, 1, 2, 3))

    def train_step(
        state: TrainState, batch: dict[str, jax.Array], num_micro_batches: jax.Array | None = None
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        loss_scale = optimizer.loss_scale(state.opt_state)
        step = step_gradients(state.params, batch, num_micro_batches, loss_scale, state.frozen)
        here = state.opt_state
        if optimizer.on_host:
            here = jax.tree.map(lambda x, where: jax.device_put(x, where.with_memory_kind("device")), here, on_host)
        params, opt_state, progress, metrics = update(state.params, here, state.progress, step)
        if optimizer.on_host:
            opt_state = jax.device_put(opt_state, on_host)
        return TrainState(params, opt_state, progress, state.step + 1, state.outer, state.frozen), metrics

    shardings = state_shardings(decoder, optimizer, mesh, local)
    on_host = shardings.opt_state
    everywhere = sharding(mesh)
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(shardings, sharding(mesh, TRAIN_BATCH_AXES), everywhere),
        out_shardings=(shardings, per_replica(everywhere) if local else everywhere),
    )


def make_synchronise(decoder: Decoder, optimizer: GradientAccumulation, mesh: Mesh, local: LocalUpdates) -> Any:
    """The jitted function state -> state in which the replicas meet; the state passed in is given up."""

    def synchronise(state: TrainState) -> TrainState:
        assert state.outer is not None
        params, outer = local.synchronised(state.params, state.outer)
        return dataclasses.replace(state, params=params, outer=outer)

    shardings = state_shardings(decoder, optimizer, mesh, local)
    return jax.jit(synchronise, donate_argnums=0, in_shardings=(shardings,), out_shardings=shardings)


def make_summarise(mesh: Mesh) -> Any:
    """The jitted function of a step's metrics, each [R], to scalars for the whole step.

    Losses are means over what is counted in all replicas, target tokens or pairs; norms and the learning rate are means
    over replicas; the step counts as skipped where any replica skipped it; the loss scale is the least.
    """

    def summarise(metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
        counted_R = metrics.get("pairs", metrics["target_tokens"])
        share_R = counted_R / jnp.maximum(jnp.sum(counted_R), 1)
        whole = {
            **{name: jnp.sum(metrics[name]) for name in ("target_tokens", "pairs") if name in metrics},
            "skipped": jnp.any(metrics["skipped"]),
            "groups": jnp.sum(metrics["groups"]),
            "group_squares": jnp.sum(metrics["group_squares"]),
        }
        for name, x_R in metrics.items():
            if name in ("loss", "z_loss", *AUXILIARY_METRICS, *PREFERENCE_METRICS):
                whole[name] = jnp.sum(share_R * x_R)
            elif name == "loss_scale":
                whole[name] = jnp.min(x_R)
            elif name not in whole:
                whole[name] = jnp.mean(x_R)
        return whole

    return jax.jit(summarise, out_shardings=sharding(mesh))


def make_eval_step(decoder: Decoder, mesh: Mesh, config: NumericsConfig, objective: Objective = NEXT_TOKEN) -> Any:
    """The jitted function (params, batch [B, T]) -> the objective's scores of examples, on every device.

    Those of NEXT_TOKEN are (nll sums [B], target tokens [B]). `params` are all of the decoder's, as `Decoder.joined`
    gives them.
    """

    def scores(params: Any, rows: dict[str, jax.Array]) -> Any:
        return objective.scores(decoder, params, rows, num_tiles=config.num_vocab_tiling)

    by_replica = over_replicas(scores, mesh.shape["data"], rows=(1,))

    def eval_step(params: Any, batch: dict[str, jax.Array]) -> Any:
        rows = in_context_order(objective.rows(batch, EVAL_BATCH_AXES), EVAL_BATCH_AXES)
        return jax.tree.map(lambda x_RB: x_RB.reshape(-1, *x_RB.shape[2:]), by_replica(decoder.cast(params), rows))

    return jax.jit(
        eval_step,
        in_shardings=(tree_shardings(mesh, decoder.axes), sharding(mesh, EVAL_BATCH_AXES)),
        out_shardings=sharding(mesh),
    )
