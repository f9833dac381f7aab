"""The pipeline: layers dealt to the devices of the `stage` axis, and one micro-batch flowing through them in pieces."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_lite.parallel.axes import constrain, num_shards, over_stages

StageFunction = Callable[[Any, Any], Any]
"""(parameters of a stack of layers, rows) -> rows, a tree of the same shapes."""


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """How layers are dealt to stages and a micro-batch to pipeline microbatches.

    With several repeats, the stages are passed round so often (the circular schedule): stage p has a stack of layers
    for each. Layer l belongs to repeat, stage and place l = (repeat * P + stage) * layers per stack + place.

    Attributes:
      num_stages: P, the size of the mesh axis `stage`.
      num_microbatches: M, a multiple of P: the pieces of one micro-batch.
      num_repeats: times that a piece passes all stages.
    """

    num_stages: int
    num_microbatches: int
    num_repeats: int = 1

    @property
    def num_ticks(self) -> int:
        """Times that all stages run for one micro-batch; of each stage's, P - 1 are idle."""
        return self.num_repeats * self.num_microbatches + self.num_stages - 1

    def dealt(self, stack: jax.Array) -> jax.Array:
        """A parameter of all layers, [L, ...], as it is stored: [repeats, L / repeats, ...] where there are several.

        Contiguous parts of the dim of layers are then what the stages hold.
        """
        if self.num_repeats == 1:
            return stack
        return stack.reshape(self.num_repeats, stack.shape[0] // self.num_repeats, *stack.shape[1:])

    def dealt_axes(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The logical axes of `dealt` parameters."""
        return axes if self.num_repeats == 1 else ("repeats", *axes)

    def run(self, stage: StageFunction, params: Any, rows: Any, *, axes: Any) -> Any:
        """`rows` after all layers: what `stage(all layers, rows)` would be, with M pieces under way at a time.

        Every tick runs each stage on the piece it has and hands the results on to the next stage. The last stage's
        come round to the first, which keeps all M pieces: before their first pass, between passes and after the last.
        Idle ticks run on rows that are thrown away; nothing of them reaches a result or a gradient.

        Args:
          stage: must leave the rows independent of each other.
          params: leaves [L, ...] or [repeats, L / repeats, ...], sharded over stages.
          rows: tree of arrays [B, ...]; B a multiple of M x the shards of the batch.
          axes: like `rows`, the logical axes of each array, the first of them "batch".
        Source: Huang et al. 2019, arXiv:1811.06965; the circular schedule is Narayanan et al. 2021, arXiv:2104.04473,
          section 2.2, with breadth before depth.
        """
        num_stages, num_pieces = self.num_stages, self.num_microbatches
        stage_P = jnp.arange(num_stages)
        params_RP = self._by_stage(params)

        def of_stage(params_R: Any, repeat: jax.Array, piece: Any) -> Any:
            return stage(self._stack_of(params_R, repeat), piece)

        run_stages = over_stages(of_stage, in_axes=(1, 0, 0))

        def tick(carry: Any, time: jax.Array) -> tuple[Any, None]:
            pieces_PM, inputs_P = carry
            repeat_P = jnp.clip((time - stage_P) // num_pieces, 0, self.num_repeats - 1)
            outputs_P = self._lay_out(run_stages(params_RP, repeat_P, inputs_P), axes)
            outputs_P = self._lay_out(jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), outputs_P), axes)
            back = time - (num_stages - 1)  # what the last stage has just run, now with the first

            def keep(pieces: jax.Array, outputs: jax.Array) -> jax.Array:
                slot = back % num_pieces
                kept = jax.lax.dynamic_index_in_dim(pieces, slot, axis=1, keepdims=False)
                kept = jnp.where(back >= 0, outputs, kept)
                return jax.lax.dynamic_update_index_in_dim(pieces, kept, slot, axis=1)

            def give(pieces: jax.Array, outputs: jax.Array) -> jax.Array:
                next_piece = jax.lax.dynamic_index_in_dim(pieces, (time + 1) % num_pieces, axis=1, keepdims=False)
                return jnp.where(_of_first_stage(outputs), next_piece, outputs)

            pieces_PM = self._lay_out(jax.tree.map(keep, pieces_PM, outputs_P), axes, None)
            return (pieces_PM, self._lay_out(jax.tree.map(give, pieces_PM, outputs_P), axes)), None

        pieces_PM = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (num_stages, *x.shape)), jax.tree.map(self._pieces, rows, axes)
        )
        pieces_PM = self._lay_out(pieces_PM, axes, None)
        first_P = jax.tree.map(lambda x: jnp.where(_of_first_stage(x[:, 0]), x[:, 0], 0), pieces_PM)
        carry = pieces_PM, self._lay_out(first_P, axes)
        (pieces_PM, _), _ = jax.lax.scan(tick, carry, jnp.arange(self.num_ticks))
        return jax.tree.map(self._joined, pieces_PM, axes)

    def _by_stage(self, params: Any) -> Any:
        """Leaves [repeats, P, layers per stack, ...]."""
        lead = self.num_repeats, self.num_stages

        def deal(stored: jax.Array) -> jax.Array:
            rest = stored.shape[1:] if self.num_repeats == 1 else stored.shape[2:]
            return stored.reshape(*lead, -1, *rest)

        return jax.tree.map(deal, params)

    def _stack_of(self, params_R: Any, repeat: jax.Array) -> Any:
        """A stage's layers for one of its repeats."""
        if self.num_repeats == 1:
            return jax.tree.map(lambda w: w[0], params_R)
        return jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, repeat, keepdims=False), params_R)

    def _lay_out(self, tree: Any, axes: Any, *between: None) -> Any:
        return jax.tree.map(lambda x, names: constrain(x, ("stages", *between, *names)), tree, axes)

    def _pieces(self, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """[B, ...] as [M, B / M, ...], on every stage; each device of a stage has as many rows of every piece."""
        shards, pieces = num_shards("batch"), self.num_microbatches
        x = x.reshape(shards, pieces, x.shape[0] // (shards * pieces), *x.shape[1:])
        x = x.swapaxes(0, 1)
        return constrain(x.reshape(pieces, -1, *x.shape[3:]), (None, *axes))

    def _joined(self, x_PM: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """The first stage's pieces [P, M, B / M, ...] as [B, ...], with the rows shared out among stages."""
        x_M = jnp.sum(jnp.where(_of_first_stage(x_PM), x_PM, 0), axis=0, dtype=x_PM.dtype)
        x_M = constrain(x_M, ("stages", *axes))
        shards = num_shards("batch")
        x = x_M.reshape(x_M.shape[0], shards, -1, *x_M.shape[2:]).swapaxes(0, 1)
        return constrain(x.reshape(-1, *x_M.shape[2:]), ("end_batch", *axes[1:]))


def _of_first_stage(x_P: jax.Array) -> jax.Array:
    """True for the first stage's part of an array [P, ...]."""
    return (jnp.arange(x_P.shape[0]) == 0).reshape(-1, *[1] * (x_P.ndim - 1))
