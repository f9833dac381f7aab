"""Attention of one tile, some queries and some keys, forward and backward; `tiled_attention` is made of these.

No scores are kept: the backward pass recomputes a tile's from the log-partition of each row.
Source: Dao 2023, arXiv:2307.08691, section 3.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

_MASKED = -1e30  # finite: a row without any key inside a tile must not give inf - inf

_dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

Index = int | jax.Array


@dataclasses.dataclass(frozen=True)
class Scoring:
    """How queries score keys, and which they score.

    Attributes:
      scale: factor of the product of a query and a key; None: H ** -0.5 for keys of width H.
      window: keys that a query sees: its own and those of the window - 1 tokens before it; None: all that are no later.
      chunk: a query sees only keys of its own chunk of this many tokens of its document; None: there are no chunks.
        The decoder passes chunks to `attention` as documents; only attention over a cache reads this.
      soft_cap: c in c * tanh(score / c), which bounds a score; None: scores are not bounded.

    Raises:
      ValueError: the window or the cap is not positive.
    Source: windows, Beltagy et al. 2020, arXiv:2004.05150, section 3.1; the cap, Gemma 2, arXiv:2408.00118, section 2.
    """

    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window} keys leaves a query without its own. Nearest that works: 1.")
        if self.soft_cap is not None and self.soft_cap <= 0:
            raise ValueError(f"soft_cap={self.soft_cap} is not positive. Nearest that works: None.")

    def scale_of(self, key_dim: int) -> float:
        """The scale for keys of this width."""
        return key_dim**-0.5 if self.scale is None else self.scale

    def score(self, product: jax.Array, key_dim: int) -> jax.Array:
        """Scores of any shape from the products of queries and keys of this width, in their dtype."""
        score = product * self.scale_of(key_dim)
        return score if self.soft_cap is None else self.soft_cap * jnp.tanh(score / self.soft_cap)

    def dproduct(self, dscore: jax.Array, score: jax.Array, key_dim: int) -> jax.Array:
        """The gradient of the products, from that of their scores and the scores themselves."""
        dproduct = dscore * self.scale_of(key_dim)
        return dproduct if self.soft_cap is None else dproduct * (1 - jnp.square(score / self.soft_cap))


PLAIN = Scoring()
"""Llama's: every key that is no later, scored by its product with the query over the square root of their width."""


def part(x: jax.Array, first: Index, count: int, axis: int) -> jax.Array:
    """`count` entries of a dim; `first` may be traced."""
    if isinstance(first, int):
        return jax.lax.slice_in_dim(x, first, first + count, axis=axis)
    return jax.lax.dynamic_slice_in_dim(x, first, count, axis=axis)


def put(x: jax.Array, new: jax.Array, first: Index) -> jax.Array:
    """`x` with `new` at the positions of dim 3 from `first` on."""
    return jax.lax.dynamic_update_slice_in_dim(x, new, first, axis=3)


def whole_blocks(x: jax.Array, block: int, *, axis: int = 1, value: float = 0) -> jax.Array:
    """`x` padded to a whole number of blocks of tokens."""
    fill = -x.shape[axis] % block
    pads = [(0, fill if dim == axis else 0) for dim in range(x.ndim)]
    return jnp.pad(x, pads, constant_values=value) if fill else x


class Keys(NamedTuple):
    """Keys and values in the layout of the forward pass's matmuls, and their documents."""

    k_BKHS: jax.Array
    v_BKSW: jax.Array
    segment_BS: jax.Array

    @classmethod
    def of(cls, k_BSKH: jax.Array, v_BSKW: jax.Array, segment_BS: jax.Array) -> "Keys":
        """Keys and values from the projections, transposed."""
        return cls(k_BSKH.transpose(0, 2, 3, 1), v_BSKW.transpose(0, 2, 1, 3), segment_BS)

    def part(self, first: Index, count: int) -> "Keys":
        """The part with `count` positions from `first` on."""
        return Keys(*(part(x, first, count, axis) for x, axis in zip(self, (3, 2, 1), strict=True)))


