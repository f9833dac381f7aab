"""Projections and experts in eight bits against the recipe in float64; the same on every mesh; what crosses and meets.

The recipe by hand loops over rows and knows no jax: what of it is eight bits is numpy's and ml_dtypes'.
"""

import dataclasses
import functools
import re
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from maxtext_lite.models.capacity import with_capacity
from maxtext_lite.models.dropless import dropless
from maxtext_lite.models.eight_bits import FORMATS, in_eight_bits, largest_magnitude
from maxtext_lite.models.grouped_matmul import grouped_matmul, grouped_matmul_transposed
from maxtext_lite.models.lora import Adapted
from maxtext_lite.models.moe import ExpertShape, ExpertWeights, Routing
from maxtext_lite.models.ops import project
from maxtext_lite.parallel import MESH_AXES, make_mesh, over_replicas, sharding
from maxtext_lite.xla.hlo import collectives

WORDS = ("int8", "fp8", "fp8_full")
LARGEST = {"int8": 127.0, "e4m3": 448.0}
OF_WORD = {"int8": "int8", "fp8": "e4m3", "fp8_full": "e4m3"}
B, T, D, N, H = 8, 8, 16, 4, 6
RNG = np.random.default_rng(0)


def _rounded(x, kind, dims):
    """x on the grid of a format, in float64: scales are for all of `dims` together."""
    scale = np.abs(x).max(dims, keepdims=True) / LARGEST[kind]
    if kind == "int8":
        return np.rint(x / scale) * scale
    return np.float64((x / scale).astype(ml_dtypes.float8_e4m3fn)) * scale


def _by_hand(x, w, g, word):
    """y, dx and dw of x [B, T, i], w [i, o] and g [B, T, o]."""
    kind = OF_WORD[word]
    w_rounded, w_scale = _rounded(w, kind, 0), np.abs(w).max(0) / LARGEST[kind]
    y = _rounded(x, kind, -1) @ w_rounded
    dx = _rounded(g * w_scale, kind, -1) @ (w_rounded / w_scale).T
    rows = zip(x, g, strict=True)
    if word != "fp8":
        rows = ((_rounded(x_row, kind, 0), _rounded(g_row, kind, 0)) for x_row, g_row in rows)
    return y, dx, sum(x_row.T @ g_row for x_row, g_row in rows)


def _arrays(inputs, outputs):
    """Tokens and channels of very different sizes, as activations have them."""
    x, w, g = RNG.normal(size=(B, T, inputs)), RNG.normal(size=(inputs, outputs)), RNG.normal(size=(B, T, outputs))
    x *= np.exp(RNG.normal(size=(B, T, 1)) + RNG.normal(size=(inputs,)))
    return x.astype(np.float32), w.astype(np.float32), (1e-4 * g).astype(np.float32)


def _with_gradients(x, w, g, axes, word):
    y, back = jax.vjp(lambda x, w: project(x, _param(w, axes, word)), x, w)
    return y, *back(g)


def _param(w, axes, word, grad_dtype=jnp.float32):
    return nnx.Param(w, axes=axes, grad_dtype=grad_dtype, quantization=word)


def _close(got, want, tolerance=2e-6):
    for a, b in zip(got, want, strict=True):
        b = np.asarray(b)
        np.testing.assert_allclose(np.asarray(a).reshape(b.shape), b, rtol=0, atol=tolerance * np.abs(b).max())


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("inputs", [1, 2], ids=["one input dim", "two"])
@pytest.mark.fast
def test_a_projection_and_its_gradients_are_those_of_the_recipe(inputs, word):
    outwards, inwards = (("embed", "heads", "head_dim"), (D,), (N, H)), (("heads", "head_dim", "embed"), (N, H), (D,))
    axes, ins, outs = outwards if inputs == 1 else inwards
    x, w, g = _arrays(int(np.prod(ins)), int(np.prod(outs)))
    shaped = x.reshape(B, T, *ins), w.reshape(*ins, *outs), g.reshape(B, T, *outs)
    got = jax.jit(functools.partial(_with_gradients, axes=axes, word=word))(*shaped)
    _close(got, _by_hand(*map(np.float64, (x, w, g)), word))


