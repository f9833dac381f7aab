"""Names for the trees of arrays that training passes around, and what is done with any of them."""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

Tree: TypeAlias = Any
"""A pytree: of arrays, their shapes, their shardings or their logical axes, as the place that takes it says."""

Params: TypeAlias = dict[str, Any]
"""A nested dict like the decoder's parameters, or the part of it that is trained: see `models.decoder.Params`."""

Rows: TypeAlias = dict[str, jax.Array]
"""The arrays of a batch by field: tokens, targets, segments, positions (int32), weights (float32), and what else the
objective needs; [A, B, T] of a step, [B, T] of a micro-batch or an evaluation."""

Metrics: TypeAlias = dict[str, jax.Array]
"""Replicated scalars by name."""


def as_float32(tree: Tree) -> Tree:
    """The arrays of a tree in float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def num_elements(tree: Tree) -> int:
    """How many numbers the arrays of a tree hold."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
