"""The train step and the evaluation step, each one jitted function.

`ChunkedStep` splits the train step into three functions, for a batch that arrives in chunks.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.stages import Wrapped

from maxtext_lite.config.phases import phases
from maxtext_lite.data.feed import DeviceBatch
from maxtext_lite.parallel import (
    Params,
    Tree,
    devices_share_threads,
    in_context_order,
    per_replica,
    sharding,
    tree_shardings,
    vmap_over_data,
)
from maxtext_lite.training.arrays import Metrics, Rows, as_float32
from maxtext_lite.training.gradients import (
    TRAIN_BATCH_AXES,
    StepGradients,
    accumulate_micro_batches,
    correct_expected,
    count_rows,
    rows_of_batch,
    step_gradients,
    sum_over_replicas,
    zero_gradients,
    zero_gradients_shardings,
)
from maxtext_lite.training.loss import AUXILIARY_METRICS, forward
from maxtext_lite.training.objective import Objective, ScoredObjective
from maxtext_lite.training.optimizer import Progress, Schedule, master_of, with_master
from maxtext_lite.training.state import StepContext, TrainState, gradient_shardings, state_shardings

EVAL_BATCH_AXES = ("global_batch", "length")
_REDUCTIONS = {
    "target_tokens": "sum",
    "groups": "sum",
    "group_squares": "sum",
    "skipped": "any",
    "loss_scale": "min",
    "skipped_in_a_row": "max",
}


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
    parameters, after the update), learning_rate, skipped, groups and group_squares (see `noise`) and, where they apply,
    z_loss, loss_scale and the objective's own. With local updates each is [R]: replicas skip on their own, and nothing
    crosses the data axis until `summarise` and `synchronise`. skipped_in_a_row is then a metric too; the caller puts
    its summary into the state.
    """

    def train_step(
        state: TrainState, batch: Rows, num_micro_batches: jax.Array | None = None
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


class ChunkedStep:
    """The train step of a batch that arrives in chunks: `start`, `add` for each chunk, then `update`, all jitted.

    Attributes:
      start: () -> StepGradients before the first chunk.
      add: (state, sums, batch) -> sums plus those of a chunk, whose arrays are [A, B, T], of any A and B; the sums
        passed in are donated, the state is not.
      update: (state, sums) -> (state, metrics) as of `make_train_step`, after the last chunk; the state passed in is
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


def apply_gradients(
    parts: StepContext, schedule: Schedule, state: TrainState, step: StepGradients
) -> tuple[TrainState, Metrics]:
    """The state after an update with the step's gradients, and the metrics of `make_train_step`."""
    update = functools.partial(_update_replica, parts, schedule)
    if parts.local:
        update = vmap_over_data(update, parts.local.num_replicas, own=(0, 1, 2, 3))
    opt_state = state.opt_state
    opt_state_shardings = state_shardings(parts).opt_state
    if parts.optimizer.on_host:
        opt_state = _copy_to_devices(opt_state, opt_state_shardings)
    params, opt_state, progress, metrics = update(state.params, opt_state, state.progress, step, state.skipped_in_a_row)
    if parts.optimizer.on_host:
        opt_state = jax.device_put(opt_state, opt_state_shardings)
    state = dataclasses.replace(state, params=params, opt_state=opt_state, progress=progress, step=state.step + 1)
    if not parts.local:
        state = dataclasses.replace(state, skipped_in_a_row=metrics.pop("skipped_in_a_row"))
    return state, metrics


def _update_replica(
    parts: StepContext,
    schedule: Schedule,
    params: Params,
    opt_state: optax.MultiStepsState,
    progress: Progress,
    step: StepGradients,
    skipped_in_a_row: jax.Array,
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
    learning_rate = schedule(opt_state.gradient_step + 1, new_progress)
    old_params = params
    if optimizer.over_data:
        params = jax.lax.with_sharding_constraint(params, gradient_shardings(parts))
    new_params, new_opt_state = optimizer.finish(step.gradients, opt_state, params, learning_rate, step.expert_counts)
    params = _where(is_applied, new_params, params)
    opt_state = _where(is_applied, new_opt_state, opt_state)
    progress = _where(is_applied, new_progress, progress)
    param_norm = optax.tree.norm(as_float32(params))
    if optimizer.over_data and not _gathers_in_place(parts.mesh):
        new_params = jax.lax.with_sharding_constraint(new_params, state_shardings(parts).params)
        params = _where(is_applied, new_params, old_params)

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
    if parts.config.z_loss_multiplier:
        metrics["z_loss"] = parts.config.z_loss_multiplier * step.losses.z_loss
    metrics |= objective.metrics(step.losses.aux, num_counted, parts.config)
    loss_scale = optimizer.loss_scale(opt_state)
    metrics["skipped_in_a_row"] = optimizer.skipped_after(skipped_in_a_row, is_finite, loss_scale)
    if loss_scale is not None:
        metrics["loss_scale"] = loss_scale
        opt_state = _where(has_ended, opt_state, optimizer.next_loss_scale(opt_state, is_finite))
    return params, opt_state, progress, metrics


def _gathers_in_place(mesh: Mesh) -> bool:
    """Whether an all-gather writes straight into a donated array.

    On a TPU, XLA copies the array before the step and the gathered values after it, unless the result is computed from
    those values.
    """
    return mesh.devices.flat[0].platform != "tpu"


def _where(condition: jax.Array, tree: Tree, otherwise: Tree) -> Tree:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), tree, otherwise)


