"""Each kernel of the grouped matmul against a loop over groups, with its derivatives; under one and two vmaps."""

import functools
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from maxtext_lite.kernels.grouped_matmul import on_hopper, on_tpu
from maxtext_lite.models.experts import (
    grouped_kernel,
    in_blocks,
)
from tests.gpu import absent_gpu
from tests.meshes import mesh_of

U, IN, OUT, E = 9, 5, 4, 3
RNG = np.random.default_rng(0)
SIZES = np.array([[4, 0, 3], [2, 3, 4], [0, 9, 0], [0, 0, 0]], np.int32)
SETS = 2, len(SIZES)


def arrays(*leading, sizes=(U, IN, OUT)):
    rows, ins, outs = sizes
    shapes = (rows, ins), (E, ins, outs), (rows, outs)
    return [RNG.normal(size=(*leading, *shape)).astype(np.float32) for shape in shapes]


def by_loop(x, weight, sizes, g):
    """Result, where there are groups' rows, and both gradients of sum(result * g)."""
    x, weight, g = (np.float64(array) for array in (x, weight, g))
    group = np.repeat(np.arange(E), sizes)
    used = len(group)
    y, dx = (
        np.einsum("ui,uio->uo", x[:used], weight[group]),
        np.einsum("uo,uio->ui", g[:used], weight[group]),
    )
    dweight = np.stack(
        [x[:used][group == e].T @ g[:used][group == e] for e in range(E)]
    )
    return y, dx, dweight


def with_gradients(x, weight, sizes, g, kernel="ragged_dot"):
    matmul = grouped_kernel(kernel, x.dtype)
    g = g.astype(x.dtype)
    dx = matmul.by_rows_transposed(g, weight, sizes)
    return matmul.by_rows(x, weight, sizes), dx, matmul.over_rows(x, g, sizes)


@pytest.mark.parametrize(
    ("weights_mapped", "kernel"), [(True, "ragged_dot"), (False, "blocks")]
)
@pytest.mark.fast
def test_a_mapped_dim_becomes_more_groups(weights_mapped, kernel):
    """Four sets of which each leaves other rows unused; one more vmap outside, as in a pipeline."""
    x, weight, g = arrays(*SETS)
    run = jax.vmap(
        functools.partial(with_gradients, kernel=kernel),
        in_axes=(0, 0 if weights_mapped else None, 0, 0),
    )
    found = jax.jit(jax.vmap(run, in_axes=(0, 0, None, 0)))(
        x, weight if weights_mapped else weight[:, 0], SIZES, g
    )
    for i, r in np.ndindex(SETS):
        want = by_loop(
            x[i, r], weight[i, r if weights_mapped else 0], SIZES[r], g[i, r]
        )
        for got, right in zip(found, want, strict=True):
            # Rows after the groups hold nothing of use.
            assert_allclose(got[i, r][: len(right)], right, atol=1e-5)