@pytest.mark.parametrize("word", WORDS)
def test_the_error_is_within_the_formats_own(word):
    """Half a step of a scale with int8; with float8 half of the last bit, 2^-4 of a number, and of the smallest."""
    x, w, g = (np.float64(a) for a in _arrays(D, 12))
    y, dx, dw = (np.float64(a) for a in _with_gradients(*map(jnp.float32, (x, w, g)), ("embed", "mlp"), word))
    w_scale = np.abs(w).max(0)

    def error(a, kind, dims):
        largest = np.abs(a).max(dims, keepdims=True)
        if kind == "int8":
            return np.broadcast_to(largest / 254, a.shape)
        return np.abs(a) / 16 + largest / LARGEST[kind] * 2.0**-10

    def bound(left, right, left_error, right_error):
        return left_error @ np.abs(right) + np.abs(left) @ right_error + left_error @ right_error

    kind = OF_WORD[word]
    w_error, g_error = error(w, kind, 0), error(g * w_scale, kind, -1) / w_scale
    assert (np.abs(y - x @ w) <= bound(x, w, error(x, kind, -1), w_error) + 1e-6).all()
    assert (np.abs(dx - g @ w.T) <= bound(g, w.T, g_error, w_error.T) + 1e-9).all()
    of_rows = zip(x, g, strict=True)
    if word == "fp8":
        np.testing.assert_allclose(dw, sum(a.T @ b for a, b in of_rows), rtol=1e-4, atol=1e-7)
    else:
        most = sum(bound(a.T, b, error(a, kind, 0).T, error(b, kind, 0)) for a, b in of_rows)
        assert (np.abs(dw - sum(a.T @ b for a, b in zip(x, g, strict=True))) <= most + 1e-9).all()
    assert np.abs(y - x @ w).max() > 1e-4 * np.abs(y).max()  # it is rounded at all


@pytest.mark.parametrize("word", WORDS)
def test_numbers_of_the_grid_stay_as_they_are_and_zeros_and_infinities_too(word):
    for dtype in (FORMATS[word].forward, FORMATS[word].backward):
        kind = OF_WORD[word]
        scale, grid = 2.0**-20, np.float32(_rounded(RNG.normal(size=(3, 64)), kind, 1))
        grid = grid / np.abs(grid).max(1, keepdims=True) * np.float32(LARGEST[kind] * scale)
        on_grid = np.float32(np.float64(_rounded(np.float64(grid), kind, 1)))
        scaled = in_eight_bits(jnp.asarray(on_grid), largest_magnitude(jnp.asarray(on_grid), (1,)), dtype)
        np.testing.assert_array_equal(np.asarray(scaled.scale), scale)
        np.testing.assert_array_equal(np.float32(np.asarray(scaled.numbers)) * np.asarray(scaled.scale), on_grid)
        nothing = in_eight_bits(jnp.zeros((2, 4)), jnp.zeros((2, 1)), dtype)
        assert not np.any(np.float32(np.asarray(nothing.numbers)))
        for bad in (np.inf, np.nan):
            x = jnp.array([[1.0, bad]])
            lost = in_eight_bits(x, largest_magnitude(x, (1,)), dtype)
            assert not np.isfinite(lost.numbers.astype(jnp.float32) * lost.scale).all()


def _mesh(**sizes):
    sizes = dict.fromkeys(MESH_AXES, 1) | sizes
    return make_mesh(sizes, dict.fromkeys(MESH_AXES, 1), jax.devices()[: int(np.prod(list(sizes.values())))])


