"""Causal attention within documents, by a kernel chosen by name."""

import dataclasses

import jax

from maxtext_lite.config.kernels import KERNELS, lacking
from maxtext_lite.models.splash import splash_attention
from maxtext_lite.models.tile import PLAIN, Scoring, may_see
from maxtext_lite.models.tiled_attention import tiled_attention
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

    Where the mesh in use has a context axis, the T tokens are in the order of `parallel.context_order`.

    Args:
      k_BSKH: keys of the same T positions as the queries (S = T); N must be a multiple of K.
      v_BSKW: their values, whose width W may be another than H.
      segment_BT: document number of each token; padding is a document of its own.
      sink_N: each head's learned score of nothing, which takes part in the softmax; None: no sinks.
      kernel: one of KERNELS.
      strategy: how the shards of a context axis exchange keys, one of `tiled_attention.STRATEGIES`.
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
    values_differ = v_BSKW.shape[-1] != k_BSKH.shape[-1]
    soft_caps = [] if scoring.soft_cap is None else [scoring.soft_cap]
    if lacks := lacking(kernel, soft_caps=soft_caps, sinks=sink_N is not None, values_differ=values_differ):
        raise ValueError(f"attention={kernel} does not know {' or '.join(lacks)}. Nearest that works: dot_product.")
    if scoring.window is not None and scoring.window >= q_BTNH.shape[1]:
        scoring = dataclasses.replace(scoring, window=None)  # it reaches every key: no mask, no tile to pass over
    if context_shards() > 1 and kernel not in ("dot_product", "splash"):
        raise ValueError(f"attention={kernel} does not work on {context_shards()} shards of the tokens")
    if kernel == "dot_product":
        return tiled_attention(q_BTNH, k_BSKH, v_BSKW, segment_BT, strategy, sink_N, scoring)
    if kernel == "cudnn_flash":
        # cuDNN before 9.10.2 has no window beside a mask of documents, and would refuse the step when it compiles: the
        # window is a part of the mask.
        first = None if scoring.window is None else 0
        seen_B1TS = may_see(segment_BT, segment_BT, first, first, scoring.window)[:, 0]
        return jax.nn.dot_product_attention(
            q_BTNH, k_BSKH, v_BSKW, mask=seen_B1TS, is_causal=True, scale=scoring.scale, implementation="cudnn"
        )
    if kernel == "splash":
        return splash_attention(
            q_BTNH, k_BSKH, v_BSKW, segment_BT, sink_N, strategy=strategy, scoring=scoring, interpret=False
        )
    raise ValueError(f"unknown attention kernel {kernel!r}; known: {', '.join(KERNELS)}")
