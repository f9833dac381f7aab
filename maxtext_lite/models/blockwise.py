"""Attention by plain matmuls, a block of queries at a time, with a backward pass that keeps no scores.

Half of the square of scores is never computed, none of it is kept: the backward pass rebuilds it from the log-partition
of each row. Source: Dao 2023, arXiv:2307.08691, section 3, for whole examples without its inner loop over keys.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

_SMALLEST_BLOCK = 128
_MOST_BLOCKS = 16
_MASKED = -1e30  # finite: a row without any key inside a block must not give inf - inf

_dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

Index = int | jax.Array


def block_queries(num_tokens: int) -> int:
    """Queries in a block of `blockwise_attention` of examples of `num_tokens` tokens."""
    return _SMALLEST_BLOCK * math.ceil(num_tokens / (_SMALLEST_BLOCK * _MOST_BLOCKS))


def part(x: jax.Array, first: Index, count: int, axis: int) -> jax.Array:
    """`count` entries of a dim; `first` may be traced."""
    if isinstance(first, int):
        return jax.lax.slice_in_dim(x, first, first + count, axis=axis)
    return jax.lax.dynamic_slice_in_dim(x, first, count, axis=axis)


class Keys(NamedTuple):
    """Keys and values as the forward pass multiplies by them, and their documents."""

    k_BKHS: jax.Array
    v_BKSH: jax.Array
    segment_BS: jax.Array

    @classmethod
    def of(cls, k_BSKH: jax.Array, v_BSKH: jax.Array, segment_BS: jax.Array) -> "Keys":
        """Keys and values as they come from the projections, turned."""
        return cls(k_BSKH.transpose(0, 2, 3, 1), v_BSKH.transpose(0, 2, 1, 3), segment_BS)

    def part(self, first: Index, count: int) -> "Keys":
        """Those of `count` positions."""
        return Keys(*(part(x, first, count, axis) for x, axis in zip(self, (3, 2, 1), strict=True)))


class BackwardKeys(NamedTuple):
    """Keys and values as the backward pass multiplies by them, and their documents."""

    k_BKHS: jax.Array
    k_BKSH: jax.Array
    v_BKHS: jax.Array
    segment_BS: jax.Array

    @classmethod
    def of(cls, k_BSKH: jax.Array, v_BSKH: jax.Array, segment_BS: jax.Array) -> "BackwardKeys":
        """Keys and values as they come from the projections, turned."""
        k_BKHS, k_BKSH = k_BSKH.transpose(0, 2, 3, 1), k_BSKH.transpose(0, 2, 1, 3)
        return cls(k_BKHS, k_BKSH, v_BSKH.transpose(0, 2, 3, 1), segment_BS)

    def part(self, first: Index, count: int) -> "BackwardKeys":
        """Those of `count` positions."""
        return BackwardKeys(*(part(x, first, count, axis) for x, axis in zip(self, (3, 2, 3, 1), strict=True)))


class BackwardQueries(NamedTuple):
    """Queries and the gradient of their context, in each orientation that a matmul wants, copied once for all blocks.

    Attributes:
      log_partition_BKGT1: of each row of scores, over all its keys, wherever they are.
      product_BKGT1: gradient times context.
    """

    q_BKGTH: jax.Array
    q_BKHGT: jax.Array
    g_BKGTH: jax.Array
    g_BKHGT: jax.Array
    log_partition_BKGT1: jax.Array
    product_BKGT1: jax.Array
    segment_BT: jax.Array

    @classmethod
    def of(
        cls,
        q_BTNH: jax.Array,
        g_BTNH: jax.Array,
        context_BTNH: jax.Array,
        log_partition_BKGT1: jax.Array,
        segment_BT: jax.Array,
    ) -> "BackwardQueries":
        """Queries, gradient and context as the forward pass has them, turned."""
        K = log_partition_BKGT1.shape[1]
        q_BTKGH, g_BTKGH = grouped(q_BTNH, K), grouped(g_BTNH, K)
        product_BTKG = jnp.sum(g_BTKGH.astype(jnp.float32) * grouped(context_BTNH, K).astype(jnp.float32), axis=-1)
        return cls(
            q_BTKGH.transpose(0, 2, 3, 1, 4),
            q_BTKGH.transpose(0, 2, 4, 3, 1),
            g_BTKGH.transpose(0, 2, 3, 1, 4),
            g_BTKGH.transpose(0, 2, 4, 3, 1),
            log_partition_BKGT1,
            product_BTKG.transpose(0, 2, 3, 1)[..., None],
            segment_BT,
        )

    def part(self, first: Index, count: int) -> "BackwardQueries":
        """Those of `count` positions."""
        axes = (3, 4, 3, 4, 3, 3, 1)
        return BackwardQueries(*(part(x, first, count, axis) for x, axis in zip(self, axes, strict=True)))


def grouped(x_BTNH: jax.Array, num_kv_heads: int) -> jax.Array:
    """[B, T, K, G, H]: the query heads of each kv head."""
    B, T, _, H = x_BTNH.shape
    return x_BTNH.reshape(B, T, num_kv_heads, -1, H)


def ungrouped(x_BKGTH: jax.Array) -> jax.Array:
    """[B, T, N, H]."""
    B, K, G, T, H = x_BKGTH.shape
    return x_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, K * G, H)


def may_see(
    segment_BT: jax.Array, segment_BS: jax.Array, first_query: Index | None, first_key: Index | None
) -> jax.Array:
    """True where a query may look at a key: one of its document that comes no later, [B, 1, 1, T, S].

    Args:
      first_query: number of the first query among the tokens that keys are numbered by too; None: all keys are earlier.
      first_key: number of the first key.
    """
    same_document_BTS = segment_BT[:, :, None] == segment_BS[:, None, :]
    if first_query is None or first_key is None:
        return same_document_BTS[:, None, None]
    T, S = segment_BT.shape[1], segment_BS.shape[1]
    not_later_TS = (first_query + jnp.arange(T))[:, None] >= (first_key + jnp.arange(S))[None, :]
    return (not_later_TS & same_document_BTS)[:, None, None]


def attend(q_BKGTH: jax.Array, keys: Keys, seen_B11TS: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Context [B, K, G, T, H] of these keys alone and log-partition [B, K, G, T, 1], float32.

    The log-partition of a query that sees none of them is so low that its context counts for nothing in a `merge`.
    """
    score_BKGTS = _dot("BKGTH,BKHS->BKGTS", q_BKGTH, keys.k_BKHS) * q_BKGTH.shape[-1] ** -0.5
    score_BKGTS = jnp.where(seen_B11TS, score_BKGTS, _MASKED)
    max_BKGT1 = jnp.max(score_BKGTS, axis=-1, keepdims=True)
    weight_BKGTS = jnp.exp(score_BKGTS - max_BKGT1)
    sum_BKGT1 = jnp.sum(weight_BKGTS, axis=-1, keepdims=True)
    context_BKGTH = _dot("BKGTS,BKSH->BKGTH", weight_BKGTS.astype(q_BKGTH.dtype), keys.v_BKSH) / sum_BKGT1
    return context_BKGTH, max_BKGT1 + jnp.log(sum_BKGT1)


