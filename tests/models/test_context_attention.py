"""Attention of tokens that are split over devices equals float64 attention of the whole example, and its gradients."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.models import context_attention
from maxtext_lite.models.attention import attention
from maxtext_lite.models.context_attention import STRATEGIES, tile_tokens
from maxtext_lite.parallel import MESH_AXES, context_order, make_mesh, sharding
from maxtext_lite.parallel.hlo import collectives

B, N, K, H = 2, 4, 2, 8
AXES = ("batch", "length", "activation_heads", None)


def inputs(num_tokens, scale=1.0):
    """Documents of ragged lengths that cross all cuts but the last eighth, which is padding."""
    rng = np.random.default_rng(0)
    q, k, v, g = (rng.normal(size=(B, num_tokens, heads, H)).astype(np.float32) for heads in (N, K, K, N))
    segment = np.cumsum(rng.random((B, num_tokens)) < 4 / num_tokens, axis=1) + 1
    segment[:, -num_tokens // 8 :] = 0
    return scale * q, k, v, segment.astype(np.int32), g


def exact(q, k, v, segment, g):
    """Context, and the gradients of its product with g, in float64."""
    q, k, v, g = (np.asarray(x, np.float64) for x in (q, k, v, g))
    k, v = (x.repeat(N // K, axis=2) for x in (k, v))
    seen = np.tril(np.ones((q.shape[1],) * 2, bool)) & (segment[:, :, None] == segment[:, None, :])
    score = np.where(seen[:, None], np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(H), -np.inf)
    weight = np.exp(score - score.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    context = np.einsum("bnts,bsnh->btnh", weight, v)
    dweight = np.einsum("btnh,bsnh->bnts", g, v)
    dscore = weight * (dweight - np.sum(weight * dweight, -1, keepdims=True)) / np.sqrt(H)
    dq = np.einsum("bnts,bsnh->btnh", dscore, k)
    dk, dv = np.einsum("bnts,btnh->bsnh", dscore, q), np.einsum("bnts,btnh->bsnh", weight, g)
    shared = lambda x: x.reshape(*x.shape[:2], K, N // K, H).sum(axis=3)  # noqa: E731
    return context, dq, shared(dk), shared(dv)


def on_mesh(arrays, dtype=jnp.float32, kernel="dot_product", strategy="ring", **sizes):
    """The compiled function (q, k, v, segment, g) -> context and gradients on a mesh, its arguments, and the mesh."""
    mesh = make_mesh(
        dict.fromkeys(MESH_AXES, 1) | sizes, dict.fromkeys(MESH_AXES, 1), jax.devices()[: math.prod(sizes.values())]
    )
    order = context_order(arrays[0].shape[1], mesh.shape["context"])

    def both(q, k, v, segment, g):
        context, vjp = jax.vjp(lambda *qkv: attention(*qkv, segment, kernel=kernel, strategy=strategy), q, k, v)
        return context, *vjp(g)

    arguments = [
        jax.device_put(
            x[:, order].astype(dtype if x.ndim == 4 else np.int32), sharding(mesh, AXES[: x.ndim])
        ) for x in arrays
    ]  # fmt: skip
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        return jax.jit(both).lower(*arguments).compile(), arguments, mesh


def in_true_order(results, shards):
    back = np.argsort(context_order(results[0].shape[1], shards))
    return [np.asarray(x, np.float64)[:, back] for x in results]


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
    monkeypatch.setattr(context_attention, "_TILE", tile)
    arrays, want = ragged
    compiled, arguments, mesh = on_mesh(arrays, strategy=strategy, **sizes)
    for got, expected in zip(in_true_order(compiled(*arguments), mesh.shape["context"]), want, strict=True):
        assert np.linalg.norm(got - expected) <= 2e-6 * np.linalg.norm(expected)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


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


def test_memory_falls_with_the_shards(long):
    """A device has some copies of the scores of one tile, its share of the arrays, and what all_gather gathers."""
    temporaries = {key: step.memory_analysis().temp_size_in_bytes for key, step in long.items()}
    whole = temporaries.pop(("ring", 1))
    queries, keys = (4 * B * 4096 * heads * H for heads in (N, K))  # bytes, float32
    for (strategy, shards), size in temporaries.items():
        tile = 4 * B * N * tile_tokens(4096 // (2 * shards)) ** 2
        gathered = 2 * 2 * keys if strategy == "all_gather" else 0  # and the gradients of what is gathered
        assert size <= whole / 20
        assert size <= 5 * tile + 12 * queries / shards + gathered


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


@pytest.mark.parametrize(
    ("chunk", "tile"), [(1, 1), (48, 48), (512, 512), (4096, 512), (1536, 512), (900, 450), (1042, 521), (600, 600)]
)
def test_a_tile_divides_a_chunk(chunk, tile):
    assert tile_tokens(chunk) == tile


def test_a_kernel_for_whole_examples_is_refused():
    with pytest.raises(ValueError, match="attention=splash does not work on 2 shards of the tokens"):
        on_mesh(inputs(32), kernel="splash", context=2)
