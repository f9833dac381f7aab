"""Attention by kernels for NVIDIA GPUs, jax's in Triton and cuDNN's, and a custom_vjp around fused kernels.

A fused kernel, such as tokamax's (kernels/mosaic.py), is a forward and a backward pass. The custom_vjp adds what both
lack: replicas, which become more rows; sinks, whose share of the softmax is taken off the kernel's context; and names
for the tensors that a rematerialised layer may keep.
"""

import dataclasses
import functools
import importlib
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap

from maxtext_lite.config.kernels import KERNEL_SCOPE
from maxtext_lite.models.attention import PLAIN, Scoring, may_see, sink_gradient, whole_blocks
from maxtext_lite.parallel import over_shards

_PADDING = -1  # the document of tokens that only fill up a kernel's last block


class Inputs(NamedTuple):
    """The arguments of a kernel; the int32 numbers `mask_BT` say which keys a query may see."""

    q_BTNH: Array
    k_BSKH: Array
    v_BSKW: Array
    mask_BT: Array


class FusedKernel(Protocol):
    """The two passes of a causal attention kernel."""

    def forward(self, inputs: Inputs) -> tuple[Array, Array]:
        """Context [B, T, N, W] and the float32 natural log-partition of each row of scores, [B, N, T]."""
        ...

    def backward(
        self, inputs: Inputs, context_BTNW: Array, log_partition_BNT: Array, g_BTNW: Array
    ) -> tuple[Array, Array, Array]:
        """The gradients of queries, keys and values; context and log-partition may count more than the keys."""
        ...


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def fused_attention(inputs: Inputs, sink_N: Array | None, kernel: FusedKernel) -> Array:
    """Context [B, T, N, W] by a kernel, with or without sinks; vmap puts replicas into the rows of one call.

    Source of the sinks' share: gpt-oss, arXiv:2508.10925.
    """
    return _forward(inputs, sink_N, kernel)[0]


def _forward(inputs: Inputs, sink_N: Array | None, kernel: FusedKernel) -> Any:
    context_BTNW, log_partition_BNT = by_rows(kernel.forward)(inputs)
    if sink_N is not None:
        of_keys_BNT = log_partition_BNT
        log_partition_BNT = jnp.logaddexp(of_keys_BNT, sink_N.astype(jnp.float32)[None, :, None])
        share_BTN = jnp.exp(of_keys_BNT - log_partition_BNT).swapaxes(1, 2)
        context_BTNW = (context_BTNW * share_BTN[..., None]).astype(context_BTNW.dtype)
    context_BTNW = checkpoint_name(context_BTNW, "context")
    log_partition_BNT = checkpoint_name(log_partition_BNT, "context")
    return context_BTNW, (inputs, sink_N, context_BTNW, log_partition_BNT)


def _backward(kernel: FusedKernel, residuals: Any, g_BTNW: Array) -> tuple[Any, Array | None]:
    inputs, sink_N, context_BTNW, log_partition_BNT = residuals
    gradients = by_rows(kernel.backward)(inputs, context_BTNW, log_partition_BNT, g_BTNW)
    dsink_N = sink_gradient(sink_N, log_partition_BNT[:, :, None, :, None], context_BTNW, g_BTNW)
    return Inputs(*gradients, None), dsink_N  # type: ignore[arg-type]


fused_attention.defvjp(_forward, _backward)


_Found = TypeVar("_Found")


