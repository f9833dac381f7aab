"""The gradients of a step: micro-batches are differentiated one after the other, and their gradients are summed.

Every micro-batch's loss is divided by the whole step's count, such as its target tokens, so the gradients add up to
those of one big batch, however it is split. Each replica of the `data` axis sums its own gradients in float32; at the
end the replicas' sums are all-reduced once, in `grad_dtype`. With local updates nothing is all-reduced: each replica
has its own parameters and its own count.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from maxtext_lite.models import EXPERT_COUNTS, LARGEST_LOGITS, empty_aux
from maxtext_lite.parallel import (
    Params,
    constrain,
    in_context_order,
    per_replica,
    sharding,
    tree_shardings,
    vmap_over_data,
)
from maxtext_lite.training.arrays import Rows
from maxtext_lite.training.loss import LossSums, MicroBatchSums, forward, zero_sums
from maxtext_lite.training.state import StepContext, gradient_shardings

TRAIN_BATCH_AXES = ("accumulation", "global_batch", "length")


class StepGradients(NamedTuple):
    """The gradients of a step and its sums, over all of its micro-batches or those so far.

    Every leaf has a leading dim R, one entry per replica, until the replicas are summed; with local updates it stays.

    Attributes:
      gradients: of the mean loss, float32.
      losses: means over what the objective counts.
      expert_counts: `Outputs.expert_counts`.
      largest_logits: `Outputs.largest_logits`, of which the largest is taken and not the sum.
      counts: `target_tokens`, `examples` (rows with a token, by example), and the objective's divisor.
      group_squares: sum over groups of (W / w) x |G|^2; 0 in a step with one group. A group is one replica's part of
        one micro-batch, w its count, W the step's count, and G = (w / W) x the group's mean gradient its part of
        `gradients`.
      groups: groups with a count above 0, int32.
    """

    gradients: Params
    losses: LossSums
    expert_counts: Array | None
    largest_logits: Array | None
    counts: dict[str, Array]
    group_squares: Array
    groups: Array


def step_gradients(
    parts: StepContext,
    params: Params,
    batch: Rows,
    num_micro_batches: Array | int | None = None,
    loss_scale: Array | None = None,
    frozen: Params | None = None,
) -> StepGradients:
    """The gradients of a step on a whole batch [A, B, T].

    Args:
      params: the parameters to differentiate by.
      num_micro_batches: the micro-batches to compute (None: all; may be traced, so one executable serves any
        accumulation); the weights and segments of the others must be 0.
      frozen: the decoder's other parameters (see `TrainState`).
    """
    rows = rows_of_batch(parts, batch)
    counts = count_rows(parts, rows)
    divisor_R = counts[parts.objective.divisor]
    if not parts.local:
        divisor_R = jnp.broadcast_to(jnp.sum(divisor_R), parts.num_replicas)
    divisor_R = jnp.where(divisor_R > 0, divisor_R, 1).astype(jnp.float32)
    sums = accumulate_micro_batches(
        parts,
        zero_gradients(parts),
        params,
        frozen,
        rows,
        divisor_R,
        loss_scale=loss_scale,
        num_micro_batches=num_micro_batches,
        has_groups=parts.num_replicas * rows["weights"].shape[0] > 1,
    )
    sums = sums._replace(counts=counts)
    return sum_over_replicas(parts, sums, divisor_R, loss_scale)


def zero_gradients(parts: StepContext) -> StepGradients:
    """The sums before the first micro-batch."""
    decoder = parts.decoder
    num_replicas = parts.num_replicas
    zeros_R = jnp.zeros(num_replicas)
    none_R = jnp.zeros(num_replicas, jnp.int32)
    accumulator = parts.optimizer.accumulator(decoder.trained(decoder.abstract_params), num_replicas)
    return StepGradients(
        gradients=_constrain_accumulator(parts, accumulator),
        losses=zero_sums(decoder, zeros_R, *parts.objective.own_sums),
        expert_counts=empty_aux(decoder.shape, num_replicas, 0).get(EXPERT_COUNTS),
        largest_logits=empty_aux(decoder.shape, num_replicas, 0).get(LARGEST_LOGITS),
        counts=dict.fromkeys(("target_tokens", parts.objective.divisor, "examples"), none_R),
        group_squares=zeros_R,
        groups=none_R,
    )


def zero_gradients_shardings(parts: StepContext) -> StepGradients:
    """The shardings of the sums between micro-batches: gradients as the parameters, each replica's on its devices."""
    decoder = parts.decoder
    gradients = tree_shardings(parts.mesh, decoder.trained(decoder.axes))
    each_R = sharding(parts.mesh, ("replica",))
    sums = jax.eval_shape(lambda: zero_gradients(parts))._replace(gradients=None)
    return jax.tree.map(lambda _: each_R, sums)._replace(gradients=jax.tree.map(per_replica, gradients))


