"""Sums of rows by index in an order that does not change from run to run, on GPUs too.

XLA's scatter adds by atomic operations on GPUs, in the order in which threads arrive: the same step repeated gave the
token table other last bits. On CPUs and TPUs its order is fixed.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_ROWS_OF_BLOCK = 128


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rows_at(table_VD: jax.Array, index_BT: jax.Array, num_rows: int) -> jax.Array:
    """The rows [B, T, D] of a table of `num_rows` rows."""
    del num_rows
    return table_VD[index_BT]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def sums_at(x_BTD: jax.Array, index_BT: jax.Array, num_rows: int) -> jax.Array:
    """Row v of the result [num_rows, D] is the sum of the x[b, t] with index[b, t] = v. B, T: any dims."""

    def scattered(x_BTD: jax.Array, index_BT: jax.Array) -> jax.Array:
        zeros_VD = jnp.zeros((num_rows, x_BTD.shape[-1]), x_BTD.dtype)
        return jax.vjp(lambda table_VD: table_VD[index_BT], zeros_VD)[1](x_BTD)[0]

    def ordered(x_BTD: jax.Array, index_BT: jax.Array) -> jax.Array:
        return _in_order(x_BTD.reshape(-1, x_BTD.shape[-1]), index_BT.reshape(-1), num_rows)

    return jax.lax.platform_dependent(x_BTD, index_BT, cuda=ordered, rocm=ordered, default=scattered)


def _with_index(function: Callable[..., Any]) -> Callable[..., tuple[jax.Array, jax.Array]]:
    return lambda x, index_BT, num_rows: (function(x, index_BT, num_rows), index_BT)


def _transposed(function: Callable[..., Any]) -> Callable[..., tuple[jax.Array, None]]:
    return lambda num_rows, index_BT, g: (function(g, index_BT, num_rows), None)


rows_at.defvjp(_with_index(rows_at), _transposed(sums_at))
sums_at.defvjp(_with_index(sums_at), _transposed(rows_at))


def _in_order(x_ND: jax.Array, index_N: jax.Array, num_rows: int) -> jax.Array:
    """`sums_at` of flat arrays without adding to one place twice.

    Rows are sorted by index and cut into blocks of n. Each block sums its rows of each index, a run, by a matmul with
    zeros and ones, so that one row that is not finite leaves no number in its block. The sum of a run that goes on in
    the next block is carried there, and written where it ends.
    """
    n = _ROWS_OF_BLOCK
    index_N = jnp.pad(index_N.astype(jnp.int32), (0, -len(index_N) % n), constant_values=num_rows)
    order_N = jnp.argsort(index_N, stable=True)
    index_cn = index_N[order_N].reshape(-1, n)
    x_cnD = x_ND.at[order_N].get(mode="fill", fill_value=0).reshape(*index_cn.shape, x_ND.shape[-1])

    starts_cn = jnp.diff(index_cn, axis=1, prepend=index_cn[:, :1]) != 0
    run_cn = jnp.cumsum(starts_cn, axis=1, dtype=jnp.int32)  # a block's runs are 0, 1, ..
    is_in_cmn = run_cn[:, None] == jnp.arange(n)[:, None]
    highest = jax.lax.Precision.HIGHEST
    sum_cmD = jnp.einsum("cmn,cnD->cmD", is_in_cmn.astype(x_ND.dtype), x_cnD, precision=highest)

    last_c = run_cn[:, -1]
    goes_on_c = index_cn[:, 0] == jnp.roll(index_cn[:, -1], 1)  # from the block before
    goes_on_c = goes_on_c.at[0].set(False)
    tail_cD = jnp.take_along_axis(sum_cmD, last_c[:, None, None], axis=1)[:, 0]
    tail_cD = jax.lax.associative_scan(_carry, ((goes_on_c & (last_c == 0))[:, None], tail_cD))[1]
    before_cD = jnp.roll(tail_cD, 1, axis=0)
    sum_cmD = sum_cmD.at[:, 0].add(jnp.where(goes_on_c[:, None], before_cD, 0))

    ends_at_c = last_c - jnp.roll(goes_on_c, -1)
    index_cm = jnp.max(jnp.where(is_in_cmn, index_cn[:, None], -1), axis=-1)
    is_whole_cm = (jnp.arange(n) <= ends_at_c[:, None]) & (index_cm < num_rows)
    # Places beyond the table are dropped; they differ, as a scatter of unique rows needs.
    place_cm = jnp.where(is_whole_cm, index_cm, num_rows + jnp.arange(index_cm.size).reshape(index_cm.shape))
    zeros_VD = jnp.zeros((num_rows, x_ND.shape[-1]), x_ND.dtype)
    return zeros_VD.at[place_cm].set(sum_cmD, mode="drop", unique_indices=True)


def _carry(left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Joins neighbouring ranges of blocks: (the last run spans the range and goes on from before it, its sum)."""
    (left_spans, left_sum), (right_spans, right_sum) = left, right
    return left_spans & right_spans, right_sum + jnp.where(right_spans, left_sum, 0)
