"""Hand-written derivatives equal the automatic ones of the plain formulas, in float64; bfloat16 stays close."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxtext_lite.models.ops import layer_norm, mlp_hidden, product, project, rms_norm, rotate, soft_capped
from maxtext_lite.models.rotary import Rope, rotary_angles
from maxtext_lite.parallel import MESH_AXES, make_mesh, sharding
from maxtext_lite.xla.hlo import collectives

B, T, D, N, H = 2, 3, 8, 2, 4


def _random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def _rotation():
    return rotary_angles(jnp.tile(jnp.arange(T), (B, 1)) + 3, Rope(H, 100.0))


def _plain_rotate(x):
    position, plane = np.arange(T) + 3, np.arange(H // 2)
    angle = position[:, None] / 100.0 ** (2 * plane / H)
    z = (x[..., : H // 2] + 1j * x[..., H // 2 :]) * np.exp(1j * angle)[None, :, None]
    return jnp.concatenate([z.real, z.imag], -1)


def _param(w, axes, grad_dtype=jnp.float32):
    return nnx.Param(w, axes=axes, grad_dtype=grad_dtype, quantization="none")


def _project(*axes):
    return lambda x, w: project(x, _param(w, axes))


CASES = {
    "project": (_project("embed", "heads", "head_dim"),
                lambda x, w: jnp.einsum("btd,dnh->btnh", x, w), (B, T, D), (D, N, H)),
    "project two dims": (_project("heads", "head_dim", "embed"), lambda x, w: jnp.einsum("btnh,nhd->btd", x, w),
                         (B, T, N, H), (N, H, D)),
    "rms_norm": (lambda x, w: rms_norm(x, w, 1e-5),
                 lambda x, w: x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w,
                 (B, T, D), (D,)),
    "silu": (lambda g, u: mlp_hidden("silu", g, u), lambda g, u: g / (1 + jnp.exp(-g)) * u, (B, T, D), (B, T, D)),
    "gelu": (lambda g, u: mlp_hidden("gelu", g, u),
             lambda g, u: g * 0.5 * (1 + jax.scipy.special.erf(g / np.sqrt(2))) * u, (B, T, D), (B, T, D)),
    "gelu_tanh, not gated": (
        lambda x, _: mlp_hidden("gelu_tanh", x, None),
        lambda x, _: 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))), (B, T, D), ()),
    "clamped_silu": (
        lambda g, u: mlp_hidden("clamped_silu", 6 * g, 6 * u),
        lambda g, u: (jnp.clip(6 * u, -7, 7) + 1) * (c := jnp.minimum(6 * g, 7)) / (1 + jnp.exp(-1.702 * c)),
        (B, T, D), (B, T, D)),
    "layer_norm": (lambda x, w: layer_norm(x, w[0], w[1], 1e-5),
                   lambda x, w: w[1] + w[0] * (x - x.mean(-1, keepdims=True))
                                / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5),
                   (B, T, D), (2, D)),
    "rms_norm of heads": (lambda x, w: rms_norm(x, w, 1e-5),
                          lambda x, w: x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w, (B, T, N, H), (H,)),
    "soft_capped": (lambda x, _: soft_capped(x, 2.0), lambda x, _: 2 * jnp.tanh(x / 2), (B, T, D), ()),
    "rotate a part": (
        lambda x, _: rotate(x, _rotation()),
        lambda x, _: jnp.concatenate([_plain_rotate(x[..., :H]), x[..., H:]], -1), (B, T, N, H + 3), ()),
    "rotate": (lambda x, _: rotate(x, _rotation()), lambda x, _: _plain_rotate(x), (B, T, N, H), ()),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_equal_the_plain_formula(name):
    ours, plain, *shapes = CASES[name]
    arguments = [_random(*shape, seed=i).astype(jnp.float32) for i, shape in enumerate(shapes)]
    weight = _random(*jax.eval_shape(ours, *arguments).shape, seed=9)

    def value_and_gradients(function, arguments):
        return jax.jit(jax.value_and_grad(lambda *a: jnp.sum(function(*a) * weight), argnums=(0, 1)))(*arguments)

    with jax.default_matmul_precision("highest"):
        got = value_and_gradients(ours, arguments)
    with jax.enable_x64(True):
        want = value_and_gradients(plain, [jnp.asarray(np.asarray(a, np.float64)) for a in arguments])
        want = jax.tree.map(np.asarray, want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), got, want)


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_in_bfloat16_out(name):
    ours, plain, *shapes = CASES[name]
    arguments = [_random(*shape, seed=i).astype(jnp.bfloat16) for i, shape in enumerate(shapes)]
    got = ours(*arguments)
    assert got.dtype == jnp.bfloat16
    want = plain(*[jnp.asarray(a, jnp.float32) for a in arguments])
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("axes", [("embed", "heads", "head_dim"), ("heads", "head_dim", "embed")], ids=str)
def test_a_weight_is_gathered_before_its_use_and_its_gradient_goes_back_to_the_shards(axes):
    """On fsdp 2 x tensor 2 as on one device; narrow sums cross only where something crosses."""
    sizes = {"embed": 8, "heads": 4, "head_dim": 6}
    ins = 1 if axes[0] == "embed" else 2
    shape = tuple(sizes[axis] for axis in axes)
    x, w, g = (_random(2, 4, *shape[:ins]), _random(*shape, seed=1), _random(2, 4, *shape[ins:], seed=2))
    mesh = make_mesh(dict.fromkeys(MESH_AXES, 1) | {"fsdp": 2, "tensor": 2}, dict.fromkeys(MESH_AXES, 1),
                     jax.devices()[:4])  # fmt: skip
    activation = ("batch", None, "activation_heads", None)
    x_axes, y_axes = (("batch", None, None), activation) if ins == 1 else (activation, ("batch", None, None))

    def compiled(on, grad_dtype):
        def gradients(x, w, g):
            y, back = jax.vjp(lambda x, w: project(x, _param(w, axes, grad_dtype)), x, w)
            return y, *back(g)

        where = [sharding(on, of) for of in (x_axes, axes, y_axes)]
        with jax.set_mesh(on), jax.default_matmul_precision("highest"):
            return jax.jit(gradients, in_shardings=where).lower(*map(jnp.float32, (x, w, g))).compile(), where

    def results(on, grad_dtype):
        step, where = compiled(on, grad_dtype)
        found = step(*(jax.device_put(jnp.float32(a), to) for a, to in zip((x, w, g), where, strict=True)))
        return jax.device_get(found), found[2].sharding

    one = make_mesh(dict.fromkeys(MESH_AXES, 1), dict.fromkeys(MESH_AXES, 1), jax.devices()[:1])
    whole, narrow = results(one, jnp.float32)[0], results(one, jnp.bfloat16)[0]
    jax.tree.map(np.testing.assert_array_equal, whole, narrow)
    (split, lies_at), (rounded, _) = results(mesh, jnp.float32), results(mesh, jnp.bfloat16)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), whole, split)
    np.testing.assert_array_equal(split[1], rounded[1])
    off = np.linalg.norm(rounded[2] - whole[2]) / np.linalg.norm(whole[2])
    assert 1e-4 < off < 4e-3  # bfloat16 has 8 bits
    assert lies_at.is_equivalent_to(sharding(mesh, axes), len(axes))
    gathers = [c for c in collectives(compiled(mesh, jnp.float32)[0].as_text()) if c.kind == "all-gather"]
    assert gathers
    assert {c.axes(mesh) for c in gathers} == {("fsdp",)}
    matrix = w.size // 2  # the tensor half of it
    assert {c.payload_bytes for c in gathers} == {4 * matrix}


def test_a_rotation_depends_on_relative_position_only():
    q, k = _random(1, 1, 1, H, seed=1), _random(1, 1, 1, H, seed=2)

    def score(i, j):
        at = lambda p: rotary_angles(jnp.full((1, 1), p), Rope(H, 100.0))  # noqa: E731
        return float(jnp.sum(rotate(q, at(i)) * rotate(k, at(j))))

    assert score(5, 3) == pytest.approx(score(105, 103), rel=1e-4)
    assert score(5, 3) != pytest.approx(score(5, 4), rel=1e-2)


@pytest.mark.parametrize(("platform", "dtype", "result"), [
    ("cpu", "bf16", "f32"), ("tpu", "bf16", "f32"), ("cuda", "bf16", "bf16"), ("cuda", "f32", "f32"),
])  # fmt: skip
def test_a_gpus_matmul_writes_the_dtype_and_others_cast(platform, dtype, result):
    of = {"bf16": jnp.bfloat16, "f32": jnp.float32}[dtype]
    arrays = [jax.ShapeDtypeStruct(shape, of) for shape in ((2, 8, 64), (64, 32))]
    traced = jax.jit(lambda x, weight: product("BTi,io->BTo", x, weight, "embed")).trace(*arrays)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert [line.rpartition("x")[2] for line in text.splitlines() if "dot_general" in line] == [f"{result}>"]
    assert traced.out_info.dtype == of