def _on_a_mesh(mesh, axes, word, arrays, grad_dtype=jnp.float32):
    """The compiled program of y, dx and dw, and what it gives, where replicas' gradients are added up."""
    tokens = ("global_batch", "length", None)
    activation = ("global_batch", "length", "activation_mlp")
    x_axes, g_axes = (tokens, activation) if axes[0] == "embed" else (activation, tokens)

    def step(w, x, g):
        def of_replica(w, x, g):
            y, back = jax.vjp(lambda x, w: project(x, _param(w, axes, word, grad_dtype)), x, w)
            return y, *back(g)

        y, dx, dw = over_replicas(of_replica, mesh.shape["data"], rows=(1, 2))(w, x, g)
        return y.reshape(B, T, -1), dx.reshape(B, T, -1), jnp.sum(dw, axis=0)

    where = [sharding(mesh, of) for of in (axes, x_axes, g_axes)]
    x, w, g = arrays
    with jax.set_mesh(mesh):
        compiled = jax.jit(step, in_shardings=where).lower(w, x, g).compile()
    return compiled, jax.device_get(compiled(*map(jax.device_put, (w, x, g), where)))


MESHES = ({"fsdp": 8}, {"data": 2, "fsdp": 4}, {"fsdp": 2, "tensor": 2, "context": 2})


