"""Sums of rows by index: the way for GPUs, run here on a CPU, against float64 and against the scatter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.models.ordered_sums import _in_order, rows_at, sums_at
from tests.gpu import unordered_sums

in_order = jax.jit(_in_order, static_argnums=2)


@pytest.mark.parametrize(
    ("tokens", "rows", "draw"),
    [
        (1, 3, "uniform"),
        (129, 5, "uniform"),  # one more than a block
        (1000, 1, "uniform"),  # one run through all blocks
        (256, 1, "uniform"),  # and through blocks that no padding fills
        (640, 300, "sorted"),
        (2048, 3000, "uniform"),  # most runs are of one row
        (1500, 40, "skewed"),  # a few long runs, many short ones
    ],
)
def test_rows_are_summed_by_index(tokens: int, rows: int, draw: str):
    random = np.random.default_rng(tokens)
    index = (
        random.integers(0, rows, tokens) if draw != "skewed" else np.minimum(random.geometric(0.3, tokens), rows) - 1
    )
    index = np.sort(index) if draw == "sorted" else index
    x = random.normal(size=(tokens, 3)).astype(np.float32)
    expected = np.zeros((rows, 3))
    np.add.at(expected, index, x.astype(np.float64))
    np.testing.assert_allclose(in_order(x, jnp.asarray(index), rows), expected, atol=1e-4)


def test_a_run_that_ends_with_its_block_and_one_that_spans_blocks():
    index = np.repeat([4, 2, 7, 0], [128, 300, 84, 128])  # sorted: 0 fills a block, 2 spans three, 4 begins within one
    x = np.arange(640 * 2, dtype=np.float32).reshape(640, 2)
    expected = np.zeros((9, 2))
    np.add.at(expected, index, x)
    np.testing.assert_array_equal(in_order(x, jnp.asarray(index), 9), expected)  # whole numbers below 2^24


def test_each_replica_is_summed_by_itself():
    random = np.random.default_rng(0)
    x, index = random.normal(size=(3, 300, 2)).astype(np.float32), random.integers(0, 11, (3, 300))
    batched = jax.vmap(lambda x, index: _in_order(x, index, 11))(x, index)
    for found, one, of_one in zip(batched, x, index, strict=True):
        np.testing.assert_array_equal(found, in_order(one, of_one, 11))


def test_each_is_the_others_gradient():
    random = np.random.default_rng(1)
    table, index = random.normal(size=(7, 4)).astype(np.float32), jnp.asarray(random.integers(0, 7, (2, 5)))
    g = random.normal(size=(2, 5, 4)).astype(np.float32)
    rows, back = jax.vjp(lambda table: rows_at(table, index, 7), table)
    np.testing.assert_array_equal(rows, table[index])
    np.testing.assert_array_equal(back(g)[0], sums_at(g, index, 7))
    sums, back = jax.vjp(lambda g: sums_at(g, index, 7), g)
    np.testing.assert_allclose(sums, np.zeros((7, 4)) + jax.ops.segment_sum(g.reshape(10, 4), index.reshape(10), 7))
    np.testing.assert_array_equal(back(table)[0], table[index])


def test_on_gpus_nothing_is_added_to_one_place_twice():
    """The program for CUDA has no scatter but of unique rows; that for CPUs is the plain one."""

    def gradient(table: jax.Array, index: jax.Array) -> jax.Array:
        return jax.grad(lambda table: jnp.sum(rows_at(table, index, 7) ** 2))(table)

    lowered = jax.jit(gradient).trace(jnp.zeros((7, 4)), jnp.zeros((2, 300), jnp.int32))
    of_gpu, of_cpu = (lowered.lower(lowering_platforms=(platform,)).as_text() for platform in ("cuda", "cpu"))
    assert "stablehlo.scatter" in of_gpu
    assert unordered_sums(of_gpu) == []
    assert unordered_sums(of_cpu) == ["tensor<7x4xf32>"]