def merge(one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Contexts and log-partitions over two sets of keys as those over both; each query sees a key of the first."""
    (one_BKGTH, one_BKGT1), (other_BKGTH, other_BKGT1) = one, other
    both_BKGT1 = jnp.logaddexp(one_BKGT1, other_BKGT1)
    share_BKGT1, other_share_BKGT1 = jnp.exp(one_BKGT1 - both_BKGT1), jnp.exp(other_BKGT1 - both_BKGT1)
    return share_BKGT1 * one_BKGTH + other_share_BKGT1 * other_BKGTH, both_BKGT1


def attend_backward(
    queries: BackwardQueries, keys: BackwardKeys, seen_B11TS: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What these queries and keys add to the gradients: dq [B, K, G, T, H], dk and dv [B, K, H, S], float32."""
    dtype, scale = queries.q_BKGTH.dtype, queries.q_BKGTH.shape[-1] ** -0.5
    score_BKGTS = _dot("BKGTH,BKHS->BKGTS", queries.q_BKGTH, keys.k_BKHS) * scale
    weight_BKGTS = jnp.where(seen_B11TS, jnp.exp(score_BKGTS - queries.log_partition_BKGT1), 0)
    dweight_BKGTS = _dot("BKGTH,BKHS->BKGTS", queries.g_BKGTH, keys.v_BKHS)
    dscore_BKGTS = (weight_BKGTS * (dweight_BKGTS - queries.product_BKGT1) * scale).astype(dtype)
    dq_BKGTH = _dot("BKGTS,BKSH->BKGTH", dscore_BKGTS, keys.k_BKSH)
    dk_BKHS = _dot("BKHGT,BKGTS->BKHS", queries.q_BKHGT, dscore_BKGTS)
    dv_BKHS = _dot("BKHGT,BKGTS->BKHS", queries.g_BKHGT, weight_BKGTS.astype(dtype))
    return dq_BKGTH, dk_BKHS, dv_BKHS


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def blockwise_attention(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segment_BT: jax.Array, block: int
) -> jax.Array:
    """`attention` of whole examples, `block` queries at a time over the keys that come no later."""
    return _forward(q_BTNH, k_BSKH, v_BSKH, segment_BT, block)[0]


def _blocks(num_tokens: int, block: int) -> list[tuple[int, int]]:
    return [(first, min(first + block, num_tokens)) for first in range(0, num_tokens, block)]


def _forward(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segment_BT: jax.Array, block: int) -> Any:
    q_BKGTH = grouped(q_BTNH, k_BSKH.shape[2]).transpose(0, 2, 3, 1, 4)
    keys = Keys.of(k_BSKH, v_BSKH, segment_BT)
    contexts, log_partitions = [], []
    for first, end in _blocks(q_BTNH.shape[1], block):
        near = keys.part(0, end)
        seen_B11TS = may_see(segment_BT[:, first:end], near.segment_BS, first, 0)
        context_BKGTH, log_partition_BKGT1 = attend(q_BKGTH[:, :, :, first:end], near, seen_B11TS)
        contexts.append(context_BKGTH.astype(q_BTNH.dtype))
        log_partitions.append(log_partition_BKGT1)
    context_BTNH = checkpoint_name(ungrouped(jnp.concatenate(contexts, axis=3)), "context")
    log_partition_BKGT1 = checkpoint_name(jnp.concatenate(log_partitions, axis=3), "context")
    residuals = (q_BTNH, k_BSKH, v_BSKH, segment_BT, context_BTNH, log_partition_BKGT1)
    return context_BTNH, residuals


def _backward(block: int, residuals: Any, g_BTNH: jax.Array) -> Any:
    q_BTNH, k_BSKH, v_BSKH, segment_BT, context_BTNH, log_partition_BKGT1 = residuals
    dtype = q_BTNH.dtype
    queries = BackwardQueries.of(q_BTNH, g_BTNH, context_BTNH, log_partition_BKGT1, segment_BT)
    keys = BackwardKeys.of(k_BSKH, v_BSKH, segment_BT)
    dq_blocks = []
    dk_BKHS, dv_BKHS = jnp.zeros(keys.k_BKHS.shape, jnp.float32), jnp.zeros(keys.v_BKHS.shape, jnp.float32)
    for first, end in _blocks(q_BTNH.shape[1], block):
        of_block, near = queries.part(first, end - first), keys.part(0, end)
        seen_B11TS = may_see(of_block.segment_BT, near.segment_BS, first, 0)
        dq_BKGTH, dk_near_BKHS, dv_near_BKHS = attend_backward(of_block, near, seen_B11TS)
        dq_blocks.append(dq_BKGTH.astype(dtype))
        dk_BKHS = dk_BKHS.at[..., :end].add(dk_near_BKHS)
        dv_BKHS = dv_BKHS.at[..., :end].add(dv_near_BKHS)
    dq_BTNH = ungrouped(jnp.concatenate(dq_blocks, axis=3))
    return dq_BTNH, dk_BKHS.transpose(0, 3, 1, 2).astype(dtype), dv_BKHS.transpose(0, 3, 1, 2).astype(dtype), None


blockwise_attention.defvjp(_forward, _backward)
