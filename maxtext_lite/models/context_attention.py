"""Attention of examples whose tokens are split over the devices of the context axis, arranged by `context_order`.

Each device first attends its own queries to its own keys, which stand in their true order. Of the four pairs of its
chunks with those of another shard, causality then rules out two and asks for the whole of the others: late queries see
all early keys, and early queries see the early keys of a lower shard, late queries the late keys of a higher one. So
every device does the same work, of which documents alone mask something. It is done tile by tile, a square of `tile`
queries and keys at a time, whose contexts are merged by their log-partitions: one tile's scores exist at a time.
With a sliding window, tiles that are further apart than it are passed over; how many a device has then depends on its
chunks, which stand at the two ends of the example for the first shard and side by side in its middle for the last.

The strategies differ in how the other shards' keys come, and how their gradients go back.
Source: Liu et al. 2023, arXiv:2310.01889; Dubey et al. 2024, arXiv:2407.21783, section 3.3.2.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from maxtext_lite.models.blockwise import (
    PLAIN,
    BackwardKeys,
    BackwardQueries,
    Keys,
    Scoring,
    attend,
    attend_backward,
    grouped,
    may_see,
    merge,
    part,
    sink_gradient,
    ungrouped,
    with_sink,
)
from maxtext_lite.parallel import (
    CHUNKS_PER_SHARD,
    context_shards,
    from_all_shards,
    over_shards,
    own_shard,
    sum_to_shards,
    to_next_shard,
)

_HEADS = ("batch", "length", "activation_heads", None)
_ROWS = ("batch", "activation_heads", None, "length", None)
_TOKENS = ("batch", "length")
_SINKS = ("activation_heads",)

_TILE = 512

Tiles = tuple[Any, Any]
"""First query and first key of each tile, int arrays of one dim."""

Visit = Callable[[Any, Any, Any, jax.Array], tuple[Any, Any]]
"""(state, sums for the other shard, the other shard's keys, its number) -> (state, sums)."""


def _all_gather(visit: Visit, state: Any, keys: Any, sums: Any) -> tuple[Any, Any]:
    """Every shard's keys come at once; one reduction brings the sums home. Two collectives, and a device's keys
    and sums are those of whole examples."""
    own, shards, of_all = own_shard(), context_shards(), from_all_shards(keys)

    def body(distance: Any, carry: Any) -> Any:
        state, sums = carry
        other = (own - distance) % shards
        theirs, their_sums = jax.tree.map(lambda x: x[other], (of_all, sums))
        state, their_sums = visit(state, their_sums, theirs, other)
        return state, jax.tree.map(lambda x, new: x.at[other].set(new), sums, their_sums)

    sums = jax.tree.map(lambda x: jnp.zeros((shards, *x.shape), x.dtype), sums)
    state, sums = jax.lax.fori_loop(1, shards, body, (state, sums))
    return state, sum_to_shards(sums)


def _ring(visit: Visit, state: Any, keys: Any, sums: Any) -> tuple[Any, Any]:
    """Keys go round from shard to shard, and with them the sums, which are home after the last hop. A device never
    holds more than its own keys and one other shard's, and one more on their way while it works."""
    own, shards = own_shard(), context_shards()

    def hop(state: Any, sums: Any, theirs: Any, distance: Any) -> tuple[Any, Any]:
        state, sums = visit(state, sums, theirs, (own - distance) % shards)
        return state, to_next_shard(sums)

    def body(carry: Any, distance: Any) -> Any:
        state, sums, theirs = carry
        coming = to_next_shard(theirs)
        state, sums = hop(state, sums, theirs, distance)
        return (state, sums, coming), None

    carry = (state, sums, to_next_shard(keys))
    if shards > 2:
        carry, _ = jax.lax.scan(body, carry, jnp.arange(1, shards - 1))
    return hop(*carry, shards - 1)


STRATEGIES: dict[str, Callable[[Visit, Any, Any, Any], tuple[Any, Any]]] = {"all_gather": _all_gather, "ring": _ring}
"""How each shard's keys come to the others, by the value of context_parallel_strategy."""


def tile_tokens(chunk: int) -> int:
    """Queries, and keys, of a tile: the divisor of a chunk's tokens that is nearest to 512 as a ratio."""
    divisors = [number for number in range(1, chunk + 1) if chunk % number == 0]
    return min(divisors, key=lambda number: max(number / _TILE, _TILE / number))


def _own_tiles(num_tokens: int, tile: int) -> Tiles:
    """Those of a device's queries with its own keys that come no later; each query's own tile comes first."""
    pairs = [(query, key) for query in range(num_tokens // tile) for key in range(query, -1, -1)]
    query, key = (tile * np.array(side) for side in zip(*pairs, strict=True))
    return query, key


def _tiles_with(other: jax.Array, chunk: int, tile: int) -> Tiles:
    """Those of a device's queries with the keys of another shard: of the two pairs of chunks that causality allows."""
    query, key = (tile * side.ravel() for side in np.indices((chunk // tile, chunk // tile)))
    later = chunk * (other > own_shard()).astype(jnp.int32)  # the late chunks of both, or the early ones
    return jnp.concatenate([chunk + query, later + query]), jnp.concatenate([key, later + key])


@dataclasses.dataclass(frozen=True)
class _Places:
    """Where the tokens of the tiles stand in the example, and what queries see of keys there.

    Attributes:
      chunk: tokens of a chunk.
      tile: queries, and keys, of a tile.
    """

    chunk: int
    tile: int
    window: int | None

    @classmethod
    def of(cls, num_tokens: int, window: int | None) -> "_Places":
        """Those of a device's tokens."""
        chunk = num_tokens // CHUNKS_PER_SHARD
        return cls(chunk, tile_tokens(chunk), window)

    def true_place(self, shard: jax.Array, place: jax.Array) -> jax.Array:
        """The number in the example of the token at this place of a shard."""
        late = 2 * context_shards() - 1 - shard
        return place % self.chunk + self.chunk * jnp.where(place < self.chunk, shard, late)

    def seen(self, segment_BT: jax.Array, segment_BS: jax.Array, tile: Any, other: jax.Array | None) -> jax.Array:
        """Which keys of a tile its queries see, [B, 1, 1, T, S].

        Args:
          tile: its first query and first key, as places on their shards.
          other: the shard of the keys, none of which is later than a query; None: the queries' own.
        """
        query, key = tile
        if self.window is None:
            return may_see(segment_BT, segment_BS, query if other is None else None, key)
        return may_see(segment_BT, segment_BS, *self._true_places(tile, other), self.window)

    def if_near(self, found: Callable[[], Any], nothing: Callable[[], Any], tile: Any, other: jax.Array | None) -> Any:
        """`found()` of a tile, or `nothing()` where the window of none of its queries reaches its last key."""
        if self.window is None:
            return found()
        query, key = self._true_places(tile, other)
        return jax.lax.cond(query - (key + self.tile - 1) < self.window, found, nothing)

    def _true_places(self, tile: Any, other: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        query, key = tile
        own = own_shard()
        return self.true_place(own, query), self.true_place(own if other is None else other, key)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 6))
def context_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKW: jax.Array,
    segment_BT: jax.Array,
    strategy: str,
    sink_N: jax.Array | None = None,
    scoring: Scoring = PLAIN,
) -> jax.Array:
    """`attention` of examples in context order, T being split over the context axis of the mesh in use.

    Kept for the backward pass are its arguments, the context and the log-partitions, each device's own part of them.

    Args:
      strategy: one of STRATEGIES.
    Raises:
      KeyError: the strategy is unknown.
    """
    return _forward(q_BTNH, k_BSKH, v_BSKW, segment_BT, strategy, sink_N, scoring)[0]


def _forward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKW: jax.Array,
    segment_BT: jax.Array,
    strategy: str,
    sink_N: jax.Array | None,
    scoring: Scoring,
) -> Any:
    local = functools.partial(_shard_forward, STRATEGIES[strategy], scoring)
    arguments, axes = (q_BTNH, k_BSKH, v_BSKW, segment_BT), (_HEADS, _HEADS, _HEADS, _TOKENS)
    sinks, sink_axes = ((), ()) if sink_N is None else ((sink_N,), (_SINKS,))
    context_BTNW, log_partition_BKGT1 = over_shards(local, (*axes, *sink_axes), [_HEADS, _ROWS])(*arguments, *sinks)
    context_BTNW, log_partition_BKGT1 = (checkpoint_name(x, "context") for x in (context_BTNW, log_partition_BKGT1))
    return context_BTNW, (*arguments, context_BTNW, log_partition_BKGT1, sink_N)


def _backward(strategy: str, scoring: Scoring, residuals: Any, g_BTNW: jax.Array) -> Any:
    *residuals, context_BTNW, log_partition_BKGT1, sink_N = residuals
    local = functools.partial(_shard_backward, STRATEGIES[strategy], scoring)
    in_axes = (_HEADS, _HEADS, _HEADS, _TOKENS, _HEADS, _ROWS, _HEADS)
    dq_BTNH, dk_BSKH, dv_BSKW = over_shards(local, in_axes, [_HEADS, _HEADS, _HEADS])(
        *residuals, context_BTNW, log_partition_BKGT1, g_BTNW
    )
    return dq_BTNH, dk_BSKH, dv_BSKW, None, sink_gradient(sink_N, log_partition_BKGT1, context_BTNW, g_BTNW)


context_attention.defvjp(_forward, _backward)


def _shard_forward(
    strategy: Any,
    scoring: Scoring,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKW: jax.Array,
    segment_BT: jax.Array,
    sink_N: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One device's context and log-partitions."""
    T, W = q_BTNH.shape[1], v_BSKW.shape[-1]
    places = _Places.of(T, scoring.window)
    chunk, tile = places.chunk, places.tile
    q_BKGTH = grouped(q_BTNH, k_BSKH.shape[2]).transpose(0, 2, 3, 1, 4)
    B, K, G = q_BKGTH.shape[:3]

    def nothing(num_queries: int) -> tuple[jax.Array, jax.Array]:
        rows = (B, K, G, num_queries)
        return jnp.zeros((*rows, W), jnp.float32), jnp.full((*rows, 1), -jnp.inf, jnp.float32)

    def look(state: Any, keys: Keys, tiles: Tiles, other: jax.Array | None) -> Any:
        """`state`, the context and log-partition so far, after these tiles."""

        def one(state: Any, at: Any) -> tuple[Any, None]:
            query, key = at
            seen_keys = keys.part(key, tile)
            seen_B11TS = places.seen(part(segment_BT, query, tile, axis=1), seen_keys.segment_BS, at, other)
            q_tile_BKGTH = part(q_BKGTH, query, tile, axis=3)
            found = places.if_near(
                lambda: attend(q_tile_BKGTH, seen_keys, seen_B11TS, scoring), lambda: nothing(tile), at, other
            )
            context_BKGTW, log_partition_BKGT1 = state
            before = part(context_BKGTW, query, tile, axis=3), part(log_partition_BKGT1, query, tile, axis=3)
            both_BKGTW, both_BKGT1 = merge(before, found)
            return (_put(context_BKGTW, both_BKGTW, query), _put(log_partition_BKGT1, both_BKGT1, query)), None

        return jax.lax.scan(one, state, tiles)[0]

    def visit(state: Any, sums: Any, theirs: Any, other: jax.Array) -> tuple[Any, Any]:
        return look(state, Keys.of(*theirs), _tiles_with(other, chunk, tile), other), sums

    own = (k_BSKH, v_BSKW, segment_BT)
    state = look(nothing(T), Keys.of(*own), _own_tiles(T, tile), None)
    state, _ = strategy(visit, state, own, ())
    context_BKGTW, log_partition_BKGT1 = with_sink(state, sink_N)
    return ungrouped(context_BKGTW.astype(q_BTNH.dtype)), log_partition_BKGT1


def _shard_backward(
    strategy: Any,
    scoring: Scoring,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKW: jax.Array,
    segment_BT: jax.Array,
    context_BTNW: jax.Array,
    log_partition_BKGT1: jax.Array,
    g_BTNW: jax.Array,
) -> tuple[jax.Array, ...]:
    """One device's dq, dk and dv; what other devices' queries add to dk and dv comes back from them."""
    T, dtype = q_BTNH.shape[1], q_BTNH.dtype
    places = _Places.of(T, scoring.window)
    chunk, tile = places.chunk, places.tile
    queries = BackwardQueries.of(q_BTNH, g_BTNW, context_BTNW, log_partition_BKGT1, segment_BT)

    def look(dq_BKGTH: jax.Array, sums: Any, keys: BackwardKeys, tiles: Tiles, other: Any) -> tuple[Any, Any]:
        """dq, and dk and dv of these keys, with what these tiles add."""

        def one(carry: Any, at: Any) -> tuple[Any, None]:
            (dq_BKGTH, sums), (query, key) = carry, at
            of_tile, seen_keys = queries.part(query, tile), keys.part(key, tile)
            seen_B11TS = places.seen(of_tile.segment_BT, seen_keys.segment_BS, at, other)
            of_these = (of_tile.q_BKGTH, seen_keys.k_BKHS, seen_keys.v_BKWS)  # dq, dk and dv have their shapes
            dq_tile_BKGTH, *dkv = places.if_near(
                lambda: attend_backward(of_tile, seen_keys, seen_B11TS, scoring),
                lambda: tuple(jnp.zeros(x.shape, jnp.float32) for x in of_these),
                at,
                other,
            )
            dq_BKGTH = _put(dq_BKGTH, part(dq_BKGTH, query, tile, axis=3) + dq_tile_BKGTH, query)
            sums = tuple(_put(x, part(x, key, tile, axis=3) + more, key) for x, more in zip(sums, dkv, strict=True))
            return (dq_BKGTH, sums), None

        return jax.lax.scan(one, (dq_BKGTH, sums), tiles)[0]

    def visit(dq_BKGTH: jax.Array, sums: Any, theirs: Any, other: jax.Array) -> tuple[Any, Any]:
        return look(dq_BKGTH, sums, BackwardKeys.of(*theirs), _tiles_with(other, chunk, tile), other)

    own, keys = (k_BSKH, v_BSKW, segment_BT), BackwardKeys.of(k_BSKH, v_BSKW, segment_BT)
    zeros = jnp.zeros(keys.k_BKHS.shape, jnp.float32), jnp.zeros(keys.v_BKWS.shape, jnp.float32)
    dq_BKGTH = jnp.zeros(queries.q_BKGTH.shape, jnp.float32)
    dq_BKGTH, own_sums = look(dq_BKGTH, zeros, keys, _own_tiles(T, tile), None)
    dq_BKGTH, sums = strategy(visit, dq_BKGTH, own, zeros)
    dkv = ((own + others).transpose(0, 3, 1, 2).astype(dtype) for own, others in zip(own_sums, sums, strict=True))
    return ungrouped(dq_BKGTH.astype(dtype)), *dkv


def _put(x: jax.Array, new: jax.Array, first: jax.Array) -> jax.Array:
    """`x` with `new` at the positions from `first` on, which dim 3 counts."""
    return jax.lax.dynamic_update_slice_in_dim(x, new, first, axis=3)
