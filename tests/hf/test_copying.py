"""Copies are what NumPy's own assignment makes of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.hf.copying import aligned_empty, as_bits, assign, assign_cast, is_finite

X = np.random.default_rng(0).normal(size=(5, 70, 3)).astype(np.float32)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 2, 0)])
@pytest.mark.parametrize("source", [X, X[:, ::2], X.astype(jnp.bfloat16)])
@pytest.mark.parametrize("to", [np.float32, jnp.bfloat16, np.float16])
def test_any_arrangement_and_format(order, source, to):
    expected = source.transpose(order).astype(to)
    into = np.empty(expected.shape, to)
    assign_cast(into, source, as_bits(source).transpose(order))
    np.testing.assert_array_equal(into, expected)


def test_parts_of_an_array_are_assigned_in_place():
    whole = np.zeros((3, 4, 90), np.float32)
    assign(whole[1:, :, 10:80], np.swapaxes(X[:2, :, :], 1, 2)[:, [0, 1, 2, 2]])
    np.testing.assert_array_equal(whole[1:, 3, 10:80], X[:2, :, 2])
    assert not whole[0].any()
    assert not whole[:, :, 80:].any()


def test_bits_are_a_view():
    x = np.ones(3, jnp.bfloat16)
    as_bits(x)[0] = 0
    assert x.tolist() == [0, 1, 1]
    assert as_bits(X) is X


@pytest.mark.parametrize("format", [np.float64, np.float32, np.float16, jnp.bfloat16])
def test_a_number_that_is_none_is_found_wherever_it_stands(format):
    x = np.random.default_rng(0).normal(size=(3, 70_000)).astype(format)
    x[0, :4] = [0, -0.0, jnp.finfo(format).max, jnp.finfo(format).tiny / 2]
    assert is_finite(x)
    assert is_finite(x[:0])
    for place in (0, 65_535, 65_536, x.size - 1):
        for value in (np.nan, -np.nan, np.inf, -np.inf):
            damaged = x.copy()
            damaged.reshape(-1)[place] = value
            assert not is_finite(damaged)


@pytest.mark.parametrize("shape", [(3, 70_001), (5,), ()])
@pytest.mark.parametrize("format", [np.float32, jnp.bfloat16])
def test_what_is_aligned_is_not_copied_to_a_cpu_and_survives_donation(shape, format):
    x = aligned_empty(shape, np.dtype(format))
    x[...] = 1
    on_device = jax.device_put(x, jax.devices()[0])
    assert on_device.unsafe_buffer_pointer() == x.ctypes.data
    assert on_device.shape == shape
    assert (jax.jit(lambda y: 2 * y, donate_argnums=0)(on_device) == 2).all()
    assert (x == 1).all()
