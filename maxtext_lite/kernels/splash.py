"""Attention by splash, jax's Pallas kernel for TPU, for whole examples and examples split over the context axis.

With all_gather, one kernel has the keys of all shards, and its mask knows the positions of arranged queries and keys.
With ring, keys go round the shards: one kernel for a device's own keys, and one for two pairs of chunks of every other
shard, whose results are merged by their log-partitions. The kernel has no gradient for that: its backward pass is
called with the context and log-partition of all keys, by a name that is private to jax. How far apart the tokens of two
chunks are depends on the shards, so keys are gathered with either strategy where attention has a window.
Source: Liu et al. 2023, arXiv:2310.01889; Dubey et al. 2024, arXiv:2407.21783, section 3.3.2.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask import Mask, MultiHeadMask

from maxtext_lite.config.kernels import token_multiple
from maxtext_lite.kernels.chunk_pairs import Pairs, merged_over_shards, summed_over_shards
from maxtext_lite.kernels.splash_blocks import CausalMask, FullMask, LocalMask, block_sizes
from maxtext_lite.models.tile import PLAIN, Scoring, ungrouped, with_sink
from maxtext_lite.models.tiled_attention import Passes, on_devices
from maxtext_lite.parallel import CHUNKS_PER_SHARD, Tree, context_shards, gathered, num_shards, over_shards, sharding

_HEADS = ("batch", "length", "activation_heads", None)
_TOKENS = ("batch", "length")


@jax.custom_vjp
def _with_gradient_as_wide(x: jax.Array) -> jax.Array:
    """`x` with its gradient cast to its dtype: splash returns that of float32 sinks in the queries' dtype."""
    return x


_with_gradient_as_wide.defvjp(lambda x: (x, x), lambda x, dx: (dx.astype(x.dtype),))


def splash_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKW: jax.Array,
    segment_BT: jax.Array,
    sink_N: jax.Array | None = None,
    *,
    strategy: str = "all_gather",
    scoring: Scoring = PLAIN,
    interpret: bool = False,
) -> jax.Array:
    """`attention` by the Pallas kernel for TPU; T, or on context shards each chunk, must be a multiple of 128.

    Args:
      strategy: how the shards of a context axis exchange keys, one of `tiled_attention.STRATEGIES`.
      interpret: run the kernel's steps as plain XLA operations, as tests on CPU do.
    Raises:
      ValueError: T, or a chunk, is not a multiple of 128.
    """
    T, shards = q_BTNH.shape[1], context_shards()
    unit = token_multiple("splash", shards)
    if T % unit:
        raise ValueError(f"attention=splash needs max_target_length={T} to be a multiple of {unit}")
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

    def scaled(self, q_BTNH: jax.Array) -> jax.Array:
        """Queries [B, N, T, H] times the scale, which the kernel does not have."""
        return (q_BTNH * self.scoring.scale_of(q_BTNH.shape[-1])).swapaxes(1, 2)


def _gathered(
    options: _Options,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKW: jax.Array,
    segment_BT: jax.Array,
    sink_N: jax.Array | None,
) -> jax.Array:
    """Attention of a device's queries to all keys of their examples."""
    (T, N), shards, window = q_BTNH.shape[1:3], context_shards(), options.scoring.window
    mask = CausalMask((T, T), shards) if window is None else LocalMask((T, T), window, shards)
    span = T if shards == 1 else T // (CHUNKS_PER_SHARD * shards)
    num_heads = N // num_shards("activation_heads")
    head_dim = max(q_BTNH.shape[-1], v_BSKW.shape[-1])
    kernel = options.kernel(mask, num_heads, head_dim, span=span, shards=shards, residual_checkpoint_name="context")

    def local(
        kernel: Any,
        q_BTNH: jax.Array,
        k_BSKH: jax.Array,
        v_BSKW: jax.Array,
        segment_BT: jax.Array,
        sink_N: jax.Array | None,
    ) -> jax.Array:
        """The heads, rows and queries of one device."""
        # As they are arranged: putting chunks into their true order would copy keys and values several times.
        k_BKSH, v_BKSW = (gathered(x.swapaxes(1, 2), "length", 2) for x in (k_BSKH, v_BSKW))
        segment_BS = gathered(segment_BT, "length", 1)

        def one_row(*row: jax.Array) -> jax.Array:
            *heads, segment_T, segment_S = row
            segments = splash_attention_kernel.SegmentIds(segment_T, segment_S)
            own_sink_N = None if sink_N is None else _with_gradient_as_wide(sink_N)
            return kernel(*heads, segment_ids=segments, sinks=own_sink_N)

        return jax.vmap(one_row)(options.scaled(q_BTNH), k_BKSH, v_BKSW, segment_BT, segment_BS).swapaxes(1, 2)

    mesh = jax.sharding.get_abstract_mesh()
    where = None if mesh.empty else kernel.manual_sharding_spec(sharding(mesh, (None, "length")))
    run = over_shards(local, (where, _HEADS, _HEADS, _HEADS, _TOKENS, ("activation_heads",)), _HEADS)
    return run(kernel, q_BTNH, k_BSKH, v_BSKW, segment_BT, sink_N)


