"""Causal attention within documents, by a kernel chosen by name."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

from maxtext_lite.parallel import over_shards

KERNELS = ("dot_product", "cudnn_flash", "splash")
"""Attention kernels: XLA's matmuls in blocks (any platform), cuDNN's (NVIDIA GPUs), Pallas splash (TPU)."""

_BLOCK = 128
_MAX_BLOCKS = 16
_MASKED = -1e30  # finite: a row without any key inside a block must not give inf - inf


def resolve_attention(name: str, *, platform: str, dtype: Any, num_tokens: int) -> str:
    """The kernel that `auto` means; any other name stands for itself.

    Args:
      platform: "cpu", "gpu" or "tpu".
      num_tokens: of an example.
    Raises:
      ValueError: the named kernel does not run there; says what it needs.
    """
    runs = {
        "dot_product": (True, "nothing"),
        "cudnn_flash": (platform == "gpu" and jnp.dtype(dtype).itemsize == 2, "an NVIDIA GPU and dtype=bfloat16"),
        "splash": (
            platform == "tpu" and num_tokens % _BLOCK == 0,
            f"a TPU and a max_target_length that is a multiple of {_BLOCK}",
        ),
    }
    if name == "auto":
        return next(kernel for kernel in reversed(KERNELS) if runs[kernel][0])
    if not runs[name][0]:
        raise ValueError(
            f"attention={name} needs {runs[name][1]}; here are {platform}, {jnp.dtype(dtype).name} and "
            f"{num_tokens} tokens. Nearest that works: dot_product."
        )
    return name


def attention(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segment_BT: jax.Array, *, kernel: str
) -> jax.Array:
    """Causal grouped-query attention that never looks across packed documents.

    Args:
      k_BSKH: keys of the same T positions as the queries (S = T); N must be a multiple of K.
      segment_BT: document number of each token; padding is a document of its own.
      kernel: one of KERNELS.
    Returns:
      Context [B, T, N, H] in the dtype of q_BTNH; the softmax runs in float32.
    Raises:
      ValueError: N is not a multiple of K, or the kernel is unknown.
    Source: Ainslie et al. 2023, arXiv:2305.13245, section 2.2.
    """
    if q_BTNH.shape[2] % k_BSKH.shape[2]:
        raise ValueError(f"{q_BTNH.shape[2]} query heads are not a multiple of {k_BSKH.shape[2]} kv heads")
    if kernel == "dot_product":
        block = _BLOCK * math.ceil(q_BTNH.shape[1] / (_BLOCK * _MAX_BLOCKS))
        return blockwise_attention(q_BTNH, k_BSKH, v_BSKH, segment_BT, block)
    if kernel == "cudnn_flash":
        same_document_B1TS = (segment_BT[:, :, None] == segment_BT[:, None, :])[:, None]
        return jax.nn.dot_product_attention(
            q_BTNH, k_BSKH, v_BSKH, mask=same_document_B1TS, is_causal=True, implementation="cudnn"
        )
    if kernel == "splash":
        return splash_attention(q_BTNH, k_BSKH, v_BSKH, segment_BT, interpret=False)
    raise ValueError(f"unknown attention kernel {kernel!r}; known: {', '.join(KERNELS)}")


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def blockwise_attention(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segment_BT: jax.Array, block: int
) -> jax.Array:
    """`attention` by plain matmuls, `block` queries at a time over the keys that come no later.

    Half of the square of scores is never computed, none of it is kept: the backward pass rebuilds it from the
    log-partition of each row. Source: Dao 2023, arXiv:2307.08691, section 3, without its inner loop over keys.
    """
    return _blockwise_forward(q_BTNH, k_BSKH, v_BSKH, segment_BT, block)[0]


def _blocks(T: int, block: int) -> list[tuple[int, int]]:
    return [(first, min(first + block, T)) for first in range(0, T, block)]


def _seen(segment_BT: jax.Array, first: int, end: int) -> jax.Array:
    """True where a query of first..end may look at a key before `end`: [B, 1, 1, end - first, end]."""
    not_later_TS = jnp.arange(first, end)[:, None] >= jnp.arange(end)[None, :]
    same_document_BTS = segment_BT[:, first:end, None] == segment_BT[:, None, :end]
    return (not_later_TS & same_document_BTS)[:, None, None]


def _grouped(x_BTNH: jax.Array, num_kv_heads: int) -> jax.Array:
    B, T, _, H = x_BTNH.shape
    return x_BTNH.reshape(B, T, num_kv_heads, -1, H)


def _ungrouped(x_BKGTH: jax.Array) -> jax.Array:
    B, K, G, T, H = x_BKGTH.shape
    return x_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, K * G, H)


_dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _blockwise_forward(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segment_BT: jax.Array, block: int
) -> Any:
    dtype, scale = q_BTNH.dtype, q_BTNH.shape[-1] ** -0.5
    q_BKGTH = _grouped(q_BTNH, k_BSKH.shape[2]).transpose(0, 2, 3, 1, 4)
    k_BKHS, v_BKSH = k_BSKH.transpose(0, 2, 3, 1), v_BSKH.transpose(0, 2, 1, 3)
    contexts, log_partitions = [], []
    for first, end in _blocks(q_BTNH.shape[1], block):
        score_BKGTS = _dot("BKGTH,BKHS->BKGTS", q_BKGTH[:, :, :, first:end], k_BKHS[..., :end]) * scale
        score_BKGTS = jnp.where(_seen(segment_BT, first, end), score_BKGTS, _MASKED)
        max_BKGT1 = jnp.max(score_BKGTS, axis=-1, keepdims=True)
        weight_BKGTS = jnp.exp(score_BKGTS - max_BKGT1)
        sum_BKGT1 = jnp.sum(weight_BKGTS, axis=-1, keepdims=True)
        context_BKGTH = _dot("BKGTS,BKSH->BKGTH", weight_BKGTS.astype(dtype), v_BKSH[:, :, :end]) / sum_BKGT1
        contexts.append(context_BKGTH.astype(dtype))
        log_partitions.append(max_BKGT1 + jnp.log(sum_BKGT1))
    context_BTNH = checkpoint_name(_ungrouped(jnp.concatenate(contexts, axis=3)), "context")
    log_partition_BKGT1 = checkpoint_name(jnp.concatenate(log_partitions, axis=3), "context")
    residuals = (q_BTNH, k_BSKH, v_BSKH, segment_BT, context_BTNH, log_partition_BKGT1)
    return context_BTNH, residuals


def _blockwise_backward(block: int, residuals: Any, g_BTNH: jax.Array) -> Any:
    q_BTNH, k_BSKH, v_BSKH, segment_BT, context_BTNH, log_partition_BKGT1 = residuals
    dtype, scale, K = q_BTNH.dtype, q_BTNH.shape[-1] ** -0.5, k_BSKH.shape[2]
    # Each operand in the orientation its matmuls want, copied once instead of once a block.
    q_BTKGH, g_BTKGH = _grouped(q_BTNH, K), _grouped(g_BTNH, K)
    q_BKGTH, q_BKHGT = q_BTKGH.transpose(0, 2, 3, 1, 4), q_BTKGH.transpose(0, 2, 4, 3, 1)
    g_BKGTH, g_BKHGT = g_BTKGH.transpose(0, 2, 3, 1, 4), g_BTKGH.transpose(0, 2, 4, 3, 1)
    k_BKHS, k_BKSH = k_BSKH.transpose(0, 2, 3, 1), k_BSKH.transpose(0, 2, 1, 3)
    v_BKHS = v_BSKH.transpose(0, 2, 3, 1)
    product_BTKG = jnp.sum(g_BTKGH.astype(jnp.float32) * _grouped(context_BTNH, K).astype(jnp.float32), axis=-1)
    product_BKGT1 = product_BTKG.transpose(0, 2, 3, 1)[..., None]
    dq_blocks = []
    dk_BKHS, dv_BKHS = jnp.zeros(k_BKHS.shape, jnp.float32), jnp.zeros(v_BKHS.shape, jnp.float32)
    for first, end in _blocks(q_BTNH.shape[1], block):
        score_BKGTS = _dot("BKGTH,BKHS->BKGTS", q_BKGTH[:, :, :, first:end], k_BKHS[..., :end]) * scale
        weight_BKGTS = jnp.where(
            _seen(segment_BT, first, end), jnp.exp(score_BKGTS - log_partition_BKGT1[:, :, :, first:end]), 0
        )
        dweight_BKGTS = _dot("BKGTH,BKHS->BKGTS", g_BKGTH[:, :, :, first:end], v_BKHS[..., :end])
        dscore_BKGTS = (weight_BKGTS * (dweight_BKGTS - product_BKGT1[:, :, :, first:end]) * scale).astype(dtype)
        dq_blocks.append(_dot("BKGTS,BKSH->BKGTH", dscore_BKGTS, k_BKSH[:, :, :end]).astype(dtype))
        dk_BKHS = dk_BKHS.at[..., :end].add(_dot("BKHGT,BKGTS->BKHS", q_BKHGT[..., first:end], dscore_BKGTS))
        dv_BKHS = dv_BKHS.at[..., :end].add(
            _dot("BKHGT,BKGTS->BKHS", g_BKHGT[..., first:end], weight_BKGTS.astype(dtype))
        )
    dq_BTNH = _ungrouped(jnp.concatenate(dq_blocks, axis=3))
    return dq_BTNH, dk_BKHS.transpose(0, 3, 1, 2).astype(dtype), dv_BKHS.transpose(0, 3, 1, 2).astype(dtype), None


blockwise_attention.defvjp(_blockwise_forward, _blockwise_backward)


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
    if T % _BLOCK:
        raise ValueError(f"attention=splash needs max_target_length={T} to be a multiple of {_BLOCK}")

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
