"""The pipeline: layers split over the `stage` axis, through which a micro-batch flows in pieces."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from maxtext_lite.batching.topology import PipelineShape
from maxtext_lite.parallel.mesh import Tree, constrain, num_shards, over_stages

StageFunction = Callable[[Tree, Tree], Tree]
"""(parameters of a stack of layers, rows) -> rows, a tree of the same shapes."""


class Flight(NamedTuple):
    """The arrays between two ticks of the schedule 1f1b, for P stages and pieces of b rows.

    Attributes:
      inputs: the rows that the stages run next, [P, b, ...].
      saved: inputs of the last 2P - 1 ticks, [P, 2P - 1, b, ...], those of tick t at t mod (2P - 1).
      cotangents: of the outputs whose backward pass the stages run next, [P, b, ...] for each floating-point array.
    """

    inputs: Tree
    saved: Tree
    cotangents: list[Array]


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The split of layers over stages and of a micro-batch into pipeline microbatches.

    With several repeats, pieces go round the stages that many times (the circular schedule), and stage p has a stack of
    layers for each round. Layer l = (repeat * P + stage) * layers per stack + place.

    Attributes:
      num_stages: P, the size of the mesh axis `stage`.
      num_microbatches: M, a multiple of P: the pieces of one micro-batch.
      num_repeats: times that a piece passes all stages.
      schedule: order of the work of a train step. `gpipe` runs all pieces of a micro-batch forward and then, by
        automatic differentiation, backward. With `1f1b` every tick runs one piece forward and one backward, and the
        pieces of all micro-batches of a step follow each other without a gap. Evaluation has no backward pass.
    """

    num_stages: int
    num_microbatches: int
    num_repeats: int = 1
    schedule: Literal["gpipe", "1f1b"] = "gpipe"

    @property
    def num_ticks(self) -> int:
        """Times that all stages run forward for one micro-batch; each stage is idle in P - 1 of them."""
        return PipelineShape(self.num_stages, self.num_microbatches, self.num_repeats, 1).num_ticks("gpipe")

    def num_ticks_1f1b(self, num_micro_batches: Any) -> Any:
        """How often all stages run forward and backward in a step; each is idle 2 (P - 1) times."""
        return PipelineShape(self.num_stages, self.num_microbatches, 1, num_micro_batches).num_ticks("1f1b")

    def in_stages(self, stack: Array) -> Array:
        """A parameter of all layers, [L, ...], as it is stored: [repeats, L / repeats, ...] if there are several.

        Each stage then has a contiguous part of the dim of layers.
        """
        if self.num_repeats == 1:
            return stack
        return stack.reshape(self.num_repeats, stack.shape[0] // self.num_repeats, *stack.shape[1:])

    def axes_in_stages(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The logical axes of parameters `in_stages`."""
        return axes if self.num_repeats == 1 else ("repeats", *axes)

    def run(self, stage: StageFunction, params: Tree, rows: Tree, *, axes: Tree) -> Tree:
        """`rows` after all layers: equal to `stage(all layers, rows)`, with M pieces under way at a time.

        Every tick runs each stage on its piece and passes the results to the next stage. The results of the last stage
        go round to the first, which keeps all M pieces: before their first pass, between passes and after the last. In
        idle ticks stages run on rows that are discarded and reach neither a result nor a gradient.

        Args:
          stage: must treat the rows independently of each other.
          params: leaves [L, ...] or [repeats, L / repeats, ...], sharded over stages.
          rows: tree of arrays [B, ...]; B a multiple of M x the shards of the batch.
          axes: like `rows`, the logical axes of each array, the first of them "batch".
        Source: Huang et al. 2019, arXiv:1811.06965; the circular schedule is Narayanan et al. 2021, arXiv:2104.04473,
          section 2.2, with breadth before depth.
        """
        num_stages = self.num_stages
        num_pieces = self.num_microbatches
        stage_P = jnp.arange(num_stages)
        params_RP = self._by_stage(params)
        sums_RP = jax.tree.map(lambda w: w.astype(jnp.promote_types(w.dtype, jnp.float32)), params_RP)

        def weight_of(w: Array, total: Array) -> Array:
            return _summed_as(total, w) if _is_float(w) else w

        def run_stage(params_R: Tree, sums_R: Tree, repeat: Array, piece: Tree) -> Tree:
            stack = self._stack_of(params_R, repeat)
            sums = self._stack_of(sums_R, repeat)
            return stage(jax.tree.map(weight_of, stack, sums), piece)

        run_stages = over_stages(run_stage, in_axes=(1, 1, 0, 0))

        def take(pieces_PM: Tree, time: Array) -> tuple[Tree, Tree]:
            """The pieces that are left, and the one that enters at a tick, if one does."""
            enters = time < num_pieces * self.num_repeats
            arrays, tree = jax.tree.flatten(pieces_PM)
            pairs = [_take(x, time % num_pieces, enters) for x in arrays]
            left, entering = zip(*pairs, strict=True)
            return tree.unflatten(left), tree.unflatten(entering)

        def first_stage(x: Array, otherwise: Array | int) -> Array:
            return jnp.where(_is_stage(x, 0), x, otherwise)

        def tick(carry: Tree, time: Array) -> tuple[Tree, None]:
            pieces_PM, inputs_P = carry
            repeat_P = jnp.clip((time - stage_P) // num_pieces, 0, self.num_repeats - 1)
            outputs_P = run_stages(params_RP, sums_RP, repeat_P, inputs_P)
            outputs_P = self._lay_out(outputs_P, axes)
            outputs_P = jax.tree.map(_to_next_stage, outputs_P)
            outputs_P = self._lay_out(outputs_P, axes)
            back = time - (num_stages - 1)  # the pass that the last stage has just run, whose piece is now at the first
            pieces_PM = jax.tree.map(
                lambda x, out: _put(x, out, back % num_pieces, back >= 0),
                pieces_PM,
                outputs_P,
            )
            pieces_PM = self._lay_out(pieces_PM, axes, None)
            pieces_PM, next_P = take(pieces_PM, time + 1)
            inputs_P = jax.tree.map(first_stage, next_P, outputs_P)
            inputs_P = self._lay_out(inputs_P, axes)
            return (pieces_PM, inputs_P), None

        def on_all_stages(x: Array, names: tuple[str, ...]) -> Array:
            x_M = self._pieces(x, names)
            return jnp.broadcast_to(x_M, (num_stages, *x_M.shape))

        pieces_PM = jax.tree.map(on_all_stages, rows, axes)
        pieces_PM = self._lay_out(pieces_PM, axes, None)
        pieces_PM, first_P = take(pieces_PM, jnp.int32(0))
        first_P = jax.tree.map(lambda x: first_stage(x, 0), first_P)
        carry = pieces_PM, self._lay_out(first_P, axes)
        (pieces_PM, _), _ = jax.lax.scan(tick, carry, jnp.arange(self.num_ticks))
        return jax.tree.map(self._joined, pieces_PM, axes)

    def no_flight(self, rows: Tree, *leading: int) -> Flight:
        """The state before any tick: zeros.

        Args:
          rows: shapes and dtypes of a piece, [b, ...].
          leading: dims before all others.
        """

        def zeros(x: jax.ShapeDtypeStruct, *between: int) -> Array:
            return jnp.zeros((*leading, self.num_stages, *between, *x.shape), x.dtype)

        saved = jax.tree.map(lambda x: zeros(x, 2 * self.num_stages - 1), rows)
        return Flight(jax.tree.map(zeros, rows), saved, [zeros(x) for x in _floats(rows)])

    def tick_1f1b(
        self,
        stage: Callable[[Tree, Tree, Tree], Tree],
        params: Tree,
        frozen: Tree,
        flight: Flight,
        time: Array,
        *,
        entering: Tree,
        leave: Callable[[Tree], tuple[list[Array], Tree]],
        axes: Tree,
    ) -> tuple[Flight, Tree, list[Array], Tree]:
        """One tick of all stages: a piece forward and an earlier piece backward.

        Stage p runs piece `time - p` forward and piece `time - 2 (P - 1) + p` backward. The last stage turns each piece
        round in the tick in which it arrives, and the first gets it back 2 (P - 1) ticks after it began. A stage keeps
        only its inputs, and runs forward again before it runs backward. Pieces that do not exist must enter as
        arbitrary finite rows with cotangents of 0, which stay 0 all the way back.

        Args:
          stage: (params of a stack of layers, frozen ones, rows) -> rows, as in `run` otherwise.
          params: as in `run`, with one repeat.
          frozen: other parameters of the stages, of the same shapes, without gradients. None: nothing.
          entering: rows of piece `time`.
          leave: (rows of piece `time - (P - 1)` after the last layer) -> (their cotangents, anything).
        Returns:
          The flight, the gradients of `params` (in their dtype and shapes), the cotangents of the rows of piece
          `time - 2 (P - 1)` as they entered, and what `leave` returned besides its cotangents.
        Source: Narayanan et al. 2019 (PipeDream), Harlap et al. 2018, arXiv:1806.03377, section 3.2; here without stale
          weights, because all gradients of a step belong to the same weights.
        """
        num_stages = self.num_stages
        num_saved = 2 * self.num_stages - 1
        stacks_P, frozen_P = jax.tree.map(lambda w: w[0], self._by_stage((params, frozen)))

        def enter(x: Array, inputs: Array) -> Array:
            return jnp.where(_is_stage(inputs, 0), x, inputs)

        def save(saved: Array, inputs: Array) -> Array:
            return jax.lax.dynamic_update_index_in_dim(saved, inputs, time % num_saved, axis=1)

        def run_backward(stack: Tree, frozen: Tree, age: Array, saved: Tree, cotangents: list[Array]) -> Any:
            rows = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, age, keepdims=False), saved)

            def run_floats(stack: Tree, floats: list[Array]) -> list[Array]:
                outputs = stage(stack, frozen, _with_floats(rows, floats))
                return _floats(outputs)

            _, backward = jax.vjp(run_floats, stack, _floats(rows))
            return backward(cotangents)

        inputs_P = jax.tree.map(enter, entering, flight.inputs)
        inputs_P = self._lay_out(inputs_P, axes)
        saved_P = jax.tree.map(save, flight.saved, inputs_P)
        saved_P = self._lay_out(saved_P, axes, None)
        outputs_P = over_stages(stage)(stacks_P, frozen_P, inputs_P)
        outputs_P = self._lay_out(outputs_P, axes)
        left = jax.tree.map(lambda x: _at_stage(x, num_stages - 1), outputs_P)
        left_cotangents, result = leave(left)
        arrays, tree = jax.tree.flatten(outputs_P)
        float_axes = [names for x, names in zip(arrays, tree.flatten_up_to(axes), strict=True) if _is_float(x)]
        cotangents_P = [
            jnp.where(_is_stage(cotangents, num_stages - 1), new, cotangents)
            for new, cotangents in zip(left_cotangents, flight.cotangents, strict=True)
        ]
        cotangents_P = self._lay_out(cotangents_P, float_axes)
        age_P = (time - 2 * (num_stages - 1) + 2 * jnp.arange(num_stages)) % num_saved
        gradients_P, cotangents_P = over_stages(run_backward)(stacks_P, frozen_P, age_P, saved_P, cotangents_P)
        cotangents_P = self._lay_out(cotangents_P, float_axes)
        gradients = jax.tree.map(lambda g, w: g.reshape(w.shape), gradients_P, params)
        entered_cotangents = [_at_stage(x, 0) for x in cotangents_P]
        onwards = jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), outputs_P)
        onwards = self._lay_out(onwards, axes)
        backwards = [jnp.roll(x, -1, axis=0) for x in cotangents_P]
        backwards = self._lay_out(backwards, float_axes)
        return (
            Flight(onwards, saved_P, backwards),
            gradients,
            entered_cotangents,
            result,
        )

    def _by_stage(self, params: Tree) -> Tree:
        """Leaves [repeats, P, layers per stack, ...]."""

        def split(stored: Array) -> Array:
            rest = stored.shape[1:] if self.num_repeats == 1 else stored.shape[2:]
            return stored.reshape(self.num_repeats, self.num_stages, -1, *rest)

        return jax.tree.map(split, params)

    def _stack_of(self, params_R: Tree, repeat: Array) -> Tree:
        """The layers of a stage for one of its repeats."""
        if self.num_repeats == 1:
            return jax.tree.map(lambda w: w[0], params_R)
        return jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, repeat, keepdims=False), params_R)

    def _lay_out(self, tree: Tree, axes: Tree, *between: None) -> Tree:
        return jax.tree.map(lambda x, names: constrain(x, ("stages", *between, *names)), tree, axes)

    def _pieces(self, x: Array, axes: tuple[str, ...]) -> Array:
        """Splits [B, ...] into [M, B / M, ...] on every stage, whose devices have equally many rows of every piece."""
        pieces = self.num_microbatches
        x_sM = x.reshape(num_shards("batch"), pieces, -1, *x.shape[1:])
        x_Ms = x_sM.swapaxes(0, 1)
        x_M = x_Ms.reshape(pieces, -1, *x.shape[1:])
        return constrain(x_M, (None, *axes))

    def _joined(self, x_PM: Array, axes: tuple[str, ...]) -> Array:
        """The first stage's pieces [P, M, B / M, ...] as [B, ...], with the rows divided among the stages."""
        x_M = constrain(_at_stage(x_PM, 0), ("stages", *axes))
        rest = x_M.shape[2:]
        x_Ms = x_M.reshape(len(x_M), num_shards("batch"), -1, *rest)
        x_sM = x_Ms.swapaxes(0, 1)
        x = x_sM.reshape(-1, *rest)
        return constrain(x, ("end_batch", *axes[1:]))


@jax.custom_vjp
def _summed_as(sums: Array, weight: Array) -> Array:
    """Returns `weight`, and gives its cotangent to `sums`: a scan adds up the ticks' in the dtype of `sums`. Nothing
    reads the values of `sums`."""
    del sums
    return weight


_summed_as.defvjp(
    lambda sums, weight: (weight, jnp.zeros((), sums.dtype)),
    lambda dtype_of, g: (g.astype(dtype_of.dtype), None),
)


@jax.custom_vjp
def _to_next_stage(x_P: Array) -> Array:
    """Sends each stage's part to the next one, the last one's to the first. Backward it is one exchange, too, where the
    transpose of `jnp.roll` would be two."""
    return jnp.roll(x_P, 1, axis=0)


_to_next_stage.defvjp(
    lambda x_P: (_to_next_stage(x_P), None),
    lambda _, g_P: (jnp.roll(g_P, -1, axis=0) if _is_float(g_P) else None,),
)


@jax.custom_vjp
def _put(pieces_PM: Array, new_P: Array, slot: Array, is_there: Array) -> Array:
    """`pieces_PM` with a piece, if there is one, in the slot of the previous piece, which was taken.

    Nothing reads a slot after `_take` and before the next `_put`. So its cotangent does not matter, and each of the two
    has the other as its transpose: in place, where automatic differentiation adds up whole arrays of pieces.
    """
    new_P = jnp.where(is_there, new_P, _at(pieces_PM, slot))
    return jax.lax.dynamic_update_index_in_dim(pieces_PM, new_P, slot, axis=1)


@jax.custom_vjp
def _take(pieces_PM: Array, slot: Array, is_there: Array) -> tuple[Array, Array]:
    """The pieces, and the one in a slot, which leaves it; what is returned if there is none has a gradient of 0."""
    del is_there
    return pieces_PM, _at(pieces_PM, slot)


def _at(pieces_PM: Array, slot: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(pieces_PM, slot, axis=1, keepdims=False)


def _put_backward(how: tuple[Array, Array], g_PM: Array) -> tuple[Tree, ...]:
    slot, is_there = how
    if not _is_float(g_PM):
        return None, None, None, None
    return g_PM, jnp.where(is_there, _at(g_PM, slot), 0), None, None


def _take_backward(how: tuple[Array, Array], cotangents: tuple[Array, Array]) -> tuple[Tree, ...]:
    g_PM, g_P = cotangents
    return _put(g_PM, g_P, *how) if _is_float(g_PM) else None, None, None


_put.defvjp(lambda pieces_PM, new_P, *how: (_put(pieces_PM, new_P, *how), how), _put_backward)
_take.defvjp(lambda pieces_PM, *how: (_take(pieces_PM, *how), how), _take_backward)


def _is_stage(x_P: Array, stage: int) -> Array:
    """True for one stage's part of an array [P, ...]."""
    return (jnp.arange(len(x_P)) == stage).reshape(-1, *[1] * (x_P.ndim - 1))


def _at_stage(x_P: Array, stage: int) -> Array:
    """One stage's part, on all stages; a sum, because the partitioner would gather all parts to select one."""
    return jnp.sum(jnp.where(_is_stage(x_P, stage), x_P, 0), axis=0, dtype=x_P.dtype)


def _is_float(x: Tree) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _floats(rows: Tree) -> list[Tree]:
    """The floating-point arrays of a tree of rows, which the stages change and differentiate."""
    return [x for x in jax.tree.leaves(rows) if _is_float(x)]


def _with_floats(rows: Tree, floats: list[Array]) -> Tree:
    """The rows with these floating-point arrays in place of their own."""
    leaves, tree = jax.tree.flatten(rows)
    new = iter(floats)
    return tree.unflatten([next(new) if _is_float(x) else x for x in leaves])
