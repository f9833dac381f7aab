"""Attention by splash, jax's Pallas kernel for TPU, for whole examples and examples split over the context axis.

With all_gather, one kernel has the keys of all shards, and its mask knows the positions of arranged queries and keys.
With ring, keys go round the shards: one kernel for a device's own keys, and one for two pairs of chunks of every other
shard, whose results are merged by their log-partitions. The kernel has no gradient for that: its backward pass is
called with the context and log-partition of all keys, by a name that is private to jax. How far apart the tokens of two
chunks are depends on the shards, so keys are gathered with either strategy where attention has a window.
Source: Liu et al. 2023, arXiv:2310.01889; Dubey et al. 2024, arXiv:2407.21783, section 3.3.2.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask import Mask, MultiHeadMask

from maxtext_lite.config.kernels import SPLASH_BLOCK
from maxtext_lite.kernels.chunk_pairs import Pairs, merged_over_shards, summed_over_shards
from maxtext_lite.models.attention import PLAIN, Passes, Scoring, on_devices, ungrouped, with_sink
from maxtext_lite.parallel import (
    CHUNKS_PER_SHARD,
    Tree,
    context_order,
    context_shards,
    gathered,
    num_shards,
    over_shards,
    sharding,
)


@dataclass(frozen=True)
class MostTokens:
    """The most queries and keys of a block in each of splash's kernels; `at_once` keys are multiplied at a time.

    Attributes:
      head_dim: the largest width of keys or values that these sizes suit.
      dkv, dq: of the two kernels of the backward pass.
      fused: of the kernel for all three gradients; None: it is not used.
    """

    head_dim: float
    forward: tuple[int, int]
    dkv: tuple[int, int]
    dq: tuple[int, int]
    fused: tuple[int, int] | None
    at_once: int = 512


MOST_TOKENS = (
    MostTokens(128, forward=(1024, 512), dkv=(2048, 512), dq=(2048, 512), fused=(1024, 2048)),
    MostTokens(256, forward=(1024, 512), dkv=(1024, 512), dq=(1024, 512), fused=(1024, 1024)),
    MostTokens(float("inf"), forward=(512, 512), dkv=(512, 512), dq=(512, 512), fused=None),
)
"""Blocks by the width of heads; the first that suits is taken.

