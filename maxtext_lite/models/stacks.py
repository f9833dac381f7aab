"""Layers with the same parameter shapes as one stack, initialised at once and scanned."""

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from maxtext_lite.config import LayerKind, MlpKind
from maxtext_lite.models.block import Block
from maxtext_lite.parallel import Tree


def graph_of(layer: Callable[..., Block]) -> Any:
    """The graph that makes a module from one layer's parameters."""
    return nnx.graphdef(nnx.eval_shape(lambda: layer(rngs=nnx.Rngs(params=0))))


def stacked(axis: str, layer: Callable[..., Block], num_layers: int, rngs: nnx.Rngs) -> Any:
    """A layer whose parameters are those of all layers, stacked on a leading dim."""

    graphs: list[Any] = []

    def create(key: jax.Array) -> Any:
        graph, params = nnx.split(layer(rngs=nnx.Rngs(params=key)))
        graphs.append(graph)  # the same for every layer: this is traced once
        return params

    stacked = jax.vmap(create)(jax.random.split(rngs.params(), num_layers))
    stacked = jax.tree.map(
        lambda param: param.replace(axes=(axis, *param.axes)),
        stacked,
        is_leaf=lambda node: isinstance(node, nnx.Param),
    )
    return nnx.merge(graphs[0], stacked)


Kinds = tuple[LayerKind, MlpKind | None]
"""The kind of a layer's attention and that of its mlp, which is also its stack if there are several."""


def layer_of(stack: Tree, number: jax.Array) -> Tree:
    """The parameters of one layer of a stack [L, ...], for a loop over a few tokens.

    On CPUs XLA casts bfloat16 to float32 before it slices, and casts before the loop: a float32 copy of the whole stack
    for each token. An optimization barrier that includes the loop's own counter keeps the cast in the loop.
    """
    stack, number = jax.lax.platform_dependent(
        stack, number, cpu=lambda *both: jax.lax.optimization_barrier(both), default=lambda *both: both
    )
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False), stack)


def scan_pattern(
    layer: Callable[[Kinds, int | None, Tree, Tree], Tree],
    kinds: tuple[Kinds, ...],
    carry: Tree,
    stacks: dict[MlpKind | None, Tree],
) -> Tree:
    """The carry after layers whose kinds follow a repeated pattern.

    Args:
      layer: (kinds, place, carry, stack) -> carry, for the stack's entry at that place; None: the stack is the entry.
      kinds: the pattern.
      stacks: for each kind of mlp, leaves [L, ...]. The layers after the last whole pattern run outside the scan.
    """
    period, num_layers = len(kinds), sum(jax.tree.leaves(stack)[0].shape[0] for stack in stacks.values())
    rounds, each = num_layers // period, Counter(mlp for _, mlp in kinds)
    if len(stacks) > 1 and rounds < 2:  # no pattern repeats
        return _in_runs(layer, [kinds[number % period] for number in range(num_layers)], carry, stacks)
    if period == 1:
        ((_, mlp),) = kinds
        return jax.lax.scan(lambda carry, stack: (layer(kinds[0], None, carry, stack), None), carry, stacks[mlp])[0]

    def some(carry: Tree, stacks: dict[MlpKind | None, Tree], count: int) -> Tree:
        done = Counter[MlpKind | None]()
        for kind in kinds[:count]:
            carry = layer(kind, done[kind[1]], carry, stacks[kind[1]])
            done[kind[1]] += 1
        return carry

    def in_rounds(mlp: MlpKind | None) -> Tree:
        whole = rounds * each[mlp]
        return jax.tree.map(lambda x: x[:whole].reshape(rounds, each[mlp], *x.shape[1:]), stacks[mlp])

    def rest(mlp: MlpKind | None) -> Tree:
        return jax.tree.map(lambda x: x[rounds * each[mlp] :], stacks[mlp])

    whole: dict[MlpKind | None, Tree] = {mlp: in_rounds(mlp) for mlp in stacks}
    carry, _ = jax.lax.scan(lambda carry, stacks: (some(carry, stacks, period), None), carry, whole)
    return some(carry, {mlp: rest(mlp) for mlp in stacks}, num_layers - rounds * period)


def _in_runs(
    layer: Callable[[Kinds, int | None, Tree, Tree], Tree],
    kinds: list[Kinds],
    carry: Tree,
    stacks: dict[MlpKind | None, Tree],
) -> Tree:
    """`scan_pattern` for each run of consecutive layers with the same kind of mlp."""
    done = Counter[MlpKind | None]()
    for _, group in itertools.groupby(kinds, key=lambda kind: kind[1]):
        run = tuple(group)
        mlp, first = run[0][1], done[run[0][1]]
        done[mlp] += len(run)
        part = jax.tree.map(lambda x: x[first : first + len(run)], stacks[mlp])  # noqa: B023
        period = next(p for p in range(1, len(run) + 1) if run[p:] == run[: len(run) - p])
        carry = scan_pattern(layer, run[:period], carry, {mlp: part})
    return carry
