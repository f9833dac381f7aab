"""The context axis: the tokens of an example on each of its shards, and how shards exchange arrays.

A causal query sees all earlier keys, so late tokens are more work than early ones. The tokens are therefore split into
twice as many chunks as there are shards, and each shard gets one early chunk and the late one that makes its work equal
to that of the others. Source: Dubey et al. 2024, arXiv:2407.21783, section 3.3.2.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from maxtext_lite.parallel.mesh import (
    MESH_AXES_OF,
    LogicalAxes,
    Tree,
    constrain,
    num_shards,
)

CHUNKS_PER_SHARD = 2
"""An early and a late chunk; the tokens of an example are a multiple of this times the shards."""


def context_order(num_tokens: int, shards: int) -> np.ndarray:
    """The token at each place of an arranged example: of c shards, shard i has chunks i and 2c - 1 - i.

    Within a shard the tokens are in their true order; its early chunk comes before its late one.

    Raises:
      ValueError: num_tokens is not a multiple of 2 x shards.
    """
    num_chunks = CHUNKS_PER_SHARD * shards
    if num_tokens % num_chunks:
        raise ValueError(f"{num_tokens} tokens are not a multiple of {CHUNKS_PER_SHARD} chunks x {shards} shards")
    chunks = np.arange(num_tokens).reshape(num_chunks, -1)
    early = np.arange(shards)
    return chunks[np.stack([early, num_chunks - 1 - early], axis=1).ravel()].ravel()


def context_shards() -> int:
    """Parts into which the mesh in use splits the tokens of an example; 1 without a mesh."""
    return num_shards("length")


def in_context_order(batch: Mapping[str, Array], axes: LogicalAxes) -> dict[str, Array]:
    """Arrays [..., T] whose dims have these logical axes, in `context_order`; unchanged on one shard.

    Sums over tokens do not change, and within a shard a later place has a later token.
    """
    if context_shards() == 1:
        return dict(batch)

    def arrange(x: Array) -> Array:
        return constrain(jnp.take(x, context_order(x.shape[-1], context_shards()), axis=-1), axes)

    return {name: arrange(x) for name, x in batch.items()}


def in_token_order(x: Array, axes: LogicalAxes, dim: int = -1) -> Array:
    """An array that is in `context_order` along `dim`, back in the order of the tokens."""
    if context_shards() == 1:
        return x
    places = np.argsort(context_order(x.shape[dim], context_shards()))
    return constrain(jnp.take(x, places, axis=dim), axes)


def own_shard() -> Array:
    """Inside `over_shards`: the number of this device along the context axis, an int32 scalar."""
    return jax.lax.axis_index(MESH_AXES_OF["length"])


def chunks_of(shard: Array) -> tuple[Array, Array]:
    """Numbers of the early and the late chunk of an example on a shard."""
    return shard, CHUNKS_PER_SHARD * context_shards() - 1 - shard


def to_next_shard(tree: Tree) -> Tree:
    """Inside `over_shards`: the previous shard's arrays, while this shard's go to the next and the last one's to 0."""
    shards = context_shards()
    return jax.lax.ppermute(
        tree,
        MESH_AXES_OF["length"],
        [(shard, (shard + 1) % shards) for shard in range(shards)],
    )


def from_all_shards(tree: Tree) -> Tree:
    """Inside `over_shards`: the arrays of every shard, by its number on a new first dim."""
    return jax.lax.all_gather(tree, MESH_AXES_OF["length"])


def whole_examples(tree: Tree) -> Tree:
    """Inside `over_shards`: arrays [B, T, ...] of all tokens in their true order, from each shard's own."""
    if context_shards() == 1:
        return tree

    def in_order(x: Array) -> Array:
        early, late = jnp.split(x, CHUNKS_PER_SHARD, axis=2)
        chunks = jnp.moveaxis(jnp.concatenate([early, late[::-1]]), 0, 1)
        return chunks.reshape(chunks.shape[0], -1, *chunks.shape[3:])

    return jax.tree.map(in_order, from_all_shards(tree))


def sum_to_shards(tree: Tree) -> Tree:
    """Inside `over_shards`: the sum of all shards' parts for this shard, at its number on the first dim."""
    return jax.lax.psum_scatter(tree, MESH_AXES_OF["length"])
