"""The grouped matmul against a loop over groups, alone and under one and two vmaps, with its derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.models.grouped_matmul import grouped_matmul

U, IN, OUT, E = 9, 5, 4, 3
RNG = np.random.default_rng(0)
SIZES = {"ragged": [4, 0, 3], "full": [2, 3, 4], "one": [0, 9, 0], "none": [0, 0, 0]}


def _by_loop(x, weight, sizes, cotangent):
    """Result and both gradients of sum(result * cotangent), group by group in float64."""
    y, dx, dweight = np.zeros((U, OUT)), np.zeros((U, IN)), np.zeros((E, IN, OUT))
    start = 0
    for group, size in enumerate(sizes):
        rows = slice(start, start + size)
        y[rows] = x[rows] @ weight[group]
        dx[rows] = cotangent[rows] @ weight[group].T
        dweight[group] = x[rows].T @ cotangent[rows]
        start += size
    return y, dx, dweight


def _with_gradients(x, weight, sizes, cotangent):
    y, back = jax.vjp(lambda x, weight: grouped_matmul(x, weight, sizes), x, weight)
    return y, *back(cotangent)


def _arrays(*leading):
    normal = lambda *sizes: RNG.normal(size=sizes).astype(np.float32)  # noqa: E731
    return normal(*leading, U, IN), normal(*leading, E, IN, OUT), normal(*leading, U, OUT)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_equals_a_loop_over_groups(sizes):
    x, weight, cotangent = _arrays()
    got = jax.jit(_with_gradients)(x, weight, jnp.array(sizes), cotangent)
    for g, want in zip(got, _by_loop(x, weight, sizes, cotangent), strict=True):
        np.testing.assert_allclose(g, want, atol=1e-5)


@pytest.mark.parametrize("weights_mapped", [False, True])
def test_a_mapped_dim_becomes_more_groups(weights_mapped):
    """Four sets of which each leaves other rows unused; one more vmap outside, as in a pipeline."""
    x, weight, cotangent = _arrays(2, len(SIZES))
    sizes = np.array(list(SIZES.values()))
    function = jax.vmap(_with_gradients, in_axes=(0, 0 if weights_mapped else None, 0, 0))
    function = jax.vmap(function, in_axes=(0, 0, None, 0))
    weight = weight if weights_mapped else weight[:, 0]
    y, dx, dweight = jax.jit(function)(x, weight, sizes, cotangent)
    for i in range(2):
        for r, group_sizes in enumerate(sizes):
            own = weight[i, r] if weights_mapped else weight[i]
            want = _by_loop(x[i, r], own, group_sizes, cotangent[i, r])
            for g, w in zip((y[i, r], dx[i, r], dweight[i, r]), want, strict=True):
                np.testing.assert_allclose(g, w, atol=1e-5)


def test_bfloat16_sums_in_float32():
    x, weight, cotangent = (jnp.asarray(array, jnp.bfloat16) for array in _arrays())
    sizes = jnp.array(SIZES["ragged"])
    y, dx, dweight = jax.jit(_with_gradients)(x, weight, sizes, cotangent.astype(jnp.float32))
    assert (y.dtype, dx.dtype, dweight.dtype) == (jnp.float32, jnp.bfloat16, jnp.bfloat16)
    wide = [np.asarray(array, np.float64) for array in (x, weight, cotangent)]
    by_hand = _by_loop(*wide[:2], SIZES["ragged"], wide[2])
    for g, want, tolerance in zip((y, dx, dweight), by_hand, (1e-5, 0.05, 0.05), strict=True):
        np.testing.assert_allclose(np.asarray(g, np.float64), want, atol=tolerance)
