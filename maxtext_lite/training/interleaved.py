"""The gradients of a step with the pipeline schedule 1f1b: every tick runs one piece forward and one backward."""

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from maxtext_lite.models import EXPERT_COUNTS, Stream, empty_aux, stream_axes
from maxtext_lite.parallel import Params, constrain, num_shards, vmap_over_data
from maxtext_lite.parallel.pipeline import Flight
from maxtext_lite.training.arrays import Rows
from maxtext_lite.training.loss import MicroBatchSums, Outputs, TokenSplit, tokens_ahead
from maxtext_lite.training.state import StepContext

Sums = TypeVar("Sums")
Count: TypeAlias = Array | int


def run_1f1b(
    parts: StepContext,
    params: Params,
    frozen: Params | None,
    factor_R: Array,
    rows: Rows,
    num_micro_batches: Count,
    sums: Sums,
    add: Callable[[Sums, Params, MicroBatchSums], Sums],
) -> Sums:
    """Runs all ticks of a step and adds the gradients of each tick to `sums`.

    Piece i of a step is pipeline microbatch i % M of micro-batch i // M. All stages compute the embedding and the loss,
    each for its part of a piece's tokens, split along the sequence.

    Args:
      params: the trained parameters as `Decoder.cast` gives them; [R, ...] where replicas have their own.
      frozen: the other parameters.
      factor_R: multiplies each replica's loss.
      rows: [A, B, T]; only the first `num_micro_batches` (may be traced) are computed.
      add: (sums, gradients, sums of the losses) -> sums.
    """
    schedule = _Schedule(parts)
    last_stage = schedule.pipeline.num_stages - 1
    own = (0, 2, 3) if parts.local else (2, 3)
    run_tick = vmap_over_data(schedule.tick, parts.num_replicas, own=own, rows=(4, 5, 6))

    def tick(time: Array, carry: tuple[Flight, Sums]) -> tuple[Flight, Sums]:
        flight, sums = carry
        entering = schedule.piece(time, rows, num_micro_batches)
        leaving = schedule.piece(time - last_stage, rows, num_micro_batches)
        returning = schedule.piece(time - 2 * last_stage, rows, num_micro_batches)
        # As in the loop over micro-batches.
        here, frozen_here, pieces = jax.lax.optimization_barrier((params, frozen, [entering, leaving, returning]))
        flight, found, gradients = run_tick(here, frozen_here, factor_R, flight, *pieces, time)
        return flight, add(sums, gradients, found)

    num_ticks = schedule.pipeline.num_ticks_1f1b(num_micro_batches)
    _, sums = jax.lax.fori_loop(0, num_ticks, tick, (schedule.empty_flight(rows), sums))
    return sums


