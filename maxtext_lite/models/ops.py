"""The arithmetic of a layer, with derivatives written by hand.

Each keeps for the backward pass only what it was given, in the dtype it was given it: automatic derivatives would
keep float32 copies of bfloat16 activations, and move more memory than the arithmetic needs. Matmuls name float32 as
the result of their sums, in both directions, which is also what makes bfloat16 fast on CPUs that have it.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

Rotation = tuple[jax.Array, jax.Array]
"""Cosines and sines [B, T, H/2], float32."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def project(x: jax.Array, weight: jax.Array, num_contracted: int = 1) -> jax.Array:
    """x [B, T, *in] times weight [*in, *out], where `in` has `num_contracted` dims: [B, T, *out] in the dtype of x."""
    x_BTi, weight_io = _as_matrices(x, weight, num_contracted)
    y_BTo = jnp.einsum("BTi,io->BTo", x_BTi, weight_io, preferred_element_type=jnp.float32).astype(x.dtype)
    return y_BTo.reshape(*x.shape[:2], *weight.shape[num_contracted:])


def _as_matrices(x: jax.Array, weight: jax.Array, num_contracted: int) -> tuple[jax.Array, jax.Array]:
    x_BTi = x.reshape(*x.shape[:2], math.prod(weight.shape[:num_contracted]))
    return x_BTi, weight.reshape(x_BTi.shape[-1], -1).astype(x.dtype)


def weight_gradient(x_BTi: jax.Array, g_BTo: jax.Array) -> jax.Array:
    """x^T g [in, out] in float32."""
    return jnp.einsum("BTi,BTo->io", x_BTi, g_BTo, preferred_element_type=jnp.float32)


def _project_forward(x: jax.Array, weight: jax.Array, num_contracted: int) -> Any:
    return project(x, weight, num_contracted), (x, weight)


def _project_backward(num_contracted: int, residuals: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = residuals
    x_BTi, weight_io = _as_matrices(x, weight, num_contracted)
    g_BTo = g.reshape(*g.shape[:2], -1)
    dx_BTi = jnp.einsum("BTo,io->BTi", g_BTo, weight_io, preferred_element_type=jnp.float32).astype(x.dtype)
    return dx_BTi.reshape(x.shape), weight_gradient(x_BTi, g_BTo).astype(weight.dtype).reshape(weight.shape)


project.defvjp(_project_forward, _project_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x_BTD: jax.Array, scale_D: jax.Array, epsilon: float) -> jax.Array:
    """x / sqrt(mean(x^2) + epsilon) * scale, in float32, returned in the dtype of x. Source: Zhang & Sennrich 2019."""
    return _rms_norm_forward(x_BTD, scale_D, epsilon)[0]


def _rms_norm_forward(x_BTD: jax.Array, scale_D: jax.Array, epsilon: float) -> Any:
    x_f32 = x_BTD.astype(jnp.float32)
    inverse_BT1 = jax.lax.rsqrt(jnp.mean(jnp.square(x_f32), axis=-1, keepdims=True) + epsilon)
    return (x_f32 * inverse_BT1 * scale_D.astype(jnp.float32)).astype(x_BTD.dtype), (x_BTD, scale_D, inverse_BT1)


def _rms_norm_backward(epsilon: float, residuals: Any, g_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
    del epsilon
    x_BTD, scale_D, inverse_BT1 = residuals
    unit_BTD, g_f32 = x_BTD.astype(jnp.float32) * inverse_BT1, g_BTD.astype(jnp.float32)
    scaled_BTD = g_f32 * scale_D.astype(jnp.float32)
    along_BT1 = jnp.mean(scaled_BTD * unit_BTD, axis=-1, keepdims=True)
    dx_BTD = inverse_BT1 * (scaled_BTD - unit_BTD * along_BT1)
    return dx_BTD.astype(x_BTD.dtype), jnp.sum(g_f32 * unit_BTD, axis=(0, 1)).astype(scale_D.dtype)


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


@jax.custom_vjp
def silu_times(gate_BTF: jax.Array, up_BTF: jax.Array) -> jax.Array:
    """silu(gate) * up, in float32, returned in their dtype."""
    return (jax.nn.silu(gate_BTF.astype(jnp.float32)) * up_BTF.astype(jnp.float32)).astype(gate_BTF.dtype)


def _silu_times_backward(residuals: Any, g_BTF: jax.Array) -> tuple[jax.Array, jax.Array]:
    gate_BTF, up_BTF = residuals
    gate, up, g = (x.astype(jnp.float32) for x in (gate_BTF, up_BTF, g_BTF))
    sigmoid = jax.nn.sigmoid(gate)
    dgate = g * up * sigmoid * (1 + gate * (1 - sigmoid))
    return dgate.astype(gate_BTF.dtype), (g * gate * sigmoid).astype(up_BTF.dtype)


silu_times.defvjp(lambda gate, up: (silu_times(gate, up), (gate, up)), _silu_times_backward)


def rotary_angles(position_BT: jax.Array, head_dim: int, max_timescale: float) -> Rotation:
    """The rotation of each position in each plane of a head.

    Source: Su et al. 2021, arXiv:2104.09864, section 3.4.2.
    """
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    angle_BTH = position_BT[..., None].astype(jnp.float32) / max_timescale**exponent
    return jnp.cos(angle_BTH), jnp.sin(angle_BTH)


@jax.custom_vjp
def rotate(x_BTNH: jax.Array, rotation: Rotation) -> jax.Array:
    """Heads rotated by `rotary_angles`; plane h is dims h and h + H/2, as in Llama's published weights."""
    cosine, sine = (angle_BTH[:, :, None, :] for angle_BTH in rotation)
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return rotated.astype(x_BTNH.dtype)


def _rotate_backward(rotation: Rotation, g_BTNH: jax.Array) -> tuple[jax.Array, None]:
    cosine_BTH, sine_BTH = rotation
    return rotate(g_BTNH, (cosine_BTH, -sine_BTH)), None  # the transpose of a rotation turns it back


rotate.defvjp(lambda x, rotation: (rotate(x, rotation), rotation), _rotate_backward)
