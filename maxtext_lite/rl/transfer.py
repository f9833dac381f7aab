"""The devices that sample, and how the trainer's parameters come to them."""

from collections.abc import Mapping, Sequence
from typing import Any

# pyright: reportUnknownMemberType=false
# jax declares some of its functions in part.
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from maxtext_lite.models import Decoder, merged
from maxtext_lite.models.decoder import Params
from maxtext_lite.parallel import MESH_AXES, make_mesh, tree_shardings


def sampling_mesh(devices: Sequence[Any], sizes: Mapping[str, int]) -> Mesh:
    """The mesh of the devices that sample, of these sizes by axis (`batching.rollout_mesh`); the others have 1."""
    ones: dict[str, int] = dict.fromkeys(MESH_AXES, 1)
    return make_mesh(ones | dict(sizes), ones, devices)


class Transfer:
    """Takes a trainer's parameters to a decoder that samples, on the same devices or on others.

    Adapters are merged, layers that pipeline stages share out are put in order and all is cast to the decoder's
    `dtype` where the parameters are: what is sent is then as little as can be. What it gives shares no memory with what
    it was given.

    Args:
      decoder: that samples, without pipeline and adapters.
      mesh: that it samples on.
    """

    def __init__(self, decoder: Decoder, mesh: Mesh):
        self._decoder, self._mesh = decoder, mesh
        self._there = tree_shardings(mesh, decoder.axes)
        self._jitted: dict[Mesh, Any] = {}  # for each mesh that parameters have come from: one, of one trainer

    def __call__(self, params: Params) -> Params:
        """The decoder's parameters on its mesh, of the trainer's, which are on a mesh of theirs."""
        here = jax.tree.leaves(params)[0].sharding.mesh
        stays = list(here.devices.flat) == list(self._mesh.devices.flat)
        if here not in self._jitted:
            where = self._there if stays else tree_shardings(here, self._decoder.axes)
            self._jitted[here] = jax.jit(self._plain, out_shardings=where)
        plain = self._jitted[here](params)
        return plain if stays else jax.device_put(plain, self._there, donate=True)

    def _plain(self, params: Params) -> Params:
        wanted = self._decoder.abstract_params

        def ordered(x: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
            return x.reshape(like.shape)

        def narrow(x: jax.Array) -> jax.Array:
            return x.astype(self._decoder.shape.dtype)

        in_order = jax.tree.map(ordered, merged(params), wanted)
        # The tables are wide for their gradients; looked up, their rows are cast all the same.
        tables = jax.tree.map(narrow, in_order["embedding"])
        # Without a copy, what is not cast would be the trainer's own array, which its next step donates.
        return jax.tree.map(jnp.copy, self._decoder.cast(in_order) | {"embedding": tables})