class BackwardKeys(NamedTuple):
    """Keys and values in the layouts of the backward pass's matmuls, and their documents."""

    k_BKHS: jax.Array
    k_BKSH: jax.Array
    v_BKWS: jax.Array
    segment_BS: jax.Array

    @classmethod
    def of(cls, k_BSKH: jax.Array, v_BSKW: jax.Array, segment_BS: jax.Array) -> "BackwardKeys":
        """Keys and values from the projections, transposed."""
        k_BKHS, k_BKSH = k_BSKH.transpose(0, 2, 3, 1), k_BSKH.transpose(0, 2, 1, 3)
        return cls(k_BKHS, k_BKSH, v_BSKW.transpose(0, 2, 3, 1), segment_BS)

    def part(self, first: Index, count: int) -> "BackwardKeys":
        """The part with `count` positions from `first` on."""
        return BackwardKeys(*(part(x, first, count, axis) for x, axis in zip(self, (3, 2, 3, 1), strict=True)))


class BackwardQueries(NamedTuple):
    """Queries and the gradient of their context, in each layout that a matmul needs, copied once for all tiles.

    Attributes:
      log_partition_BKGT1: of each row of scores, over all its keys on all devices.
      product_BKGT1: gradient times context.
    """

    q_BKGTH: jax.Array
    q_BKHGT: jax.Array
    g_BKGTW: jax.Array
    g_BKWGT: jax.Array
    log_partition_BKGT1: jax.Array
    product_BKGT1: jax.Array
    segment_BT: jax.Array

    @classmethod
    def of(
        cls,
        q_BTNH: jax.Array,
        g_BTNW: jax.Array,
        context_BTNW: jax.Array,
        log_partition_BKGT1: jax.Array,
        segment_BT: jax.Array,
    ) -> "BackwardQueries":
        """Queries, gradient and context in the forward pass's layout, transposed."""
        K = log_partition_BKGT1.shape[1]
        q_BTKGH, g_BTKGW = grouped(q_BTNH, K), grouped(g_BTNW, K)
        product_BTKG = jnp.sum(g_BTKGW.astype(jnp.float32) * grouped(context_BTNW, K).astype(jnp.float32), axis=-1)
        return cls(
            q_BTKGH.transpose(0, 2, 3, 1, 4),
            q_BTKGH.transpose(0, 2, 4, 3, 1),
            g_BTKGW.transpose(0, 2, 3, 1, 4),
            g_BTKGW.transpose(0, 2, 4, 3, 1),
            log_partition_BKGT1,
            product_BTKG.transpose(0, 2, 3, 1)[..., None],
            segment_BT,
        )

    def part(self, first: Index, count: int) -> "BackwardQueries":
        """The part with `count` positions from `first` on."""
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
    segment_BT: jax.Array,
    segment_BS: jax.Array,
    first_query: Index | None,
    first_key: Index | None,
    window: int | None = None,
) -> jax.Array:
    """True where a query may see a key: in its document, no later, and in its window, [B, 1, 1, T, S].

    Args:
      first_query: number of the first query in the numbering of the keys; None: all keys are earlier and in the window.
      first_key: number of the first key.
      window: as in `Scoring`. A document's tokens are as far apart as in the row.
    """
    same_document_BTS = segment_BT[:, :, None] == segment_BS[:, None, :]
    if first_query is None or first_key is None:
        return same_document_BTS[:, None, None]
    T, S = segment_BT.shape[1], segment_BS.shape[1]
    query_T1, key_1S = (first_query + jnp.arange(T))[:, None], (first_key + jnp.arange(S))[None, :]
    seen_TS = query_T1 >= key_1S
    if window is not None:
        seen_TS &= query_T1 - key_1S < window
    return (seen_TS & same_document_BTS)[:, None, None]


def attend(
    q_BKGTH: jax.Array, keys: Keys, seen_B11TS: jax.Array, scoring: Scoring = PLAIN
) -> tuple[jax.Array, jax.Array]:
    """Context [B, K, G, T, W] of these keys alone and log-partition [B, K, G, T, 1], float32.

    The log-partition of a query that sees none of them is so low that its context has no weight in a `merge`.
    """
    score_BKGTS = scoring.score(_dot("BKGTH,BKHS->BKGTS", q_BKGTH, keys.k_BKHS), q_BKGTH.shape[-1])
    score_BKGTS = jnp.where(seen_B11TS, score_BKGTS, _MASKED)
    max_BKGT1 = jnp.max(score_BKGTS, axis=-1, keepdims=True)
    weight_BKGTS = jnp.exp(score_BKGTS - max_BKGT1)
    sum_BKGT1 = jnp.sum(weight_BKGTS, axis=-1, keepdims=True)
    context_BKGTW = _dot("BKGTS,BKSW->BKGTW", weight_BKGTS.astype(q_BKGTH.dtype), keys.v_BKSW) / sum_BKGT1
    return context_BKGTW, max_BKGT1 + jnp.log(sum_BKGT1)


