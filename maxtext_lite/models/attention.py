"""Causal attention within documents, by a kernel chosen by name."""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from maxtext_lite.config.kernels import kernel_named
from maxtext_lite.config.registry import resolve
from maxtext_lite.parallel import (
    CHUNKS_PER_SHARD,
    Tree,
    context_shards,
    over_shards,
    own_shard,
)

_MASKED = -1e30  # finite: a row without any key inside a tile must not give inf - inf

dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

Index = int | Array


@dataclasses.dataclass(frozen=True)
class Scoring:
    """How queries score keys, and which they score.

    Attributes:
      scale: factor of the product of a query and a key; None: H ** -0.5 for keys of width H.
      window: keys that a query sees: its own and those of the window - 1 tokens before it; None: all that are no later.
      chunk: a query sees only keys of its own chunk of this many tokens of its document; None: there are no chunks.
        The decoder passes chunks to `attention` as documents; only attention over a cache reads this.
      soft_cap: c in c * tanh(score / c), which bounds a score; None: scores are not bounded.

    Source: windows, Beltagy et al. 2020, arXiv:2004.05150, section 3.1; the cap, Gemma 2, arXiv:2408.00118, section 2.
    """

    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None
    chunk: int | None = None

    def scale_of(self, key_dim: int) -> float:
        """The scale for keys of this width."""
        return key_dim**-0.5 if self.scale is None else self.scale

    def score(self, product: Array, key_dim: int) -> Array:
        """Scores of any shape from the products of queries and keys of this width, in their dtype."""
        score = product * self.scale_of(key_dim)
        return score if self.soft_cap is None else self.soft_cap * jnp.tanh(score / self.soft_cap)

    def dproduct(self, dscore: Array, score: Array, key_dim: int) -> Array:
        """The gradient of the products, from their scores and the scores' gradient."""
        dproduct = dscore * self.scale_of(key_dim)
        return dproduct if self.soft_cap is None else dproduct * (1 - jnp.square(score / self.soft_cap))


PLAIN = Scoring()
"""Llama's: every key that is no later, scored by q k / sqrt(H)."""


def part(x: Array, first: Index, count: int, axis: int) -> Array:
    """`count` entries of a dim; `first` may be traced."""
    if isinstance(first, int):
        return jax.lax.slice_in_dim(x, first, first + count, axis=axis)
    return jax.lax.dynamic_slice_in_dim(x, first, count, axis=axis)


def put(x: Array, new: Array, first: Index) -> Array:
    """`x` with `new` at the positions of dim 3 from `first` on."""
    return jax.lax.dynamic_update_slice_in_dim(x, new, first, axis=3)


def whole_blocks(x: Array, block: int, *, axis: int = 1, value: float = 0) -> Array:
    """`x` padded to a whole number of blocks of tokens."""
    fill = -x.shape[axis] % block
    pads = [(0, fill if dim == axis else 0) for dim in range(x.ndim)]
    return jnp.pad(x, pads, constant_values=value) if fill else x


class Keys(NamedTuple):
    """Keys and values in the layout of the forward pass's matmuls, and their documents."""

    k_BKHS: Array
    v_BKSW: Array
    segment_BS: Array

    @classmethod
    def of(cls, k_BSKH: Array, v_BSKW: Array, segment_BS: Array) -> "Keys":
        """Keys and values from the projections, transposed."""
        return cls(k_BSKH.transpose(0, 2, 3, 1), v_BSKW.transpose(0, 2, 1, 3), segment_BS)

    def part(self, first: Index, count: int) -> "Keys":
        """The part with `count` positions from `first` on."""
        return Keys(*_parts(self, (3, 2, 1), first, count))