class _Schedule:
    """The pieces of a step and the work of one tick on them."""

    def __init__(self, parts: StepContext):
        assert parts.decoder.pipeline is not None
        self.pipeline = parts.decoder.pipeline
        self._parts = parts
        self._decoder = parts.decoder
        self._num_replicas = parts.num_replicas

    def empty_flight(self, rows: Rows) -> Flight:
        """The state of the pipeline before the first tick."""
        shape = self._decoder.shape
        _, B, T = rows["tokens"].shape
        sizes = B // (self._num_replicas * self.pipeline.num_microbatches), T

        def piece() -> Stream:
            token_BT = jnp.zeros(sizes, jnp.int32)
            return Stream(
                jnp.zeros((*sizes, shape.emb_dim), shape.dtype),
                token_BT,
                token_BT,
                empty_aux(shape, *sizes),
            )

        return self.pipeline.no_flight(jax.eval_shape(piece), self._num_replicas)

    def piece(self, item: Array, rows: Rows, num_micro_batches: Count) -> Rows:
        """A piece's rows, [B / M, T]; before the first and after the last piece, padding of weight 0."""
        M = self.pipeline.num_microbatches
        num_items = num_micro_batches * M
        exists = (item >= 0) & (item < num_items)
        item = jnp.clip(item, 0, num_items - 1)
        shards = self._num_replicas * num_shards("batch")

        def take(x_ABT: Array) -> Array:
            x_BT = jax.lax.dynamic_index_in_dim(x_ABT, item // M, keepdims=False)
            pieces = x_BT.reshape(shards, M, -1, x_BT.shape[-1])
            return jax.lax.dynamic_index_in_dim(pieces, item % M, axis=1, keepdims=False).reshape(-1, x_BT.shape[-1])

        piece = {name: take(x) for name, x in rows.items()}
        return {name: x * exists if name.startswith(("weights", "segments")) else x for name, x in piece.items()}

    def tick(
        self,
        params: Params,
        frozen: Params | None,
        factor: Array,
        flight: Flight,
        entering: Rows,
        leaving: Rows,
        returning: Rows,
        time: Array,
    ) -> tuple[Flight, MicroBatchSums, Params]:
        """One replica's tick: the flight after it, the sums of the losses of `leaving`, and gradients."""
        decoder = self._decoder
        axes = stream_axes(decoder.shape)
        layers = params["layers"]
        ends = {name: value for name, value in params.items() if name != "layers"}

        def whole(ends: Params) -> Params:
            return decoder.joined(ends | {"layers": layers}, frozen)

        def run(layers: Params, frozen_layers: Params | None, stream: Stream) -> Stream:
            return decoder.layers(decoder.joined(layers, frozen_layers), stream)

        def embed(ends: Params, rows: Rows) -> Array:
            x_BTD = decoder.embed(whole(ends), self._split(rows["tokens"]), self._split(rows["positions"]))
            x_BTD = constrain(self._merge(x_BTD), axes.x_BTD)
            return decoder.dense_layers(whole(ends), Stream(x_BTD, rows["segments"], rows["positions"], {})).x_BTD

        def leave(stream: Stream) -> tuple[list[Array], tuple[MicroBatchSums, Params]]:
            def loss(ends: Params, x_BTD: Array, aux: dict[str, Array]) -> tuple[Array, MicroBatchSums]:
                params = whole(ends)
                x_BTD = decoder.final_norm(params, self._split(x_BTD))
                tokens = TokenSplit(self._split, self._merge)
                whole_stream = stream._replace(x_BTD=self._merge(x_BTD), aux=stream.aux | aux)
                ahead, aux = decoder.predict_ahead(params, whole_stream, tokens_ahead(leaving))
                ahead = [self._split(each) for each in ahead]
                outputs = Outputs(decoder, params, x_BTD, aux, self._parts.config, tokens, ahead)
                loss, sums = self._parts.objective.loss(outputs, leaving, factor)
                return loss, (sums, outputs.expert_counts, outputs.largest_logits)

            aux = {name: x for name, x in stream.aux.items() if name != EXPERT_COUNTS}  # which has no gradient
            differentiate = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
            (_, found), (ends_gradient, x_gradient, aux_gradient) = differentiate(ends, stream.x_BTD, aux)
            x_gradient = constrain(x_gradient, axes.x_BTD)
            aux_gradient = {name: constrain(g, axes.aux[name]) for name, g in aux_gradient.items()}
            return jax.tree.leaves([x_gradient, aux_gradient]), (found, ends_gradient)

        x_BTD = embed(ends, entering)
        aux = empty_aux(decoder.shape, *entering["tokens"].shape)
        flight, layer_gradients, cotangents, (found, loss_gradient) = self.pipeline.tick_1f1b(
            run,
            layers,
            None if frozen is None else frozen["layers"],
            flight,
            time,
            entering=Stream(x_BTD, entering["segments"], entering["positions"], aux),
            leave=leave,
            axes=axes,
        )
        _, embed_backward = jax.vjp(lambda ends: embed(ends, returning), ends)
        (embed_gradient,) = embed_backward(cotangents[0])
        gradients = jax.tree.map(jnp.add, loss_gradient, embed_gradient)
        return flight, found, gradients | {"layers": layer_gradients}

    def _split(self, x: Array) -> Array:
        """[b, T, ...] as [b P, T / P, ...], split over the stages."""
        b, T = x.shape[:2]
        P = self.pipeline.num_stages
        return constrain(
            _whole(x).reshape(b * P, T // P, *x.shape[2:]),
            ("end_batch",) + (None,) * (x.ndim - 1),
        )

    def _merge(self, x: Array) -> Array:
        """The inverse of `_split`."""
        return _whole(x.reshape(x.shape[0] // self.pipeline.num_stages, -1, *x.shape[2:]))


def _whole(x: Array) -> Array:
    """Rows with all of their tokens on one shard; there is no direct way from one split to the other."""
    return constrain(x, ("batch",) + (None,) * (x.ndim - 1))