@pytest.mark.parametrize("axes", [("embed", "mlp"), ("mlp", "embed")], ids=str)
@pytest.mark.parametrize("word", ["int8", "fp8_full"])
def test_a_projection_is_the_same_on_every_mesh(axes, word):
    """To the last bits of float32, where scales of a device's own would show in the second digit."""
    arrays = _arrays(16, 16)
    want = _with_gradients(*map(jnp.asarray, arrays), axes, word)
    for sizes in MESHES:
        mesh = _mesh(**sizes)
        compiled, got = _on_a_mesh(mesh, axes, word, arrays)
        _close(got, want, 1e-6)
        gathers = [c for c in collectives(compiled.as_text()) if c.kind == "all-gather" and "fsdp" in c.axes(mesh)]
        weights = [c for c in gathers if c.payload_bytes >= 16 * 16 // mesh.shape["tensor"]]
        assert weights
        assert all(re.search(r"= \(?s8\[", c.line) for c in weights), [c.line for c in weights]
    halves = [_with_gradients(*(jnp.asarray(a[rows]) if a.ndim == 3 else a for a in arrays), axes, word)[2]
              for rows in (slice(0, B, 2), slice(1, B, 2))]  # fmt: skip
    _close([halves[0] + halves[1]], want[2:], 1e-6)


def test_int8_is_multiplied_as_int8_in_all_three_matmuls():
    text = jax.jit(functools.partial(_with_gradients, axes=("embed", "mlp"), word="int8")).lower(
        *map(jnp.asarray, _arrays(D, 12))).as_text()  # fmt: skip
    dots = re.findall(r"dot_general .*: \((\S+), (\S+)\) -> (\S+)", text)
    assert len(dots) >= 3
    assert all(a.endswith("xi8>") and b.endswith("xi8>") and y.endswith("xi32>") for a, b, y in dots), dots


def test_adapters_stay_as_they_are():
    """Beside a weight in eight bits: y = q(x) q(W) + s x a b, and the gradients of a and b are those of x itself."""
    x, w, g = _arrays(D, 12)
    a, b = RNG.normal(size=(D, 3)).astype(np.float32), RNG.normal(size=(3, 12)).astype(np.float32)
    adapted = Adapted(jnp.asarray(w), jnp.asarray(a), jnp.asarray(b), 1.5)

    def of(x, a, b):
        return project(x, _param(dataclasses.replace(adapted, a=a, b=b), ("embed", "mlp"), "int8"))

    with jax.default_matmul_precision("highest"):
        y, back = jax.vjp(of, jnp.asarray(x), adapted.a, adapted.b)
        _, da, db = back(jnp.asarray(g))
    x, w, g, a, b = map(np.float64, (x, w, g, a, b))
    plain, _, _ = _by_hand(x, w, g, "int8")
    x2, g2 = x.reshape(-1, D), g.reshape(-1, 12)
    _close((y, da, db), (plain + 1.5 * x @ a @ b, 1.5 * x2.T @ g2 @ b.T, 1.5 * (x2 @ a).T @ g2), 1e-5)


# ---- Experts --------------------------------------------------------------------------------------------------------

E, J, F = 4, 2, 8
SIZES = np.array([5, 0, 9, 4])


@pytest.mark.parametrize("kernel", ["ragged_dot", "blocks", "tokamax"])
def test_grouped_matmuls_of_int8_are_exact(kernel):
    """`tokamax`, whose kernels do not know it, hands it on."""
    x, g = (RNG.integers(-127, 128, (20, width)).astype(np.int8) for width in (16, 8))
    weight = RNG.integers(-127, 128, (E, 16, 8)).astype(np.int8)
    expert = np.repeat(np.arange(E), SIZES)
    y = jax.jit(grouped_matmul, static_argnums=3)(x, weight, jnp.asarray(SIZES, jnp.int32), kernel)
    dx = jax.jit(grouped_matmul_transposed, static_argnums=3)(g, weight, jnp.asarray(SIZES, jnp.int32), kernel)
    assert y.dtype == dx.dtype == jnp.int32
    used = SIZES.sum()
    np.testing.assert_array_equal(y[:used], np.einsum("ui,uio->uo", x[:used].astype(int), weight[expert]))
    np.testing.assert_array_equal(dx[:used], np.einsum("uo,uio->ui", g[:used].astype(int), weight[expert]))


@pytest.mark.parametrize("sizes", [{}, {"fsdp": 2, "expert": 2, "tensor": 2}], ids=str)
def test_experts_with_and_without_a_capacity_round_to_the_same_on_every_mesh(sizes):
    """Two ways to the same: rows by expert with kernels of their own, and slots of examples. With fp8, whose dW is in
    the activations' dtype in both, all gradients agree; with int8 all but dW."""
    x, g = (RNG.normal(size=(B, T, D)).astype(np.float32) for _ in range(2))
    weights = ExpertWeights(*(RNG.normal(size=s).astype(np.float32) for s in ((E, D, F), (E, D, F), (E, F, D))))
    expert = np.stack([RNG.permutation(E)[:J] for _ in range(B * T)]).reshape(B, T, J).astype(np.int32)
    share = RNG.uniform(size=(B, T, J)).astype(np.float32)
    mesh = _mesh(**sizes)

    def run(word, with_slots):
        shape = ExpertShape(E, J, F, quantization=word, capacity_factor=Fraction(100))

        def of(x, weights):
            if with_slots:
                return with_capacity(x, Routing(expert, share, {}), weights, shape)[0]
            return dropless(x, jnp.asarray(expert), jnp.asarray(share), weights, shape)

        def step(x, weights, g):
            y, back = jax.vjp(of, x, weights)
            dx, dweights = back(g)
            return y, dx, *dweights.arrays()

        rows = sharding(mesh, ("batch", "length", None))
        of_weights = [
            jax.device_put(w, sharding(mesh, axes)) for w, axes in zip(weights[:3], weights.axes(), strict=True)
        ]
        arguments = (jax.device_put(x, rows), ExpertWeights(*of_weights), jax.device_put(g, rows))
        with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
            return jax.device_get(jax.jit(step)(*arguments))

    for word, compared in (("fp8", 5), ("int8", 2)):
        slots, rows = run(word, True)[:compared], run(word, False)[:compared]
        _close(rows, slots, 1e-5)
    plain = run("none", True)
    assert 1e-3 < np.abs(plain[0] - slots[0]).max() / np.abs(plain[0]).max() < 0.05
