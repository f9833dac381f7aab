"""The tiles of attention over a device's tokens, and the loop over them.

A tile is a square of at most 512 queries and keys. Causality and the window admit all of a tile, none of it, or cut it.
A cut tile is computed in strips of 128 queries, each over only the keys that it may see. A tile that no query sees is
skipped.

A device's tokens are runs of consecutive tokens: a whole example, or a shard's early and its late chunk
(`parallel.context_order`). By causality a device's late run sees all early runs, and in addition either its early run
sees those of lower shards or its late run sees those of higher shards: every shard has the same work. With a sliding
window the number of tiles depends on where a shard's runs are: at the two ends of the example for the first shard, next
to each other in its middle for the last. Source: Dubey et al. 2024, arXiv:2407.21783, section 3.3.2.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_lite.models.tile import Index
from maxtext_lite.parallel import CHUNKS_PER_SHARD, Tree, context_shards, own_shard

_TILE = 512
_STRIP = 128


class Strip(NamedTuple):
    """Some queries of a tile and the keys that they are multiplied by: the first of each, and how many."""

    query: int
    num_queries: int
    key: int
    num_keys: int


class Tiles(NamedTuple):
    """Tiles with the same strips.

    Attributes:
      query: place of each tile's first query among its device's tokens, padding included; ints.
      key: place of each tile's first key among its device's tokens.
      distance: how many tokens of the example the first query is after the first key: an int for all tiles, or an array
        with one for each, some of them beyond the window; None: causality and window mask nothing.
      strips: of each tile.
    """

    query: Any
    key: Any
    distance: Any
    strips: Sequence[Strip]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of a device's tokens in runs and tiles.

    Attributes:
      num_runs: runs of consecutive tokens, one after the other.
      run: tokens of a run; padding fills it up to whole tiles.
      num_tiles: tiles along a run.
      tile: queries, and keys, of a tile.
      window: as in `Scoring`.
    """

    num_runs: int
    run: int
    num_tiles: int
    tile: int
    window: int | None

    @classmethod
    def of(cls, num_tokens: int, window: int | None) -> "Layout":
        """The layout for this many tokens on a device: the fewest tiles of at most 512, with little padding."""
        num_runs = 1 if context_shards() == 1 else CHUNKS_PER_SHARD
        run = num_tokens // num_runs
        num_tiles = math.ceil(run / _TILE)
        tile = run if num_tiles == 1 else min(_TILE, 8 * math.ceil(run / num_tiles / 8))
        return cls(num_runs, run, num_tiles, tile, window)

    @property
    def padded_run(self) -> int:
        """Tokens of a run with its padding."""
        return self.num_tiles * self.tile

    def pad(self, x: jax.Array, axis: int, value: int = 0) -> jax.Array:
        """`x` with padding along dim `axis`, that of a device's tokens."""
        missing = self.padded_run - self.run
        if not missing:
            return x
        x = x.reshape(*x.shape[:axis], self.num_runs, self.run, *x.shape[axis + 1 :])
        x = jnp.pad(x, [(0, missing * (dim == axis + 1)) for dim in range(x.ndim)], constant_values=value)
        return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

    def unpad(self, x: jax.Array, axis: int) -> jax.Array:
        """`x` without the padding."""
        if self.padded_run == self.run:
            return x
        x = x.reshape(*x.shape[:axis], self.num_runs, self.padded_run, *x.shape[axis + 1 :])
        x = jax.lax.slice_in_dim(x, 0, self.run, axis=axis + 1)
        return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

    @property
    def whole(self) -> Strip:
        """The strip that is a whole tile."""
        return Strip(0, self.tile, 0, self.tile)

    def own_tiles(self) -> list[Tiles]:
        """The tiles of a device's queries with its own keys."""
        found, far = [], []
        starts = range(0, self.num_runs * self.padded_run, self.padded_run)
        for apart in range(self.num_tiles):
            distance, runs = apart * self.tile, range(apart, self.num_tiles)
            query = [start + at * self.tile for start in starts for at in runs]
            places = np.array([query, np.subtract(query, distance)])
            if apart and (self.window is None or distance + self.tile <= self.window):
                far.append(places)
            elif strips := self._strips(distance):
                found.append(Tiles(places[0], places[1], distance, strips))
        if far:
            query, key = np.concatenate(far, axis=1)
            found.append(Tiles(query, key, None, [self.whole]))
        if self.num_runs > 1:
            found.append(self._tiles_between(np.array([1]), np.array([0]), own_shard()))
        return found

    def tiles_with(self, other: jax.Array) -> list[Tiles]:
        """The tiles of a device's queries with another shard's keys, in the two pairs of runs that causality allows."""
        later = (other > own_shard()).astype(jnp.int32)  # both late runs, or both early ones
        return [self._tiles_between(jnp.stack([1, later]), jnp.stack([0, later]), other)]

    def _strips(self, distance: int) -> list[Strip]:
        """The strips of a tile whose first query is `distance` tokens after its first key."""
        strips = []
        for first in range(0, self.tile, _STRIP):
            num_queries = min(_STRIP, self.tile - first)
            end = min(self.tile, distance + first + num_queries)
            nearest = 0 if self.window is None else max(0, distance + first - self.window + 1)
            start = nearest // _STRIP * _STRIP  # unaligned slices are slow on accelerators
            if nearest < end:
                strips.append(Strip(first, num_queries, start, end - start))
        return strips

    def _tiles_between(self, query_run: Any, key_run: Any, other: jax.Array) -> Tiles:
        """All tiles of pairs of a device's run and a shard's run, in which no key is later than a query."""
        query, key = (self.tile * side.ravel() for side in np.indices((self.num_tiles, self.num_tiles)))
        distance = None
        if self.window is not None:
            apart = self._start(own_shard(), query_run) - self._start(other, key_run)
            distance = (apart[:, None] + query - key).ravel()
        query, key = ((self.padded_run * run[:, None] + x).ravel() for run, x in ((query_run, query), (key_run, key)))
        return Tiles(query, key, distance, [self.whole])

    def _start(self, shard: jax.Array, run: Any) -> jax.Array:
        """The first token of a shard's run, by its number in the example."""
        return self.run * jnp.where(run == 0, shard, CHUNKS_PER_SHARD * context_shards() - 1 - shard)

    def of_each_query(self, find: Callable[[Strip, Index, Index, Index | None], Tree]) -> Tree:
        """The results for a device's first own tiles, which have each query once: arrays with queries in dim 3.

        Args:
          find: as in `fold`.
        """
        some = self.own_tiles()[0]

        def visit(query: Any, key: Any) -> Tree:
            strips = [
                find(strip, query + strip.query, key + strip.key, some.distance + strip.query - strip.key)
                for strip in some.strips
            ]
            return jax.tree.map(lambda *x: jnp.concatenate(x, axis=3), *strips)

        if len(some.query) == 1:
            return visit(int(some.query[0]), int(some.key[0]))
        of_tiles = jax.lax.scan(lambda _, at: (None, visit(*at)), None, (some.query, some.key))[1]
        return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], -1, *x.shape[5:]), of_tiles)

    def fold(
        self,
        tiles: Sequence[Tiles],
        state: Tree,
        find: Callable[[Strip, Index, Index, Index | None], Any],
        put: Callable[[Any, Any, Strip, Index, Index], Any],
        nothing: Any = None,
    ) -> Any:
        """`state` after a loop over tiles.

        Args:
          find: (strip, place of its first query, of its first key, their distance) -> its result.
          put: (state, a result, strip, place of its first query, of its first key) -> state.
          nothing: () -> the result for a whole tile beyond the window.
        """
        for some in tiles:
            state = self._fold_alike(some, state, find, put, nothing)
        return state

    def _fold_alike(self, some: Tiles, state: Tree, find: Any, put: Any, nothing: Any) -> Tree:
        window = self.window if isinstance(some.distance, jax.Array) else None  # it may exclude a tile

        def visit(state: Tree, query: Any, key: Any, distance: Any) -> Tree:
            for strip in some.strips:
                places = strip, query + strip.query, key + strip.key
                apart = None if distance is None else distance + strip.query - strip.key
                look = functools.partial(find, *places, apart)
                if window is None or apart is None:
                    found = look()
                else:
                    found = jax.lax.cond(apart - strip.num_keys + 1 < window, look, nothing)
                state = put(state, found, *places)
            return state

        each = (some.query, some.key) if window is None else (some.query, some.key, some.distance)
        rest = (some.distance,) if window is None else ()
        if len(some.query) > 1:
            return jax.lax.scan(lambda state, at: (visit(state, *at, *rest), None), state, each)[0]
        return visit(state, *(int(x[0]) if isinstance(x, np.ndarray) else x[0] for x in each), *rest)
