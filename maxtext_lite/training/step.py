"""The train step, one jitted function: gradients, update, metrics."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh
from jax.stages import Wrapped

from maxtext_lite.parallel import (
    Params,
    Tree,
    per_replica,
    sharding,
    vmap_over_data,
)
from maxtext_lite.training.arrays import Metrics, Rows, as_float32
from maxtext_lite.training.gradients import (
    TRAIN_BATCH_AXES,
    StepGradients,
    step_gradients,
)
from maxtext_lite.training.loss import AUXILIARY_METRICS
from maxtext_lite.training.objective import Objective
from maxtext_lite.training.optimizer import Progress, Schedule
from maxtext_lite.training.state import StepContext, TrainState, gradient_shardings, state_shardings


def means_of(objective: Objective) -> set[str]:
    """The metrics that are means over what the objective counts."""
    own = {name for name, reduction in objective.reductions.items() if reduction == "mean"}
    return {"loss", "z_loss", *AUXILIARY_METRICS, *own}


def make_train_step(parts: StepContext, schedule: Schedule) -> Wrapped:
    """The jitted function (state, batch, num_micro_batches=None) -> (state, metrics); the state passed in is donated.

    `batch` contains tokens, targets, segments, positions (int32) and weights (float32), each [A, B, T], and any further
    fields of the objective. A step whose gradient is not finite, or that has no target, is `skipped`: parameters,
    optimizer state and schedule stay as they are. So is every step after one that ends the run (`TrainState`).

    Metrics are replicated scalars: loss, target_tokens, grad_norm (before clipping), param_norm (of the trained
    parameters, after the update), learning_rate, skipped, groups and group_squares (for the noise scale) and, where
    they apply, z_loss, loss_scale and the objective's own. With local updates each is [R]: replicas skip on their own,
    and nothing crosses the data axis until `summarise` and `synchronise`. skipped_in_a_row is then a metric too, which
    the caller reduces over the replicas and stores in the state.
    """

    def train_step(
        state: TrainState, batch: Rows, num_micro_batches: Array | None = None
    ) -> tuple[TrainState, Metrics]:
        loss_scale = parts.optimizer.loss_scale(state.opt_state)
        step = step_gradients(parts, state.params, batch, num_micro_batches, loss_scale, state.frozen)
        return apply_gradients(parts, schedule, state, step)

    shardings = state_shardings(parts)
    everywhere = sharding(parts.mesh)
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(shardings, sharding(parts.mesh, TRAIN_BATCH_AXES), everywhere),
        out_shardings=(shardings, per_replica(everywhere) if parts.local else everywhere),
    )


def apply_gradients(
    parts: StepContext, schedule: Schedule, state: TrainState, step: StepGradients
) -> tuple[TrainState, Metrics]:
    """The state after an update with the step's gradients, and the metrics of `make_train_step`."""
    rate_at = functools.partial(schedule, step=state.step + 1)
    update = functools.partial(_update_replica, parts, rate_at)
    if parts.local:
        update = vmap_over_data(update, parts.local.num_replicas, own=(0, 1, 2, 3))
    shardings = state_shardings(parts)
    offloaded = (state.opt_state, state.average)
    where = (shardings.opt_state, shardings.average)
    if parts.optimizer.on_host:
        offloaded = copy_to_devices(offloaded, where)
    opt_state, average = offloaded
    params, opt_state, progress, metrics = update(state.params, opt_state, state.progress, step, state.skipped_in_a_row)
    if average is not None:
        new_average = parts.optimizer.average(average, params, opt_state)
        average = choose(~metrics["skipped"], new_average, average)
    offloaded = (opt_state, average)
    if parts.optimizer.on_host:
        offloaded = jax.device_put(offloaded, where)
    opt_state, average = offloaded
    state = dataclasses.replace(
        state, params=params, opt_state=opt_state, average=average, progress=progress, step=state.step + 1
    )
    if not parts.local:
        state = dataclasses.replace(state, skipped_in_a_row=metrics.pop("skipped_in_a_row"))
    return state, metrics


