"""Grouped matmuls by kernels for TPUs (Pallas) and for NVIDIA Hopper GPUs (tokamax)."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from maxtext_lite.config.kernels import KERNEL_SCOPE
from maxtext_lite.kernels.tokamax_ops import ragged_dot, waiting_for_each_matmul, with_blocks
from maxtext_lite.models.experts import (
    BY_ROWS,
    BY_ROWS_TRANSPOSED,
    OVER_ROWS,
    RAGGED_DOT,
    GroupedKernel,
    Layout,
    in_blocks,
)

_LANES = 128


def _tile(size: int, limit: int) -> int:
    """The multiple of 128 up to `limit` that pads a dim of this size least; of several, the largest."""

    def padded(tile: int) -> tuple[int, int]:
        return -(-size // tile) * tile, -tile

    return min(range(_LANES, limit + 1, _LANES), key=padded)


def on_tpu(layout: Layout, dtype: DTypeLike = jnp.float32, *, interpret: bool = False) -> GroupedKernel:
    """Pallas's grouped matmul for TPUs, which reads weights of either layout without a copy.

    `ragged_dot` is compiled to a kernel too, but with one layout: whole weights are copied for its transposes. It is
    used if a dim is no multiple of 128.

    Args:
      layout: of weights, and of their gradients.
      dtype: of results, whose sums are float32 until they are written.
      interpret: in jax, on any platform.
    """

    # Pallas for TPUs takes a while to import.
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

    def suits(*sizes: int) -> bool:
        return all(size % _LANES == 0 for size in sizes)

    def tiles(x: Array, inner: int, outer: int, limit: int) -> tuple[int, int, int]:
        """Tile sizes of rows, the summed dim and the other dim, within 13 MB of the chip's memory."""
        rows = max(tile for tile in (128, 256, 512) if x.shape[0] % tile == 0)
        return rows, _tile(inner, limit * 2 // x.dtype.itemsize), _tile(outer, 1024)

    def matmul(x_Ui: Array, weight_Eio: Array, size_E: Array, layout: Layout) -> Array:
        tiling = tiles(x_Ui, *weight_Eio.shape[1:], limit=1024)
        is_transposed = layout == "oi"
        weight = weight_Eio.swapaxes(1, 2) if is_transposed else weight_Eio
        y_Uo: Any = gmm(x_Ui, weight, size_E, dtype, tiling, transpose_rhs=is_transposed, interpret=interpret)
        return y_Uo

    def by_rows(x_Ui: Array, weight_Eio: Array, size_E: Array) -> Array:
        if not suits(*x_Ui.shape, *weight_Eio.shape[1:]):
            return RAGGED_DOT.by_rows(x_Ui, weight_Eio, size_E).astype(dtype)
        return matmul(x_Ui, weight_Eio, size_E, layout)

    def by_rows_transposed(g_Uo: Array, weight_Eio: Array, size_E: Array) -> Array:
        if not suits(*g_Uo.shape, *weight_Eio.shape[1:]):
            return RAGGED_DOT.by_rows_transposed(g_Uo, weight_Eio, size_E).astype(dtype)
        return matmul(g_Uo, weight_Eio.swapaxes(1, 2), size_E, "io" if layout == "oi" else "oi")

    def over_rows(x_Ui: Array, g_Uo: Array, size_E: Array) -> Array:
        if not suits(*x_Ui.shape, *g_Uo.shape):
            return RAGGED_DOT.over_rows(x_Ui, g_Uo, size_E).astype(dtype)
        left, right = (x_Ui, g_Uo) if layout == "io" else (g_Uo, x_Ui)
        tiling = tiles(left, left.shape[1], right.shape[1], limit=512)
        sums: Any = tgmm(left.swapaxes(0, 1), right, size_E, dtype, tiling, interpret=interpret)
        return sums if layout == "io" else sums.swapaxes(1, 2)

    return GroupedKernel(by_rows, by_rows_transposed, over_rows)


_HOPPER_TILES = {"block_m": 128, "block_n": 64, "block_k": 128, "num_stages": 4}
"""The fastest on an H100 for bfloat16 groups of 128 rows and more, in 48 of 53 cases in tokamax's table. The table
knows exact shapes only; by itself tokamax takes half of block_m and of num_stages.
Source: tokamax 0.0.12, data/autotuning/nvidia_h100_80gb_hbm3/pallas_mosaic_gpu_ragged_dot.json."""


def on_hopper(layout: Layout = "io", dtype: DTypeLike = jnp.float32) -> GroupedKernel:
    """tokamax's kernels for NVIDIA GPUs of compute capability 9.0; `in_blocks` if a dim is no multiple of 64."""
    del layout, dtype  # weights lie one way, and results are float32

    def run(dims: jax.lax.RaggedDotDimensionNumbers, instead: Callable[..., Array]) -> Callable[..., Array]:
        def function(left: Array, right: Array, size_E: Array) -> Array:
            sizes = (left.shape[1], *right.shape[1:])
            if any(size % 64 for size in sizes):
                return instead(left, right, size_E)
            tiles = _HOPPER_TILES
            mended = contextlib.nullcontext()
            if dims is OVER_ROWS:
                # It multiplies rows after the last group by 0, and these need not be numbers.
                is_used_U1 = (jnp.arange(len(left)) < jnp.sum(size_E))[:, None]
                left = jnp.where(is_used_U1, left, 0)
                right = jnp.where(is_used_U1, right, 0)
                tiles = {} if left.shape[1] % _HOPPER_TILES["block_m"] else _HOPPER_TILES
                mended = waiting_for_each_matmul()
            options = {"ragged_dot_dimension_numbers": dims, "preferred_element_type": jnp.float32}
            op = ragged_dot()
            op = with_blocks(op, op.bind(left, right, group_sizes=size_E, **options), tiles)
            with jax.named_scope(f"{KERNEL_SCOPE}tokamax_ragged_dot"), mended:
                y: Any = op(left, right, group_sizes=size_E, **options)
            return y

        return function

    blocks = in_blocks()
    return GroupedKernel(
        run(BY_ROWS, blocks.by_rows),
        run(BY_ROWS_TRANSPOSED, blocks.by_rows_transposed),
        run(OVER_ROWS, blocks.over_rows),
    )
