"""Causal attention within documents, by a kernel chosen by name."""

import dataclasses

import jax

from maxtext_lite.config.kernels import KERNELS, Needs, lacking
from maxtext_lite.config.registry import load
from maxtext_lite.models.tile import PLAIN, Scoring
from maxtext_lite.parallel import context_shards


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

    If the mesh in use has a context axis, the T tokens are in the order of `parallel.context_order`.

    Args:
      k_BSKH: keys of the same T positions as the queries (S = T); N must be a multiple of K.
      v_BSKW: their values, whose width W may differ from H.
      segment_BT: document number of each token; padding is a document of its own. A document's tokens are contiguous.
        cudnn_flash does not read it: rows must contain one document each.
      sink_N: each head's learned score without a key, which takes part in the softmax; None: no sinks.
      kernel: one of KERNELS.
      strategy: how the shards of a context axis exchange keys, one of `tiled_attention.STRATEGIES`.
      scoring: how queries score keys, and how many they see.
    Returns:
      Context [B, T, N, W] in the dtype of q_BTNH; the softmax runs in float32.
    Raises:
      ValueError: N is not a multiple of K, or the kernel is unknown, cannot work on shards of the tokens, or lacks a
        feature that is needed.
    Source: Ainslie et al. 2023, arXiv:2305.13245, section 2.2.
    """
    if q_BTNH.shape[2] % k_BSKH.shape[2]:
        raise ValueError(f"{q_BTNH.shape[2]} query heads are not a multiple of {k_BSKH.shape[2]} kv heads")
    if kernel not in KERNELS:
        raise ValueError(f"unknown attention kernel {kernel!r}; known: {', '.join(KERNELS)}")
    if scoring.window is not None and scoring.window >= q_BTNH.shape[1]:
        scoring = dataclasses.replace(scoring, window=None)  # it reaches every key: no mask, no tile to skip
    needs = Needs(
        head_dim=q_BTNH.shape[-1],
        window=scoring.window is not None,
        soft_cap=scoring.soft_cap or 0.0,
        sinks=sink_N is not None,
        chunks=scoring.chunk is not None and scoring.chunk < q_BTNH.shape[1],
        values_differ=v_BSKW.shape[-1] != k_BSKH.shape[-1],
    )
    if lacks := lacking(kernel, needs):
        raise ValueError(f"attention={kernel} does not support {' or '.join(lacks)}. Nearest that works: dot_product.")
    if context_shards() > 1 and not KERNELS[kernel].context_shards:
        raise ValueError(f"attention={kernel} does not work on {context_shards()} shards of the tokens")
    kernel_attention = load("attention", kernel)  # with the arguments of this function
    return kernel_attention(q_BTNH, k_BSKH, v_BSKW, segment_BT, sink_N, strategy=strategy, scoring=scoring)