class BackwardKeys(NamedTuple):
    """Keys and values in the layouts of the backward pass's matmuls, and their documents."""

    k_BKHS: Array
    k_BKSH: Array
    v_BKWS: Array
    segment_BS: Array

    @classmethod
    def of(cls, k_BSKH: Array, v_BSKW: Array, segment_BS: Array) -> "BackwardKeys":
        """Keys and values from the projections, transposed."""
        k_BKHS = k_BSKH.transpose(0, 2, 3, 1)
        k_BKSH = k_BSKH.transpose(0, 2, 1, 3)
        return cls(k_BKHS, k_BKSH, v_BSKW.transpose(0, 2, 3, 1), segment_BS)

    def part(self, first: Index, count: int) -> "BackwardKeys":
        """The part with `count` positions from `first` on."""
        return BackwardKeys(*_parts(self, (3, 2, 3, 1), first, count))


class BackwardQueries(NamedTuple):
    """Queries and the gradient of their context, in each layout that a matmul needs, copied once for all tiles.

    Attributes:
      log_partition_BKGT1: of each row of scores, over all its keys on all devices.
      product_BKGT1: gradient times context.
    """

    q_BKGTH: Array
    q_BKHGT: Array
    g_BKGTW: Array
    g_BKWGT: Array
    log_partition_BKGT1: Array
    product_BKGT1: Array
    segment_BT: Array

    @classmethod
    def of(
        cls,
        q_BTNH: Array,
        g_BTNW: Array,
        context_BTNW: Array,
        log_partition_BKGT1: Array,
        segment_BT: Array,
    ) -> "BackwardQueries":
        """Queries, gradient and context in the forward pass's layout, transposed."""
        K = log_partition_BKGT1.shape[1]
        q_BTKGH = grouped(q_BTNH, K)
        g_BTKGW = grouped(g_BTNW, K)
        product_BTKG = jnp.sum(
            g_BTKGW.astype(jnp.float32) * grouped(context_BTNW, K).astype(jnp.float32),
            axis=-1,
        )
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
        return BackwardQueries(*_parts(self, (3, 4, 3, 4, 3, 3, 1), first, count))


def _parts(arrays: Sequence[Array], axes: Sequence[int], first: Index, count: int) -> list[Array]:
    return [part(x, first, count, axis) for x, axis in zip(arrays, axes, strict=True)]


def grouped(x_BTNH: Array, num_kv_heads: int) -> Array:
    """[B, T, K, G, H]: the query heads of each kv head."""
    B, T, _, H = x_BTNH.shape
    return x_BTNH.reshape(B, T, num_kv_heads, -1, H)


def ungrouped(x_BKGTH: Array) -> Array:
    """[B, T, N, H]."""
    B, K, G, T, H = x_BKGTH.shape
    return x_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, K * G, H)


def may_see(
    segment_BT: Array,
    segment_BS: Array,
    first_query: Index | None,
    first_key: Index | None,
    window: int | None = None,
) -> Array:
    """True where a key is in the query's document and window, and no later: [B, 1, 1, T, S].

    Args:
      first_query: number of the first query in the numbering of the keys; None: all keys are earlier and in the window.
      first_key: number of the first key.
      window: as in `Scoring`. A document's tokens are as far apart as in the row.
    """
    same_document_BTS = segment_BT[:, :, None] == segment_BS[:, None, :]
    if first_query is None or first_key is None:
        return same_document_BTS[:, None, None]
    query_T1 = (first_query + jnp.arange(segment_BT.shape[1]))[:, None]
    key_1S = (first_key + jnp.arange(segment_BS.shape[1]))[None, :]
    seen_TS = query_T1 >= key_1S
    if window is not None:
        seen_TS &= query_T1 - key_1S < window
    return (seen_TS & same_document_BTS)[:, None, None]