def rows_of_batch(parts: StepContext, batch: Rows) -> Rows:
    """The rows [A, B, T] of examples, tokens in the order of the context shards."""
    return in_context_order(parts.objective.rows(batch, TRAIN_BATCH_AXES), TRAIN_BATCH_AXES)


def count_rows(parts: StepContext, rows: Rows) -> dict[str, Array]:
    """The counts of rows [A, B, T] by replica, as in `StepGradients`."""
    objective = parts.objective
    counts_AB = objective.counts(rows)
    counts = {name: _sum_by_replica(parts, counts_AB[name]) for name in sorted({"target_tokens", objective.divisor})}
    has_token_AB = jnp.any(rows["segments"] > 0, axis=-1)
    counts["examples"] = _sum_by_replica(parts, has_token_AB.astype(jnp.int32)) // objective.rows_per_example
    return counts


def accumulate_micro_batches(
    parts: StepContext,
    sums: StepGradients,
    params: Params,
    frozen: Params | None,
    rows: Rows,
    divisor_R: Array,
    *,
    loss_scale: Array | None,
    num_micro_batches: Array | int | None = None,
    has_groups: bool = True,
) -> StepGradients:
    """Adds the gradients of the first `num_micro_batches` (None: all) of the rows [A, B, T] to `sums`.

    Args:
      divisor_R: the count that divides the loss of each replica.
      has_groups: the step has more than one group, so its groups are measured.
    """
    decoder = parts.decoder
    factor_R = (1.0 if loss_scale is None else loss_scale) / divisor_R
    whole = decoder.cast(decoder.joined(params, frozen))
    params = decoder.trained(whole)
    frozen = decoder.frozen(whole)
    if num_micro_batches is None:
        num_micro_batches = rows["weights"].shape[0]

    def add(sums: StepGradients, gradients: Params, found: MicroBatchSums) -> StepGradients:
        *added, largest = found
        losses, expert_counts = jax.tree.map(jnp.add, (sums.losses, sums.expert_counts), tuple(added))
        largest = jax.tree.map(jnp.maximum, sums.largest_logits, largest)
        accumulator = _constrain_accumulator(parts, parts.optimizer.accumulate(sums.gradients, gradients))
        sums = sums._replace(gradients=accumulator, losses=losses, expert_counts=expert_counts)
        return sums._replace(largest_logits=largest)

    if parts.is_interleaved:
        from maxtext_lite.training.interleaved import run_1f1b  # only this schedule needs it

        return run_1f1b(parts, params, frozen, factor_R, rows, num_micro_batches, sums, add)

    def loss(params: Params, frozen: Params | None, factor: Array, rows: Rows) -> tuple[Array, MicroBatchSums]:
        outputs = forward(decoder, decoder.joined(params, frozen), rows, parts.config)
        loss, sums = parts.objective.loss(outputs, rows, factor)
        return loss, (sums, outputs.expert_counts, outputs.largest_logits)

    own = (0, 2) if parts.local else (2,)
    differentiate = vmap_over_data(jax.value_and_grad(loss, has_aux=True), parts.num_replicas, own=own, rows=(3,))

    def micro_step(index: Array, sums: StepGradients) -> StepGradients:
        micro_batch = {name: jax.lax.dynamic_index_in_dim(x, index, keepdims=False) for name, x in rows.items()}
        # Tied to the loop's rows, sharded weights are gathered where they are used; as loop constants, whole
        # embeddings would be gathered before the loop and kept until its end.
        here, frozen_here, micro_batch = jax.lax.optimization_barrier((params, frozen, micro_batch))
        (_, found), gradients = differentiate(here, frozen_here, factor_R, micro_batch)
        sums = add(sums, gradients, found)
        if parts.local or not has_groups:
            return sums
        counted_B = parts.objective.counts(micro_batch)[parts.objective.divisor]
        return _add_group(sums, gradients, _sum_by_replica(parts, counted_B[None]), divisor_R)

    return jax.lax.fori_loop(0, num_micro_batches, micro_step, sums)