def _copy_to_devices(tree: Tree, on_host: Tree) -> Tree:
    """Arrays in pinned host memory, with these shardings, copied to the devices."""
    return jax.tree.map(lambda x, where: jax.device_put(x, where.with_memory_kind("device")), tree, on_host)


def make_synchronise(parts: StepContext) -> Wrapped:
    """The jitted function state -> state that synchronises the replicas of local updates; its argument is donated.

    Once the run has ended (`TrainState`), it changes nothing.
    """
    optimizer = parts.optimizer
    local = parts.local
    assert local is not None
    shardings = state_shardings(parts)
    on_host = master_of(shardings.opt_state)  # on the devices without optimizer_memory_host_offload

    def synchronise(state: TrainState) -> TrainState:
        assert state.outer is not None
        masters = master_of(state.opt_state)
        if optimizer.on_host:
            masters = _copy_to_devices(masters, on_host)
        params, outer = local.synchronised(state.params, state.outer, masters)
        synchronised = params, outer, None if outer.master is None else local.copies(outer.master)
        has_ended = optimizer.has_ended(state.skipped_in_a_row)
        params, outer, masters = _where(has_ended, (state.params, state.outer, masters), synchronised)
        if optimizer.on_host:
            masters = jax.device_put(masters, on_host)
        return dataclasses.replace(state, params=params, opt_state=with_master(state.opt_state, masters), outer=outer)

    return jax.jit(synchronise, donate_argnums=0, in_shardings=(shardings,), out_shardings=shardings)


def make_summarise(parts: StepContext) -> Wrapped:
    """The jitted function from a step's metrics, each [R], to scalars for the whole step.

    Losses are means over the target tokens, pairs or weight of all replicas; the other metrics are reduced as
    `_REDUCTIONS` says, or are means over replicas.
    """
    divisor = parts.objective.divisor
    means = means_of(parts.objective)
    reductions = {**parts.objective.reductions, **_REDUCTIONS, divisor: "sum"}

    def summarise(metrics: Metrics) -> Metrics:
        counted_R = metrics[divisor]
        whole = jnp.sum(counted_R)
        share_R = counted_R / jnp.where(whole > 0, whole, 1)  # a custom loss may have a weight between 0 and 1
        summary: Metrics = {}
        for name, x_R in metrics.items():
            if name in means:
                summary[name] = jnp.sum(share_R * x_R)
            else:
                summary[name] = getattr(jnp, reductions.get(name, "mean"))(x_R)
        return summary

    return jax.jit(summarise, out_shardings=sharding(parts.mesh))


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
