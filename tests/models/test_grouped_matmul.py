"""Each kernel of the grouped matmul against a loop over groups, with its derivatives; under one and two vmaps."""

import contextlib
import functools
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.models import grouped_matmul as kernels_of_groups
from maxtext_lite.models.grouped_matmul import block_rows, grouped_matmul, in_blocks, on_hopper, on_tpu
from tests.gpu import absent_gpu

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


def _with_gradients(x, weight, sizes, cotangent, kernel="ragged_dot"):
    y, back = jax.vjp(lambda x, weight: grouped_matmul(x, weight, sizes, kernel), x, weight)
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


@pytest.mark.parametrize("rows", [1, 4, U])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_blocks_equal_a_loop_over_groups_however_many_rows_they_have(rows, sizes):
    """Rows that belong to no group are not finite, and do no harm to those that do."""
    x, weight, cotangent = _arrays()
    used = sum(sizes)
    want = _by_loop(x, weight, sizes, cotangent)
    x[used:], cotangent[used:] = np.nan, np.inf
    kernel, sizes = in_blocks(rows), jnp.array(sizes)
    np.testing.assert_allclose(jax.jit(kernel.by_rows)(x, weight, sizes)[:used], want[0][:used], atol=1e-5)
    dx = jax.jit(kernel.by_rows_transposed)(cotangent, weight, sizes)
    np.testing.assert_allclose(dx[:used], want[1][:used], atol=1e-5)
    np.testing.assert_allclose(jax.jit(kernel.over_rows)(x, cotangent, sizes), want[2], atol=1e-5)


def test_a_block_has_about_the_rows_of_a_group():
    assert [block_rows(65_536, E) for E in (8, 128, 256, 1024)] == [512, 512, 256, 128]
    assert block_rows(100, 8) == 100


@pytest.mark.parametrize("kernel", ["ragged_dot", "blocks"])
@pytest.mark.parametrize("weights_mapped", [False, True])
def test_a_mapped_dim_becomes_more_groups(weights_mapped, kernel):
    """Four sets of which each leaves other rows unused; one more vmap outside, as in a pipeline."""
    x, weight, cotangent = _arrays(2, len(SIZES))
    sizes = np.array(list(SIZES.values()))
    run = functools.partial(_with_gradients, kernel=kernel)
    function = jax.vmap(run, in_axes=(0, 0 if weights_mapped else None, 0, 0))
    function = jax.vmap(function, in_axes=(0, 0, None, 0))
    weight = weight if weights_mapped else weight[:, 0]
    y, dx, dweight = jax.jit(function)(x, weight, sizes, cotangent)
    for i in range(2):
        for r, group_sizes in enumerate(sizes):
            own = weight[i, r] if weights_mapped else weight[i]
            want = _by_loop(x[i, r], own, group_sizes, cotangent[i, r])
            used = sum(group_sizes)  # rows after them hold nothing of use
            np.testing.assert_allclose(y[i, r, :used], want[0][:used], atol=1e-5)
            np.testing.assert_allclose(dx[i, r, :used], want[1][:used], atol=1e-5)
            np.testing.assert_allclose(dweight[i, r], want[2], atol=1e-5)


# ---- For NVIDIA -----------------------------------------------------------------------------------------------------


def _per_row_of_all(text, num_rows, num_groups):
    """Arrays of a lowered program that have something for every pair of a row and a group."""
    found = {tuple(map(int, sizes.split("x"))) for sizes in re.findall(r"tensor<((?:\d+x)*\d+)x[a-z]\w*>", text)}
    return sorted(sizes for sizes in found if np.prod(sizes) >= num_rows * num_groups * min(IN_WIDE, OUT_WIDE))


IN_WIDE, OUT_WIDE = 256, 128


def _lowered_for_cuda(function):
    """A program of 512 rows in 16 groups, with its gradient, mapped over two sets of rows."""
    sizes = ((2, 512, IN_WIDE), (16, IN_WIDE, OUT_WIDE), (2, 512, OUT_WIDE), (2, 16))
    kinds = (jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.int32)
    x, weight, cotangent, size = (jax.ShapeDtypeStruct(*pair) for pair in zip(sizes, kinds, strict=True))
    mapped = jax.vmap(function, in_axes=(0, None, 0, 0))
    return jax.jit(mapped).trace(x, weight, size, cotangent).lower(lowering_platforms=("cuda",)).as_text()