@pytest.mark.parametrize(
    ("kernel", "sizes"),
    [
        (in_blocks(4), (U, IN, OUT)),
        (on_tpu("io", interpret=True), (256, 128, 256)),
        (on_tpu("oi", interpret=True), (256, 128, 256)),
    ],
    ids=["blocks", "TPU", "TPU, transposed"],
)
def test_rows_that_belong_to_no_group_do_no_harm_to_those_that_do(kernel, sizes):
    """They are not finite here. The kernel for TPUs runs in the interpreter."""

    @jax.jit
    def run(x, weight, size, g):
        return (
            kernel.by_rows(x, weight, size),
            kernel.by_rows_transposed(g, weight, size),
            kernel.over_rows(x, g, size),
        )

    for groups in SIZES * (sizes[0] // U):
        x, weight, g = arrays(sizes=sizes)
        x[groups.sum() :], g[groups.sum() :] = np.nan, np.inf
        with jax.default_matmul_precision("highest"):
            found = run(x, weight, groups, g)
        for got, right in zip(found, by_loop(x, weight, groups, g), strict=True):
            assert_allclose(
                got[: len(right)], right, atol=1e-5 if sizes[0] == U else 1e-4
            )


def test_bfloat16_sums_in_float32():
    x, weight, g = (array.astype(jnp.bfloat16) for array in arrays())
    y, dx, dweight = jax.jit(with_gradients)(x, weight, SIZES[0], g.astype(np.float32))
    assert y.dtype == dx.dtype == dweight.dtype == jnp.float32
    want = by_loop(x, weight, SIZES[0], g)
    for got, right, tolerance in zip(
        (y, dx, dweight), want, (1e-5, 0.05, 0.05), strict=True
    ):
        assert_allclose(np.float64(got)[: len(right)], right, atol=tolerance)


@pytest.mark.parametrize("kernel", ["ragged_dot", "blocks", "tokamax"])
def test_those_of_int8_are_exact(kernel):
    """`tokamax`, whose kernels do not know it, hands it on."""
    x, weight, g = (
        RNG.integers(-127, 128, array.shape).astype(np.int8) for array in arrays()
    )

    @jax.jit
    def run(x, weight, size, g):
        matmul = grouped_kernel(kernel, x.dtype)
        dx = matmul.by_rows_transposed(g, weight, size)
        return matmul.by_rows(x, weight, size), dx

    y, dx = run(x, weight, SIZES[0], g)
    assert y.dtype == dx.dtype == jnp.int32
    for got, right in zip((y, dx), by_loop(x, weight, SIZES[0], g), strict=False):
        assert_array_equal(got[: len(right)], right)


# ---- For NVIDIA -----------------------------------------------------------------------------------------------------

IN_WIDE, OUT_WIDE = 256, 128


def lowered_for_cuda(kernel):
    """A program of 512 rows in 16 groups, with its gradient, mapped over two sets of rows."""
    sizes = (2, 512, IN_WIDE), (16, IN_WIDE, OUT_WIDE), (2, 16), (2, 512, OUT_WIDE)
    kinds = jnp.bfloat16, jnp.bfloat16, jnp.int32, jnp.float32
    given = [jax.ShapeDtypeStruct(*pair) for pair in zip(sizes, kinds, strict=True)]
    mapped = jax.vmap(
        functools.partial(with_gradients, kernel=kernel), in_axes=(0, None, 0, 0)
    )
    return jax.jit(mapped).trace(*given).lower(lowering_platforms=("cuda",)).as_text()


def per_row_of_all(text):
    """Arrays of a lowered program that have something for every pair of a row and a group."""
    found = {
        tuple(map(int, sizes.split("x")))
        for sizes in re.findall(r"tensor<((?:\d+x)*\d+)x[a-z]\w*>", text)
    }
    assert found
    return [
        sizes for sizes in found if np.prod(sizes) >= 1024 * 16 * min(IN_WIDE, OUT_WIDE)
    ]


def test_for_nvidia_no_operand_has_every_row_for_every_group():
    assert not per_row_of_all(lowered_for_cuda("blocks"))
    assert per_row_of_all("tensor<16x1024x128xbf16>")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jax, in tokamax
def test_tokamax_lowers_both_ways_for_a_hopper_gpu(monkeypatch):
    """Where it is installed. It asks the default device what it is, and is told."""
    pytest.importorskip("tokamax")
    with absent_gpu(monkeypatch, mesh_of()):
        text = lowered_for_cuda("tokamax")
    assert len(re.findall(r"custom_call @mosaic_gpu", text)) == 3
    assert "dot_general" not in text
    assert not per_row_of_all(text)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jax, in tokamax
def test_the_sum_over_rows_waits_for_each_matmul(monkeypatch):
    """As tokamax has it, it overwrites registers that a matmul still reads."""
    pytest.importorskip("tokamax")
    kernels, waits = (
        importlib.import_module(
            "tokamax._src.ops.ragged_dot.pallas_mosaic_gpu_kernel_sm90"
        ),
        [],
    )
    pallas, wait = kernels.plgpu, kernels.plgpu.wgmma_wait
    monkeypatch.setattr(pallas, "wgmma_wait", lambda n: (waits.append(n), wait(n)))
    x, g = (
        jax.ShapeDtypeStruct((512, width), jnp.bfloat16)
        for width in (IN_WIDE, OUT_WIDE)
    )
    sizes = jax.ShapeDtypeStruct((16,), jnp.int32)
    with absent_gpu(monkeypatch, mesh_of()):
        jax.jit(on_hopper().over_rows).trace(x, g, sizes).lower(
            lowering_platforms=("cuda",)
        )
    assert set(waits) == {0}
