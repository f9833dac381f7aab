"""Copies that NumPy alone makes slowly: of transposed arrays, and of arrays in bfloat16."""

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

_ALIGNED_TO = 64  # bytes, as XLA aligns the arrays of a CPU
_COLUMNS = 32  # copied at once: few enough that a transposed array's cache lines are used before they are evicted


def aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """np.empty, aligned so that jax on a CPU uses the memory without a copy: write to it before jax has it."""
    num_bytes = math.prod(shape) * dtype.itemsize
    whole = np.empty(num_bytes + _ALIGNED_TO, np.uint8)
    start = -whole.ctypes.data % _ALIGNED_TO
    return whole[start : start + num_bytes].view(dtype).reshape(shape)


def assign(into: np.ndarray, source: np.ndarray) -> None:
    """`into[...] = source` in NumPy's own formats; ten times faster if the source is transposed."""
    if source.ndim < 2 or source.strides[-1] == source.itemsize:
        into[...] = source
        return
    for start in range(0, source.shape[-1], _COLUMNS):
        into[..., start : start + _COLUMNS] = source[..., start : start + _COLUMNS]


def as_bits(x: np.ndarray) -> np.ndarray:
    """A bfloat16 array as uint16, which NumPy copies several times faster; any other array unchanged."""
    return x.view(np.uint16) if x.dtype == jnp.bfloat16 else x


def assign_cast(into: np.ndarray, tensor: np.ndarray, source: np.ndarray) -> None:
    """`into[...] = source`, where `source` is a rearranged `as_bits(tensor)`, cast from the tensor's format."""
    if tensor.dtype != jnp.bfloat16:
        assign(into, source)
    elif into.dtype == jnp.bfloat16:
        assign(as_bits(into), source)
    elif into.dtype == np.float32:  # a bfloat16 is its upper half
        bits = into.view(np.uint32)
        assign(bits, source)
        bits <<= 16
    else:
        into[...] = source.view(jnp.bfloat16)


_EXPONENTS = {2: 0x7C00, 4: 0x7F800000, 8: 0x7FF0000000000000}  # all of these bits set: infinite or NaN
_AT_ONCE = 2**16  # numbers, which stay in the cache for the second pass over them


def is_finite(x: np.ndarray) -> bool:
    """Whether a contiguous array of floats has no NaN and no infinity.

    Takes 0.12 s of CPU for a GB of any format; np.isfinite takes 0.7 s in bfloat16, and copying the GB 0.2 s.
    """
    bits = x.reshape(-1).view(np.dtype(f"u{x.itemsize}"))
    mask = bits.dtype.type(0x7F80 if x.dtype == jnp.bfloat16 else _EXPONENTS[x.itemsize])
    return not any((bits[start : start + _AT_ONCE] & mask).max() == mask for start in range(0, bits.size, _AT_ONCE))