def _update_replica(
    parts: StepContext,
    rate_at: Callable[[Any, Progress], Array],
    params: Params,
    opt_state: optax.MultiStepsState,
    progress: Progress,
    step: StepGradients,
    skipped_in_a_row: Array,
) -> tuple[Params, optax.MultiStepsState, Progress, Metrics]:
    """One replica's parameters, optimizer state and progress after a step, unchanged if it is skipped; and metrics."""
    optimizer = parts.optimizer
    objective = parts.objective
    num_counted = step.counts[objective.divisor]
    target_tokens = step.counts["target_tokens"]
    grad_norm = optax.tree.norm(step.gradients)
    is_finite = jnp.isfinite(grad_norm) & jnp.isfinite(step.losses.loss)
    has_ended = optimizer.has_ended(skipped_in_a_row)
    is_applied = is_finite & (num_counted > 0) & ~has_ended

    new_progress = progress.plus(step.counts["examples"], target_tokens)
    learning_rate = rate_at(opt_state.gradient_step + 1, new_progress)
    old_params = params
    if optimizer.over_data:
        params = jax.lax.with_sharding_constraint(params, gradient_shardings(parts))
    counts_LE = step.expert_counts
    order = parts.decoder.shape.expert_order
    if counts_LE is not None and order != sorted(order):
        counts_LE = counts_LE[jnp.asarray(order)]
    of_batch = (counts_LE, step.largest_logits)
    new_params, new_opt_state = optimizer.finish(step.gradients, opt_state, params, learning_rate, *of_batch)
    params = choose(is_applied, new_params, params)
    opt_state = choose(is_applied, new_opt_state, opt_state)
    progress = choose(is_applied, new_progress, progress)
    param_norm = optax.tree.norm(as_float32(params))
    if optimizer.over_data and not _gathers_in_place(parts.mesh):
        new_params = jax.lax.with_sharding_constraint(new_params, state_shardings(parts).params)
        params = choose(is_applied, new_params, old_params)

    metrics = {
        "loss": step.losses.loss,
        "target_tokens": target_tokens,
        "grad_norm": grad_norm,
        "param_norm": param_norm,
        "learning_rate": learning_rate,
        "skipped": ~is_applied,
        "groups": step.groups,
        "group_squares": step.group_squares,
    }
    if step.largest_logits is not None:
        metrics["largest_attention_logit"] = jnp.max(step.largest_logits)
    if parts.config.z_loss_multiplier:
        metrics["z_loss"] = parts.config.z_loss_multiplier * step.losses.z_loss
    metrics |= objective.metrics(step.losses.aux, num_counted, parts.config)
    loss_scale = optimizer.loss_scale(opt_state)
    metrics["skipped_in_a_row"] = optimizer.skipped_after(skipped_in_a_row, is_finite, loss_scale)
    if loss_scale is not None:
        metrics["loss_scale"] = loss_scale
        opt_state = choose(has_ended, opt_state, optimizer.next_loss_scale(opt_state, is_finite))
    return params, opt_state, progress, metrics


def _gathers_in_place(mesh: Mesh) -> bool:
    """Whether an all-gather writes straight into a donated array.

    On a TPU, XLA would copy the donated array before the gather and the gathered values after it. There the values are
    gathered first and `choose` makes the result from them.
    """
    return mesh.devices.flat[0].platform != "tpu"


def choose(condition: Array, tree: Tree, otherwise: Tree) -> Tree:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), tree, otherwise)


def copy_to_devices(tree: Tree, on_host: Tree) -> Tree:
    """Arrays in pinned host memory, with these shardings, copied to the devices."""
    return jax.tree.map(lambda x, where: jax.device_put(x, where.with_memory_kind("device")), tree, on_host)
