"""Layers that are alike as one stack of parameters, made at once and scanned."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from maxtext_lite.config import LayerKind
from maxtext_lite.models.block import Block


def graph_of(layer: Callable[..., Block]) -> Any:
    """What makes a module of one layer's parameters."""
    return nnx.graphdef(nnx.eval_shape(lambda: layer(rngs=nnx.Rngs(params=0))))


def stacked(axis: str, layer: Callable[..., Block], num_layers: int, rngs: nnx.Rngs) -> Any:
    """A layer whose every parameter holds all layers' values, stacked on a leading dim."""

    def create(key: jax.Array) -> Any:
        return nnx.split(layer(rngs=nnx.Rngs(params=key)))[1]

    stacked = jax.vmap(create)(jax.random.split(rngs.params(), num_layers))
    stacked = jax.tree.map(
        lambda param: param.replace(axes=(axis, *param.axes)),
        stacked,
        is_leaf=lambda node: isinstance(node, nnx.Param),
    )
    return nnx.merge(graph_of(layer), stacked)


def layer_of(stack: Any, number: jax.Array) -> Any:
    """The parameters of one layer of a stack [L, ...], for a loop that is run for a token or a few.

    XLA makes float32 of bfloat16 on CPUs before it slices, and of whole stacks before the loop: as much memory again,
    and for each token. What an optimization barrier has passed with the loop's own number stays in the loop.
    """

    def behind_a_barrier(stack: Any, number: jax.Array) -> Any:
        return jax.lax.optimization_barrier((stack, number))

    stack, number = jax.lax.platform_dependent(stack, number, cpu=behind_a_barrier, default=lambda *both: both)
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False), stack)


def scan_pattern(
    layer: Callable[[LayerKind, int | None, Any, Any], Any], kinds: tuple[LayerKind, ...], carry: Any, stack: Any
) -> Any:
    """What is carried through a stack of layers whose kinds take turns.

    Args:
      layer: (kind, place, carry, stack) -> carry, of the stack's entry at that place; None: the stack is the entry.
      stack: leaves [L, ...]; the layers after the last whole round of kinds run by themselves.
    """
    period, num_layers = len(kinds), jax.tree.leaves(stack)[0].shape[0]
    whole = num_layers - num_layers % period
    if period == 1:
        return jax.lax.scan(lambda carry, stack: (layer(kinds[0], None, carry, stack), None), carry, stack)[0]

    def some(carry: Any, stack: Any, count: int) -> Any:
        for place, kind in enumerate(kinds[:count]):
            carry = layer(kind, place, carry, stack)
        return carry

    rounds = jax.tree.map(lambda x: x[:whole].reshape(whole // period, period, *x.shape[1:]), stack)
    carry, _ = jax.lax.scan(lambda carry, stack: (some(carry, stack, period), None), carry, rounds)
    return some(carry, jax.tree.map(lambda x: x[whole:], stack), num_layers - whole)
