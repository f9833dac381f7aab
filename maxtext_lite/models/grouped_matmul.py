"""Matmuls of rows sorted into groups, each group with its own weight, by a kernel for the platform.

The kernels have no rule for `vmap`, except over a leading dim of both operands. Here a mapped dim becomes more groups:
R sets of E groups are R*E groups, with one set's rows after another's.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.typing import DTypeLike

from maxtext_lite.config.kernels import GroupedMatmul
from maxtext_lite.config.registry import load
from maxtext_lite.models.ops import dtype_of_totals

BY_ROWS = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
BY_ROWS_TRANSPOSED = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
OVER_ROWS = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
ALL_DIMS = (BY_ROWS, BY_ROWS_TRANSPOSED, OVER_ROWS)


Layout = Literal["io", "oi"]
"""The order in which a weight's in and out dims lie in memory: an all-gather leaves the dim that it gathers first."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def grouped_matmul(
    x_Ui: jax.Array,
    weight_Eio: jax.Array,
    size_E: jax.Array,
    kernel: GroupedMatmul = "ragged_dot",
    layout: Layout = "io",
    dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    """Each row times its group's weight: [U, out] in `dtype`; rows after the last group are undefined.

    For int8 operands the result is int32, for float8 float32, without a derivative. Kernels without eight bits are
    replaced: `megablox` by XLA's own, `tokamax` by `blocks`.

    Args:
      x_Ui: rows, sorted by group.
      size_E: int32 rows of each group; their sum is at most U.
      layout: of the weight; kernels that know both layouts need no transposed copy.
      dtype: the float32 sums are rounded to it, in the kernel where it can.
    """
    return _kernel_for(x_Ui, kernel, layout, dtype).by_rows(x_Ui, weight_Eio, size_E)


def grouped_matmul_transposed(
    g_Uo: jax.Array,
    weight_Eio: jax.Array,
    size_E: jax.Array,
    kernel: GroupedMatmul = "ragged_dot",
    layout: Layout = "io",
) -> jax.Array:
    """`grouped_matmul` with transposed weights: [U, in] in float32, or in int32 for int8 operands."""
    return _kernel_for(g_Uo, kernel, layout).by_rows_transposed(g_Uo, weight_Eio, size_E)


