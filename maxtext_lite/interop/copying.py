"""Copies of arrays that NumPy by itself makes slowly: transposed ones, and those in bfloat16."""

import jax.numpy as jnp
import numpy as np

_COLUMNS = 32  # that are copied at once: what is read of a transposed array then stays in the cache until it is used


def assign(into: np.ndarray, source: np.ndarray) -> None:
    """`into[...] = source`, of formats of NumPy's own; ten times faster where the source is transposed."""
    if source.ndim < 2 or source.strides[-1] == source.itemsize:
        into[...] = source
        return
    for start in range(0, source.shape[-1], _COLUMNS):
        into[..., start : start + _COLUMNS] = source[..., start : start + _COLUMNS]


def as_bits(x: np.ndarray) -> np.ndarray:
    """A bfloat16 array as uint16, which NumPy moves several times faster; any other as it is."""
    return x.view(np.uint16) if x.dtype == jnp.bfloat16 else x


def assign_cast(into: np.ndarray, tensor: np.ndarray, source: np.ndarray) -> None:
    """`into[...] = source`, where `source` is made of `as_bits(tensor)` and stands for numbers in its format."""
    if tensor.dtype != jnp.bfloat16:
        assign(into, source)
    elif into.dtype == jnp.bfloat16:
        assign(as_bits(into), source)
    elif into.dtype == np.float32:  # of which a bfloat16 is the upper half
        bits = into.view(np.uint32)
        assign(bits, source)
        bits <<= 16
    else:
        into[...] = source.view(jnp.bfloat16)
