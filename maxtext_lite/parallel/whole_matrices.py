"""Functions of whole matrices whose parts are on several devices."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding

from maxtext_lite.parallel.mesh import names_in


def over_whole_matrices(
    function: Callable[[Array], Array], x: Array, where: NamedSharding, num_stacked: int, apart: Sequence[str] = ()
) -> Array:
    """`function`, which maps a stack [S, ...] to one of its shape, with whole matrices of its own on each device.

    Devices exchange their parts of all matrices for all parts of some, and back. Those with the same parts share the
    work. Zeros fill up a stack that does not divide.

    Args:
      x: a stack laid out by `where`, with `num_stacked` dims before those of its matrices.
      apart: mesh axes over which nothing is exchanged.
    """
    mesh = where.mesh
    entries = [names_in(entry) for entry in where.spec]
    moves = [(dim + 1, names) for dim, names in enumerate(entries[num_stacked:]) if names]
    taken = {*apart, *(name for names in entries for name in names)}
    same = tuple(name for name in mesh.axis_names if name not in taken)
    num_same = math.prod(mesh.shape[name] for name in same)
    num_devices = num_same * math.prod(mesh.shape[name] for _, names in moves for name in names)

    def on_device(x: Array) -> Array:
        stack = x.reshape(-1, *x.shape[num_stacked:])
        stack = jnp.pad(stack, [(0, -len(stack) % num_devices), *[(0, 0)] * (stack.ndim - 1)])
        own = stack.reshape(num_same, -1, *stack.shape[1:])[jax.lax.axis_index(same) if num_same > 1 else 0]
        for dim, names in moves:
            own = jax.lax.all_to_all(own, names, 0, dim, tiled=True)
        own = function(own)
        for dim, names in reversed(moves):
            own = jax.lax.all_to_all(own, names, dim, 0, tiled=True)
        stack = jax.lax.all_gather(own, same, tiled=True) if num_same > 1 else own
        return stack[: math.prod(x.shape[:num_stacked])].reshape(x.shape)

    return jax.shard_map(on_device, in_specs=where.spec, out_specs=where.spec, check_vma=False)(x)
