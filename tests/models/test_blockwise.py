"""Pieces of attention put together are attention: over parts of the keys, and in either direction."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.models import Scoring
from maxtext_lite.models.blockwise import Keys, attend, block_queries, blockwise_attention, grouped, may_see, merge
from tests.models.test_attention import SINK, by_loops, exact, inputs, with_a_long_document

B, T, N, K, H = 2, 128, 4, 2, 16


def test_what_is_found_over_two_parts_of_the_keys_merges_into_the_whole():
    q, k, v, segment = (jnp.asarray(x) for x in inputs())
    q_BKGTH = grouped(q, K).transpose(0, 2, 3, 1, 4)
    keys = Keys.of(k, v, segment)
    found = []
    for first, count in ((0, 128), (0, 40), (40, 88)):
        part = keys.part(first, count)
        # Every query sees a key of the first part: documents and order masked only in the second.
        seen = may_see(segment, part.segment_BS, 0, first) if first else jnp.ones((B, 1, 1, T, count), bool)
        whole = jnp.concatenate([jnp.ones((B, 1, 1, T, 40), bool), may_see(segment, segment[:, 40:], 0, 40)], axis=-1)
        found.append(attend(q_BKGTH, part, whole if count == T else seen))
    want, *parts = found
    for got, expected in zip(merge(*parts), want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_a_part_without_any_key_to_see_counts_for_nothing():
    q, k, v, segment = (jnp.asarray(x) for x in inputs())
    q_BKGTH, keys = grouped(q, K).transpose(0, 2, 3, 1, 4), Keys.of(k, v, segment)
    everything = jnp.ones((B, 1, 1, T, T), bool)
    one = attend(q_BKGTH, keys, everything)
    for got, want in zip(merge(one, attend(q_BKGTH, keys, ~everything)), one, strict=True):
        np.testing.assert_array_equal(got, want)


def test_may_see_is_causal_and_within_documents():
    segment_T, segment_S = jnp.array([[1, 1, 2]]), jnp.array([[1, 2]])
    seen = lambda *firsts: may_see(segment_T, segment_S, *firsts)[0, 0, 0].tolist()  # noqa: E731
    assert seen(5, 5) == [[True, False], [True, False], [False, True]]
    assert seen(0, 1) == [[False, False], [True, False], [False, True]]
    assert seen(None, 7) == [[True, False], [True, False], [False, True]]
    # Queries 5, 6 and 7, keys 4 and 5.
    assert seen(5, 4, 3) == [[True, False], [True, False], [False, True]]
    assert seen(5, 4, 2) == [[True, False], [False, False], [False, False]]


@pytest.mark.parametrize(("num_tokens", "block"), [(1, 128), (2048, 128), (2049, 256), (32768, 2048)])
def test_there_are_at_most_16_blocks_of_a_multiple_of_128(num_tokens, block):
    assert block_queries(num_tokens) == block


def test_bfloat16_runs_and_stays_close():
    q, k, v, segment = inputs()
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    got, vjp = jax.vjp(lambda q, k, v: blockwise_attention(q, k, v, segment, 64), *narrow)
    assert got.dtype == jnp.bfloat16
    assert all(g.dtype == jnp.bfloat16 for g in vjp(got))
    np.testing.assert_allclose(np.asarray(got, np.float32), by_loops(q, k, v, segment), atol=0.05)


@pytest.mark.parametrize(("scoring", "sinks", "num_kv_heads", "value_dim"), [
    (Scoring(), True, 2, 16),
    (Scoring(window=1, soft_cap=0.7), False, 2, 16),
    (Scoring(scale=0.4, window=7), True, 4, 6),  # inside a block
    (Scoring(window=18, soft_cap=1.5), True, 1, 6),  # the last key of the block before the last
    (Scoring(scale=1.1, window=34, soft_cap=30.0), False, 2, 20),
    (Scoring(scale=0.4, window=999, soft_cap=1.5), True, 2, 6),  # more than there is
], ids=str)  # fmt: skip
def test_windows_soft_caps_sinks_and_values_of_another_width(scoring, sinks, num_kv_heads, value_dim):
    """Three blocks of 16 queries and one of 5, over three sets of documents and padding for each compilation."""
    sink = SINK if sinks else None

    @jax.jit
    def both(q, k, v, segment, g, sink):
        run = lambda q, k, v, sink: blockwise_attention(q, k, v, segment, 16, sink, scoring)  # noqa: E731
        context, vjp = jax.vjp(run, q, k, v, sink)
        return context, *(dx for dx in vjp(g) if dx is not None)

    for seed in range(3):
        q, k, v, segment = inputs(53, seed)
        segment = with_a_long_document(segment)
        k, v = k.repeat(num_kv_heads, axis=2)[:, :, :num_kv_heads], v.repeat(num_kv_heads, axis=2)[:, :, :num_kv_heads]
        v = np.concatenate([v, -2 * v], axis=3)[..., :value_dim]
        g = np.random.default_rng(seed).normal(size=(B, 53, N, value_dim)).astype(np.float32)
        with jax.default_matmul_precision("highest"):
            results = both(q, k, v, segment, g, sink)
        for got, want in zip(results, exact(q, k, v, segment, g, sink, scoring), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_keys_before_every_window_are_not_multiplied():
    """Of 8 blocks of queries each looks at one block of keys or two, not at the up to 8 before it, in both passes."""
    q, k, v, segment = (jnp.zeros(x.shape, x.dtype) for x in inputs(1024))

    def flops(scoring):
        run = lambda q, k, v: blockwise_attention(q, k, v, segment, 128, None, scoring)  # noqa: E731
        forward, both = jax.jit(run), jax.jit(lambda q, k, v: jax.vjp(run, q, k, v)[1](q))
        return np.array([step.lower(q, k, v).cost_analysis()["flops"] for step in (forward, both)])

    pairs = flops(Scoring(window=129)) / flops(Scoring())
    assert np.all(pairs > 15 / 36 - 0.05), pairs  # 1 + 7 x 2 pairs of blocks, of 1 + 2 + ... + 8
    assert np.all(pairs < 15 / 36 + 0.05), pairs