Those of the forward, dkv and dq kernels of heads of up to 128 are MaxText's for v6e
(benchmarks/maxtext_trillium_model_configs.py at 02df154); for v5e it names the fused kernel
(maxtext_v5e_model_configs.py at 00f6981). There a kernel is given several times its default memory on the chip. These
are the largest of those that compile with the default on v5e, v5p and v6e, in float32 and with a soft cap too.
"""

MOST_PARTS_OF_DQ = 2
"""The fused kernel spares two of seven matmuls, but writes a part of the queries' gradient for each block of keys. Each
part is as large as the queries, and they are added up afterwards. With four parts (8,192 tokens, heads of 128, v6e)
that sum takes 2.1 ms of the compiler's cycles in a layer of llama3-8b, more than the matmuls; with two (4,096 tokens,
v5e) 0.8 ms, less than they. Where there would be more, the gradient has a kernel of its own."""


def block_sizes(
    *, span: int, num_keys: int, head_dim: int, window: int | None = None
) -> splash_attention_kernel.BlockSizes:
    """Sizes that divide `span` tokens.

    Args:
      span: consecutive tokens in a row of a mask, of queries and of keys; a multiple of 128.
      num_keys: keys of all blocks.
      head_dim: the larger width of keys and values.
      window: with one, blocks of keys are small, which skips most keys outside it.
    """
    most = next(each for each in MOST_TOKENS if head_dim <= each.head_dim)

    def block(limit: int, tokens: int = span) -> int:
        sizes = range(SPLASH_BLOCK, min(limit, tokens) + 1, SPLASH_BLOCK)
        return max(size for size in sizes if tokens % size == 0)

    def of_keys(limit: int) -> tuple[int, int]:
        keys = block(limit)
        return keys, block(most.at_once, keys)

    sizes: dict[str, Any] = {"block_q": block(most.forward[0])}
    sizes["block_kv"], sizes["block_kv_compute"] = of_keys(most.forward[1])
    if most.fused and window is None and num_keys // block(most.fused[1]) <= MOST_PARTS_OF_DQ:
        queries, keys = most.fused
        sizes["use_fused_bwd_kernel"] = True
    else:
        queries, keys = most.dkv
        sizes |= {"block_q_dq": block(most.dq[0]), "block_kv_dq": block(most.dq[1])}
    sizes["block_q_dkv"] = block(queries)
    sizes["block_kv_dkv"], sizes["block_kv_dkv_compute"] = of_keys(keys)
    return splash_attention_kernel.BlockSizes(**sizes)


# ---- Masks ----------------------------------------------------------------------------------------------------------
# jax reads each block of a mask several times, only to know whether any and whether all of it are True: at 32,768
# tokens that is 11 seconds of comparisons. Here a block is two numbers with these answers.


def _some_and_all(some: bool, every: bool) -> np.ndarray:
    return np.array([[some, some and every]])


def _within(queries: np.ndarray, keys: np.ndarray, window: int | None) -> np.ndarray:
    """Whether some and whether all keys are no later than their query and fewer than `window` before it, [1, 2].

    Queries and keys each follow each other.
    """
    for tokens in (queries, keys):
        assert tokens[-1] - tokens[0] == len(tokens) - 1
    nearest = queries[0] - keys[-1]
    farthest = queries[-1] - keys[0]
    some = farthest >= 0
    every = nearest >= 0
    if window is not None:
        some = some and nearest < window
        every = every and farthest < window
    return _some_and_all(bool(some), bool(every))


class CausalMask(splash_attention_mask.CausalMask):
    """jax's, whose blocks are two numbers.

    Args:
      shards: of the context axis, as which queries and keys are arranged (`context_order`).
    """

    def __init__(self, shape: tuple[int, int], shards: int = 1):
        super().__init__(shape)
        self._positions = _arranged(self, shards)

    def __getitem__(self, index: Any) -> np.ndarray:
        """Whether some and whether all of a block are True, [1, 2]; queries and keys are slices within a chunk."""
        return _within(self.q_sequence[index[0]], self._positions[index[1]], None)


class LocalMask(splash_attention_mask.LocalMask):
    """jax's, of the last `window` tokens including the query's own; its blocks are two numbers. As `CausalMask`."""

    def __init__(self, shape: tuple[int, int], window: int, shards: int = 1):
        super().__init__(shape, (window - 1, 0), offset=0)
        self._window = window
        self._positions = _arranged(self, shards)

    def __getitem__(self, index: Any) -> np.ndarray:
        """As `CausalMask`."""
        return _within(self.q_sequence[index[0]], self._positions[index[1]], self._window)


def _arranged(mask: Any, shards: int) -> np.ndarray:
    """Has a mask look at the positions of arranged queries and keys; returns them."""
    num_tokens = mask.shape[0]
    if shards == 1:
        return np.arange(num_tokens)
    plain = mask.mask_function
    chunk = num_tokens // (CHUNKS_PER_SHARD * shards)

    def mask_function(position_Q: Any, place_S: Any) -> Any:
        """`context_order` in arithmetic: inside the kernel there is no table to look a place up in."""
        shard = place_S // (2 * chunk)
        late = place_S // chunk % 2
        chunk_S = shard + late * (2 * shards - 1 - 2 * shard)
        return plain(position_Q, chunk_S * chunk + place_S % chunk)

    mask.mask_function = mask_function
    mask.q_sequence = context_order(num_tokens, shards).astype(mask.q_sequence.dtype)
    return mask.q_sequence


class FullMask(splash_attention_mask.FullMask):
    """jax's full mask, with blocks as two numbers."""

    def __getitem__(self, index: Any) -> np.ndarray:
        """As `CausalMask`."""
        return _some_and_all(True, True)


_HEADS = ("batch", "length", "activation_heads", None)
_TOKENS = ("batch", "length")


@jax.custom_vjp
def _with_gradient_as_wide(x: Array) -> Array:
    """Casts the gradient of `x` to its dtype: for float32 sinks, splash returns it in the queries' dtype."""
    return x


_with_gradient_as_wide.defvjp(lambda x: (x, x), lambda x, dx: (dx.astype(x.dtype),))


def splash_attention(
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKW: Array,
    segment_BT: Array,
    sink_N: Array | None = None,
    *,
    strategy: str = "all_gather",
    scoring: Scoring = PLAIN,
    interpret: bool = False,
) -> Array:
    """`attention` by the Pallas kernel for TPU; T, or on context shards each chunk, must be a multiple of 128.

    Args:
      strategy: how the shards of a context axis exchange keys, one of `attention.STRATEGIES`.
      interpret: run the kernel's steps as plain XLA operations, as tests on CPU do.
    """
    shards = context_shards()
    options = _Options(scoring, interpret)
    if shards > 1 and strategy == "ring" and scoring.window is None:
        passes = Passes(_shard_forward, _shard_backward, (options,))
        return on_devices((q_BTNH, k_BSKH, v_BSKW, segment_BT), sink_N, passes)
    return _gathered(options, q_BTNH, k_BSKH, v_BSKW, segment_BT, sink_N)