def by_rows(function: Callable[..., _Found]) -> Callable[..., _Found]:
    """`function` of trees of arrays [B, ...], with a rule for vmap: a mapped dim adds rows to one call."""
    folded = custom_vmap(function)

    @folded.def_vmap
    def rule(count: int, is_mapped: list[Any], *trees: Any) -> tuple[_Found, _Found]:
        def rows(x: Array, mapped: bool) -> Array:
            if not mapped:
                x = jnp.broadcast_to(x, (count, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        def apart(x: Array) -> Array:
            return x.reshape(count, -1, *x.shape[1:])

        folded_trees = [jax.tree.map(rows, tree, mapped) for tree, mapped in zip(trees, is_mapped, strict=True)]
        found = folded(*folded_trees)
        return jax.tree.map(apart, found), jax.tree.map(lambda _: True, found)

    return folded


@functools.cache
def _mha() -> Any:
    """jax's module for attention in Triton, which newer versions of jax deprecate in favour of tokamax."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module("jax.experimental.pallas.ops.gpu.attention")


@dataclasses.dataclass(frozen=True)
class Mha:
    """jax's attention in Triton, with one kv head for each query head; `mask_BT` is the document of each token.

    Its backward pass is a private function with the same arguments in jax 0.10 to 0.12.

    Attributes:
      interpret: run the kernel's steps as plain XLA operations, as tests on CPU do.
    """

    scale: float
    interpret: bool

    def forward(self, inputs: Inputs) -> tuple[Array, Array]:
        """See FusedKernel."""
        options: Any = {"block_sizes": self._blocks(), "interpret": self.interpret, "return_residuals": True}
        with jax.named_scope(f"{KERNEL_SCOPE}pallas_mha"):
            context_BTNH, log2_partition_BNT = _mha().mha(*inputs, self.scale, True, **options)
        return context_BTNH, log2_partition_BNT * math.log(2)

    def backward(
        self, inputs: Inputs, context_BTNW: Array, log_partition_BNT: Array, g_BTNW: Array
    ) -> tuple[Array, Array, Array]:
        """See FusedKernel."""
        with jax.named_scope(f"{KERNEL_SCOPE}pallas_mha_backward"):
            gradients = _mha()._mha_backward(
                sm_scale=self.scale,
                causal=True,
                block_sizes=self._blocks(),
                backward_pass_impl="triton",
                num_warps=None,
                num_stages=2,
                grid=None,
                interpret=self.interpret,
                debug=False,
                return_residuals=False,
                res=(*inputs, context_BTNW, log_partition_BNT / math.log(2)),
                do=g_BTNW,
            )
        return gradients[:3]

    @staticmethod
    def _blocks() -> Any:
        half = _MHA_BLOCK // 2
        return _mha().BlockSizes(
            block_q=_MHA_BLOCK,
            block_k=_MHA_BLOCK,
            block_q_dkv=half,
            block_kv_dkv=half,
            block_q_dq=half,
            block_kv_dq=half,
        )


_MHA_BLOCK = 64
"""Tokens of a block; a row is a whole number of blocks. Two stages of blocks of 128 tokens and 128 dims would take more
shared memory than GPUs for graphics have."""

_HEADS = ("batch", None, "activation_heads", None)
_ROWS = ("batch", None)


def mha_attention(
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    segment_BT: Array,
    sink_N: None = None,
    *,
    strategy: str = "",
    scoring: Scoring = PLAIN,
    interpret: bool = False,
) -> Array:
    """`attention` by jax's kernels in Triton, which have no windows or soft caps and take T in blocks of 64.

    Tokens are padded to whole blocks, with the padding as a document. Each kv head is repeated for the query heads that
    share it: with fewer, the kernel silently reads another head's.

    Args:
      interpret: run the kernels' steps as plain XLA operations, as tests on CPU do.
    """
    del sink_N, strategy  # it knows neither sinks nor shards of the tokens

    def local(q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, segment_BT: Array) -> Array:
        """The heads and rows of one device."""
        T = q_BTNH.shape[1]
        group = q_BTNH.shape[2] // k_BSKH.shape[2]
        k_BTNH = jnp.repeat(k_BSKH, group, axis=2)
        v_BTNH = jnp.repeat(v_BSKH, group, axis=2)
        inputs = Inputs(
            whole_blocks(q_BTNH, _MHA_BLOCK),
            whole_blocks(k_BTNH, _MHA_BLOCK),
            whole_blocks(v_BTNH, _MHA_BLOCK),
            whole_blocks(segment_BT, _MHA_BLOCK, value=_PADDING),
        )
        context_BTNH: Any = fused_attention(inputs, None, Mha(scoring.scale_of(q_BTNH.shape[-1]), interpret))
        return context_BTNH[:, :T]

    return over_shards(local, (_HEADS, _HEADS, _HEADS, _ROWS), _HEADS)(q_BTNH, k_BSKH, v_BSKH, segment_BT)


def _cudnn(*heads: Array, **options: Any) -> Array:
    return jax.nn.dot_product_attention(*heads, is_causal=True, implementation="cudnn", **options)


def cudnn_attention(
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    segment_BT: Array,
    sink_N: None = None,
    *,
    strategy: str = "",
    scoring: Scoring = PLAIN,
) -> Array:
    """`attention` by cuDNN for rows with one document each and padding after it; it does not read documents."""
    del segment_BT, sink_N, strategy
    # A padding query sees the document before it, but no token of the document, and so no loss, sees the padding.
    window = None if scoring.window is None else (scoring.window - 1, 0)

    def local(q_BTNH: Array, k_BSKH: Array, v_BSKH: Array) -> Array:
        """The heads and rows of one device."""
        return _cudnn(q_BTNH, k_BSKH, v_BSKH, scale=scoring.scale, local_window_size=window)

    return over_shards(local, (_HEADS, _HEADS, _HEADS), _HEADS)(q_BTNH, k_BSKH, v_BSKH)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _masked(q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, seen_B1TS: Array, scale: float) -> Array:
    """cuDNN's attention with a mask; its own rule for vmap expects one mask for each head, and fails."""

    def attend(q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, seen_B1TS: Array) -> Array:
        return _cudnn(q_BTNH, k_BSKH, v_BSKH, mask=seen_B1TS, scale=scale)

    return by_rows(attend)(q_BTNH, k_BSKH, v_BSKH, seen_B1TS)


def _masked_backward(scale: float, inputs: tuple[Array, ...], g_BTNH: Array) -> tuple[Array | None, ...]:
    """Runs the forward kernel again, because `jax.nn` does not return its residuals."""

    def gradients(*rows: Array) -> tuple[Array, ...]:
        *heads, seen_B1TS, g_BTNH = rows
        attend = functools.partial(_cudnn, mask=seen_B1TS, scale=scale)
        _, pull_back = jax.vjp(attend, *heads)
        return pull_back(g_BTNH)

    return (*by_rows(gradients)(*inputs, g_BTNH), None)


_masked.defvjp(lambda *arguments: (_masked(*arguments), arguments[:4]), _masked_backward)


def cudnn_masked_attention(
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    segment_BT: Array,
    sink_N: None = None,
    *,
    strategy: str = "",
    scoring: Scoring = PLAIN,
) -> Array:
    """`attention` by cuDNN with a mask [B, 1, T, S] of documents; T must be even."""
    del sink_N, strategy

    def local(q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, segment_BT: Array) -> Array:
        """The heads and rows of one device."""
        # cuDNN before 9.10.2 has no window beside a mask, and would refuse the step when it compiles: the window is a
        # part of the mask.
        first = None if scoring.window is None else 0
        seen_B1TS = may_see(segment_BT, segment_BT, first, first, scoring.window)[:, 0]
        return _masked(q_BTNH, k_BSKH, v_BSKH, seen_B1TS, scoring.scale_of(q_BTNH.shape[-1]))

    return over_shards(local, (_HEADS, _HEADS, _HEADS, _ROWS), _HEADS)(q_BTNH, k_BSKH, v_BSKH, segment_BT)