def attend(q_BKGTH: Array, keys: Keys, seen_B11TS: Array, scoring: Scoring = PLAIN) -> tuple[Array, Array]:
    """Context [B, K, G, T, W] of these keys alone and log-partition [B, K, G, T, 1], float32.

    The log-partition of a query that sees none of them is so low that its context has no weight in a `merge`.
    """
    score_BKGTS = scoring.score(dot("BKGTH,BKHS->BKGTS", q_BKGTH, keys.k_BKHS), q_BKGTH.shape[-1])
    score_BKGTS = jnp.where(seen_B11TS, score_BKGTS, _MASKED)
    max_BKGT1 = jnp.max(score_BKGTS, axis=-1, keepdims=True)
    weight_BKGTS = jnp.exp(score_BKGTS - max_BKGT1)
    sum_BKGT1 = jnp.sum(weight_BKGTS, axis=-1, keepdims=True)
    context_BKGTW = dot("BKGTS,BKSW->BKGTW", weight_BKGTS.astype(q_BKGTH.dtype), keys.v_BKSW) / sum_BKGT1
    return context_BKGTW, max_BKGT1 + jnp.log(sum_BKGT1)


def merge(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
    """Contexts and log-partitions over both of two sets of keys; each query sees a key of the first."""
    one_BKGTW, one_BKGT1 = one
    other_BKGTW, other_BKGT1 = other
    both_BKGT1 = jnp.logaddexp(one_BKGT1, other_BKGT1)
    one_share_BKGT1 = jnp.exp(one_BKGT1 - both_BKGT1)
    other_share_BKGT1 = jnp.exp(other_BKGT1 - both_BKGT1)
    return one_share_BKGT1 * one_BKGTW + other_share_BKGT1 * other_BKGTW, both_BKGT1


def with_sink(found: tuple[Array, Array], sink_N: Array | None) -> tuple[Array, Array]:
    """Contexts and log-partitions with each head's sink, which has no value, beside all keys.

    Source: gpt-oss, arXiv:2508.10925; sinks are from Xiao et al. 2023, arXiv:2309.17453.
    """
    if sink_N is None:
        return found
    context_BKGTW, log_partition_BKGT1 = found
    sink_KG11 = sink_N.astype(jnp.float32).reshape(*log_partition_BKGT1.shape[1:3], 1, 1)
    both_BKGT1 = jnp.logaddexp(log_partition_BKGT1, sink_KG11)
    return jnp.exp(log_partition_BKGT1 - both_BKGT1) * context_BKGTW, both_BKGT1


def sink_gradient(sink_N: Array | None, log_partition_BKGT1: Array, context_BTNW: Array, g_BTNW: Array) -> Array | None:
    """dsink [N], in the sinks' dtype, from the results of `with_sink` and the gradient of the context."""
    if sink_N is None:
        return None
    product_BTN = jnp.sum(g_BTNW.astype(jnp.float32) * context_BTNW.astype(jnp.float32), axis=-1)
    log_partition_BTN = ungrouped(log_partition_BKGT1)[..., 0]
    weight_BTN = jnp.exp(sink_N.astype(jnp.float32) - log_partition_BTN)
    return -jnp.sum(weight_BTN * product_BTN, axis=(0, 1)).astype(sink_N.dtype)  # like a key with value 0


def attend_backward(
    queries: BackwardQueries,
    keys: BackwardKeys,
    seen_B11TS: Array,
    scoring: Scoring = PLAIN,
) -> tuple[Array, Array, Array]:
    """These queries' and keys' terms of the gradients, float32: dq [B, K, G, T, H], dk [B, K, H, S], dv [B,K,W,S]."""
    dtype = queries.q_BKGTH.dtype
    H = queries.q_BKGTH.shape[-1]
    score_BKGTS = scoring.score(dot("BKGTH,BKHS->BKGTS", queries.q_BKGTH, keys.k_BKHS), H)
    weight_BKGTS = jnp.where(seen_B11TS, jnp.exp(score_BKGTS - queries.log_partition_BKGT1), 0)
    dweight_BKGTS = dot("BKGTW,BKWS->BKGTS", queries.g_BKGTW, keys.v_BKWS)
    dscore_BKGTS = weight_BKGTS * (dweight_BKGTS - queries.product_BKGT1)
    dproduct_BKGTS = scoring.dproduct(dscore_BKGTS, score_BKGTS, H).astype(dtype)
    dq_BKGTH = dot("BKGTS,BKSH->BKGTH", dproduct_BKGTS, keys.k_BKSH)
    dk_BKHS = dot("BKHGT,BKGTS->BKHS", queries.q_BKHGT, dproduct_BKGTS)
    dv_BKWS = dot("BKWGT,BKGTS->BKWS", queries.g_BKWGT, weight_BKGTS.astype(dtype))
    return dq_BKGTH, dk_BKHS, dv_BKWS


def attention(
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKW: Array,
    segment_BT: Array,
    sink_N: Array | None = None,
    *,
    kernel: str,
    strategy: str,
    scoring: Scoring = PLAIN,
) -> Array:
    """Causal grouped-query attention that never looks across packed documents.

    If the mesh in use has a context axis, the T tokens are in the order of `parallel.context_order`.

    Args:
      k_BSKH: keys of the same T positions as the queries (S = T); N must be a multiple of K.
      v_BSKW: their values, whose width W may differ from H.
      segment_BT: document number of each token; padding is a document of its own. A document's tokens are contiguous.
        cudnn_flash does not read it: rows must contain one document each.
      sink_N: each head's learned score without a key, which takes part in the softmax; None: no sinks.
      kernel: a name of the registry's kind `attention`; the config's rules refuse what it does not support.
      strategy: how the shards of a context axis exchange keys, one of `key_exchange.STRATEGIES`.
      scoring: how queries score keys, and how many they see.
    Returns:
      Context [B, T, N, W] in the dtype of q_BTNH; the softmax runs in float32.
    Source: Ainslie et al. 2023, arXiv:2305.13245, section 2.2.
    """
    if scoring.window is not None and scoring.window >= q_BTNH.shape[1]:
        scoring = dataclasses.replace(scoring, window=None)  # it reaches every key: no mask, no tile to skip
    kernel_attention = resolve(kernel_named(kernel).computes)
    return kernel_attention(q_BTNH, k_BSKH, v_BSKW, segment_BT, sink_N, strategy=strategy, scoring=scoring)


TILE = 512
"""Queries and keys in a tile of plain attention."""
_STRIP = 128


class Strip(NamedTuple):
    """Some queries of a tile and the keys that they are multiplied by: the first of each, and how many."""

    query: int
    num_queries: int
    key: int
    num_keys: int


class Tiles(NamedTuple):
    """Tiles with the same strips.

    Attributes:
      query: place of each tile's first query among its device's tokens, padding included; ints.
      key: place of each tile's first key among its device's tokens.
      distance: how many tokens of the example the first query is after the first key: an int for all tiles, or an array
        with one for each, some of them beyond the window; None: causality and window mask nothing.
      strips: of each tile.
    """

    query: Any
    key: Any
    distance: Any
    strips: Sequence[Strip]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of a device's tokens in runs and tiles.

    Attributes:
      num_runs: runs of consecutive tokens, one after the other.
      run: tokens of a run; padding fills it up to whole tiles.
      num_tiles: tiles along a run.
      tile: queries, and keys, of a tile.
      window: as in `Scoring`.
    """

    num_runs: int
    run: int
    num_tiles: int
    tile: int
    window: int | None

    @classmethod
    def of(cls, num_tokens: int, window: int | None) -> "Layout":
        """The layout for this many tokens on a device: the fewest tiles of at most 512, with little padding."""
        num_runs = 1 if context_shards() == 1 else CHUNKS_PER_SHARD
        run = num_tokens // num_runs
        num_tiles = math.ceil(run / TILE)
        tile = run if num_tiles == 1 else min(TILE, 8 * math.ceil(run / num_tiles / 8))
        return cls(num_runs, run, num_tiles, tile, window)

    @property
    def padded_run(self) -> int:
        """Tokens of a run with its padding."""
        return self.num_tiles * self.tile

    def pad(self, x: Array, axis: int, value: int = 0) -> Array:
        """Pads `x` along dim `axis`, a device's tokens."""
        missing = self.padded_run - self.run
        if not missing:
            return x
        pads = [(0, 0)] * (x.ndim + 1)
        pads[axis + 1] = (0, missing)
        return _joined(jnp.pad(self._runs(x, axis), pads, constant_values=value), axis)

    def unpad(self, x: Array, axis: int) -> Array:
        """`x` without the padding."""
        if self.padded_run == self.run:
            return x
        return _joined(jax.lax.slice_in_dim(self._runs(x, axis), 0, self.run, axis=axis + 1), axis)

    def _runs(self, x: Array, axis: int) -> Array:
        """`x` with dim `axis` as two: the runs, and the tokens of each."""
        return x.reshape(*x.shape[:axis], self.num_runs, -1, *x.shape[axis + 1 :])

    def own_tiles(self) -> list[Tiles]:
        """The tiles of a device's queries with its own keys."""
        found: list[Tiles] = []
        far_queries: list[np.ndarray] = []
        far_keys: list[np.ndarray] = []
        run_start_R1 = self.padded_run * np.arange(self.num_runs)[:, None]
        for apart in range(self.num_tiles):
            distance = apart * self.tile
            query = (run_start_R1 + self.tile * np.arange(apart, self.num_tiles)).ravel()
            if apart and (self.window is None or distance + self.tile <= self.window):
                far_queries.append(query)
                far_keys.append(query - distance)
            elif strips := self._strips(distance):
                found.append(Tiles(query, query - distance, distance, strips))
        if far_queries:
            found.append(
                Tiles(
                    np.concatenate(far_queries),
                    np.concatenate(far_keys),
                    None,
                    [Strip(0, self.tile, 0, self.tile)],
                )
            )
        if self.num_runs > 1:
            found.append(self._tiles_between(np.array([1]), np.array([0]), own_shard()))
        return found

    def tiles_with(self, other: Array) -> list[Tiles]:
        """The tiles of a device's queries with another shard's keys, in the two pairs of runs that causality allows."""
        later = (other > own_shard()).astype(jnp.int32)  # both late runs, or both early ones
        return [self._tiles_between(jnp.stack([1, later]), jnp.stack([0, later]), other)]

    def _strips(self, distance: int) -> list[Strip]:
        """The strips of a tile whose first query is `distance` tokens after its first key."""
        strips: list[Strip] = []
        for first in range(0, self.tile, _STRIP):
            num_queries = min(_STRIP, self.tile - first)
            end = min(self.tile, distance + first + num_queries)
            nearest = 0 if self.window is None else max(0, distance + first - self.window + 1)
            start = nearest // _STRIP * _STRIP  # unaligned slices are slow on accelerators
            if nearest < end:
                strips.append(Strip(first, num_queries, start, end - start))
        return strips

    def _tiles_between(self, query_run: Any, key_run: Any, other: Array) -> Tiles:
        """All tiles of pairs of a device's and a shard's run in which no key is later than a query."""
        query, key = np.indices((self.num_tiles, self.num_tiles)).reshape(2, -1) * self.tile
        distance = None
        if self.window is not None:
            apart = self._start(own_shard(), query_run) - self._start(other, key_run)
            distance = (apart[:, None] + query - key).ravel()
        query = (self.padded_run * query_run[:, None] + query).ravel()
        key = (self.padded_run * key_run[:, None] + key).ravel()
        return Tiles(query, key, distance, [Strip(0, self.tile, 0, self.tile)])

    def _start(self, shard: Array, run: Any) -> Array:
        """The first token of a shard's run, by its number in the example."""
        return self.run * jnp.where(run == 0, shard, CHUNKS_PER_SHARD * context_shards() - 1 - shard)

    def of_each_query(self, find: Callable[[Strip, Index, Index, Index | None], Tree]) -> Tree:
        """The results for a device's first own tiles, which have each query once: arrays with queries in dim 3.

        Args:
          find: as in `fold`.
        """
        tiles = self.own_tiles()[0]

        def visit(query: Any, key: Any) -> Tree:
            strips = [
                find(
                    strip,
                    query + strip.query,
                    key + strip.key,
                    tiles.distance + strip.query - strip.key,
                )
                for strip in tiles.strips
            ]
            return jax.tree.map(lambda *x: jnp.concatenate(x, axis=3), *strips)

        if len(tiles.query) == 1:
            return visit(int(tiles.query[0]), int(tiles.key[0]))
        _, of_tiles = jax.lax.scan(lambda _, at: (None, visit(*at)), None, (tiles.query, tiles.key))
        return jax.tree.map(
            lambda x: jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], -1, *x.shape[5:]),
            of_tiles,
        )

    def fold(
        self,
        tiles: Sequence[Tiles],
        state: Tree,
        find: Callable[[Strip, Index, Index, Index | None], Any],
        put: Callable[[Any, Any, Strip, Index, Index], Any],
        nothing: Any = None,
    ) -> Any:
        """`state` after a loop over tiles.

        Args:
          find: (strip, place of its first query, of its first key, their distance) -> its result.
          put: (state, a result, strip, place of its first query, of its first key) -> state.
          nothing: () -> the result for a whole tile beyond the window.
        """
        for alike in tiles:
            state = self._fold_alike(alike, state, find, put, nothing)
        return state

    def _fold_alike(self, tiles: Tiles, state: Tree, find: Any, put: Any, nothing: Any) -> Tree:
        places = [tiles.query, tiles.key]
        may_be_beyond = isinstance(tiles.distance, Array)  # the window
        if may_be_beyond:
            places.append(tiles.distance)

        def visit(state: Tree, query: Any, key: Any, distance: Any = tiles.distance) -> Tree:
            for strip in tiles.strips:
                where = strip, query + strip.query, key + strip.key
                apart = None if distance is None else distance + strip.query - strip.key
                look = functools.partial(find, *where, apart)
                if apart is None or not may_be_beyond:
                    found = look()
                else:
                    found = jax.lax.cond(apart - strip.num_keys + 1 < self.window, look, nothing)
                state = put(state, found, *where)
            return state

        if len(tiles.query) > 1:
            return jax.lax.scan(lambda state, at: (visit(state, *at), None), state, places)[0]
        return visit(state, *(int(x[0]) if isinstance(x, np.ndarray) else x[0] for x in places))


