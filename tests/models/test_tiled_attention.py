"""Attention in tiles, on one device and of tokens split over several, equals float64 attention, and its gradients."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.models import tile_layout
from maxtext_lite.models.attention import attention
from maxtext_lite.models.tile import PLAIN, Scoring
from maxtext_lite.models.tiled_attention import STRATEGIES, tiled_attention
from maxtext_lite.parallel import MESH_AXES, context_order, make_mesh, over_replicas, sharding
from maxtext_lite.xla.hlo import collectives
from tests.models.test_attention import SINK, by_loops, exact, with_a_long_document
from tests.models.test_attention import inputs as rows

B, N, K, H = 2, 4, 2, 8
AXES = ("batch", "length", "activation_heads", None)


def inputs(num_tokens, scale=1.0):
    """Documents of ragged lengths that cross all cuts but the last eighth, which is padding."""
    rng = np.random.default_rng(0)
    q, k, v, g = (rng.normal(size=(B, num_tokens, heads, H)).astype(np.float32) for heads in (N, K, K, N))
    segment = np.cumsum(rng.random((B, num_tokens)) < 4 / num_tokens, axis=1) + 1
    segment[:, -num_tokens // 8 :] = 0
    return scale * q, k, v, segment.astype(np.int32), g


def on_mesh(arrays, dtype=jnp.float32, kernel="dot_product", strategy="ring", sink=None, scoring=PLAIN, **sizes):
    """The compiled function (q, k, v, segment, g) -> context and gradients on a mesh, its arguments, and the mesh."""
    mesh = make_mesh(
        dict.fromkeys(MESH_AXES, 1) | sizes, dict.fromkeys(MESH_AXES, 1), jax.devices()[: math.prod(sizes.values())]
    )
    order = context_order(arrays[0].shape[1], mesh.shape["context"])

    def both(q, k, v, segment, g):
        def run(q, k, v, sink):
            return attention(q, k, v, segment, sink, kernel=kernel, strategy=strategy, scoring=scoring)

        context, vjp = jax.vjp(run, q, k, v, sink)
        return context, *(dx for dx in vjp(g) if dx is not None)

    arguments = [
        jax.device_put(
            x[:, order].astype(dtype if x.ndim == 4 else np.int32), sharding(mesh, AXES[: x.ndim])
        ) for x in arrays
    ]  # fmt: skip
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        return jax.jit(both).lower(*arguments).compile(), arguments, mesh


def in_true_order(results, shards):
    back = np.argsort(context_order(results[0].shape[1], shards))
    return [np.asarray(x, np.float64)[:, back] if x.ndim == 4 else np.asarray(x, np.float64) for x in results]


@pytest.fixture(scope="module")
def ragged():
    arrays = inputs(96)
    return arrays, exact(*arrays)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("sizes", "tile"),
    [
        ({"context": 2}, 512),
        ({"context": 4}, 512),
        ({"context": 8}, 512),
        ({"context": 3}, 8),  # a chunk of 16 tokens is two tiles
        ({"context": 2}, 5),  # a chunk of 24 is four of 6
        ({"context": 2, "tensor": 2, "fsdp": 2}, 8),
    ],
    ids=str,
)
def test_equals_float64_attention_of_whole_examples(sizes, tile, strategy, ragged, monkeypatch):
    monkeypatch.setattr(tile_layout, "_TILE", tile)
    arrays, want = ragged
    compiled, arguments, mesh = on_mesh(arrays, strategy=strategy, **sizes)
    for got, expected in zip(in_true_order(compiled(*arguments), mesh.shape["context"]), want, strict=True):
        assert np.linalg.norm(got - expected) <= 2e-6 * np.linalg.norm(expected)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "tile", "strategy", "scoring", "sinks"),
    [
        ({"context": 2}, 6, "ring", Scoring(window=7, soft_cap=1.5, scale=0.5), True),  # a tile and a key
        ({"context": 2}, 6, "all_gather", Scoring(window=20), False),
        ({"context": 4}, 512, "all_gather", Scoring(window=13, soft_cap=1.5), True),  # a chunk of 12 and a key
        ({"context": 4}, 4, "ring", Scoring(window=31), True),  # crosses chunks, and passes by tiles
        ({"context": 8}, 3, "ring", Scoring(window=50, soft_cap=0.9), False),
        ({"context": 8}, 512, "all_gather", Scoring(window=1), True),
        ({"context": 2, "tensor": 2, "fsdp": 2}, 8, "ring", Scoring(soft_cap=1.5, scale=0.2), True),
    ],
    ids=str,
)
def test_windows_soft_caps_sinks_and_values_of_another_width(
    sizes, tile, strategy, scoring, sinks, ragged, monkeypatch
):
    monkeypatch.setattr(tile_layout, "_TILE", tile)
    (q, k, v, segment, g), _ = ragged
    arrays, sink = (q, k, v[..., :6], with_a_long_document(segment), g[..., :6]), SINK if sinks else None
    compiled, arguments, mesh = on_mesh(arrays, strategy=strategy, sink=sink, scoring=scoring, **sizes)
    results = in_true_order(compiled(*arguments), mesh.shape["context"])
    for got, expected in zip(results, exact(*arrays, sink, scoring), strict=True):
        assert np.linalg.norm(got - expected) <= 2e-6 * np.linalg.norm(expected)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shards", [1, 2])
def test_tiles_beyond_every_window_are_passed_over(shards, monkeypatch):
    """Keys that are not numbers spoil what is computed from them, even where a mask then hides it."""
    monkeypatch.setattr(tile_layout, "_TILE", 4)
    q, k, v, segment, g = inputs(32)
    k, v = (np.where(np.arange(32)[:, None, None] < 4, np.nan, x) for x in (k, v))
    compiled, arguments, _ = on_mesh((q, k, v, segment, g), scoring=Scoring(window=6), context=shards)
    reached = 12  # query 8 is the last whose window holds key 3, and its tile ends at 11
    for got in in_true_order(compiled(*arguments), shards):
        assert np.isnan(got[:, :4]).all()
        assert np.isfinite(got[:, reached:]).all()


def test_replicas_keep_the_gradients_of_their_sinks_apart(ragged):
    """Tiles are passed over, and sinks shared, inside the map over replicas too."""
    (q, k, v, segment, g), _ = ragged
    sizes, ones = dict.fromkeys(MESH_AXES, 1) | {"data": 2, "context": 2}, dict.fromkeys(MESH_AXES, 1)
    mesh = make_mesh(sizes, ones, jax.devices()[:4])
    scoring, order = Scoring(window=7, soft_cap=1.5), context_order(96, 2)

    def dsink(sink, q, k, v, segment, g):
        run = lambda sink: attention(q, k, v, segment, sink, kernel="dot_product", strategy="ring", scoring=scoring)  # noqa: E731
        return jax.vjp(run, sink)[1](g)[0]

    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        apart = jax.jit(over_replicas(dsink, 2, rows=(1, 2, 3, 4, 5)))(SINK, *(x[:, order] for x in ragged[0]))
    for got, row in zip(apart, range(2), strict=True):
        want = exact(*(x[row : row + 1] for x in (q, k, v, segment, g)), SINK, scoring)[-1]
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_scores_beyond_the_range_of_exponentials(strategy):
    """Scores of some thousands, in documents and outside: exp of one would be infinite."""
    arrays = inputs(32, scale=3000.0)
    compiled, arguments, _ = on_mesh(arrays, strategy=strategy, context=4)
    for got, expected in zip(in_true_order(compiled(*arguments), 4), exact(*arrays), strict=True):
        assert np.linalg.norm(got - expected) <= 1e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bfloat16_runs_and_stays_close(strategy, ragged):
    arrays, want = ragged
    compiled, arguments, _ = on_mesh(arrays, dtype=jnp.bfloat16, strategy=strategy, context=4)
    results = compiled(*arguments)
    assert {x.dtype for x in results} == {jnp.dtype(jnp.bfloat16)}
    for got, expected in zip(in_true_order(results, 4), want, strict=True):
        assert np.linalg.norm(got - expected) <= 0.02 * np.linalg.norm(expected)


@pytest.fixture(scope="module")
def long():
    """Compiled for 4,096 tokens, by strategy and shards; nothing of it is run."""
    arrays = inputs(4096)
    keys = (("ring", 1), ("ring", 2), ("ring", 4), ("ring", 8), ("all_gather", 2), ("all_gather", 8))
    return {key: on_mesh(arrays, strategy=key[0], context=key[1])[0] for key in keys}


def temporary_bytes(compiled):
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_falls_with_the_shards(long):
    """A device has some copies of the scores of one tile, its share of the arrays, and what all_gather gathers."""
    queries, keys = (4 * B * 4096 * heads * H for heads in (N, K))  # bytes, float32
    for (strategy, shards), step in long.items():
        tile = 4 * B * N * min(512, 4096 // (2 * shards)) ** 2
        gathered = 2 * 2 * keys if strategy == "all_gather" else 0  # and the gradients of what is gathered
        assert temporary_bytes(step) <= 5 * tile + 12 * queries / shards + gathered


def test_memory_is_linear_in_the_tokens(long):
    """Of 12,288 tokens it is what 4,096 have three times, and no array of them has two dims of tokens."""
    longer = on_mesh(inputs(12288), context=1)[0]
    tile = 4 * B * N * 512**2
    assert temporary_bytes(longer) - tile <= 3.1 * (temporary_bytes(long["ring", 1]) - tile)
    sizes = [
        math.prod(map(int, dims.split(","))) for dims in re.findall(r"[a-z]+[0-9]+\[([0-9,]+)\]", longer.as_text())
    ]
    assert max(sizes) == B * N * 512**2 > B * N * 12288 * H


def test_a_ring_passes_keys_on_and_gathers_nothing(long):
    for shards in (2, 4, 8):
        kinds = {c.kind for c in collectives(long["ring", shards].as_text())}
        assert kinds == {"collective-permute"}
    # Forward k, v and documents; backward these and two gradients. None waits in a loop where there is one other shard.
    assert len(collectives(long["ring", 2].as_text())) in (5, 8)  # the keys of both passes may be one exchange


def test_gathering_is_one_collective_for_each_array(long):
    """Of keys, values and documents, and two reductions back; scores do not travel."""
    found = collectives(long["all_gather", 8].as_text())
    assert {c.kind for c in found} == {"all-gather", "reduce-scatter"}
    assert sum(c.kind == "all-gather" for c in found) in (3, 6)  # of both passes, or shared by them
    assert sum(c.kind == "reduce-scatter" for c in found) == 2
    assert not [c.line for c in found if c.in_loop]


def test_bfloat16_on_one_device_runs_and_stays_close():
    q, k, v, segment = rows()
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    got, vjp = jax.vjp(lambda q, k, v: tiled_attention(q, k, v, segment, "ring"), *narrow)
    assert got.dtype == jnp.bfloat16
    assert all(g.dtype == jnp.bfloat16 for g in vjp(got))
    np.testing.assert_allclose(np.asarray(got, np.float32), by_loops(q, k, v, segment), atol=0.05)


@pytest.mark.parametrize(("scoring", "sinks", "num_kv_heads", "value_dim", "tile"), [
    (Scoring(), True, 2, 16, 512),
    (Scoring(window=1, soft_cap=0.7), False, 2, 16, 512),
    (Scoring(scale=0.4, window=7), True, 4, 6, 512),  # inside a strip
    (Scoring(window=18, soft_cap=1.5), True, 1, 6, 512),  # the last key of the strip before the last
    (Scoring(scale=1.1, window=34, soft_cap=30.0), False, 2, 20, 512),
    (Scoring(scale=0.4, window=999, soft_cap=1.5), True, 2, 6, 512),  # more than there is
    (Scoring(), True, 2, 16, 16),  # three tiles and one that is padded, as in the others
    (Scoring(window=9, soft_cap=0.7), True, 4, 6, 32),  # of two strips each
    (Scoring(scale=0.4, window=18), False, 1, 6, 16),  # sees whole tiles, and parts
], ids=str)  # fmt: skip
def test_windows_soft_caps_sinks_and_other_widths_on_one_device(
    scoring, sinks, num_kv_heads, value_dim, tile, monkeypatch
):
    """Three strips of 16 queries and one of 5, over three sets of documents and padding for each compilation."""
    monkeypatch.setattr(tile_layout, "_STRIP", 16)
    monkeypatch.setattr(tile_layout, "_TILE", tile)
    sink = SINK if sinks else None

    @jax.jit
    def both(q, k, v, segment, g, sink):
        run = lambda q, k, v, sink: tiled_attention(q, k, v, segment, "ring", sink, scoring)  # noqa: E731
        context, vjp = jax.vjp(run, q, k, v, sink)
        return context, *(dx for dx in vjp(g) if dx is not None)

    for seed in range(3):
        q, k, v, segment = rows(53, seed)
        segment = with_a_long_document(segment)
        k, v = k.repeat(num_kv_heads, axis=2)[:, :, :num_kv_heads], v.repeat(num_kv_heads, axis=2)[:, :, :num_kv_heads]
        v = np.concatenate([v, -2 * v], axis=3)[..., :value_dim]
        g = np.random.default_rng(seed).normal(size=(2, 53, N, value_dim)).astype(np.float32)
        with jax.default_matmul_precision("highest"):
            results = both(q, k, v, segment, g, sink)
        for got, want in zip(results, exact(q, k, v, segment, g, sink, scoring), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