def test_for_nvidia_no_operand_has_every_row_for_every_group():
    run = functools.partial(_with_gradients, kernel="blocks")
    assert not _per_row_of_all(_lowered_for_cuda(run), 1024, 16)

    def dense(x, weight, size, cotangent):  # what the search must find
        one_hot = jnp.repeat(jnp.eye(16, dtype=x.dtype), size, axis=0, total_repeat_length=512)
        return jnp.einsum("UE,Ui,Eio->Uo", one_hot, x, weight) + cotangent

    assert _per_row_of_all(_lowered_for_cuda(dense), 1024, 16)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jax, in tokamax
def test_tokamax_lowers_both_ways_for_a_hopper_gpu(monkeypatch):
    """Where it is installed. It asks the default device what it is, and is told."""
    pytest.importorskip("tokamax")
    with absent_gpu(monkeypatch, jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))):
        text = _lowered_for_cuda(functools.partial(_with_gradients, kernel="tokamax"))
    assert len(re.findall(r"custom_call @mosaic_gpu", text)) == 3
    assert "dot_general" not in text
    assert not _per_row_of_all(text, 1024, 16)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jax, in tokamax
@pytest.mark.parametrize("mended", [True, False])
def test_the_sum_over_rows_waits_for_each_matmul(monkeypatch, mended):
    """As tokamax has it, it overwrites registers that a matmul still reads: once that is mended, this test says so."""
    pytest.importorskip("tokamax")
    if not mended:
        monkeypatch.setattr(kernels_of_groups, "waiting_for_each_matmul", contextlib.nullcontext)
    kernels, waits = importlib.import_module("tokamax._src.ops.ragged_dot.pallas_mosaic_gpu_kernel_sm90"), list[int]()
    pallas, wait = kernels.plgpu, kernels.plgpu.wgmma_wait
    monkeypatch.setattr(pallas, "wgmma_wait", lambda n: (waits.append(n), wait(n)))
    x, g = jax.ShapeDtypeStruct((512, IN_WIDE), jnp.bfloat16), jax.ShapeDtypeStruct((512, OUT_WIDE), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((16,), jnp.int32)
    with absent_gpu(monkeypatch, jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))):
        jax.jit(on_hopper().over_rows).trace(x, g, sizes).lower(lowering_platforms=("cuda",))
    assert set(waits) == ({0} if mended else {1})
    assert kernels.plgpu is pallas


# ---- For TPUs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[100, 0, 156], [0, 128, 0]], ids=str)
@pytest.mark.parametrize("layout", ["io", "oi"])
def test_the_kernel_for_tpus_equals_a_loop_over_groups_in_either_layout(layout, sizes):
    """In the interpreter; rows that belong to no group are not finite, and do no harm to those that do."""
    rng, used = np.random.default_rng(0), sum(sizes)
    shapes = ((256, 128), (E, 128, 384), (256, 384))
    x, weight, cotangent = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    ends = np.cumsum(sizes)
    x[used:], cotangent[used:] = np.nan, np.inf
    kernel, size_E = on_tpu(layout, interpret=True), jnp.array(sizes)
    y, dx = kernel.by_rows(x, weight, size_E), kernel.by_rows_transposed(cotangent, weight, size_E)
    dweight = kernel.over_rows(x, cotangent, size_E)
    for group, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        rows = slice(end - size, end)
        wide, g = np.float64(x[rows]), np.float64(cotangent[rows])
        np.testing.assert_allclose(y[rows], wide @ weight[group], atol=1e-4)
        np.testing.assert_allclose(dx[rows], g @ weight[group].T, atol=1e-4)
        np.testing.assert_allclose(dweight[group], wide.T @ g, atol=1e-4)


def test_bfloat16_sums_in_float32():
    x, weight, cotangent = (jnp.asarray(array, jnp.bfloat16) for array in _arrays())
    sizes = jnp.array(SIZES["ragged"])
    y, dx, dweight = jax.jit(_with_gradients)(x, weight, sizes, cotangent.astype(jnp.float32))
    assert (y.dtype, dx.dtype, dweight.dtype) == (jnp.float32, jnp.bfloat16, jnp.bfloat16)
    wide = [np.asarray(array, np.float64) for array in (x, weight, cotangent)]
    by_hand = _by_loop(*wide[:2], SIZES["ragged"], wide[2])
    for g, want, tolerance in zip((y, dx, dweight), by_hand, (1e-5, 0.05, 0.05), strict=True):
        np.testing.assert_allclose(np.asarray(g, np.float64), want, atol=tolerance)
