"""An optimizer's moments in bfloat16 or eight bits, rounded at random: the nearest value would miss small changes."""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from maxtext_lite.batching.parameters import moment_block
from maxtext_lite.parallel import Tree, TreePath


class Quantized(NamedTuple):
    """A moment in eight bits, in blocks along its last dim.

    Its elements are s x c^2 (mu, with the sign of c) or s x c^4 (nu) with c = code / largest code, which keeps small
    elements apart from zero.

    Attributes:
      codes: int8 for mu, uint8 for nu, in the moment's shape.
      scales: float32 powers of two [..., blocks], the s.
    """

    codes: Array
    scales: Array


def _moment(path: TreePath) -> str | None:
    """Optax's name of the moment that a leaf of a state belongs to; None if it is no moment."""
    names = [entry.name for entry in path if isinstance(entry, jax.tree_util.GetAttrKey)]
    return next((name for name in names if name in ("mu", "nu", "trace")), None)


Rounding: TypeAlias = Callable[[Array, Array, str], Array | Quantized]
"""(moment in float32, key, Optax's name of the moment) -> what is kept of it. Its expected value is the moment."""


def narrow(state: Tree, key: Array, rounding: Rounding) -> Tree:
    """A state with its float32 moments rounded.

    The random bits of an element depend on the key and its place in the whole tree, not on the mesh.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(state)
    narrowed = []
    for number, (path, x) in enumerate(leaves):
        moment = _moment(path)
        narrowed.append(x if moment is None else rounding(x, jax.random.fold_in(key, number), moment))
    return tree.unflatten(narrowed)


def widen(state: Tree) -> Tree:
    """A state with its moments in float32."""

    def of_moment(path: TreePath, x: Array | Quantized) -> Array:
        if isinstance(x, Quantized):
            return _dequantize(x)
        return x if _moment(path) is None else x.astype(jnp.float32)

    return jax.tree_util.tree_map_with_path(of_moment, state, is_leaf=lambda node: isinstance(node, Quantized))


def _random_bits(key: Array, shape: tuple[int, ...]) -> Array:
    """32 random bits for each element from its place in row-major order. Unlike jax.random, one fused loop everywhere.

    Source: the mixer is lowbias32 of Wellons 2018, Prospecting for Hash Functions.
    """
    bits = jnp.zeros(shape, jnp.uint32)
    for dim, size in enumerate(shape):
        bits = bits * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
    for word in jax.random.bits(key, (2,)):
        bits ^= word
        bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
        bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)
        bits ^= bits >> 16
    return bits


def _round_to_bfloat16(x: Array, key: Array, moment: str) -> Array:
    del moment
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + (_random_bits(key, x.shape) >> 16)
    return jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32).astype(jnp.bfloat16)


def _quantize(x: Array, key: Array, moment: str) -> Quantized:
    is_square = moment == "nu"
    dtype = jnp.uint8 if is_square else jnp.int8
    blocks = x.reshape(*x.shape[:-1], -1, moment_block(x.shape[-1]))
    _, exponent = jnp.frexp(jnp.max(jnp.abs(blocks), axis=-1, keepdims=True))
    scales = jnp.ldexp(jnp.float32(1), jnp.clip(exponent, -100, 127))
    size = jnp.abs(blocks) / scales
    root = jnp.sqrt(jnp.sqrt(size)) if is_square else jnp.sqrt(size)
    last = jnp.iinfo(dtype).max
    below = jnp.minimum(jnp.floor(last * root), last - 1)
    low = _size(below, dtype)
    share = (size - low) / (_size(below + 1, dtype) - low)
    code = below + (share * 2.0**24 > _random_bits(key, blocks.shape) >> 8)
    if is_square:  # a divisor: never 0 where a gradient was not
        code = jnp.maximum(code, size > 0)
    codes = (jnp.sign(blocks) * code).astype(dtype).reshape(x.shape)
    return Quantized(codes, scales.squeeze(-1))


def _dequantize(moment: Quantized) -> Array:
    codes = moment.codes
    blocks = codes.astype(jnp.float32).reshape(*moment.scales.shape, -1)
    x = jnp.sign(blocks) * _size(jnp.abs(blocks), codes.dtype) * moment.scales[..., None]
    return x.reshape(codes.shape)


def _size(code: Array, dtype: jnp.dtype) -> Array:
    """The element of a code, over its block's scale."""
    return (code / jnp.iinfo(dtype).max) ** (4 if dtype == jnp.uint8 else 2)


to_bfloat16 = functools.partial(narrow, rounding=_round_to_bfloat16)
to_int8 = functools.partial(narrow, rounding=_quantize)