def grouped_weight_gradient(
    x_Ui: jax.Array,
    g_Uo: jax.Array,
    size_E: jax.Array,
    kernel: GroupedMatmul = "ragged_dot",
    layout: Layout = "io",
    dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    """The groups' x^T g: [E, in, out], float32 sums in `dtype`; rows after the last group are not counted."""
    return _mappable_kernel(kernel, layout, jnp.dtype(dtype)).over_rows(x_Ui, g_Uo, size_E)


def _matmul_forward(
    x_Ui: jax.Array, weight_Eio: jax.Array, size_E: jax.Array, kernel: GroupedMatmul, layout: Layout, dtype: DTypeLike
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return grouped_matmul(x_Ui, weight_Eio, size_E, kernel, layout, dtype), (x_Ui, weight_Eio, size_E)


def _matmul_backward(
    kernel: GroupedMatmul, layout: Layout, dtype: DTypeLike, residuals: tuple[jax.Array, ...], g_Uo: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    del dtype
    x_Ui, weight_Eio, size_E = residuals
    g_Uo = g_Uo.astype(x_Ui.dtype)
    dx_Ui = grouped_matmul_transposed(g_Uo, weight_Eio, size_E, kernel, layout).astype(x_Ui.dtype)
    return dx_Ui, grouped_weight_gradient(x_Ui, g_Uo, size_E, kernel, layout).astype(weight_Eio.dtype), None


grouped_matmul.defvjp(_matmul_forward, _matmul_backward)


# ---- Kernels --------------------------------------------------------------------------------------------------------


class GroupedKernel(NamedTuple):
    """(rows, weights, sizes), (rows, weights, sizes) with the weights transposed, and (rows, rows, sizes)."""

    by_rows: Callable[..., jax.Array]
    by_rows_transposed: Callable[..., jax.Array]
    over_rows: Callable[..., jax.Array]


def ragged(dims: jax.lax.RaggedDotDimensionNumbers) -> Callable[..., jax.Array]:
    """jax's own grouped matmul over these dims."""

    def function(left: jax.Array, right: jax.Array, size_E: jax.Array) -> jax.Array:
        totals = dtype_of_totals(left.dtype)
        return jax.lax.ragged_dot_general(left, right, size_E, dims, preferred_element_type=totals)

    return function


class _Block(NamedTuple):
    """The next rows of one group, from `first` to `end`, within the block of rows that begins at `start`."""

    group: jax.Array
    first: jax.Array
    end: jax.Array
    start: jax.Array


def block_rows(num_rows: int, num_groups: int) -> int:
    """Rows of a block: about as many as a group has, a power of two from 128 to 512, and at most all rows.

    Smaller blocks would read a weight repeatedly for little work, larger ones would multiply rows of other groups.
    """
    even = 1 << max(num_rows // num_groups - 1, 0).bit_length()
    return min(max(128, min(even, 512)), num_rows)


def _blocks(size_E: jax.Array, num_rows: int, rows_of_block: int) -> tuple[jax.Array, Callable[[jax.Array], _Block]]:
    """The number of blocks that cover all groups, each in one group, and a function from a number to its block."""
    blocks_E = -(-size_E // rows_of_block)
    end_block_E, end_row_E = jnp.cumsum(blocks_E), jnp.cumsum(size_E)

    def of(number: jax.Array) -> _Block:
        group = jnp.searchsorted(end_block_E, number, side="right")
        end = end_row_E[group]
        first = end - size_E[group] + rows_of_block * (number - end_block_E[group] + blocks_E[group])
        start = jnp.minimum(first, num_rows - rows_of_block)
        return _Block(group, first, jnp.minimum(first + rows_of_block, end), start)

    return end_block_E[-1], of


def _rows_in_blocks(
    equation: str, x_Ui: jax.Array, weight_Eio: jax.Array, size_E: jax.Array, rows_of_block: int
) -> jax.Array:
    num_rows, weight_E, totals = x_Ui.shape[0], weight_Eio, dtype_of_totals(x_Ui.dtype)
    count, block = _blocks(size_E, num_rows, rows_of_block)
    times = functools.partial(jnp.einsum, equation, preferred_element_type=totals)
    width = jax.eval_shape(times, x_Ui, weight_E[0]).shape[1]

    def step(number: jax.Array, y_Uo: jax.Array) -> jax.Array:
        at = block(number)
        x = jax.lax.dynamic_slice_in_dim(x_Ui, at.start, rows_of_block)
        y = times(x, weight_E[at.group])
        # Rows before are another group's and done; rows after are another group's too, which comes next.
        is_new = (at.start + jnp.arange(rows_of_block) >= at.first)[:, None]
        y = jnp.where(is_new, y, jax.lax.dynamic_slice_in_dim(y_Uo, at.start, rows_of_block))
        return jax.lax.dynamic_update_slice_in_dim(y_Uo, y, at.start, 0)

    return jax.lax.fori_loop(0, count, step, jnp.zeros((num_rows, width), totals))


def _sum_over_blocks(x_Ui: jax.Array, g_Uo: jax.Array, size_E: jax.Array, rows_of_block: int) -> jax.Array:
    num_rows = x_Ui.shape[0]
    count, block = _blocks(size_E, num_rows, rows_of_block)

    def step(number: jax.Array, sum_Eio: jax.Array) -> jax.Array:
        at = block(number)
        row = at.start + jnp.arange(rows_of_block)
        is_own = ((row >= at.first) & (row < at.end))[:, None]
        x, g = (
            jnp.where(is_own, jax.lax.dynamic_slice_in_dim(rows, at.start, rows_of_block), 0) for rows in (x_Ui, g_Uo)
        )
        return sum_Eio.at[at.group].add(jnp.einsum("ui,uo->io", x, g, preferred_element_type=jnp.float32))

    return jax.lax.fori_loop(0, count, step, jnp.zeros((len(size_E), x_Ui.shape[1], g_Uo.shape[1]), jnp.float32))


def in_blocks(rows_of_block: int | None = None) -> GroupedKernel:
    """The kernel in plain jax: a loop over the blocks of rows that the groups need, each in one group.

    Nothing is larger than its operands and its result. Rows are multiplied only by their own weights, except the rows
    that a group's last block has beyond the group.

    Args:
      rows_of_block: None: `block_rows`.
    """

    def rows(left: jax.Array, size_E: jax.Array) -> int:
        return block_rows(left.shape[0], len(size_E)) if rows_of_block is None else rows_of_block

    return GroupedKernel(
        lambda x, w, size: _rows_in_blocks("ui,io->uo", x, w, size, rows(x, size)),
        lambda g, w, size: _rows_in_blocks("uo,io->ui", g, w, size, rows(g, size)),
        lambda x, g, size: _sum_over_blocks(x, g, size, rows(x, size)),
    )


# ---- Under vmap -----------------------------------------------------------------------------------------------------


def _folded(size_RE: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """The permutation of the R*U rows that puts all groups one after another, and its inverse: [R * U] each.

    Rows after a set's last group go to the very end.
    """
    num_sets = size_RE.shape[0]
    used_R = jnp.sum(size_RE, axis=1)
    before_R = jnp.cumsum(used_R) - used_R
    unused_before_R = jnp.cumsum(num_rows - used_R) - (num_rows - used_R)
    row_U = jnp.arange(num_rows)
    to_RU = jnp.where(
        row_U < used_R[:, None],
        before_R[:, None] + row_U,
        jnp.sum(used_R) + unused_before_R[:, None] + row_U - used_R[:, None],
    )
    to = to_RU.reshape(num_sets * num_rows)
    return to, jnp.zeros_like(to).at[to].set(jnp.arange(num_sets * num_rows))


def _whole(x: jax.Array, is_mapped: bool, num_sets: int) -> jax.Array:
    return x if is_mapped else jnp.broadcast_to(x, (num_sets, *x.shape))


def _mappable(of_rows: Callable[..., jax.Array], rows_out: bool) -> Callable[..., jax.Array]:
    """`of_rows(left, right, size_E)` with a rule for vmap: `left` has rows, and `right` has if the result has none."""

    @custom_vmap
    def function(left: jax.Array, right: jax.Array, size_E: jax.Array) -> jax.Array:
        return of_rows(left, right, size_E)

    @function.def_vmap
    def fold(
        num_sets: int, is_mapped: list[bool], left: jax.Array, right: jax.Array, size_E: jax.Array
    ) -> tuple[jax.Array, bool]:
        operands = zip((left, right, size_E), is_mapped, strict=True)
        left, right, size_RE = (_whole(x, mapped, num_sets) for x, mapped in operands)
        num_rows, num_groups = left.shape[1], size_RE.shape[1]
        flat = [x.reshape(-1, *x.shape[2:]) for x in (left, right, size_RE)]
        if num_sets == 1:
            result = function(*flat)
        else:
            to, source = _folded(size_RE, num_rows)
            with_rows = (0,) if rows_out else (0, 1)
            flat = [x[source] if at in with_rows else x for at, x in enumerate(flat)]
            result = function(*flat)
            result = result[to] if rows_out else result
        return result.reshape(num_sets, num_rows if rows_out else num_groups, *result.shape[1:]), True

    return function


_IN_PLAIN_JAX = {"ragged_dot": GroupedKernel(*map(ragged, ALL_DIMS)), "blocks": in_blocks()}


@functools.cache
def _mappable_kernel(name: GroupedMatmul, layout: Layout, dtype: DTypeLike) -> GroupedKernel:
    """The named kernel for weights of a layout and results of a dtype, with a rule for vmap."""

    def rounded(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return lambda *operands: function(*operands).astype(dtype)

    kernel = _IN_PLAIN_JAX.get(name) or load("grouped_matmul", name)(layout, dtype)
    kernel = GroupedKernel(*map(rounded, kernel))
    return GroupedKernel(
        _mappable(kernel.by_rows, True), _mappable(kernel.by_rows_transposed, True), _mappable(kernel.over_rows, False)
    )


_OF_EIGHT_BITS: dict[GroupedMatmul, GroupedMatmul] = {
    "ragged_dot": "ragged_dot",
    "blocks": "blocks",
    "tokamax": "blocks",
    "megablox": "ragged_dot",
}


def _kernel_for(
    rows: jax.Array, kernel: GroupedMatmul, layout: Layout, dtype: DTypeLike = jnp.float32
) -> GroupedKernel:
    if rows.dtype.itemsize > 1:
        return _mappable_kernel(kernel, layout, jnp.dtype(dtype))
    return _mappable_kernel(_OF_EIGHT_BITS[kernel], layout, jnp.dtype(dtype_of_totals(rows.dtype)))
