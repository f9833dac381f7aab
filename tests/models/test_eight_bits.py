"""Projections and experts in eight bits against the recipe in float64; the same on every mesh; what crosses and meets.

The recipe by hand loops over rows and knows no jax: what of it is eight bits is numpy's and ml_dtypes'.
"""

import re
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

from maxtext_lite.analysis.hlo import collectives
from maxtext_lite.models import ExpertShape
from maxtext_lite.models.experts import ExpertWeights, Routing, dropless, with_capacity
from maxtext_lite.models.ops import number_format, project
from maxtext_lite.parallel import sharding, vmap_over_data
from tests.meshes import mesh_of
from tests.models import exact

LARGEST = {"int8": 127.0, "e4m3": 448.0}
KIND = {"int8": "int8", "fp8": "e4m3", "fp8_full": "e4m3"}
B, T, D, N, H = 8, 8, 16, 4, 4
RNG = np.random.default_rng(0)


def rounded(x, kind, dims):
    """x on the grid of a format, in float64: scales are for all of `dims` together."""
    scale = np.abs(x).max(dims, keepdims=True) / LARGEST[kind]
    if kind == "int8":
        return np.rint(x / scale) * scale
    return np.float64((x / scale).astype(ml_dtypes.float8_e4m3fn)) * scale


def by_hand(x, w, g, word):
    """y, dx and dw of x [B, T, i], w [i, o] and g [B, T, o]."""
    x, w, g, kind = np.float64(x), np.float64(w), np.float64(g), KIND[word]
    w_rounded, w_scale = rounded(w, kind, 0), np.abs(w).max(0) / LARGEST[kind]
    y = rounded(x, kind, -1) @ w_rounded
    dx = rounded(g * w_scale, kind, -1) @ (w_rounded / w_scale).T
    rows = zip(x, g, strict=True)
    if word != "fp8":
        rows = (
            (rounded(x_row, kind, 0), rounded(g_row, kind, 0)) for x_row, g_row in rows
        )
    return y, dx, sum(x_row.T @ g_row for x_row, g_row in rows)


def arrays():
    """x, w and g [B, T, 16], with tokens and channels of very different sizes, as activations have them."""
    x, w, g = (
        RNG.normal(size=(B, T, D)),
        RNG.normal(size=(D, D)),
        RNG.normal(size=(B, T, D)),
    )
    x *= np.exp(RNG.normal(size=(B, T, 1)) + RNG.normal(size=(D,)))
    return x.astype(np.float32), w.astype(np.float32), (1e-4 * g).astype(np.float32)


def with_gradients(x, w, g, axes, word, grad_dtype=jnp.float32):
    def of(x, w):
        return project(
            x, nnx.Param(w, axes=axes, grad_dtype=grad_dtype, quantization=word)
        )

    y, back = jax.vjp(of, x, w)
    return y, *back(g)


def assert_close(found, expected, tolerance=2e-6):
    for got, want in zip(found, expected, strict=True):
        want = np.asarray(want)
        assert_allclose(
            np.reshape(got, want.shape),
            want,
            rtol=0,
            atol=tolerance * np.abs(want).max(),
        )


@pytest.mark.fast
def test_a_projection_and_its_gradients_are_those_of_the_recipe():
    """From one input dim to two, and back."""
    x, w, g = arrays()
    outwards, inwards = ("embed", "heads", "head_dim"), ("heads", "head_dim", "embed")

    @jax.jit
    def run(x, w, g):
        x_heads, g_heads = (array.reshape(B, T, N, H) for array in (x, g))
        found = {}
        for word in KIND:
            to_heads = with_gradients(x, w.reshape(D, N, H), g_heads, outwards, word)
            found[word] = (
                to_heads,
                with_gradients(x_heads, w.reshape(N, H, D), g, inwards, word),
            )
        return found

    for word, results in run(x, w, g).items():
        for found in results:
            assert_close(found, by_hand(x, w, g, word))


@pytest.mark.parametrize("word", ["int8", "fp8_full"])
def test_numbers_of_the_grid_stay_as_they_are_and_zeros_and_infinities_too(word):
    kind, scale = KIND[word], 2.0**-20
    x = RNG.normal(size=(3, 64))
    grid = rounded(x / np.abs(x).max(1, keepdims=True) * LARGEST[kind], kind, 1) * scale
    rows = np.float32(
        np.concatenate([grid, np.zeros((1, 64)), [[np.inf] * 64, [np.nan] * 64]])
    )
    rows[4:, 1:] = 1

    @jax.jit
    def run(x):
        scaled = number_format(word).scaled(x, (1,))
        return scaled.scale, scaled.numbers.astype(jnp.float32) * scaled.scale

    scales, found = jax.device_get(run(rows))
    assert_array_equal(scales[:3], scale)
    assert_array_equal(found[:4], rows[:4])
    assert not np.isfinite(found[4:]).all(1).any()


