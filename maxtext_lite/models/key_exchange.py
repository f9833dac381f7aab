"""How the keys of each context shard reach the other shards, and the keys' gradients return."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from maxtext_lite.parallel import Tree, context_shards, from_all_shards, own_shard, sum_to_shards, to_next_shard

Visit = Callable[[Tree, Tree, Tree, Array], tuple[Tree, Tree]]
"""(state, sums for the other shard, the other shard's keys, its number) -> (state, sums)."""

Strategy = Callable[[Visit, Tree, Tree, Tree], tuple[Tree, Tree]]
"""(visit, state, own keys, zeros for their sums) -> (state, sums) after all other shards."""


def _all_gather(visit: Visit, state: Tree, keys: Tree, sums: Tree) -> tuple[Tree, Tree]:
    """Gathers all shards' keys at once, and returns their sums by one reduction. These are two collectives, and a
    device has the keys and sums of whole examples."""
    own = own_shard()
    shards = context_shards()
    of_all = from_all_shards(keys)

    def body(distance: Array, carry: Tree) -> Tree:
        state, sums = carry
        other = (own - distance) % shards
        theirs, their_sums = jax.tree.map(lambda x: x[other], (of_all, sums))
        state, their_sums = visit(state, their_sums, theirs, other)
        return state, jax.tree.map(lambda x, new: x.at[other].set(new), sums, their_sums)

    sums = jax.tree.map(lambda x: jnp.zeros((shards, *x.shape), x.dtype), sums)
    state, sums = jax.lax.fori_loop(1, shards, body, (state, sums))
    return state, sum_to_shards(sums)


def _ring(visit: Visit, state: Tree, keys: Tree, sums: Tree) -> tuple[Tree, Tree]:
    """Passes keys from shard to shard together with their sums, which reach their own shard with the last hop. A device
    has at most its own keys and one other shard's, and one more shard's in transit while it computes."""
    own = own_shard()
    shards = context_shards()

    def hop(state: Tree, sums: Tree, theirs: Tree, distance: Array | int) -> tuple[Tree, Tree]:
        state, sums = visit(state, sums, theirs, (own - distance) % shards)
        return state, to_next_shard(sums)

    def body(carry: Tree, distance: Array) -> Tree:
        state, sums, theirs = carry
        coming = to_next_shard(theirs)
        state, sums = hop(state, sums, theirs, distance)
        return (state, sums, coming), None

    carry = (state, sums, to_next_shard(keys))
    if shards > 2:
        carry, _ = jax.lax.scan(body, carry, jnp.arange(1, shards - 1))
    return hop(*carry, shards - 1)


STRATEGIES: dict[str, Strategy] = {
    "all_gather": _all_gather,
    "ring": _ring,
}
"""How each shard's keys reach the others, by the value of context_parallel_strategy."""
