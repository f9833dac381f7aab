"""Attention of examples whose tokens are split over the devices of the context axis, arranged by `context_order`.

Each device first attends its own queries to its own keys, which stand in their true order. Between shard i and any
other shard j, causality then rules out half of the chunk pairs and asks for all of every other: the late queries see
all early keys, and of the rest the shard with the lower number is the key: early queries see the early keys of a lower
shard, late queries the late keys of a higher one. So every device does the same work, none of it is masked but for
documents, and what is found over the keys of each shard is merged by its log-partition. The strategies differ in how
the other shards' keys come, and how their gradients go back; neither holds more scores than one block of queries by
one chunk of keys. Source: Liu et al. 2023, arXiv:2310.01889; Dubey et al. 2024, arXiv:2407.21783, section 3.3.2.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_lite.models.blockwise import (
    BackwardKeys,
    BackwardQueries,
    Index,
    Keys,
    attend,
    attend_backward,
    attend_causally,
    attend_causally_backward,
    block_queries,
    blocks,
    grouped,
    merge,
    part,
    same_document,
    ungrouped,
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


def _chunk_pairs(other: jax.Array) -> tuple[tuple[Index, Index], ...]:
    """(chunk of own queries, chunk of the other's keys) that causality allows; 0 is the early chunk, 1 the late."""
    later = (other > own_shard()).astype(jnp.int32)
    return (1, 0), (later, later)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def context_attention(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segment_BT: jax.Array, strategy: str
) -> jax.Array:
    """`attention` of examples in context order, T being split over the context axis of the mesh in use.

    Kept for the backward pass are its arguments, the context and the log-partitions, each device's own part of them.

    Args:
      strategy: one of STRATEGIES.
    Raises:
      KeyError: the strategy is unknown.
    """
    return _forward(q_BTNH, k_BSKH, v_BSKH, segment_BT, strategy)[0]


def _forward(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segment_BT: jax.Array, strategy: str) -> Any:
    local = functools.partial(_shard_forward, STRATEGIES[strategy])
    arguments = (q_BTNH, k_BSKH, v_BSKH, segment_BT)
    context_BTNH, log_partition_BKGT1 = over_shards(local, (_HEADS, _HEADS, _HEADS, _TOKENS), [_HEADS, _ROWS])(
        *arguments
    )
    return context_BTNH, (*arguments, context_BTNH, log_partition_BKGT1)


def _backward(strategy: str, residuals: Any, g_BTNH: jax.Array) -> Any:
    local = functools.partial(_shard_backward, STRATEGIES[strategy])
    in_axes = (_HEADS, _HEADS, _HEADS, _TOKENS, _HEADS, _ROWS, _HEADS)
    return *over_shards(local, in_axes, [_HEADS, _HEADS, _HEADS])(*residuals, g_BTNH), None


context_attention.defvjp(_forward, _backward)


def _shard_forward(
    strategy: Any, q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segment_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One device's context and log-partitions."""
    T = q_BTNH.shape[1]
    chunk, block = T // CHUNKS_PER_SHARD, block_queries(T)
    q_BKGTH = grouped(q_BTNH, k_BSKH.shape[2]).transpose(0, 2, 3, 1, 4)

    def visit(state: Any, sums: Any, theirs: Any, other: jax.Array) -> tuple[Any, Any]:
        keys = Keys.of(*theirs)
        for query_chunk, key_chunk in _chunk_pairs(other):
            seen_keys = keys.part(key_chunk * chunk, chunk)
            for first, end in blocks(chunk, block):
                at, count = query_chunk * chunk + first, end - first
                in_document_B11TS = same_document(part(segment_BT, at, count, axis=1), seen_keys.segment_BS)
                found = attend(part(q_BKGTH, at, count, axis=3), seen_keys, in_document_B11TS)
                before = tuple(part(x, at, count, axis=3) for x in state)
                state = tuple(
                    jax.lax.dynamic_update_slice_in_dim(x, new, at, axis=3)
                    for x, new in zip(state, merge(before, found), strict=True)
                )
        return state, sums

    own_keys = Keys.of(k_BSKH, v_BSKH, segment_BT)
    state = attend_causally(q_BKGTH, segment_BT, own_keys, block, jnp.float32)
    (context_BKGTH, log_partition_BKGT1), _ = strategy(visit, state, (k_BSKH, v_BSKH, segment_BT), ())
    return ungrouped(context_BKGTH.astype(q_BTNH.dtype)), log_partition_BKGT1


def _shard_backward(
    strategy: Any,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segment_BT: jax.Array,
    context_BTNH: jax.Array,
    log_partition_BKGT1: jax.Array,
    g_BTNH: jax.Array,
) -> tuple[jax.Array, ...]:
    """One device's dq, dk and dv; what other devices' queries add to dk and dv comes back from them."""
    T, dtype = q_BTNH.shape[1], q_BTNH.dtype
    chunk, block = T // CHUNKS_PER_SHARD, block_queries(T)
    queries = BackwardQueries.of(q_BTNH, g_BTNH, context_BTNH, log_partition_BKGT1, segment_BT)

    def visit(dq_BKGTH: jax.Array, sums: Any, theirs: Any, other: jax.Array) -> tuple[Any, Any]:
        keys = BackwardKeys.of(*theirs)
        for query_chunk, key_chunk in _chunk_pairs(other):
            seen_keys = keys.part(key_chunk * chunk, chunk)
            for first, end in blocks(chunk, block):
                at = query_chunk * chunk + first
                of_block = queries.part(at, end - first)
                in_document_B11TS = same_document(of_block.segment_BT, seen_keys.segment_BS)
                dq_block_BKGTH, *dkv = attend_backward(of_block, seen_keys, in_document_B11TS)
                dq_BKGTH = _add(dq_BKGTH, dq_block_BKGTH, at)
                sums = tuple(_add(x, more, key_chunk * chunk) for x, more in zip(sums, dkv, strict=True))
        return dq_BKGTH, sums

    own_keys = BackwardKeys.of(k_BSKH, v_BSKH, segment_BT)
    dq_BKGTH, *own_sums = attend_causally_backward(queries, own_keys, block, jnp.float32)
    zeros = tuple(jnp.zeros_like(x) for x in own_sums)
    dq_BKGTH, sums = strategy(visit, dq_BKGTH, (k_BSKH, v_BSKH, segment_BT), zeros)
    dkv = ((own + others).transpose(0, 3, 1, 2).astype(dtype) for own, others in zip(own_sums, sums, strict=True))
    return ungrouped(dq_BKGTH.astype(dtype)), *dkv


def _add(x: jax.Array, more: jax.Array, at: Index) -> jax.Array:
    """`x` with `more` added to the positions from `at` on, along the dim in which they differ: 3."""
    axis = 3
    there = part(x, at, more.shape[axis], axis)
    return jax.lax.dynamic_update_slice_in_dim(x, there + more, at, axis)
