"""The gradients of a step with the pipeline schedule 1f1b: every tick runs one piece forward and one backward."""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from maxtext_lite.models import EXPERT_COUNTS, Stream, empty_aux, stream_axes
from maxtext_lite.parallel import Flight, Params, constrain, num_shards, vmap_over_data
from maxtext_lite.training.arrays import Rows
from maxtext_lite.training.loss import LossSums, Outputs, TokenSplit
from maxtext_lite.training.state import StepContext

Sums = TypeVar("Sums")
Count: TypeAlias = jax.Array | int
PieceSums: TypeAlias = tuple[LossSums, jax.Array | None]
"""The sums and the expert counts of the rows of one forward pass."""


class InterleavedStep:
    """The loop of `gradients.GradientLoop` over the ticks of the schedule 1f1b.

    Piece i of a step is pipeline microbatch i % M of micro-batch i // M. All stages compute the embedding and the loss,
    each for its part of a piece's tokens, split along the sequence.
    """

    def __init__(self, parts: StepContext, num_replicas: int):
        assert parts.decoder.pipeline is not None
        self._parts, self._decoder, self._pipeline = parts, parts.decoder, parts.decoder.pipeline
        self._num_replicas = num_replicas
        own = (0, 2, 3) if parts.local else (2, 3)
        self._tick = vmap_over_data(self._tick_of_replica, num_replicas, own=own, rows=(4, 5, 6))

    def all_ticks(
        self,
        params: Params,
        frozen: Params | None,
        factor_R: jax.Array,
        batch: Rows,
        num_micro_batches: Count,
        *,
        start: Sums,
        added: Callable[[Sums, Params, PieceSums], Sums],
    ) -> Sums:
        """The sums after all ticks of a step: `added(sums, gradients, of the piece)` at each, beginning with `start`.

        Args:
          params: the trained parameters as `Decoder.cast` gives them; [R, ...] where replicas have their own.
          frozen: the other parameters.
          factor_R: multiplies each replica's weights.
          batch: arrays [A, B, T], of which the first `num_micro_batches` (may be traced) are computed.
        """

        def tick(time: jax.Array, carry: tuple[Flight, Sums]) -> tuple[Flight, Sums]:
            flight, sums = carry
            ages = 0, self._pipeline.num_stages - 1, 2 * (self._pipeline.num_stages - 1)
            rows = [self._piece_at(time - age, batch, num_micro_batches) for age in ages]
            # As in the loop over micro-batches.
            here, frozen_here, rows = jax.lax.optimization_barrier((params, frozen, rows))
            flight, found, gradients = self._tick(here, frozen_here, factor_R, flight, *rows, time)
            return flight, added(sums, gradients, found)

        num_ticks = self._pipeline.num_ticks_1f1b(num_micro_batches)
        return jax.lax.fori_loop(0, num_ticks, tick, (self._no_flight(batch), start))[1]

    def _no_flight(self, batch: Rows) -> Flight:
        shape, (_, B, T) = self._decoder.shape, batch["tokens"].shape
        sizes = B // (self._num_replicas * self._pipeline.num_microbatches), T
        x_BTD = jax.ShapeDtypeStruct((*sizes, shape.emb_dim), shape.dtype)
        token_BT: Any = jax.ShapeDtypeStruct(sizes, jnp.int32)
        aux = jax.eval_shape(lambda: empty_aux(shape, *sizes))
        stream = Stream(x_BTD, token_BT, token_BT, aux)  # type: ignore[arg-type]
        return self._pipeline.no_flight(stream, self._num_replicas)

    def _piece_at(self, item: jax.Array, batch: Rows, num_micro_batches: Count) -> Rows:
        """The rows of a piece, [B / M, T]; before the first and after the last piece, padding of weight 0."""
        M = self._pipeline.num_microbatches
        num_items = num_micro_batches * M
        exists = (item >= 0) & (item < num_items)
        item = jnp.clip(item, 0, num_items - 1)
        shards = self._num_replicas * num_shards("batch")

        def take(x_ABT: jax.Array) -> jax.Array:
            x_BT = jax.lax.dynamic_index_in_dim(x_ABT, item // M, keepdims=False)
            parts = x_BT.reshape(shards, M, -1, x_BT.shape[-1])
            return jax.lax.dynamic_index_in_dim(parts, item % M, axis=1, keepdims=False).reshape(-1, x_BT.shape[-1])

        rows = {name: take(x) for name, x in batch.items()}
        return rows | {"weights": rows["weights"] * exists, "segments": rows["segments"] * exists}

    def _tick_of_replica(
        self,
        params: Params,
        frozen: Params | None,
        factor: jax.Array,
        flight: Flight,
        entering: Rows,
        leaving: Rows,
        returning: Rows,
        time: jax.Array,
    ) -> tuple[Flight, PieceSums, Params]:
        decoder, axes = self._decoder, stream_axes(self._decoder.shape)
        layers = params["layers"]
        ends = {name: value for name, value in params.items() if name != "layers"}

        def whole(ends: Params) -> Params:
            return decoder.joined(ends | {"layers": layers}, frozen)

        def run(layers: Params, frozen_layers: Params | None, stream: Stream) -> Stream:
            return decoder.layers(decoder.joined(layers, frozen_layers), stream)

        def embed(ends: Params, rows: Rows) -> jax.Array:
            x_BTD = decoder.embed(whole(ends), self._split(rows["tokens"]), self._split(rows["positions"]))
            stream = Stream(constrain(self._merge(x_BTD), axes.x_BTD), rows["segments"], rows["positions"], {})
            return decoder.dense_layers(whole(ends), stream).x_BTD

        def leave(stream: Stream) -> tuple[list[jax.Array], tuple[PieceSums, Params]]:
            def loss(ends: Params, x_BTD: jax.Array, aux: dict[str, jax.Array]) -> tuple[jax.Array, PieceSums]:
                params, tokens = whole(ends), TokenSplit(self._split, self._merge)
                x_BTD = decoder.final_norm(params, self._split(x_BTD))
                outputs = Outputs(decoder, params, x_BTD, stream.aux | aux, self._parts.config, tokens)
                loss, sums = self._parts.objective.loss(outputs, leaving, factor)
                return loss, (sums, outputs.expert_counts)

            aux = {name: x for name, x in stream.aux.items() if name != EXPERT_COUNTS}
            differentiated = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
            (_, found), (ends_gradient, *cotangents) = differentiated(ends, stream.x_BTD, aux)
            laid_out = jax.tree.map(constrain, cotangents, [axes.x_BTD, {name: axes.aux[name] for name in aux}])
            return jax.tree.leaves(laid_out), (found, ends_gradient)

        aux = empty_aux(decoder.shape, *entering["tokens"].shape)
        flight, layer_gradients, cotangents, (found, loss_gradient) = self._pipeline.tick_1f1b(
            run,
            layers,
            None if frozen is None else frozen["layers"],
            flight,
            time,
            entering=Stream(embed(ends, entering), entering["segments"], entering["positions"], aux),
            leave=leave,
            axes=axes,
        )
        (embed_gradient,) = jax.vjp(lambda ends: embed(ends, returning), ends)[1](cotangents[0])
        gradients = jax.tree.map(jnp.add, loss_gradient, embed_gradient)
        return flight, found, gradients | {"layers": layer_gradients}

    def _split(self, x: jax.Array) -> jax.Array:
        """[b, T, ...] as [b P, T / P, ...], split over the stages."""
        b, T = x.shape[:2]
        stages = self._pipeline.num_stages
        x = self._whole(x)
        return constrain(x.reshape(b * stages, T // stages, *x.shape[2:]), ("end_batch",) + (None,) * (x.ndim - 1))

    def _merge(self, x: jax.Array) -> jax.Array:
        """The inverse of `_split`."""
        stages = self._pipeline.num_stages
        return self._whole(x.reshape(x.shape[0] // stages, -1, *x.shape[2:]))

    @staticmethod
    def _whole(x: jax.Array) -> jax.Array:
        """Rows with all of their tokens on one shard; there is no direct way from one split to the other."""
        return constrain(x, ("batch",) + (None,) * (x.ndim - 1))
