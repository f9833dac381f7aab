"""Causal attention within documents, by a kernel chosen by name."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

from maxtext_lite.models.blockwise import PLAIN, Scoring, block_queries, blockwise_attention, may_see
from maxtext_lite.models.context_attention import context_attention
from maxtext_lite.parallel import context_shards, over_shards

KERNELS = ("dot_product", "cudnn_flash", "splash")
"""Attention kernels: XLA's matmuls in blocks (any platform), cuDNN's (NVIDIA GPUs), Pallas splash (TPU)."""

_SPLASH_BLOCK = 128


def resolve_attention(
    name: str,
    *,
    platform: str,
    dtype: Any,
    num_tokens: int,
    num_context_shards: int = 1,
    scorings: Sequence[Scoring] = (),
    sinks: bool = False,
    values_differ: bool = False,
) -> str:
    """The kernel that `auto` means; any other name stands for itself.

    Args:
      platform: "cpu", "gpu" or "tpu".
      num_tokens: of an example.
      num_context_shards: devices that an example's tokens are split over; only dot_product works on several.
      scorings: those of all layers: one kernel works for all.
      sinks: heads have sinks.
      values_differ: values are not as wide as keys.
    Raises:
      ValueError: the named kernel does not run there, or lacks what the layers need; says what.
    """
    runs = {
        "dot_product": (True, "nothing"),
        "cudnn_flash": (
            platform == "gpu" and jnp.dtype(dtype).itemsize == 2 and num_context_shards == 1,
            "an NVIDIA GPU, dtype=bfloat16 and one context shard",
        ),
        "splash": (
            platform == "tpu" and num_tokens % _SPLASH_BLOCK == 0 and num_context_shards == 1,
            f"a TPU, a max_target_length that is a multiple of {_SPLASH_BLOCK} and one context shard",
        ),
    }
    lacking = {kernel: _lacking(kernel, scorings, sinks=sinks, values_differ=values_differ) for kernel in KERNELS}
    if name == "auto":
        return next(kernel for kernel in reversed(KERNELS) if runs[kernel][0] and not lacking[kernel])
    if not runs[name][0]:
        shards = f"{num_context_shards} context shard{'' if num_context_shards == 1 else 's'}"
        raise ValueError(
            f"attention={name} needs {runs[name][1]}; here are {platform}, {jnp.dtype(dtype).name}, "
            f"{num_tokens} tokens and {shards}. Nearest that works: dot_product."
        )
    if lacking[name]:
        raise ValueError(_refusal(name, lacking[name]))
    return name


def _lacking(kernel: str, scorings: Sequence[Scoring], *, sinks: bool, values_differ: bool) -> list[str]:
    """What these layers need and the kernel does not have, in words; [] for a kernel that suits them."""
    if kernel != "cudnn_flash":  # the others do everything
        return []
    caps = sorted({scoring.soft_cap for scoring in scorings if scoring.soft_cap is not None})
    needs = {
        f"a soft cap of scores ({', '.join(map(str, caps))})": bool(caps),
        "attention sinks": sinks,
        "values of another width than keys": values_differ,
    }
    return [what for what, needed in needs.items() if needed]


def _refusal(kernel: str, lacking: Sequence[str]) -> str:
    return f"attention={kernel} does not know {' or '.join(lacking)}. Nearest that works: dot_product."


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
    values_differ = v_BSKW.shape[-1] != k_BSKH.shape[-1]
    if lacking := _lacking(kernel, [scoring], sinks=sink_N is not None, values_differ=values_differ):
        raise ValueError(_refusal(kernel, lacking))
    if scoring.window is not None and scoring.window >= q_BTNH.shape[1]:
        scoring = dataclasses.replace(scoring, window=None)  # it reaches every key: no mask, no tile to pass over
    if context_shards() > 1:
        if kernel != "dot_product":
            raise ValueError(f"attention={kernel} does not work on {context_shards()} shards of the tokens")
        return context_attention(q_BTNH, k_BSKH, v_BSKW, segment_BT, strategy, sink_N, scoring)
    if kernel == "dot_product":
        block = block_queries(q_BTNH.shape[1])
        return blockwise_attention(q_BTNH, k_BSKH, v_BSKW, segment_BT, block, sink_N, scoring)
    if kernel == "cudnn_flash":
        # cuDNN before 9.10.2 has no window beside a mask of documents, and would refuse the step when it compiles: the
        # window is a part of the mask.
        first = None if scoring.window is None else 0
        seen_B1TS = may_see(segment_BT, segment_BT, first, first, scoring.window)[:, 0]
        return jax.nn.dot_product_attention(
            q_BTNH, k_BSKH, v_BSKW, mask=seen_B1TS, is_causal=True, scale=scoring.scale, implementation="cudnn"
        )
    if kernel == "splash":
        return splash_attention(q_BTNH, k_BSKH, v_BSKW, segment_BT, sink_N, scoring=scoring, interpret=False)
    raise ValueError(f"unknown attention kernel {kernel!r}; known: {', '.join(KERNELS)}")


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
    if T % _SPLASH_BLOCK:
        raise ValueError(f"attention=splash needs max_target_length={T} to be a multiple of {_SPLASH_BLOCK}")

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
