"""Types of the trees of arrays in training, and functions of any tree."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from maxtext_lite.parallel import Tree

Device: TypeAlias = Any
"""A jax device, or the description of an unattached one."""

Rows: TypeAlias = dict[str, Array]
"""A batch's arrays by field. They are tokens, targets, segments, positions (int32), weights (float32), and further
fields of the objective: [A, B, T] for a step, [B, T] for a micro-batch or an evaluation."""

Metrics: TypeAlias = dict[str, Array]
"""Replicated scalars by name."""

Record: TypeAlias = dict[str, Any]
"""A line of metrics.jsonl: numbers by name, on the host."""

Scalar: TypeAlias = ArrayLike
"""A number, possibly traced."""


def as_float32(tree: Tree) -> Tree:
    """The arrays of a tree in float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def num_elements(tree: Tree) -> int:
    """The number of elements of all arrays in a tree."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def map_axes(function: Callable[[tuple[str, ...]], object], axes: Tree) -> Tree:
    """`function` of each parameter's logical axes, as a tree like the parameters."""
    return jax.tree.map(function, axes, is_leaf=lambda node: isinstance(node, tuple))
