"""The gradients of a step, accumulated over micro-batches that arrive all at once or in chunks."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxtext_lite.models import EXPERT_COUNTS, empty_aux
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
from maxtext_lite.training.interleaved import InterleavedStep, PieceSums
from maxtext_lite.training.loss import LossSums, forward, zero_sums
from maxtext_lite.training.state import StepContext, gradient_shardings

TRAIN_BATCH_AXES = ("accumulation", "global_batch", "length")


class StepGradients(NamedTuple):
    """The sums of a step's micro-batches, of all or of those so far.

    Every leaf has a leading dim R, one entry per replica, until the replicas' sums are added up. With local updates it
    stays, and each replica has its own count.

    Attributes:
      gradients: of the mean loss, float32.
      loss: the mean over what the objective counts: nll over target tokens, or the loss over pairs or responses.
        z_loss and aux are means over the same, before their multipliers.
      num_counted: that count, int32.
      target_tokens: int32.
      examples: rows with an example, int32.
      group_squares: sum over groups of W / w |G|^2, where a group is one replica's part of one micro-batch, w its
        count, W that of the step, and G its part of `gradients`; 0 where there is one group.
      groups: groups with a count above 0, int32.
      expert_counts: `Outputs.expert_counts`.
    """

    gradients: Params
    loss: jax.Array
    z_loss: jax.Array
    aux: dict[str, jax.Array]
    num_counted: jax.Array
    target_tokens: jax.Array
    examples: jax.Array
    group_squares: jax.Array
    groups: jax.Array
    expert_counts: jax.Array | None


class GradientLoop:
    """The sum over the micro-batches of a step: `start`, `added` for each batch [A, B, T] of them, then `total`.

    Every micro-batch's loss is divided by the whole step's count, such as its target tokens, so gradients add up to
    those of one big batch whatever A, B and the masks are. Where that count is unknown until the last batch arrives,
    the expected count divides instead, and `total` corrects for it.

    Each replica of the `data` axis accumulates its own gradients in float32; `total` all-reduces them once, in
    `grad_dtype`. With local updates nothing is all-reduced: each replica has its own parameters and count. With the
    pipeline schedule 1f1b the loop runs over ticks instead of micro-batches; the sums are the same.
    """

    def __init__(self, parts: StepContext):
        decoder, mesh, local = parts.decoder, parts.mesh, parts.local
        self._parts, self._decoder, self._local = parts, decoder, local
        self._num_replicas = local.num_replicas if local else mesh.shape["data"]
        self._counted_names = sorted({"target_tokens", parts.objective.divisor})
        self._trained_axes = decoder.trained(decoder.axes)
        self._differentiate = vmap_over_data(
            jax.value_and_grad(self._loss_share, has_aux=True),
            self._num_replicas,
            own=(0, 2) if local else (2,),
            rows=(3,),
        )
        pipeline = decoder.pipeline
        self._interleaved = None
        if pipeline and pipeline.schedule == "1f1b":
            self._interleaved = InterleavedStep(parts, self._num_replicas)

    def rows(self, batch: Rows) -> Rows:
        """The rows [A, B, T] of examples, tokens in the order of the context shards."""
        return in_context_order(self._parts.objective.rows(batch, TRAIN_BATCH_AXES), TRAIN_BATCH_AXES)

    def counts(self, rows: Rows) -> dict[str, jax.Array]:
        """Counts over all rows of each replica, [R]: target tokens, the divisor and `examples`.

        A row with any token is one of an example, wherever its padding is.
        """
        has_example_AB = jnp.any(rows["segments"] > 0, axis=-1)
        examples_R = self._per_replica_sum(has_example_AB.astype(jnp.int32)) // self._parts.objective.rows_per_example
        counts = self._parts.objective.counts(rows)
        return {name: self._per_replica_sum(counts[name]) for name in self._counted_names} | {"examples": examples_R}

    def whole(self, counts: dict[str, jax.Array]) -> jax.Array:
        """The divisor of each replica's losses in a step with these counts, float32 [R]; 1 where the count is 0."""
        counted_R = counts[self._parts.objective.divisor]
        whole_R = counted_R if self._local else jnp.broadcast_to(jnp.sum(counted_R), self._num_replicas)
        return jnp.where(whole_R > 0, whole_R, 1).astype(jnp.float32)

    def expected(self, count: int) -> jax.Array:
        """The divisor of each replica's losses in a step with this expected count, float32 [R]."""
        return jnp.full(self._num_replicas, count, jnp.float32)

    def start(self) -> StepGradients:
        """The sums before the first micro-batch."""
        zeros_R, none_R = jnp.zeros(self._num_replicas), jnp.zeros(self._num_replicas, jnp.int32)
        objective, abstract = self._parts.objective, self._decoder.trained(self._decoder.abstract_params)
        accumulator = self._parts.optimizer.accumulator(abstract, self._num_replicas)
        zeros = jax.tree.map(_lay_out, accumulator, self._trained_axes)
        return StepGradients(
            zeros,
            *zero_sums(self._decoder, zeros_R, *objective.own_sums),
            num_counted=none_R.astype(objective.divisor_dtype),
            target_tokens=none_R,
            examples=none_R,
            group_squares=zeros_R,
            groups=none_R,
            expert_counts=empty_aux(self._decoder.shape, self._num_replicas, 0).get(EXPERT_COUNTS),
        )

    def shardings(self) -> StepGradients:
        """The shardings of the sums between batches: each replica's on its devices, gradients as the parameters."""
        gradients = jax.tree.map(per_replica, tree_shardings(self._parts.mesh, self._trained_axes))
        each_R = sharding(self._parts.mesh, ("replica",))
        others = jax.tree.map(lambda _: each_R, jax.eval_shape(self.start)._replace(gradients=None))
        return others._replace(gradients=gradients)

    def added(
        self,
        sums: StepGradients,
        params: Params,
        frozen: Params | None,
        rows: Rows,
        *,
        counts: dict[str, jax.Array],
        whole_R: jax.Array,
        loss_scale: jax.Array | None,
        num_micro_batches: jax.Array | int | None = None,
        is_all: bool,
    ) -> StepGradients:
        """The sums plus those of the first `num_micro_batches` of the rows (may be traced; None: all).

        Args:
          params: the parameters to differentiate by.
          frozen: the decoder's other parameters (see `TrainState`).
          rows, counts: as the methods of these names give them.
          whole_R: the divisor of their losses, the same for all batches of a step.
          is_all: the step has no other rows; if these are one group, it has one group.
        """
        factor_R = 1.0 / whole_R if loss_scale is None else loss_scale / whole_R
        whole = self._decoder.cast(self._decoder.joined(params, frozen))
        cast_params, cast_frozen = self._decoder.trained(whole), self._decoder.frozen(whole)
        num_batches = rows["weights"].shape[0]
        one_group = is_all and self._num_replicas * num_batches == 1

        def micro_step(index: jax.Array, sums: StepGradients) -> StepGradients:
            here = {name: jax.lax.dynamic_index_in_dim(x, index, keepdims=False) for name, x in rows.items()}
            # Tied to the loop's rows, sharded weights are gathered where they are used; as loop constants, whole
            # embeddings would be gathered before the loop and kept until its end.
            micro_params, micro_frozen, here = jax.lax.optimization_barrier((cast_params, cast_frozen, here))
            (_, found), gradients = self._differentiate(micro_params, micro_frozen, factor_R, here)
            sums = self._with_piece(sums, gradients, found)
            if one_group or self._local:
                return sums
            return self._with_groups(sums, gradients, self._counted(here), whole_R)

        end = num_batches if num_micro_batches is None else num_micro_batches
        if self._interleaved is None:
            sums = jax.lax.fori_loop(0, end, micro_step, sums)
        else:
            sums = self._interleaved.all_ticks(
                cast_params, cast_frozen, factor_R, rows, end, start=sums, added=self._with_piece
            )
        return sums._replace(
            num_counted=sums.num_counted + counts[self._parts.objective.divisor],
            target_tokens=sums.target_tokens + counts["target_tokens"],
            examples=sums.examples + counts["examples"],
        )

    def total(
        self, sums: StepGradients, *, whole_R: jax.Array, loss_scale: jax.Array | None, is_expected: bool
    ) -> StepGradients:
        """The step's gradients, summed over the replicas.

        Args:
          whole_R: the divisor of the losses.
          is_expected: it was the expected count, not the step's own. If the two are equal, so are the results, to the
            bit.
        """
        if self._interleaved and self._num_replicas > 1 and not self._local:
            # Pieces of several micro-batches are in flight at once: only replicas have separate gradients.
            sums = self._with_groups(sums, sums.gradients, sums.num_counted, whole_R)

        def all_reduce(x_R: jax.Array) -> jax.Array:
            return x_R if self._local else jnp.sum(x_R, axis=0)

        gradients = jax.tree.map(lambda g: g.astype(self._parts.config.grad_dtype), sums.gradients)
        sums = jax.tree.map(all_reduce, sums._replace(gradients=gradients))
        if self._local:
            gradients = jax.tree.map(_lay_out, sums.gradients, self._trained_axes)
        else:  # with ZeRO-1 each replica receives only its share
            gradients = jax.lax.with_sharding_constraint(sums.gradients, gradient_shardings(self._parts))
        result = sums._replace(gradients=jax.tree.map(lambda g: g.astype(jnp.float32), gradients))
        if self._parts.objective.divisor == "target_tokens":  # the same number is all-reduced once
            result = result._replace(target_tokens=result.num_counted)
        if loss_scale is not None:

            def unscaled(x: jax.Array) -> jax.Array:
                return x / loss_scale.reshape(loss_scale.shape + (1,) * (x.ndim - loss_scale.ndim))

            result = _rescaled(result, unscaled)._replace(group_squares=unscaled(unscaled(result.group_squares)))
        if is_expected:  # the expected count also stood for W in group_squares
            assert not self._local
            ratio = whole_R[0] / jnp.maximum(result.num_counted, 1)
            result = _rescaled(result, lambda x: x * ratio)._replace(group_squares=result.group_squares * ratio)
        return result

    def of_step(
        self,
        params: Params,
        batch: Rows,
        num_micro_batches: jax.Array | int | None = None,
        loss_scale: jax.Array | None = None,
        frozen: Params | None = None,
    ) -> StepGradients:
        """The gradients of a step whose whole batch, [A, B, T], is at hand; its count is known beforehand.

        Only the first `num_micro_batches` of the A are computed (None: all; may be traced), so that one executable
        serves any accumulation; weights and segments of the others must be 0.

        Args:
          params: the parameters to differentiate by.
          frozen: the decoder's other parameters (see `TrainState`).
        """
        rows = self.rows(batch)
        counts = self.counts(rows)
        whole_R = self.whole(counts)
        sums = self.added(
            self.start(),
            params,
            frozen,
            rows,
            counts=counts,
            whole_R=whole_R,
            loss_scale=loss_scale,
            num_micro_batches=num_micro_batches,
            is_all=True,
        )
        return self.total(sums, whole_R=whole_R, loss_scale=loss_scale, is_expected=False)

    def _loss_share(
        self, params: Params, frozen: Params | None, factor: jax.Array, rows: Rows
    ) -> tuple[jax.Array, PieceSums]:
        outputs = forward(self._decoder, self._decoder.joined(params, frozen), rows, self._parts.config)
        loss, sums = self._parts.objective.loss(outputs, rows, factor)
        return loss, (sums, outputs.expert_counts)

    def _per_replica_sum(self, x_AB: jax.Array) -> jax.Array:
        """[A, B] -> [R]."""
        return vmap_over_data(lambda x_BA: jnp.sum(x_BA, dtype=x_BA.dtype), self._num_replicas, rows=(0,))(x_AB.T)

    def _counted(self, rows: Rows) -> jax.Array:
        """A micro-batch's part of the divisor, [R]."""
        return self._per_replica_sum(self._parts.objective.counts(rows)[self._parts.objective.divisor][None])

    def _with_piece(self, sums: StepGradients, gradients: Params, found: PieceSums) -> StepGradients:
        accumulator = self._parts.optimizer.accumulate(sums.gradients, gradients)
        accumulator = jax.tree.map(_lay_out, accumulator, self._trained_axes)
        losses = LossSums(sums.loss, sums.z_loss, sums.aux)
        (loss, z_loss, aux), expert_counts = jax.tree.map(jnp.add, (losses, sums.expert_counts), found)
        return sums._replace(gradients=accumulator, loss=loss, z_loss=z_loss, aux=aux, expert_counts=expert_counts)

    def _with_groups(
        self, sums: StepGradients, gradients: Params, group_R: jax.Array, whole_R: jax.Array
    ) -> StepGradients:
        """The sums with one more group in each replica."""
        share_R = group_R / whole_R
        squares_R = sum(_squares_by_replica(g) for g in jax.tree.leaves(gradients))
        group_squares = jnp.where(group_R > 0, squares_R / jnp.maximum(share_R, 1e-30), 0.0)
        groups = (group_R > 0).astype(jnp.int32)
        return sums._replace(group_squares=sums.group_squares + group_squares, groups=sums.groups + groups)


def _lay_out(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return constrain(x, ("replica", *axes))


def _squares_by_replica(gradient: jax.Array) -> jax.Array:
    """Sum of squares over all dims but the first, in float32."""
    return jnp.sum(jnp.square(gradient.astype(jnp.float32)), axis=tuple(range(1, gradient.ndim)))


def _rescaled(step: StepGradients, function: Callable[[jax.Array], jax.Array]) -> StepGradients:
    """`function` applied to everything that scales with the loss, except `group_squares`."""
    gradients, loss, z_loss, aux = jax.tree.map(function, (step.gradients, step.loss, step.z_loss, step.aux))
    return step._replace(gradients=gradients, loss=loss, z_loss=z_loss, aux=aux)
