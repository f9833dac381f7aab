"""Matmuls of rows sorted into groups, each group with a weight of its own: `jax.lax.ragged_dot` that can be mapped.

`ragged_dot` has no rule for `vmap` over anything but a leading dim of both operands. Here a mapped dim becomes more
groups: R sets of E groups are R*E groups, with the rows of one set after those of another.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

_BY_ROWS = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
_BY_ROWS_TRANSPOSED = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
_OVER_ROWS = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


@jax.custom_vjp
def grouped_matmul(x_Ui: jax.Array, weight_Eio: jax.Array, size_E: jax.Array) -> jax.Array:
    """Each row times its group's weight: [U, out] in float32; rows after the last group hold nothing of use.

    Args:
      x_Ui: rows, those of the first group first.
      size_E: int32 rows of each group; their sum is at most U.
    """
    return _by_rows(x_Ui, weight_Eio, size_E)


def grouped_matmul_transposed(g_Uo: jax.Array, weight_Eio: jax.Array, size_E: jax.Array) -> jax.Array:
    """`grouped_matmul` by the transposed weights: [U, in] in float32."""
    return _by_rows_transposed(g_Uo, weight_Eio, size_E)


def grouped_weight_gradient(x_Ui: jax.Array, g_Uo: jax.Array, size_E: jax.Array) -> jax.Array:
    """The groups' x^T g: [E, in, out] in float32; rows after the last group count for nothing."""
    return _over_rows(x_Ui, g_Uo, size_E)


def _backward(residuals: Any, g_Uo: jax.Array) -> Any:
    x_Ui, weight_Eio, size_E = residuals
    g_Uo = g_Uo.astype(x_Ui.dtype)
    dx_Ui = grouped_matmul_transposed(g_Uo, weight_Eio, size_E).astype(x_Ui.dtype)
    return dx_Ui, grouped_weight_gradient(x_Ui, g_Uo, size_E).astype(weight_Eio.dtype), None


grouped_matmul.defvjp(lambda *arguments: (_by_rows(*arguments), arguments), _backward)


def _ragged(left: jax.Array, right: jax.Array, size_E: jax.Array, dims: Any) -> jax.Array:
    return jax.lax.ragged_dot_general(left, right, size_E, dims, preferred_element_type=jnp.float32)


def _folded(size_RE: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Where each of the R*U rows goes so that all groups follow each other, and where it comes from: [R * U] each.

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


def _mappable(of_rows: Callable[..., jax.Array], rows_out: bool) -> Any:
    """`of_rows(left, right, size_E)` with a rule for vmap: `left` has rows, and `right` where the result has none."""

    @custom_vmap
    def function(left: jax.Array, right: jax.Array, size_E: jax.Array) -> jax.Array:
        return of_rows(left, right, size_E)

    @function.def_vmap
    def fold(num_sets: int, is_mapped: list[bool], left: jax.Array, right: jax.Array, size_E: jax.Array) -> Any:
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


_by_rows = _mappable(lambda x, w, size: _ragged(x, w, size, _BY_ROWS), True)
_by_rows_transposed = _mappable(lambda g, w, size: _ragged(g, w, size, _BY_ROWS_TRANSPOSED), True)
_over_rows = _mappable(lambda x, g, size: _ragged(x, g, size, _OVER_ROWS), False)
