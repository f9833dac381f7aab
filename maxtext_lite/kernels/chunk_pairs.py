"""Attention on context shards by kernels that take whole blocks. It covers a shard's own keys, and then two pairs of
chunks with every other shard's, in which keys precede queries."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from maxtext_lite.models.attention import merge, part, put
from maxtext_lite.models.key_exchange import STRATEGIES
from maxtext_lite.parallel import Tree, own_shard

Change = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Two pairs of chunks of a device's queries and another shard's keys. No key is later than a query.

    Attributes:
      query: place of the first query of each among its device's tokens.
      key: place of the first key of each among its device's tokens.
    """

    query: tuple[Any, Any]
    key: tuple[Any, Any]
    chunk: int

    @classmethod
    def of(cls, other: Array, chunk: int) -> "Pairs":
        """The late queries with the early keys, and both late or both early chunks."""
        later = chunk * (other > own_shard()).astype(jnp.int32)
        return cls((chunk, later), (0, later), chunk)

    def queries(self, x: Array, axis: int) -> Array:
        """Both pairs' queries, [2 B, ...] from [B, ...]."""
        return self._parts(x, self.query, axis)

    def keys(self, x: Array, axis: int) -> Array:
        """Both pairs' keys, [2 B, ...] from [B, ...]."""
        return self._parts(x, self.key, axis)

    def _parts(self, x: Array, firsts: tuple[Any, Any], axis: int) -> Array:
        return jnp.concatenate([part(x, first, self.chunk, axis) for first in firsts])

    def updated(self, state: Tree, found: Tree, firsts: tuple[Any, Any], change: Change) -> Tree:
        """`state`, arrays whose dim 3 counts tokens, after `change(before, found)` at each pair's tokens."""
        halves = [jnp.split(x, 2) for x in found]
        for pair, first in enumerate(firsts):
            before = tuple(part(x, first, self.chunk, axis=3) for x in state)
            after = change(before, tuple(half[pair] for half in halves))
            state = tuple(put(x, new, first) for x, new in zip(state, after, strict=True))
        return state


Find = Callable[[Pairs, Any, Array], tuple[Array, ...]]
"""(pairs, another shard's keys, its number) -> results for the pairs, float32 [2 B, ...], with tokens in dim 3."""


def merged_over_shards(strategy: str, chunk: int, keys: Tree, own: tuple[Array, ...], find: Find) -> Tree:
    """Contexts and log-partitions over the keys of all shards.

    Args:
      strategy: how the shards exchange keys, one of `key_exchange.STRATEGIES`.
      keys: this shard's.
      own: the results for its own keys.
    """

    def visit(state: Tree, sums: Tree, theirs: Tree, other: Array) -> tuple[Tree, Tree]:
        pairs = Pairs.of(other, chunk)
        found = find(pairs, theirs, other)
        return pairs.updated(state, found, pairs.query, merge), sums

    return STRATEGIES[strategy](visit, own, keys, ())[0]


def summed_over_shards(strategy: str, chunk: int, keys: Tree, own: tuple[Array, ...], find: Find) -> Tree:
    """dq over the keys of all shards, and dk and dv over their queries; arguments as for `merged_over_shards`."""

    def add(before: Tree, found: Tree) -> Tree:
        return tuple(x + new for x, new in zip(before, found, strict=True))

    def visit(dq: Array, sums: Tree, theirs: Tree, other: Array) -> tuple[Tree, Tree]:
        pairs = Pairs.of(other, chunk)
        found, *dkv = find(pairs, theirs, other)
        (dq,) = pairs.updated((dq,), (found,), pairs.query, add)
        return dq, pairs.updated(sums, dkv, pairs.key, add)

    dq, *own_sums = own
    zeros = tuple(map(jnp.zeros_like, own_sums))
    dq, sums = STRATEGIES[strategy](visit, dq, keys, zeros)
    return dq, *add(own_sums, sums)
