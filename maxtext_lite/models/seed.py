"""The PRNG key of a seed."""

import jax

_BITS = 32  # that a key takes of an integer; jax drops the others


def root_key(seed: int) -> jax.Array:
    """The key of a seed from 0 to 2**63 - 1; another for each seed."""
    low = seed % 2**_BITS
    high = seed >> _BITS
    key = jax.random.key(low)
    return jax.random.fold_in(key, high) if high else key