def merge(one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Contexts and log-partitions over both of two sets of keys; each query sees a key of the first."""
    (one_BKGTW, one_BKGT1), (other_BKGTW, other_BKGT1) = one, other
    both_BKGT1 = jnp.logaddexp(one_BKGT1, other_BKGT1)
    share_BKGT1, other_share_BKGT1 = jnp.exp(one_BKGT1 - both_BKGT1), jnp.exp(other_BKGT1 - both_BKGT1)
    return share_BKGT1 * one_BKGTW + other_share_BKGT1 * other_BKGTW, both_BKGT1


def with_sink(found: tuple[jax.Array, jax.Array], sink_N: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Contexts and log-partitions with each head's sink, which has no value, beside all keys.

    Source: gpt-oss, arXiv:2508.10925; sinks are from Xiao et al. 2023, arXiv:2309.17453.
    """
    if sink_N is None:
        return found
    context_BKGTW, log_partition_BKGT1 = found
    sink_KG11 = sink_N.astype(jnp.float32).reshape(*log_partition_BKGT1.shape[1:3], 1, 1)
    both_BKGT1 = jnp.logaddexp(log_partition_BKGT1, sink_KG11)
    return jnp.exp(log_partition_BKGT1 - both_BKGT1) * context_BKGTW, both_BKGT1


def sink_gradient(
    sink_N: jax.Array | None, log_partition_BKGT1: jax.Array, context_BTNW: jax.Array, g_BTNW: jax.Array
) -> jax.Array | None:
    """dsink [N], in the sinks' dtype, from the results of `with_sink` and the gradient of the context."""
    if sink_N is None:
        return None
    product_BTN = jnp.sum(g_BTNW.astype(jnp.float32) * context_BTNW.astype(jnp.float32), axis=-1)
    log_partition_BTN = ungrouped(log_partition_BKGT1)[..., 0]
    weight_BTN = jnp.exp(sink_N.astype(jnp.float32) - log_partition_BTN)
    return -jnp.sum(weight_BTN * product_BTN, axis=(0, 1)).astype(sink_N.dtype)  # like a key with value 0


def attend_backward(
    queries: BackwardQueries, keys: BackwardKeys, seen_B11TS: jax.Array, scoring: Scoring = PLAIN
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """These queries' and keys' terms of the gradients, float32: dq [B, K, G, T, H], dk [B, K, H, S], dv [B,K,W,S]."""
    dtype, H = queries.q_BKGTH.dtype, queries.q_BKGTH.shape[-1]
    score_BKGTS = scoring.score(_dot("BKGTH,BKHS->BKGTS", queries.q_BKGTH, keys.k_BKHS), H)
    weight_BKGTS = jnp.where(seen_B11TS, jnp.exp(score_BKGTS - queries.log_partition_BKGT1), 0)
    dweight_BKGTS = _dot("BKGTW,BKWS->BKGTS", queries.g_BKGTW, keys.v_BKWS)
    dscore_BKGTS = weight_BKGTS * (dweight_BKGTS - queries.product_BKGT1)
    dproduct_BKGTS = scoring.dproduct(dscore_BKGTS, score_BKGTS, H).astype(dtype)
    dq_BKGTH = _dot("BKGTS,BKSH->BKGTH", dproduct_BKGTS, keys.k_BKSH)
    dk_BKHS = _dot("BKHGT,BKGTS->BKHS", queries.q_BKHGT, dproduct_BKGTS)
    dv_BKWS = _dot("BKWGT,BKGTS->BKWS", queries.g_BKWGT, weight_BKGTS.astype(dtype))
    return dq_BKGTH, dk_BKHS, dv_BKWS
