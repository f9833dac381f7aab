"""The tiles of all devices hold each pair of a query and a key that it sees, once, and little else."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.models import tile_layout
from maxtext_lite.models.tile_layout import Layout
from maxtext_lite.parallel import context_order


def visits(num_tokens, shards, window, monkeypatch, tile=8, strip=2):
    """How often each query is multiplied by each key [T, S], all shards together, by their numbers in the example."""
    monkeypatch.setattr(tile_layout, "_TILE", tile)
    monkeypatch.setattr(tile_layout, "_STRIP", strip)
    monkeypatch.setattr(tile_layout, "context_shards", lambda: shards)
    layout = Layout.of(num_tokens // shards, window)
    order = context_order(num_tokens, shards) if shards > 1 else np.arange(num_tokens)
    nowhere = num_tokens  # where padding goes
    numbers = order.reshape(shards * layout.num_runs, layout.run)
    numbers = np.pad(numbers, ((0, 0), (0, layout.padded_run - layout.run)), constant_values=nowhere)
    numbers = numbers.reshape(shards, -1)
    times = np.zeros((num_tokens + 1, num_tokens + 1), int)

    def find(strip, query, key, distance):
        q, k = (numbers[of][first : first + count] for of, first, count in (
            (own, int(query), strip.num_queries), (other, int(key), strip.num_keys)))  # fmt: skip
        if distance is not None and nowhere not in (q[0], k[0]):
            assert q[0] - k[0] == int(distance)
        return np.ix_(q, k)

    def put(state, found, strip, query, key):
        if found is not None:
            times[found] += 1
        return state

    for own in range(shards):
        monkeypatch.setattr(tile_layout, "own_shard", lambda own=own: jnp.int32(own))
        for other in range(shards):
            tiles = layout.own_tiles() if other == own else layout.tiles_with(jnp.int32(other))
            with monkeypatch.context() as patch:
                patch.setattr(tile_layout.jax.lax, "scan", by_loop)
                patch.setattr(tile_layout.jax.lax, "cond", lambda near, yes, no: yes() if near else no())
                layout.fold(tiles, 0, find, put, lambda: None)
    return times[:-1, :-1]


def by_loop(one, state, each):
    """`jax.lax.scan` of functions that are not of jax."""
    for at in zip(*each, strict=True):
        state, _ = one(state, at)
    return state, None


@pytest.mark.parametrize("window", [None, 1, 2, 7, 8, 9, 17, 40])
@pytest.mark.parametrize(("num_tokens", "shards"), [(8, 1), (6, 1), (32, 1), (41, 1), (64, 2), (96, 3), (72, 2)])
def test_what_a_query_sees_is_visited_once(num_tokens, shards, window, monkeypatch):
    times = visits(num_tokens, shards, window, monkeypatch)
    distance = np.arange(num_tokens)[:, None] - np.arange(num_tokens)
    seen = (distance >= 0) & (distance < (window or num_tokens))
    assert np.all(times[seen] == 1)
    assert np.max(times) == 1


def test_keys_before_every_window_are_not_multiplied(monkeypatch):
    """Two tiles of four strips: each strip looks at its own keys and those of the strip before, as the window does."""
    whole, near = (np.sum(visits(16, 1, window, monkeypatch)) for window in (None, 3))
    assert (whole, near) == (36 * 4, 15 * 4)  # 1 + 2 + .. + 8 pairs of strips, of 2 x 2 tokens; 1 + 7 x 2


def test_shards_have_equal_work(monkeypatch):
    times = visits(96, 3, None, monkeypatch)
    owners = np.argsort(context_order(96, 3)) // 32
    assert len({int(times[owners == shard].sum()) for shard in range(3)}) == 1


@pytest.mark.parametrize(
    ("run", "num_tiles", "tile"),
    [(1, 1, 1), (500, 1, 500), (512, 1, 512), (513, 2, 264), (1536, 3, 512), (2049, 5, 416), (4099, 9, 456)],
)
def test_there_are_as_few_tiles_as_can_be_and_little_padding(run, num_tiles, tile):
    layout = Layout.of(run, None)
    assert (layout.num_tiles, layout.tile) == (num_tiles, tile)
    assert run <= layout.padded_run < run + 8 * num_tiles