def _head_dim(rows: tuple[jax.Array, ...]) -> int:
    """The width of the wider of keys and values."""
    return max(rows[1].shape[-1], rows[2].shape[-1])


def _attend(options: _Options, mask: Mask, *rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Context [B, N, 1, T, W] and log-partition [B, N, 1, T, 1], float32, of rows [B, ...] of q, k, v and documents."""
    kernel = options.kernel(mask, rows[0].shape[1], _head_dim(rows), span=mask.shape[0], save_residuals=True)

    def one_row(*row: jax.Array) -> Any:
        *heads, segment_T, segment_S = row
        return kernel(*heads, segment_ids=splash_attention_kernel.SegmentIds(segment_T, segment_S))

    context_BNTW, (log_partition_BNT,) = jax.vmap(one_row)(*rows)
    return context_BNTW.astype(jnp.float32)[:, :, None], log_partition_BNT[:, :, None, :, None]


def _attend_backward(options: _Options, mask: Mask, *rows: jax.Array) -> tuple[jax.Array, ...]:
    """These queries' and keys' terms of both gradients, float32.

    Args:
      rows: q, k, v and documents as in `_attend`; the context, log-partition [B, N, T] and gradient of the context of
        these queries over all their keys.
    Returns:
      dq [B, N, 1, T, H], dk [B, K, 1, S, H] and dv [B, K, 1, S, W].
    """
    kernel = options.kernel(mask, rows[0].shape[1], _head_dim(rows), span=mask.shape[0])

    def one_row(*row: jax.Array) -> Any:
        q_NTH, k_KSH, v_KSW, segment_T, segment_S, context_NTW, partition_NT, g = row
        segments = splash_attention_kernel.SegmentIds(segment_T, segment_S)
        kept = (q_NTH, k_KSH, v_KSW, segments, None, context_NTW, partition_NT)
        kept = (*kept, kernel.dq_mask_info, kernel.dkv_mask_info)
        # Private: `kernel`'s own derivative uses the context and log-partition of these keys alone.
        backward: Any = splash_attention_kernel._splash_attention_bwd  # pyright: ignore[reportPrivateUsage]
        return backward(**kernel.kwargs, res=kept, do=g)[3:6]

    return tuple(x.astype(jnp.float32)[:, :, None] for x in jax.vmap(one_row)(*rows))


def _shard_forward(
    options: _Options,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKW: jax.Array,
    segment_BT: jax.Array,
    sink_N: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """One device's context and log-partitions."""
    T = q_BTNH.shape[1]
    chunk, q_BNTH = T // CHUNKS_PER_SHARD, options.scaled(q_BTNH)
    own = k_BSKH.swapaxes(1, 2), v_BSKW.swapaxes(1, 2), segment_BT
    full = FullMask((chunk, chunk))

    def find(pairs: Pairs, theirs: Tree, _: jax.Array) -> tuple[jax.Array, ...]:
        k, v, segment_S = (pairs.keys(x, axis) for x, axis in zip(theirs, (2, 2, 1), strict=True))
        return _attend(options, full, pairs.queries(q_BNTH, 2), k, v, pairs.queries(segment_BT, 1), segment_S)

    # A later place on a shard is a later token.
    state = _attend(options, CausalMask((T, T)), q_BNTH, *own[:2], segment_BT, segment_BT)
    context_BKGTW, log_partition_BKGT1 = with_sink(merged_over_shards("ring", chunk, own, state, find), sink_N)
    return ungrouped(context_BKGTW).astype(q_BTNH.dtype), log_partition_BKGT1


def _shard_backward(options: _Options, *arguments: jax.Array) -> tuple[jax.Array, ...]:
    """One device's dq, dk and dv, including the terms of dk and dv that other devices send for their queries."""
    q_BTNH, k_BSKH, v_BSKW, segment_BT, context_BTNW, log_partition_BKGT1, g_BTNW = arguments
    T, H, dtype = q_BTNH.shape[1], q_BTNH.shape[3], q_BTNH.dtype
    chunk, q_BNTH = T // CHUNKS_PER_SHARD, options.scaled(q_BTNH)
    own = k_BSKH.swapaxes(1, 2), v_BSKW.swapaxes(1, 2), segment_BT
    of_queries = context_BTNW.swapaxes(1, 2), log_partition_BKGT1[:, :, 0, :, 0], g_BTNW.swapaxes(1, 2)
    full = FullMask((chunk, chunk))

    def find(pairs: Pairs, theirs: Tree, _: jax.Array) -> tuple[jax.Array, ...]:
        k, v, segment_S = (pairs.keys(x, axis) for x, axis in zip(theirs, (2, 2, 1), strict=True))
        q, segment_T = pairs.queries(q_BNTH, 2), pairs.queries(segment_BT, 1)
        return _attend_backward(
            options, full, q, k, v, segment_T, segment_S, *(pairs.queries(x, axis=2) for x in of_queries)
        )

    causal = CausalMask((T, T))
    gradients = _attend_backward(options, causal, q_BNTH, *own[:2], segment_BT, segment_BT, *of_queries)
    dq_BTNH, *dkv = map(ungrouped, summed_over_shards("ring", chunk, own, gradients, find))
    return (dq_BTNH * options.scoring.scale_of(H)).astype(dtype), *(x.astype(dtype) for x in dkv)
