"""Names for the trees of arrays that training passes around, and what is done with any of them."""

# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownMemberType=false
# jax, optax and orbax declare some of their functions in part.

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

Device: TypeAlias = Any
"""A jax device, or the description of one that is not attached."""

Tree: TypeAlias = Any
"""A pytree: of arrays, their shapes, their shardings or their logical axes, as the place that takes it says."""

Path: TypeAlias = tuple[Any, ...]
"""The keys that lead to a leaf of a tree."""

Params: TypeAlias = dict[str, Any]
"""A nested dict like the decoder's parameters, or the part of it that is trained: see `models.decoder.Params`."""

Rows: TypeAlias = dict[str, jax.Array]
"""The arrays of a batch by field: tokens, targets, segments, positions (int32), weights (float32), and what else the
objective needs; [A, B, T] of a step, [B, T] of a micro-batch or an evaluation."""

Metrics: TypeAlias = dict[str, jax.Array]
"""Replicated scalars by name."""

Record: TypeAlias = dict[str, Any]
"""A line of metrics.jsonl: numbers by name, on the host."""

Scalar: TypeAlias = ArrayLike
"""A number, traced or not."""


def as_float32(tree: Tree) -> Tree:
    """The arrays of a tree in float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def num_elements(tree: Tree) -> int:
    """How many numbers the arrays of a tree hold."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
