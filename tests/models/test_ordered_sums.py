"""Sums of rows by index: the way for GPUs, run here on a CPU, against float64 and against the scatter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.models.ops import _in_order, rows_at
from tests.gpu import unordered_sums


def summed(x, index, rows):
    expected = np.zeros((rows, x.shape[-1]))
    np.add.at(expected, index, x)
    return expected


@pytest.mark.parametrize(
    ("tokens", "rows", "draws"),
    [
        (1024, 1, ("uniform",)),  # one run through all blocks, none of which is padded
        (
            1000,
            300,
            ("uniform", "sorted", "skewed"),
        ),  # most runs are of a few rows; a few long runs, many short ones
    ],
)
def test_rows_are_summed_by_index(tokens, rows, draws):
    """Three replicas in one call, each by itself."""
    in_order = jax.jit(jax.vmap(lambda x, index: _in_order(x, index, rows)))
    random = np.random.default_rng(0)
    for draw in draws:
        index = random.integers(0, rows, (3, tokens))
        index = (
            np.minimum(random.geometric(0.3, (3, tokens)), rows) - 1
            if draw == "skewed"
            else index
        )
        index = np.sort(index) if draw == "sorted" else index
        x = random.normal(size=(3, tokens, 2)).astype(np.float32)
        for found, x_of_one, index_of_one in zip(
            in_order(x, index), x, index, strict=True
        ):
            np.testing.assert_allclose(
                found, summed(np.float64(x_of_one), index_of_one, rows), atol=1e-4
            )


@pytest.mark.fast
def test_on_gpus_nothing_is_added_to_one_place_twice():
    """The program for CUDA has no scatter but of unique rows; that for CPUs is the plain one."""

    def gradient(table, index):
        return jax.grad(lambda table: jnp.sum(rows_at(table, index, 7) ** 2))(table)

    lowered = jax.jit(gradient).trace(
        np.zeros((7, 4), np.float32), np.zeros((2, 300), np.int32)
    )
    of_gpu, of_cpu = (
        lowered.lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cuda", "cpu")
    )
    assert "stablehlo.scatter" in of_gpu
    assert unordered_sums(of_gpu) == []
    assert unordered_sums(of_cpu) == ["tensor<7x4xf32>"]
