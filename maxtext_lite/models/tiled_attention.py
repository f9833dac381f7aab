"""Attention by plain matmuls, tile by tile, for whole examples and for examples split over the context axis.

The contexts of a query's tiles are merged by their log-partitions. Only one tile's scores exist at a time and none are
kept, so memory is linear in the tokens. Each device's queries first attend to its own keys, then to those of the other
shards. The strategies differ in how these keys arrive and how their gradients return.
Source: Dao 2023, arXiv:2307.08691; Liu et al. 2023, arXiv:2310.01889; Dubey et al. 2024, arXiv:2407.21783, 3.3.2.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxtext_lite.models.tile import (
    PLAIN,
    BackwardKeys,
    BackwardQueries,
    Index,
    Keys,
    Scoring,
    attend,
    attend_backward,
    grouped,
    may_see,
    merge,
    part,
    put,
    sink_gradient,
    ungrouped,
    with_sink,
)
from maxtext_lite.models.tile_layout import Layout, Strip
from maxtext_lite.parallel import (
    Tree,
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

_NO_DOCUMENT = -1  # the document of the padding after a run

Visit = Callable[[Tree, Tree, Tree, jax.Array], tuple[Tree, Tree]]
"""(state, sums for the other shard, the other shard's keys, its number) -> (state, sums)."""

Strategy = Callable[[Visit, Tree, Tree, Tree], tuple[Tree, Tree]]
"""(visit, state, own keys, zeros for their sums) -> (state, sums) after all other shards."""


def _all_gather(visit: Visit, state: Tree, keys: Tree, sums: Tree) -> tuple[Tree, Tree]:
    """All shards' keys are gathered at once, and one reduction returns their sums. There are two collectives, and a
    device has the keys and sums of whole examples."""
    own, shards, of_all = own_shard(), context_shards(), from_all_shards(keys)

    def body(distance: jax.Array, carry: Tree) -> Tree:
        state, sums = carry
        other = (own - distance) % shards
        theirs, their_sums = jax.tree.map(lambda x: x[other], (of_all, sums))
        state, their_sums = visit(state, their_sums, theirs, other)
        return state, jax.tree.map(lambda x, new: x.at[other].set(new), sums, their_sums)

    sums = jax.tree.map(lambda x: jnp.zeros((shards, *x.shape), x.dtype), sums)
    state, sums = jax.lax.fori_loop(1, shards, body, (state, sums))
    return state, sum_to_shards(sums)


def _ring(visit: Visit, state: Tree, keys: Tree, sums: Tree) -> tuple[Tree, Tree]:
    """Keys pass from shard to shard together with their sums, which reach their own shard with the last hop. A device
    has at most its own keys and one other shard's, and one more shard's in transit while it computes."""
    own, shards = own_shard(), context_shards()

    def hop(state: Tree, sums: Tree, theirs: Tree, distance: jax.Array | int) -> tuple[Tree, Tree]:
        state, sums = visit(state, sums, theirs, (own - distance) % shards)
        return state, to_next_shard(sums)

    def body(carry: Tree, distance: jax.Array) -> Tree:
        state, sums, theirs = carry
        coming = to_next_shard(theirs)
        state, sums = hop(state, sums, theirs, distance)
        return (state, sums, coming), None

    carry = (state, sums, to_next_shard(keys))
    if shards > 2:
        carry, _ = jax.lax.scan(body, carry, jnp.arange(1, shards - 1))
    return hop(*carry, shards - 1)


STRATEGIES: dict[str, Strategy] = {
    "all_gather": _all_gather,
    "ring": _ring,
}
"""How each shard's keys come to the others, by the value of context_parallel_strategy."""


class Passes(NamedTuple):
    """Attention's two passes on one device, whose first arguments are `options`.

    Attributes:
      forward: (queries, keys, values, documents, sinks or None) -> (context, log-partition).
      backward: (the same without sinks, both results, and the context's gradient) -> (dq, dk, dv).
    """

    forward: Callable[..., tuple[jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array, ...]]
    options: tuple[Hashable, ...]


def tiled_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKW: jax.Array,
    segment_BT: jax.Array,
    sink_N: jax.Array | None = None,
    *,
    strategy: str,
    scoring: Scoring = PLAIN,
) -> jax.Array:
    """`attention` for examples in context order, if the mesh in use splits T over its context axis.

    Args:
      strategy: one of STRATEGIES.
    Raises:
      KeyError: the strategy is unknown.
    """
    passes = Passes(_shard_forward, _shard_backward, (STRATEGIES[strategy], scoring))
    return on_devices((q_BTNH, k_BSKH, v_BSKW, segment_BT), sink_N, passes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def on_devices(arguments: tuple[jax.Array, ...], sink_N: jax.Array | None, passes: Passes) -> jax.Array:
    """Context [B, T, N, W] of examples in context order, by each device's passes.

    The backward pass keeps the arguments, the context and the log-partitions, each device its own part of them.

    Args:
      arguments: queries, keys, values and documents.
    """
    return _forward(arguments, sink_N, passes)[0]


def _forward(
    arguments: tuple[jax.Array, ...], sink_N: jax.Array | None, passes: Passes
) -> tuple[jax.Array, tuple[Tree, ...]]:
    local = functools.partial(passes.forward, *passes.options)
    run = over_shards(local, (_HEADS, _HEADS, _HEADS, _TOKENS, ("activation_heads",)), [_HEADS, _ROWS])
    context_BTNW, log_partition_BKGT1 = (checkpoint_name(x, "context") for x in run(*arguments, sink_N))
    return context_BTNW, (arguments, context_BTNW, log_partition_BKGT1, sink_N)


def _backward(passes: Passes, residuals: tuple[Tree, ...], g_BTNW: jax.Array) -> tuple[Tree, jax.Array | None]:
    arguments, context_BTNW, log_partition_BKGT1, sink_N = residuals
    local = functools.partial(passes.backward, *passes.options)
    run = over_shards(local, (_HEADS, _HEADS, _HEADS, _TOKENS, _HEADS, _ROWS, _HEADS), [_HEADS, _HEADS, _HEADS])
    gradients = run(*arguments, context_BTNW, log_partition_BKGT1, g_BTNW)
    return (*gradients, None), sink_gradient(sink_N, log_partition_BKGT1, context_BTNW, g_BTNW)


on_devices.defvjp(_forward, _backward)


def _shard_forward(
    strategy: Strategy,
    scoring: Scoring,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKW: jax.Array,
    segment_BT: jax.Array,
    sink_N: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """One device's context and log-partitions."""
    layout, W = Layout.of(q_BTNH.shape[1], scoring.window), v_BSKW.shape[-1]
    own = _padded_keys(layout, k_BSKH, v_BSKW, segment_BT)
    q_BKGTH = grouped(layout.pad(q_BTNH, axis=1), k_BSKH.shape[2]).transpose(0, 2, 3, 1, 4)

    def finds(keys: Keys) -> Any:
        """The function that `Layout.fold` calls for tiles of these keys; it gives contexts and log-partitions."""

        def find(strip: Strip, query: Index, key: Index, distance: Index | None) -> Tree:
            seen_keys = keys.part(key, strip.num_keys)
            of_queries = part(own[2], query, strip.num_queries, axis=1)
            seen_B11TS = may_see(of_queries, seen_keys.segment_BS, distance, 0, scoring.window)
            return attend(part(q_BKGTH, query, strip.num_queries, axis=3), seen_keys, seen_B11TS, scoring)

        return find

    def add(state: Tree, found: Tree, strip: Strip, query: Index, key: Index) -> Tree:
        context_BKGTW, log_partition_BKGT1 = (part(x, query, strip.num_queries, axis=3) for x in state)
        both = merge((context_BKGTW, log_partition_BKGT1), found)
        return tuple(put(x, new, query) for x, new in zip(state, both, strict=True))

    def nothing() -> tuple[jax.Array, jax.Array]:
        rows = (*q_BKGTH.shape[:3], layout.tile)
        return jnp.zeros((*rows, W), jnp.float32), jnp.full((*rows, 1), -jnp.inf, jnp.float32)

    def visit(state: Tree, sums: Tree, theirs: Tree, other: jax.Array) -> tuple[Tree, Tree]:
        return layout.fold(layout.tiles_with(other), state, finds(Keys.of(*theirs)), add, nothing), sums

    find = finds(Keys.of(*own))
    state = layout.fold(layout.own_tiles()[1:], layout.of_each_query(find), find, add, nothing)
    if context_shards() > 1:
        state, _ = strategy(visit, state, own, ())
    context_BKGTW, log_partition_BKGT1 = with_sink(state, sink_N)
    context_BTNW = ungrouped(context_BKGTW.astype(q_BTNH.dtype))
    return layout.unpad(context_BTNW, axis=1), layout.unpad(log_partition_BKGT1, axis=3)


def _shard_backward(strategy: Strategy, scoring: Scoring, *arguments: jax.Array) -> tuple[jax.Array, ...]:
    """One device's dq, dk and dv, including the terms of dk and dv that other devices send for their queries."""
    q_BTNH, k_BSKH, v_BSKW, segment_BT, context_BTNW, log_partition_BKGT1, g_BTNW = arguments
    layout, dtype = Layout.of(q_BTNH.shape[1], scoring.window), q_BTNH.dtype
    own = _padded_keys(layout, k_BSKH, v_BSKW, segment_BT)
    q_BTNH, g_BTNW, context_BTNW = (layout.pad(x, axis=1) for x in (q_BTNH, g_BTNW, context_BTNW))
    log_partition_BKGT1 = layout.pad(log_partition_BKGT1, axis=3)
    queries = BackwardQueries.of(q_BTNH, g_BTNW, context_BTNW, log_partition_BKGT1, own[2])

    def look(state: Tree, keys: BackwardKeys, tiles: Tree) -> Tree:
        """`state`, dq and these keys' dk and dv, plus these tiles' terms."""

        def find(strip: Strip, query: Index, key: Index, distance: Index | None) -> Tree:
            of_strip, seen_keys = queries.part(query, strip.num_queries), keys.part(key, strip.num_keys)
            seen_B11TS = may_see(of_strip.segment_BT, seen_keys.segment_BS, distance, 0, scoring.window)
            return attend_backward(of_strip, seen_keys, seen_B11TS, scoring)

        def add(state: Tree, found: Tree, strip: Strip, query: Index, key: Index) -> Tree:
            places = (query, key, key)
            before = (part(x, at, new.shape[3], axis=3) for x, new, at in zip(state, found, places, strict=True))
            sums = [x + new for x, new in zip(before, found, strict=True)]
            return tuple(put(x, new, at) for x, new, at in zip(state, sums, places, strict=True))

        def nothing() -> Tree:
            shapes = [(*x.shape[:3], layout.tile, *x.shape[4:]) for x in state]
            return tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)

        return layout.fold(tiles, state, find, add, nothing)

    def visit(dq_BKGTH: jax.Array, sums: Tree, theirs: Tree, other: jax.Array) -> tuple[Tree, Tree]:
        dq_BKGTH, *sums = look((dq_BKGTH, *sums), BackwardKeys.of(*theirs), layout.tiles_with(other))
        return dq_BKGTH, tuple(sums)

    keys = BackwardKeys.of(*own)
    zeros = jnp.zeros(keys.k_BKHS.shape, jnp.float32), jnp.zeros(keys.v_BKWS.shape, jnp.float32)
    dq_BKGTH = jnp.zeros(queries.q_BKGTH.shape, jnp.float32)
    dq_BKGTH, *own_sums = look((dq_BKGTH, *zeros), keys, layout.own_tiles())
    if context_shards() > 1:
        dq_BKGTH, sums = strategy(visit, dq_BKGTH, own, zeros)
        own_sums = [one + others for one, others in zip(own_sums, sums, strict=True)]
    results = ungrouped(dq_BKGTH.astype(dtype)), *(x.transpose(0, 3, 1, 2).astype(dtype) for x in own_sums)
    return tuple(layout.unpad(x, axis=1) for x in results)


def _padded_keys(layout: Layout, k_BSKH: jax.Array, v_BSKW: jax.Array, segment_BS: jax.Array) -> tuple[jax.Array, ...]:
    return layout.pad(k_BSKH, axis=1), layout.pad(v_BSKW, axis=1), layout.pad(segment_BS, axis=1, value=_NO_DOCUMENT)