@dataclasses.dataclass(frozen=True)
class _Options:
    scoring: Scoring
    interpret: bool

    def kernel(self, mask: Mask, num_heads: int, head_dim: int, *, span: int, shards: int = 1, **more: Any) -> Any:
        """The kernel for queries and keys that this mask describes, in blocks that divide `span` tokens.

        Args:
          head_dim: of keys or values, whichever is wider.
        """
        sizes = block_sizes(span=span, num_keys=mask.shape[1], head_dim=head_dim, window=self.scoring.window)
        return splash_attention_kernel.make_splash_mha(
            MultiHeadMask([mask] * num_heads),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=shards,
            attn_logits_soft_cap=self.scoring.soft_cap,
            interpret=self.interpret,
            **more,
        )

    def kernel_for(self, rows: tuple[Array, ...], mask: Mask, **more: Any) -> Any:
        """The kernel for these queries [B, N, T, H], keys and values, with a mask of consecutive tokens."""
        q_BNTH, k_BKSH, v_BKSW = rows[:3]
        head_dim = max(k_BKSH.shape[-1], v_BKSW.shape[-1])
        return self.kernel(mask, q_BNTH.shape[1], head_dim, span=mask.shape[0], **more)

    def scaled(self, q_BTNH: Array) -> Array:
        """Queries [B, N, T, H] times the scale, which the kernel does not have."""
        scale = self.scoring.scale_of(q_BTNH.shape[-1])
        return (q_BTNH * scale).swapaxes(1, 2)


def _gathered(
    options: _Options,
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKW: Array,
    segment_BT: Array,
    sink_N: Array | None,
) -> Array:
    """Attention of a device's queries to all keys of their examples."""
    T, N = q_BTNH.shape[1:3]
    shards = context_shards()
    window = options.scoring.window
    mask: Mask = CausalMask((T, T), shards)
    if window is not None:
        mask = LocalMask((T, T), window, shards)
    span = T if shards == 1 else T // (CHUNKS_PER_SHARD * shards)
    num_heads = N // num_shards("activation_heads")
    head_dim = max(q_BTNH.shape[-1], v_BSKW.shape[-1])
    kernel = options.kernel(mask, num_heads, head_dim, span=span, shards=shards, residual_checkpoint_name="context")

    def local(
        kernel: Any,
        q_BTNH: Array,
        k_BSKH: Array,
        v_BSKW: Array,
        segment_BT: Array,
        sink_N: Array | None,
    ) -> Array:
        """The heads, rows and queries of one device."""
        # As they are arranged: putting chunks into their true order would copy keys and values several times.
        k_BKSH = gathered(k_BSKH.swapaxes(1, 2), "length", 2)
        v_BKSW = gathered(v_BSKW.swapaxes(1, 2), "length", 2)
        segment_BS = gathered(segment_BT, "length", 1)

        def one_row(*row: Array) -> Array:
            *heads, segment_T, segment_S = row
            segments = splash_attention_kernel.SegmentIds(segment_T, segment_S)
            own_sink_N = None if sink_N is None else _with_gradient_as_wide(sink_N)
            return kernel(*heads, segment_ids=segments, sinks=own_sink_N)

        q_BNTH = options.scaled(q_BTNH)
        context_BNTW = jax.vmap(one_row)(q_BNTH, k_BKSH, v_BKSW, segment_BT, segment_BS)
        return context_BNTW.swapaxes(1, 2)

    mesh = jax.sharding.get_abstract_mesh()
    where = None if mesh.empty else kernel.manual_sharding_spec(sharding(mesh, (None, "length")))
    run = over_shards(local, (where, _HEADS, _HEADS, _HEADS, _TOKENS, ("activation_heads",)), _HEADS)
    return run(kernel, q_BTNH, k_BSKH, v_BSKW, segment_BT, sink_N)


def _attend(options: _Options, mask: Mask, *rows: Array) -> tuple[Array, Array]:
    """Float32 context [B, N, 1, T, W] and log-partition [B, N, 1, T, 1] of rows [B, ...] of q, k, v and documents."""
    kernel = options.kernel_for(rows, mask, save_residuals=True)

    def one_row(*row: Array) -> Any:
        *heads, segment_T, segment_S = row
        return kernel(*heads, segment_ids=splash_attention_kernel.SegmentIds(segment_T, segment_S))

    context_BNTW, (log_partition_BNT,) = jax.vmap(one_row)(*rows)
    return context_BNTW.astype(jnp.float32)[:, :, None], log_partition_BNT[:, :, None, :, None]


