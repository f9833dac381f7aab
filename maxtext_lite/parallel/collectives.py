"""Collectives along a logical axis, inside `over_shards`; the identity without a mesh, or if the axis is not split."""

import functools

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from maxtext_lite.parallel.axes import MESH_AXES_OF


def gathered(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """The parts of all devices along a logical axis, concatenated along `dim`."""
    names = _split_over(axis)
    return jax.lax.all_gather(x, names, axis=dim, tiled=True) if names else x


def exchanged(x: jax.Array, axis: str) -> jax.Array:
    """An all-to-all along a logical axis: the first device receives the first parts of all, in their order."""
    names = _split_over(axis)
    return _exchanged(x, names) if names else x


def scattered_sum(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """This device's part, along `dim`, of the float32 sum over all devices along a logical axis.

    Parts cross in the dtype of x and are added here, because on 16 or more TPU chips XLA turns a reduce-scatter into an
    all-reduce, of twice the bytes.
    """
    names = _split_over(axis)
    if not names:
        return x
    # The parts become a dim of their own, the first: TPUs copy whole tiles for that, whereas moving `dim` itself to the
    # front would take tiles apart.
    count = jax.lax.axis_size(names)
    shape = (*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :])
    parts = _exchanged(jnp.moveaxis(x.reshape(shape), dim, 0), names)
    # One at a time: a sum over the dim of parts reads them several times slower on TPUs.
    return functools.reduce(jnp.add, (part.astype(jnp.float32) for part in parts))


def largest(x: jax.Array, axis: str) -> jax.Array:
    """The maximum over all devices along a logical axis."""
    names = _split_over(axis)
    return jax.lax.pmax(x, names) if names else x


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


def _exchanged(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """`exchanged` along mesh axes.

    TPUs lay the first dim out outermost for it. Dims of size 1, such as that of a device's only replica under `vmap`,
    would follow it and be padded to a tile, in whole copies that take longer than the exchange. They are left out.
    """

    @custom_vmap
    def exchange(x: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(x, names, 0, 0, tiled=True)

    @exchange.def_vmap
    def of_sets(num_sets: int, is_mapped: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
        del num_sets, is_mapped
        if len(x) == 1:
            return exchange(x[0])[None], True
        return jax.lax.all_to_all(x, names, 1, 1, tiled=True), True

    return exchange(x.reshape(len(x), *(size for size in x.shape[1:] if size > 1))).reshape(x.shape)
