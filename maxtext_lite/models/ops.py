"""The arithmetic of a layer, with derivatives written by hand.

Each keeps for the backward pass only what it was given, in the dtype it was given it: automatic derivatives would
keep float32 copies of bfloat16 activations, and move more memory than the arithmetic needs. Matmuls name float32 as
the result of their sums, in both directions, which is also what makes bfloat16 fast on CPUs that have it.
"""

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from maxtext_lite.models.lora import Adapted

Rotation = tuple[jax.Array, jax.Array]
"""Cosines and sines [B, T, R/2] of R rotated dims, float32."""


def project(x: jax.Array, weight: jax.Array | Adapted, num_contracted: int = 1) -> jax.Array:
    """x [B, T, *in] times weight [*in, *out], where `in` has `num_contracted` dims: [B, T, *out] in the dtype of x."""
    if isinstance(weight, Adapted):
        added = project(project(x, weight.a, num_contracted), weight.b).astype(jnp.float32)
        y = project(x, weight.weight, num_contracted).astype(jnp.float32)
        return (y + weight.scale * added).astype(x.dtype)
    y: Any = _project(x, weight, num_contracted)
    return y


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _project(x: jax.Array, weight: jax.Array, num_contracted: int) -> jax.Array:
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
    return _project(x, weight, num_contracted), (x, weight)


def _project_backward(num_contracted: int, residuals: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = residuals
    x_BTi, weight_io = _as_matrices(x, weight, num_contracted)
    g_BTo = g.reshape(*g.shape[:2], -1)
    dx_BTi = jnp.einsum("BTo,io->BTi", g_BTo, weight_io, preferred_element_type=jnp.float32).astype(x.dtype)
    return dx_BTi.reshape(x.shape), weight_gradient(x_BTi, g_BTo).astype(weight.dtype).reshape(weight.shape)


_project.defvjp(_project_forward, _project_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x_BTD: jax.Array, scale_D: jax.Array, epsilon: float) -> jax.Array:
    """x / sqrt(mean(x^2) + epsilon) * scale over the last dim, in float32, returned in the dtype of x.

    Source: Zhang & Sennrich 2019, arXiv:1910.07467.
    """
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
    return dx_BTD.astype(x_BTD.dtype), jnp.sum(g_f32 * unit_BTD, axis=tuple(range(g_f32.ndim - 1))).astype(
        scale_D.dtype
    )


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(x_BTD: jax.Array, scale_D: jax.Array, bias_D: jax.Array, epsilon: float) -> jax.Array:
    """(x - mean(x)) / sqrt(variance(x) + epsilon) * scale + bias, in float32, returned in the dtype of x.

    Source: Ba et al. 2016, arXiv:1607.06450.
    """
    return _layer_norm(x_BTD, scale_D, bias_D, epsilon).astype(x_BTD.dtype)


def _layer_norm(x_BTD: jax.Array, scale_D: jax.Array, bias_D: jax.Array, epsilon: float) -> jax.Array:
    x_f32 = x_BTD.astype(jnp.float32)
    x_f32 = x_f32 - jnp.mean(x_f32, axis=-1, keepdims=True)
    inverse_BT1 = jax.lax.rsqrt(jnp.mean(jnp.square(x_f32), axis=-1, keepdims=True) + epsilon)
    return x_f32 * inverse_BT1 * scale_D.astype(jnp.float32) + bias_D.astype(jnp.float32)


def _layer_norm_backward(epsilon: float, residuals: Any, g_BTD: jax.Array) -> Any:
    _, backward = jax.vjp(functools.partial(_layer_norm, epsilon=epsilon), *residuals)
    return backward(g_BTD.astype(jnp.float32))


layer_norm.defvjp(lambda x, scale, bias, epsilon: (layer_norm(x, scale, bias, epsilon), (x, scale, bias)),
                  _layer_norm_backward)  # fmt: skip

Activation = Literal["silu", "gelu", "gelu_tanh", "clamped_silu"]
"""What an mlp puts its first projection through; clamped_silu is gpt-oss's, which clamps the other one too."""

_CLAMP, _STEEPNESS = 7.0, 1.702


def _activated(x: jax.Array, activation: Activation) -> jax.Array:
    match activation:
        case "silu":
            return jax.nn.silu(x)
        case "gelu":
            return jax.nn.gelu(x, approximate=False)
        case "gelu_tanh":
            return jax.nn.gelu(x, approximate=True)
        case "clamped_silu":
            return jnp.minimum(x, _CLAMP) * jax.nn.sigmoid(_STEEPNESS * jnp.minimum(x, _CLAMP))


def _hidden(activation: Activation, gate: jax.Array, up: jax.Array | None) -> jax.Array:
    """Float32, like its arguments."""
    if up is None:
        return _activated(gate, activation)
    if activation == "clamped_silu":
        up = jnp.clip(up, -_CLAMP, _CLAMP) + 1
    return _activated(gate, activation) * up


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def mlp_hidden(activation: Activation, gate: jax.Array, up: jax.Array | None) -> jax.Array:
    """activation(gate) * up, in float32, returned in their dtype; activation(gate) where `up` is None.

    Source: Shazeer 2020, arXiv:2002.05202, section 2; clamped_silu is (clip(up) + 1) times a steeper silu of the
    clipped gate, of OpenAI 2025, arXiv:2508.10925.
    """
    return _hidden(activation, *_wide(gate, up)).astype(gate.dtype)


def _wide(gate: jax.Array, up: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    return gate.astype(jnp.float32), None if up is None else up.astype(jnp.float32)


def _mlp_hidden_backward(activation: Activation, residuals: Any, g: jax.Array) -> Any:
    gate, up = residuals
    dgate, dup = jax.vjp(functools.partial(_hidden, activation), *_wide(gate, up))[1](g.astype(jnp.float32))
    return dgate.astype(gate.dtype), None if up is None else dup.astype(up.dtype)


mlp_hidden.defvjp(lambda kind, gate, up: (mlp_hidden(kind, gate, up), (gate, up)), _mlp_hidden_backward)


def soft_capped(x: jax.Array, cap: float) -> jax.Array:
    """cap x tanh(x / cap), which never leaves (-cap, cap). Source: Gemma Team 2024, arXiv:2408.00118, section 2."""
    return cap * jnp.tanh(x / cap)


@jax.custom_vjp
def rotate(x_BTNH: jax.Array, rotation: Rotation) -> jax.Array:
    """Heads of which the first R dims are rotated, R/2 being the planes of `rotation`; the others stay as they are.

    Plane h is dims h and h + R/2, as in Llama's published weights.
    """
    cosine, sine = (angle_BTH[:, :, None, :] for angle_BTH in rotation)
    planes = cosine.shape[-1]
    first, second, rest = jnp.split(x_BTNH.astype(jnp.float32), (planes, 2 * planes), axis=-1)
    rotated = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine, rest], axis=-1)
    return rotated.astype(x_BTNH.dtype)


def _rotate_backward(rotation: Rotation, g_BTNH: jax.Array) -> tuple[jax.Array, None]:
    cosine_BTH, sine_BTH = rotation
    return rotate(g_BTNH, (cosine_BTH, -sine_BTH)), None  # the transpose of a rotation, scaled or not, turns back


rotate.defvjp(lambda x, rotation: (rotate(x, rotation), rotation), _rotate_backward)
