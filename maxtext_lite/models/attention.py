"""Causal attention within documents, by a kernel chosen by name."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

from maxtext_lite.models.blockwise import block_queries, blockwise_attention
from maxtext_lite.models.context_attention import context_attention
from maxtext_lite.parallel import context_shards, over_shards

KERNELS = ("dot_product", "cudnn_flash", "splash")
"""Attention kernels: XLA's matmuls in blocks (any platform), cuDNN's (NVIDIA GPUs), Pallas splash (TPU)."""

_SPLASH_BLOCK = 128


def resolve_attention(name: str, *, platform: str, dtype: Any, num_tokens: int, num_context_shards: int = 1) -> str:
    """The kernel that `auto` means; any other name stands for itself.

    Args:
      platform: "cpu", "gpu" or "tpu".
      num_tokens: of an example.
      num_context_shards: devices that an example's tokens are split over; only dot_product works on several.
    Raises:
      ValueError: the named kernel does not run there; says what it needs.
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
    if name == "auto":
        return next(kernel for kernel in reversed(KERNELS) if runs[kernel][0])
    if not runs[name][0]:
        shards = f"{num_context_shards} context shard{'' if num_context_shards == 1 else 's'}"
        raise ValueError(
            f"attention={name} needs {runs[name][1]}; here are {platform}, {jnp.dtype(dtype).name}, "
            f"{num_tokens} tokens and {shards}. Nearest that works: dot_product."
        )
    return name


def attention(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segment_BT: jax.Array, *, kernel: str, strategy: str
) -> jax.Array:
    """Causal grouped-query attention that never looks across packed documents.

    Where the mesh in use has a context axis, the T tokens are in the order of `parallel.context_order`.

    Args:
      k_BSKH: keys of the same T positions as the queries (S = T); N must be a multiple of K.
      segment_BT: document number of each token; padding is a document of its own.
      kernel: one of KERNELS.
      strategy: how the shards of a context axis exchange keys, one of `context_attention.STRATEGIES`.
    Returns:
      Context [B, T, N, H] in the dtype of q_BTNH; the softmax runs in float32.
    Raises:
      ValueError: N is not a multiple of K, or the kernel is unknown or cannot work on shards of the tokens.
    Source: Ainslie et al. 2023, arXiv:2305.13245, section 2.2.
    """
    if q_BTNH.shape[2] % k_BSKH.shape[2]:
        raise ValueError(f"{q_BTNH.shape[2]} query heads are not a multiple of {k_BSKH.shape[2]} kv heads")
    if context_shards() > 1:
        if kernel != "dot_product":
            raise ValueError(f"attention={kernel} does not work on {context_shards()} shards of the tokens")
        return context_attention(q_BTNH, k_BSKH, v_BSKH, segment_BT, strategy)
    if kernel == "dot_product":
        return blockwise_attention(q_BTNH, k_BSKH, v_BSKH, segment_BT, block_queries(q_BTNH.shape[1]))
    if kernel == "cudnn_flash":
        same_document_B1TS = (segment_BT[:, :, None] == segment_BT[:, None, :])[:, None]
        return jax.nn.dot_product_attention(
            q_BTNH, k_BSKH, v_BSKH, mask=same_document_B1TS, is_causal=True, implementation="cudnn"
        )
    if kernel == "splash":
        return splash_attention(q_BTNH, k_BSKH, v_BSKH, segment_BT, interpret=False)
    raise ValueError(f"unknown attention kernel {kernel!r}; known: {', '.join(KERNELS)}")


def splash_attention(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segment_BT: jax.Array, *, interpret: bool
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

    def local(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segment_BT: jax.Array) -> jax.Array:
        """The heads and rows of one device."""
        mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((T, T))] * q_BTNH.shape[2])
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
        kernel = splash_attention_kernel.make_splash_mha_single_device(mask, block_sizes=sizes, interpret=interpret)

        def one_row(q_NTH: jax.Array, k_KSH: jax.Array, v_KSH: jax.Array, segment_T: jax.Array) -> Any:
            return kernel(q_NTH, k_KSH, v_KSH, segment_ids=splash_attention_kernel.SegmentIds(segment_T, segment_T))

        scaled_BNTH = (q_BTNH * q_BTNH.shape[-1] ** -0.5).swapaxes(1, 2)
        return jax.vmap(one_row)(scaled_BNTH, k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2), segment_BT).swapaxes(1, 2)

    heads = ("batch", None, "activation_heads", None)
    return over_shards(local, (heads, heads, heads, ("batch", None)), heads)(q_BTNH, k_BSKH, v_BSKH, segment_BT)
