"""Copies are what NumPy's own assignment makes of them."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.interop.copying import as_bits, assign, assign_cast

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