def _attend_backward(options: _Options, mask: Mask, *rows: Array) -> tuple[Array, ...]:
    """These queries' and keys' terms of both gradients, float32.

    Args:
      rows: q, k, v and documents as in `_attend`; the context, log-partition [B, N, T] and gradient of the context of
        these queries over all their keys.
    Returns:
      dq [B, N, 1, T, H], dk [B, K, 1, S, H] and dv [B, K, 1, S, W].
    """
    kernel = options.kernel_for(rows, mask)

    def one_row(*row: Array) -> Any:
        q_NTH, k_KSH, v_KSW, segment_T, segment_S, context_NTW, partition_NT, g = row
        segments = splash_attention_kernel.SegmentIds(segment_T, segment_S)
        kept = (q_NTH, k_KSH, v_KSW, segments, None, context_NTW, partition_NT)
        kept = (*kept, kernel.dq_mask_info, kernel.dkv_mask_info)
        # Private: `kernel`'s own derivative uses the context and log-partition of these keys alone.
        backward: Any = splash_attention_kernel._splash_attention_bwd  # pyright: ignore[reportPrivateUsage]
        return backward(**kernel.kwargs, res=kept, do=g)[3:6]

    gradients = jax.vmap(one_row)(*rows)
    return tuple(x.astype(jnp.float32)[:, :, None] for x in gradients)


def _shard_forward(
    options: _Options,
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKW: Array,
    segment_BT: Array,
    sink_N: Array | None,
) -> tuple[Array, Array]:
    """One device's context and log-partitions."""
    T = q_BTNH.shape[1]
    chunk = T // CHUNKS_PER_SHARD
    q_BNTH = options.scaled(q_BTNH)
    own = k_BSKH.swapaxes(1, 2), v_BSKW.swapaxes(1, 2), segment_BT
    full = FullMask((chunk, chunk))

    def find(pairs: Pairs, theirs: Tree, _: Array) -> tuple[Array, ...]:
        return _attend(options, full, *_rows_of(pairs, q_BNTH, segment_BT, theirs))

    # A later place on a shard is a later token.
    causal = CausalMask((T, T))
    state = _attend(options, causal, q_BNTH, *own[:2], segment_BT, segment_BT)
    state = merged_over_shards("ring", chunk, own, state, find)
    context_BKGTW, log_partition_BKGT1 = with_sink(state, sink_N)
    return ungrouped(context_BKGTW).astype(q_BTNH.dtype), log_partition_BKGT1


def _shard_backward(options: _Options, *arguments: Array) -> tuple[Array, ...]:
    """One device's dq, dk and dv, including the terms of dk and dv that other devices send for their queries."""
    q_BTNH, k_BSKH, v_BSKW, segment_BT, context_BTNW, log_partition_BKGT1, g_BTNW = arguments
    T = q_BTNH.shape[1]
    chunk = T // CHUNKS_PER_SHARD
    dtype = q_BTNH.dtype
    q_BNTH = options.scaled(q_BTNH)
    own = k_BSKH.swapaxes(1, 2), v_BSKW.swapaxes(1, 2), segment_BT
    context_BNTW = context_BTNW.swapaxes(1, 2)
    log_partition_BNT = log_partition_BKGT1[:, :, 0, :, 0]
    of_queries = (context_BNTW, log_partition_BNT, g_BTNW.swapaxes(1, 2))
    full = FullMask((chunk, chunk))

    def find(pairs: Pairs, theirs: Tree, _: Array) -> tuple[Array, ...]:
        rows = _rows_of(pairs, q_BNTH, segment_BT, theirs)
        of_pairs = [pairs.queries(x, axis=2) for x in of_queries]
        return _attend_backward(options, full, *rows, *of_pairs)

    causal = CausalMask((T, T))
    gradients = _attend_backward(options, causal, q_BNTH, *own[:2], segment_BT, segment_BT, *of_queries)
    gradients = summed_over_shards("ring", chunk, own, gradients, find)
    dq_BTNH, dk_BSKH, dv_BSKW = map(ungrouped, gradients)
    dq_BTNH = dq_BTNH * options.scoring.scale_of(q_BTNH.shape[3])
    return dq_BTNH.astype(dtype), dk_BSKH.astype(dtype), dv_BSKW.astype(dtype)


def _rows_of(pairs: Pairs, q_BNTH: Array, segment_BT: Array, theirs: Tree) -> tuple[Array, ...]:
    """The queries, keys, values and documents of both pairs; `theirs` is another shard's."""
    k_BKSH, v_BKSW, segment_BS = theirs
    q = pairs.queries(q_BNTH, axis=2)
    k = pairs.keys(k_BKSH, axis=2)
    v = pairs.keys(v_BKSW, axis=2)
    return q, k, v, pairs.queries(segment_BT, axis=1), pairs.keys(segment_BS, axis=1)
