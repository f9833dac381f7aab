"""Hand-written derivatives equal the automatic ones of the plain formulas, in float64; bfloat16 stays close."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxtext_lite.models.ops import (
    layer_norm,
    mlp_hidden,
    project,
    rms_norm,
    rotate,
    soft_capped,
    xielu,
)
from maxtext_lite.models.rotary import Rope, rotary_angles

B, T, D, N, H = 2, 4, 8, 4, 6
POSITION = np.tile(np.arange(T), (B, 1)) + 3


def project_along(*axes, grad_dtype=jnp.float32):
    return lambda x, w: project(
        x, nnx.Param(w, axes=axes, grad_dtype=grad_dtype, quantization="none")
    )


def rotated(x, _):
    return rotate(x, rotary_angles(jnp.asarray(POSITION), Rope(4, 100.0)))


def rotated_by_hand(x, _):
    angle = POSITION[..., None] / 100.0 ** (np.arange(2) / 2)
    z = (x[..., :2] + 1j * x[..., 2:4]) * np.exp(1j * angle)[:, :, None]
    return jnp.concatenate([z.real, z.imag, x[..., 4:]], -1)


def rms_norm_by_hand(x, w):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w


def layer_norm_by_hand(x, w):
    return w[1] + w[0] * (x - x.mean(-1, keepdims=True)) / jnp.sqrt(
        x.var(-1, keepdims=True) + 1e-5
    )


def clamped_by_hand(g, u):
    clipped = jnp.minimum(6 * g, 7)
    return (jnp.clip(6 * u, -7, 7) + 1) * clipped / (1 + jnp.exp(-1.702 * clipped))


def xielu_by_hand(x, w):
    p, n = (jnp.log(1 + jnp.exp(each)) for each in w)
    return (
        jnp.where(x > 0, p * x**2, (n + 0.5) * (jnp.exp(jnp.minimum(x, 0)) - 1 - x))
        + x / 2
    )


ROWS, HEADS = (B, T, D), (B, T, N, H)
CASES = {
    "project": (
        project_along("embed", "heads", "head_dim"),
        lambda x, w: jnp.einsum("btd,dnh->btnh", x, w),
        ROWS,
        (D, N, H),
    ),
    "project two dims": (
        project_along("heads", "head_dim", "embed"),
        lambda x, w: jnp.einsum("btnh,nhd->btd", x, w),
        HEADS,
        (N, H, D),
    ),
    "rms_norm": (lambda x, w: rms_norm(x, w, 1e-5), rms_norm_by_hand, ROWS, (D,)),
    "layer_norm": (
        lambda x, w: layer_norm(x, w[0], w[1], 1e-5),
        layer_norm_by_hand,
        ROWS,
        (2, D),
    ),
    "silu": (
        lambda g, u: mlp_hidden("silu", g, u),
        lambda g, u: g / (1 + jnp.exp(-g)) * u,
        ROWS,
        ROWS,
    ),
    "gelu": (
        lambda g, u: mlp_hidden("gelu", g, u),
        lambda g, u: g * 0.5 * (1 + jax.scipy.special.erf(g / np.sqrt(2))) * u,
        ROWS,
        ROWS,
    ),
    "gelu_tanh, not gated": (
        lambda x, _: mlp_hidden("gelu_tanh", x, None),
        lambda x, _: (
            0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
        ),
        ROWS,
        (),
    ),
    "relu": (
        lambda g, u: mlp_hidden("relu", g, u),
        lambda g, u: g * (g > 0) * u,
        ROWS,
        ROWS,
    ),
    "clamped_silu": (
        lambda g, u: mlp_hidden("clamped_silu", 6 * g, 6 * u),
        clamped_by_hand,
        ROWS,
        ROWS,
    ),
    "xielu": (lambda x, w: xielu(x, w[:1], w[1:]), xielu_by_hand, ROWS, (2,)),
    "soft_capped": (
        lambda x, _: soft_capped(x, 2.0),
        lambda x, _: 2 * jnp.tanh(x / 2),
        ROWS,
        (),
    ),
    "rotate a part": (rotated, rotated_by_hand, HEADS, ()),
}


def random_arrays(dtype):
    rng = np.random.default_rng(0)
    return {
        name: tuple(rng.normal(size=shape).astype(dtype) for shape in shapes)
        for name, (_, _, *shapes) in CASES.items()
    }


@pytest.mark.fast
def test_values_and_gradients_equal_the_plain_formulas():
    arrays = random_arrays(np.float32)
    rng = np.random.default_rng(9)
    weights = {
        name: rng.normal(size=jax.eval_shape(CASES[name][0], *arrays[name]).shape)
        for name in CASES
    }

    def of_all(which):
        def run(arrays):
            def total(name):
                return lambda *given: jnp.sum(
                    CASES[name][which](*given) * weights[name]
                )

            return {
                name: jax.value_and_grad(total(name), argnums=(0, 1))(*arrays[name])
                for name in CASES
            }

        return jax.jit(run)

    with jax.default_matmul_precision("highest"):
        got = jax.device_get(of_all(0)(arrays))
    with jax.enable_x64(True):
        want = jax.device_get(of_all(1)(jax.tree.map(np.float64, arrays)))
    for name in CASES:
        for a, b in zip(
            jax.tree.leaves(got[name]), jax.tree.leaves(want[name]), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6, err_msg=name)


def test_bfloat16_in_bfloat16_out():
    arrays = random_arrays(jnp.bfloat16)

    @jax.jit
    def run(arrays):
        wide = jax.tree.map(jnp.float32, arrays)
        return {
            name: (ours(*arrays[name]), plain(*wide[name]))
            for name, (ours, plain, *_) in CASES.items()
        }

    for name, (got, want) in jax.device_get(run(arrays)).items():
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            np.float32(got), want, rtol=0.02, atol=0.02, err_msg=name
        )
