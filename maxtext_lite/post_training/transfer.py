"""The mesh of the devices that sample, and the transfer of the trainer's parameters to it."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from maxtext_lite.models import Decoder
from maxtext_lite.models.lora import merged
from maxtext_lite.parallel import MESH_AXES, Params, make_mesh, tree_shardings


def sampling_mesh(devices: Sequence[Any], sizes: Mapping[str, int]) -> Mesh:
    """The mesh of the devices that sample, with these sizes by axis (`batching.rollout_mesh`) and 1 for the others."""
    ones: dict[str, int] = dict.fromkeys(MESH_AXES, 1)
    return make_mesh(ones | dict(sizes), ones, devices)


class Transfer:
    """The transfer of a trainer's parameters to a sampling decoder, on the same devices or on others.

    On the trainer's devices, adapters are merged, the stages' layers put in order, and everything cast to the decoder's
    `dtype`, to send as little as possible. The result shares no memory with the argument.

    Args:
      decoder: the sampling one, without pipeline and adapters.
      mesh: of the devices that sample.
    """

    def __init__(self, decoder: Decoder, mesh: Mesh):
        self._decoder = decoder
        self._mesh = mesh
        self._there = tree_shardings(mesh, decoder.axes)
        self._jitted: dict[Mesh, Any] = {}  # by the mesh of the parameters; one trainer has one

    def __call__(self, params: Params) -> Params:
        """The decoder's parameters on its mesh, from the trainer's on theirs."""
        here = jax.tree.leaves(params)[0].sharding.mesh
        stays = list(here.devices.flat) == list(self._mesh.devices.flat)
        if here not in self._jitted:
            where = self._there if stays else tree_shardings(here, self._decoder.axes)
            self._jitted[here] = jax.jit(self._plain, out_shardings=where)
        plain = self._jitted[here](params)
        return plain if stays else jax.device_put(plain, self._there, donate=True)

    def _plain(self, params: Params) -> Params:
        wanted = self._decoder.abstract_params

        def ordered(x: Array, like: jax.ShapeDtypeStruct) -> Array:
            return x.reshape(like.shape)

        def narrow(x: Array) -> Array:
            return x.astype(self._decoder.shape.dtype)

        in_order = jax.tree.map(ordered, merged(params), wanted)
        # The trainer keeps the tables wide for their gradients; their rows are cast at look-up anyway.
        tables = jax.tree.map(narrow, in_order["embedding"])
        # A copy, as an array that needs no cast would be the trainer's own, which its next step donates.
        return jax.tree.map(jnp.copy, self._decoder.cast(in_order) | {"embedding": tables})
