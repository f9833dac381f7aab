"""Causal attention within documents, by a kernel chosen by name."""

import dataclasses
from typing import Any

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

from maxtext_lite.config.kernels import KERNELS, SPLASH_BLOCK, Needs, lacking
from maxtext_lite.models.blockwise import PLAIN, Scoring, block_queries, blockwise_attention
from maxtext_lite.models.context_attention import context_attention
from maxtext_lite.models.gpu_attention import (
    cudnn_attention,
    cudnn_masked_attention,
    mha_attention,
    mosaic_attention,
)
from maxtext_lite.parallel import context_shards, over_shards


def attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKW: jax.Array,
    segment_BT: jax.Array,
    sink_N: jax.Array | None = None,
    *,
    kernel: str,
    strategy: str,
    scoring: Scoring = PLAIN,
) -> jax.Array:
    """Causal grouped-query attention that never looks across packed documents.

    Where the mesh in use has a context axis, the T tokens are in the order of `parallel.context_order`.

    Args:
      k_BSKH: keys of the same T positions as the queries (S = T); N must be a multiple of K.
      v_BSKW: their values, whose width W may be another than H.
      segment_BT: document number of each token; padding is a document of its own. A document's tokens stand together.
        cudnn_flash does not look at it: rows must hold one document each.
      sink_N: each head's learned score of nothing, which takes part in the softmax; None: no sinks.
      kernel: one of KERNELS.
      strategy: how the shards of a context axis exchange keys, one of `context_attention.STRATEGIES`.
      scoring: how queries score keys, and how many they see.
    Returns:
      Context [B, T, N, W] in the dtype of q_BTNH; the softmax runs in float32.
    Raises:
      ValueError: N is not a multiple of K, or the kernel is unknown, cannot work on shards of the tokens, or lacks
        what is asked of it.
    Source: Ainslie et al. 2023, arXiv:2305.13245, section 2.2.
    """
    if q_BTNH.shape[2] % k_BSKH.shape[2]:
        raise ValueError(f"{q_BTNH.shape[2]} query heads are not a multiple of {k_BSKH.shape[2]} kv heads")
    if kernel not in KERNELS:
        raise ValueError(f"unknown attention kernel {kernel!r}; known: {', '.join(KERNELS)}")
    if scoring.window is not None and scoring.window >= q_BTNH.shape[1]:
        scoring = dataclasses.replace(scoring, window=None)  # it reaches every key: no mask, no tile to pass over
    needs = Needs(
        head_dim=q_BTNH.shape[-1],
        window=scoring.window is not None,
        soft_cap=scoring.soft_cap or 0.0,
        sinks=sink_N is not None,
        values_differ=v_BSKW.shape[-1] != k_BSKH.shape[-1],
    )
    if lacks := lacking(kernel, needs):
        raise ValueError(f"attention={kernel} does not know {' or '.join(lacks)}. Nearest that works: dot_product.")
    if context_shards() > 1:
        if kernel != "dot_product":
            raise ValueError(f"attention={kernel} does not work on {context_shards()} shards of the tokens")
        return context_attention(q_BTNH, k_BSKH, v_BSKW, segment_BT, strategy, sink_N, scoring)
    if kernel == "dot_product":
        block = block_queries(q_BTNH.shape[1])
        return blockwise_attention(q_BTNH, k_BSKH, v_BSKW, segment_BT, block, sink_N, scoring)
    if kernel == "tokamax_mosaic":
        return mosaic_attention(q_BTNH, k_BSKH, v_BSKW, segment_BT, sink_N, scoring=scoring)
    if kernel == "pallas_mha":
        return mha_attention(q_BTNH, k_BSKH, v_BSKW, segment_BT, scoring=scoring)
    if kernel == "cudnn_flash":
        return cudnn_attention(q_BTNH, k_BSKH, v_BSKW, scoring=scoring)
    if kernel == "cudnn_masked":
        return cudnn_masked_attention(q_BTNH, k_BSKH, v_BSKW, segment_BT, scoring=scoring)
    return splash_attention(q_BTNH, k_BSKH, v_BSKW, segment_BT, sink_N, scoring=scoring, interpret=False)


@jax.custom_vjp
def _with_gradient_as_wide(x: jax.Array) -> jax.Array:
    """`x`, whose gradient is made of its dtype: splash gives that of float32 sinks in the dtype of the queries."""
    return x


_with_gradient_as_wide.defvjp(lambda x: (x, x), lambda x, dx: (dx.astype(x.dtype),))


def splash_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKW: jax.Array,
    segment_BT: jax.Array,
    sink_N: jax.Array | None = None,
    *,
    scoring: Scoring = PLAIN,
    interpret: bool,
) -> jax.Array:
    """`attention` by the Pallas kernel for TPU; T must be a multiple of 128.

    Args:
      interpret: run the kernel's steps as plain XLA operations, as tests on CPU do.
    Raises:
      ValueError: T is not a multiple of 128.
    """
    T = q_BTNH.shape[1]
    if T % SPLASH_BLOCK:
        raise ValueError(f"attention=splash needs max_target_length={T} to be a multiple of {SPLASH_BLOCK}")

    def local(
        q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKW: jax.Array, segment_BT: jax.Array, sink_N: Any = None
    ) -> jax.Array:
        """The heads and rows of one device."""
        if scoring.window is None:
            mask = splash_attention_mask.CausalMask((T, T))
        else:
            mask = splash_attention_mask.LocalMask((T, T), (scoring.window - 1, 0), offset=0)
        edge = max(edge for edge in (128, 256, 512) if T % edge == 0)
        sizes = splash_attention_kernel.BlockSizes(
            block_q=edge,
            block_kv=edge,
            block_kv_compute=edge,
            block_q_dkv=edge,
            block_kv_dkv=edge,
            block_kv_dkv_compute=edge,
            block_q_dq=edge,
            block_kv_dq=edge,
        )
        kernel = splash_attention_kernel.make_splash_mha_single_device(
            splash_attention_mask.MultiHeadMask([mask] * q_BTNH.shape[2]),
            block_sizes=sizes,
            attn_logits_soft_cap=scoring.soft_cap,
            interpret=interpret,
        )

        def one_row(q_NTH: jax.Array, k_KSH: jax.Array, v_KSW: jax.Array, segment_T: jax.Array) -> Any:
            segments = splash_attention_kernel.SegmentIds(segment_T, segment_T)
            own_sink_N = None if sink_N is None else _with_gradient_as_wide(sink_N)
            return kernel(q_NTH, k_KSH, v_KSW, segment_ids=segments, sinks=own_sink_N)

        scaled_BNTH = (q_BTNH * scoring.scale_of(q_BTNH.shape[-1])).swapaxes(1, 2)
        return jax.vmap(one_row)(scaled_BNTH, k_BSKH.swapaxes(1, 2), v_BSKW.swapaxes(1, 2), segment_BT).swapaxes(1, 2)

    heads = ("batch", None, "activation_heads", None)
    axes = (heads, heads, heads, ("batch", None))
    if sink_N is None:
        return over_shards(local, axes, heads)(q_BTNH, k_BSKH, v_BSKW, segment_BT)
    return over_shards(local, (*axes, ("activation_heads",)), heads)(q_BTNH, k_BSKH, v_BSKW, segment_BT, sink_N)
