"""Meshes of the first simulated devices, and where parameters lie on them."""

import math

import jax

from maxtext_lite.parallel import MESH_AXES, make_mesh, tree_shardings


def mesh_of(**sizes):
    """A mesh whose other axes are 1."""
    ones = dict.fromkeys(MESH_AXES, 1)
    return make_mesh(ones | sizes, ones, jax.devices()[: math.prod(sizes.values())])


def abstract_parameters(decoder, mesh):
    """The shapes of a decoder's parameters, with their shardings."""
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=where
        ),
        decoder.abstract_params,
        tree_shardings(mesh, decoder.axes),
    )