def _joined(x: Array, axis: int) -> Array:
    """`x` with dims `axis` and `axis` + 1 as one."""
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


_HEADS = ("batch", "length", "activation_heads", None)
_ROWS = ("batch", "activation_heads", None, "length", None)
_TOKENS = ("batch", "length")

_NO_DOCUMENT = -1  # the document of the padding after a run


class Passes(NamedTuple):
    """Attention's two passes on one device, whose first arguments are `options`.

    Attributes:
      forward: (queries, keys, values, documents, sinks or None) -> (context, log-partition).
      backward: (the same without sinks, both results, and the context's gradient) -> (dq, dk, dv).
    """

    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., tuple[Array, ...]]
    options: tuple[Hashable, ...]


def tiled_attention(
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKW: Array,
    segment_BT: Array,
    sink_N: Array | None = None,
    *,
    strategy: str,
    scoring: Scoring = PLAIN,
) -> Array:
    """`attention` for examples in context order, if the mesh in use splits T over its context axis.

    Args:
      strategy: one of `key_exchange.STRATEGIES`.
    """
    passes = Passes(_shard_forward, _shard_backward, (strategy, scoring))
    return on_devices((q_BTNH, k_BSKH, v_BSKW, segment_BT), sink_N, passes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def on_devices(arguments: tuple[Array, ...], sink_N: Array | None, passes: Passes) -> Array:
    """Context [B, T, N, W] of examples in context order, by each device's passes.

    The backward pass keeps the arguments, the context and the log-partitions, each device its own part of them.

    Args:
      arguments: queries, keys, values and documents.
    """
    return _forward(arguments, sink_N, passes)[0]


def _forward(arguments: tuple[Array, ...], sink_N: Array | None, passes: Passes) -> tuple[Array, tuple[Tree, ...]]:
    local = functools.partial(passes.forward, *passes.options)
    run = over_shards(local, (_HEADS, _HEADS, _HEADS, _TOKENS, ("activation_heads",)), [_HEADS, _ROWS])
    context_BTNW, log_partition_BKGT1 = (checkpoint_name(x, "context") for x in run(*arguments, sink_N))
    return context_BTNW, (arguments, context_BTNW, log_partition_BKGT1, sink_N)


def _backward(passes: Passes, residuals: tuple[Tree, ...], g_BTNW: Array) -> tuple[Tree, Array | None]:
    arguments, context_BTNW, log_partition_BKGT1, sink_N = residuals
    local = functools.partial(passes.backward, *passes.options)
    run = over_shards(
        local,
        (_HEADS, _HEADS, _HEADS, _TOKENS, _HEADS, _ROWS, _HEADS),
        [_HEADS, _HEADS, _HEADS],
    )
    gradients = run(*arguments, context_BTNW, log_partition_BKGT1, g_BTNW)
    return (*gradients, None), sink_gradient(sink_N, log_partition_BKGT1, context_BTNW, g_BTNW)


on_devices.defvjp(_forward, _backward)


def _shard_forward(
    strategy: str,
    scoring: Scoring,
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKW: Array,
    segment_BT: Array,
    sink_N: Array | None,
) -> tuple[Array, Array]:
    """One device's context and log-partitions."""
    layout = Layout.of(q_BTNH.shape[1], scoring.window)
    own = _padded_keys(layout, k_BSKH, v_BSKW, segment_BT)
    segment_BT = own[2]
    q_BKGTH = grouped(layout.pad(q_BTNH, axis=1), k_BSKH.shape[2]).transpose(0, 2, 3, 1, 4)

    def attend_to(keys: Keys, strip: Strip, query: Index, key: Index, distance: Index | None) -> Tree:
        seen_keys = keys.part(key, strip.num_keys)
        strip_segment_BT = part(segment_BT, query, strip.num_queries, axis=1)
        seen_B11TS = may_see(strip_segment_BT, seen_keys.segment_BS, distance, 0, scoring.window)
        return attend(
            part(q_BKGTH, query, strip.num_queries, axis=3),
            seen_keys,
            seen_B11TS,
            scoring,
        )

    def add(state: Tree, found: Tree, strip: Strip, query: Index, key: Index) -> Tree:
        context_BKGTW, log_partition_BKGT1 = (part(x, query, strip.num_queries, axis=3) for x in state)
        both = merge((context_BKGTW, log_partition_BKGT1), found)
        return tuple(put(x, new, query) for x, new in zip(state, both, strict=True))

    def nothing() -> tuple[Array, Array]:
        rows = (*q_BKGTH.shape[:3], layout.tile)
        return jnp.zeros((*rows, v_BSKW.shape[-1]), jnp.float32), jnp.full((*rows, 1), -jnp.inf, jnp.float32)

    def visit(state: Tree, sums: Tree, theirs: Tree, other: Array) -> tuple[Tree, Tree]:
        find = functools.partial(attend_to, Keys.of(*theirs))
        return layout.fold(layout.tiles_with(other), state, find, add, nothing), sums

    find = functools.partial(attend_to, Keys.of(*own))
    state = layout.fold(layout.own_tiles()[1:], layout.of_each_query(find), find, add, nothing)
    if context_shards() > 1:
        from maxtext_lite.models.key_exchange import STRATEGIES

        state, _ = STRATEGIES[strategy](visit, state, own, ())
    context_BKGTW, log_partition_BKGT1 = with_sink(state, sink_N)
    context_BTNW = ungrouped(context_BKGTW.astype(q_BTNH.dtype))
    return layout.unpad(context_BTNW, axis=1), layout.unpad(log_partition_BKGT1, axis=3)


def _shard_backward(
    strategy: str,
    scoring: Scoring,
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKW: Array,
    segment_BT: Array,
    context_BTNW: Array,
    log_partition_BKGT1: Array,
    g_BTNW: Array,
) -> tuple[Array, ...]:
    """One device's dq, dk and dv, including the terms of dk and dv that other devices send for their queries."""
    layout = Layout.of(q_BTNH.shape[1], scoring.window)
    own = _padded_keys(layout, k_BSKH, v_BSKW, segment_BT)
    q_BTNH, g_BTNW, context_BTNW = (layout.pad(x, axis=1) for x in (q_BTNH, g_BTNW, context_BTNW))
    log_partition_BKGT1 = layout.pad(log_partition_BKGT1, axis=3)
    queries = BackwardQueries.of(q_BTNH, g_BTNW, context_BTNW, log_partition_BKGT1, own[2])

    def look(state: Tree, keys: BackwardKeys, tiles: Sequence[Tiles]) -> Tree:
        """`state`, dq and these keys' dk and dv, plus these tiles' terms."""

        def find(strip: Strip, query: Index, key: Index, distance: Index | None) -> Tree:
            strip_queries = queries.part(query, strip.num_queries)
            seen_keys = keys.part(key, strip.num_keys)
            seen_B11TS = may_see(
                strip_queries.segment_BT,
                seen_keys.segment_BS,
                distance,
                0,
                scoring.window,
            )
            return attend_backward(strip_queries, seen_keys, seen_B11TS, scoring)

        def add(state: Tree, found: Tree, strip: Strip, query: Index, key: Index) -> Tree:
            places = (query, key, key)
            before = [part(x, at, new.shape[3], axis=3) for x, new, at in zip(state, found, places, strict=True)]
            sums = jax.tree.map(jnp.add, tuple(before), found)
            return tuple(put(x, new, at) for x, new, at in zip(state, sums, places, strict=True))

        def nothing() -> Tree:
            return tuple(jnp.zeros((*x.shape[:3], layout.tile, *x.shape[4:]), jnp.float32) for x in state)

        return layout.fold(tiles, state, find, add, nothing)

    def visit(dq_BKGTH: Array, sums: Tree, theirs: Tree, other: Array) -> tuple[Tree, Tree]:
        dq_BKGTH, *sums = look((dq_BKGTH, *sums), BackwardKeys.of(*theirs), layout.tiles_with(other))
        return dq_BKGTH, tuple(sums)

    keys = BackwardKeys.of(*own)
    zeros = (
        jnp.zeros(keys.k_BKHS.shape, jnp.float32),
        jnp.zeros(keys.v_BKWS.shape, jnp.float32),
    )
    dq_BKGTH = jnp.zeros(queries.q_BKGTH.shape, jnp.float32)
    dq_BKGTH, *own_sums = look((dq_BKGTH, *zeros), keys, layout.own_tiles())
    if context_shards() > 1:
        from maxtext_lite.models.key_exchange import STRATEGIES

        dq_BKGTH, sums = STRATEGIES[strategy](visit, dq_BKGTH, own, zeros)
        own_sums = jax.tree.map(jnp.add, own_sums, list(sums))
    dtype = q_BTNH.dtype
    dk_BSKH, dv_BSKW = (x.transpose(0, 3, 1, 2).astype(dtype) for x in own_sums)
    return tuple(layout.unpad(x, axis=1) for x in (ungrouped(dq_BKGTH.astype(dtype)), dk_BSKH, dv_BSKW))


def _padded_keys(layout: Layout, k_BSKH: Array, v_BSKW: Array, segment_BS: Array) -> tuple[Array, ...]:
    return (
        layout.pad(k_BSKH, axis=1),
        layout.pad(v_BSKW, axis=1),
        layout.pad(segment_BS, axis=1, value=_NO_DOCUMENT),
    )