def test_a_projection_is_that_of_the_recipe_on_every_mesh():
    """To the last bits of float32, where scales of a device's own would show in the second digit."""
    x, w, g = arrays()
    mesh, axes, word = mesh_of(data=2, fsdp=2, tensor=2), ("mlp", "embed"), "int8"
    x_axes = ("global_batch", "length", "activation_mlp")
    g_axes = ("global_batch", "length", None)

    def step(w, x, g):
        of_replica = vmap_over_data(
            lambda w, x, g: with_gradients(x, w, g, axes, word),
            mesh.shape["data"],
            rows=(1, 2),
        )
        y, dx, dw = of_replica(w, x, g)
        return y, dx, jnp.sum(dw, axis=0)

    where = [sharding(mesh, of) for of in (axes, x_axes, g_axes)]
    with jax.set_mesh(mesh):
        compiled = jax.jit(step, in_shardings=where).lower(w, x, g).compile()
    assert_close(
        compiled(*map(jax.device_put, (w, x, g), where)), by_hand(x, w, g, word)
    )
    gathers = [
        c
        for c in collectives(compiled.as_text())
        if c.kind == "all-gather" and "fsdp" in c.axes(mesh)
    ]
    weights = [c for c in gathers if c.payload_bytes >= 16 * 16 // mesh.shape["tensor"]]
    assert weights
    assert all(re.search(r"= \(?s8\[", c.line) for c in weights), [
        c.line for c in weights
    ]


def test_int8_is_multiplied_as_int8_in_all_three_matmuls():
    text = (
        jax.jit(lambda *a: with_gradients(*a, ("embed", "mlp"), "int8"))
        .lower(*arrays())
        .as_text()
    )
    dots = re.findall(r"dot_general .*: \((\S+), (\S+)\) -> (\S+)", text)
    assert len(dots) >= 3
    assert all(
        a.endswith("xi8>") and b.endswith("xi8>") and y.endswith("xi32>")
        for a, b, y in dots
    ), dots


def test_experts_with_and_without_a_capacity_round_to_the_same_on_a_mesh():
    """Two ways to the same: rows by expert with kernels of their own on a mesh, and slots of examples on a device.

    With fp8 dW is in the activations' dtype in both, and all gradients agree.
    """
    E, J, F = 4, 2, 8
    rng = np.random.default_rng(0)
    x, g = (rng.normal(size=(B, T, D)).astype(np.float32) for _ in range(2))
    weights = ExpertWeights(
        *(
            rng.normal(size=s).astype(np.float32)
            for s in ((E, D, F), (E, D, F), (E, F, D))
        )
    )
    expert = (
        np.stack([rng.permutation(E)[:J] for _ in range(B * T)])
        .reshape(B, T, J)
        .astype(np.int32)
    )
    share = rng.uniform(size=(B, T, J)).astype(np.float32)

    def run(*, with_slots):
        shape = ExpertShape(E, J, F, quantization="fp8", capacity_factor=Fraction(100))
        mesh = mesh_of() if with_slots else mesh_of(fsdp=2, expert=2, tensor=2)

        def of(x, weights):
            if with_slots:
                return with_capacity(x, Routing(expert, share, {}), weights, shape)[0]
            return dropless(x, jnp.asarray(expert), jnp.asarray(share), weights, shape)

        def step(x, weights, g):
            y, back = jax.vjp(of, x, weights)
            dx, dweights = back(g)
            return y, dx, *dweights.arrays()

        rows = sharding(mesh, ("batch", "length", None))
        places = ExpertWeights(*(sharding(mesh, axes) for axes in weights.axes()))
        given = jax.device_put((x, weights, g), (rows, places, rows))
        with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
            return jax.device_get(jax.jit(step)(*given))

    slots = run(with_slots=True)
    assert_close(run(with_slots=False), slots, 1e-5)
    plain = exact.experts(x, expert, share, weights.arrays(), g)[0]
    # Of numbers rounded to 1/16, 4 to 6 % for six draws; rounded to 1/8, it would be twice as much.
    assert 0.03 < np.linalg.norm(plain - slots[0]) / np.linalg.norm(plain) < 0.08
