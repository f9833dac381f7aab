"""What devices tell each other inside `over_shards`, by logical axis; without a mesh, or along an axis that is not
split, nothing."""

import jax
import jax.numpy as jnp

from maxtext_lite.parallel.axes import MESH_AXES_OF


def gathered(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """The parts of all devices along a logical axis, one after the other along `dim`."""
    names = _split_over(axis)
    return jax.lax.all_gather(x, names, axis=dim, tiled=True) if names else x


def scattered_sum(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """This device's part, along `dim`, of the sum over all devices along a logical axis."""
    names = _split_over(axis)
    return jax.lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True) if names else x


def summed(x: jax.Array, axis: str) -> jax.Array:
    """The sum over all devices along a logical axis."""
    names = _split_over(axis)
    return jax.lax.psum(x, names) if names else x


def shard_index(axis: str) -> jax.Array:
    """Number of this device's part of a logical axis, int32."""
    names = _split_over(axis)
    return jax.lax.axis_index(names) if names else jnp.zeros([], jnp.int32)


def _split_over(axis: str) -> tuple[str, ...]:
    mesh = jax.sharding.get_abstract_mesh()
    return () if mesh.empty else tuple(name for name in MESH_AXES_OF[axis] if mesh.shape[name] > 1)