def sum_over_replicas(
    parts: StepContext, sums: StepGradients, divisor_R: Array, loss_scale: Array | None
) -> StepGradients:
    """The step's gradients, summed over the replicas unless they train apart, and without the loss scale."""
    if parts.is_interleaved and parts.num_replicas > 1 and not parts.local:
        # Pieces of several micro-batches are in flight at once: only replicas have separate gradients.
        sums = _add_group(sums, sums.gradients, sums.counts[parts.objective.divisor], divisor_R)
    sums = sums._replace(gradients=jax.tree.map(lambda g: g.astype(parts.config.grad_dtype), sums.gradients))
    if parts.local:
        gradients = _constrain_accumulator(parts, sums.gradients)
    else:
        # With a dtype: jnp.sum would otherwise widen bfloat16, and float32 would cross the network.
        largest = jax.tree.map(lambda x_R: jnp.max(x_R, axis=0), sums.largest_logits)
        sums = jax.tree.map(lambda x_R: jnp.sum(x_R, axis=0, dtype=x_R.dtype), sums)
        sums = sums._replace(largest_logits=largest)
        # With ZeRO-1 each replica receives only its share.
        gradients = jax.lax.with_sharding_constraint(sums.gradients, gradient_shardings(parts))
    step = sums._replace(gradients=jax.tree.map(lambda g: g.astype(jnp.float32), gradients))
    if loss_scale is None:
        return step

    def unscale(x: Array) -> Array:
        return x / jnp.expand_dims(loss_scale, tuple(range(loss_scale.ndim, x.ndim)))

    gradients, losses = jax.tree.map(unscale, (step.gradients, step.losses))
    return step._replace(gradients=gradients, losses=losses, group_squares=unscale(unscale(step.group_squares)))


def correct_expected(step: StepGradients, expected: Array, counted: Array) -> StepGradients:
    """The gradients divided by the step's count instead of the count that the objective expected.

    If the two are equal, nothing changes, to the bit.
    """
    ratio = expected / jnp.maximum(counted, 1)
    gradients, losses = jax.tree.map(lambda x: x * ratio, (step.gradients, step.losses))
    return step._replace(gradients=gradients, losses=losses, group_squares=step.group_squares * ratio)


def _add_group(sums: StepGradients, gradients: Params, counted_R: Array, divisor_R: Array) -> StepGradients:
    """The sums with one more group in each replica."""
    share_R = counted_R / divisor_R
    squares_R = sum(
        jnp.sum(jnp.square(g.astype(jnp.float32)), axis=tuple(range(1, g.ndim))) for g in jax.tree.leaves(gradients)
    )
    group_squares_R = jnp.where(counted_R > 0, squares_R / jnp.maximum(share_R, 1e-30), 0.0)
    is_group_R = (counted_R > 0).astype(jnp.int32)
    return sums._replace(group_squares=sums.group_squares + group_squares_R, groups=sums.groups + is_group_R)


def _sum_by_replica(parts: StepContext, x_AB: Array) -> Array:
    """[A, B] -> [R]."""
    return vmap_over_data(lambda x_BA: jnp.sum(x_BA, dtype=x_BA.dtype), parts.num_replicas, rows=(0,))(x_AB.T)


def _constrain_accumulator(parts: StepContext, gradients: Params) -> Params:
    axes = parts.decoder.trained(parts.decoder.axes)
    return jax.tree.map(lambda x, of_x: constrain(x, ("replica", *of_x)), gradients, axes)
