"""The cache gives what the whole sequence gives; draws follow temperature, top-k and top-p."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.config import Mla
from maxtext_lite.models import Decoder, DecoderShape, ExpertShape, KVCache, Sampling, Scoring, decoding, sample_token
from maxtext_lite.models.decoding import CachedAttend
from tests.models.in_place import rewritten
from tests.models.test_attention import SINK, by_loops, inputs

SHAPE = DecoderShape(vocab_size=31, emb_dim=16, num_query_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=24, num_layers=2)


def empty_cache(shape):
    return KVCache.empty(
        num_layers=shape.num_layers,
        num_sequences=2,
        num_positions=16,
        num_kv_heads=shape.num_kv_heads,
        key_dim=shape.head_dim,
        value_dim=shape.head_dim,
        dtype=shape.dtype,
    )


@pytest.mark.parametrize("experts", [None, ExpertShape(6, 2, 10, shared_dim=10, biased=True)], ids=["mlp", "experts"])
def test_decoding_from_the_cache_equals_the_whole_sequence(experts):
    decoder = Decoder(dataclasses.replace(SHAPE, experts=experts))
    params = jax.tree.map(lambda x: 4 * x, jax.jit(decoder.init)(jax.random.key(0)))
    lengths, total = np.array([3, 7]), 12
    tokens = np.random.default_rng(0).integers(0, 31, (2, total)).astype(np.int32)
    position = jnp.tile(jnp.arange(total), (2, 1))
    whole = jax.jit(lambda p: decoder.hidden(p, tokens, jnp.ones_like(tokens), position))(params)

    # Prompts of different lengths, padded with junk that must be overwritten and never seen.
    prompt = np.where(np.arange(7)[None] < lengths[:, None], tokens[:, :7], 30)
    decode = jax.jit(decoder.decode)
    x, cache = decode(params, prompt, jnp.zeros(2, jnp.int32), empty_cache(decoder.shape))
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(x[row, :length], whole[row, :length], rtol=1e-4, atol=1e-5)
    for added in range(total - 7):
        at = lengths + added
        x, cache = decode(params, tokens[np.arange(2), at][:, None], jnp.asarray(at), cache)
        np.testing.assert_allclose(x[:, 0], whole[np.arange(2), at], rtol=1e-4, atol=1e-5)


def test_a_cache_of_two_bytes_a_number_keeps_their_bits():
    """As accelerators keep them: the same decoding with a cache of bfloat16."""
    decoder = Decoder(
        dataclasses.replace(SHAPE, dtype=jnp.bfloat16, head_dim=4, rotary_dim=2, latent=Mla(0, 8, 2, 2, 5))
    )
    params = decoder.cast(jax.jit(decoder.init)(jax.random.key(0)))
    bits = decoder.new_cache(2, 16)
    assert {x.dtype for x in jax.tree.leaves(bits)} == {jnp.dtype(jnp.uint16)}
    plain = jax.tree.map(lambda x: x.view(jnp.bfloat16), bits)
    decode = jax.jit(decoder.decode)
    for at in range(3):
        token = jnp.asarray([[at], [7]])
        x, bits = decode(params, token, jnp.full(2, at), bits)
        y, plain = decode(params, token, jnp.full(2, at), plain)
        for found, expected in ((x, y), (bits.key.view(jnp.bfloat16), plain.key)):
            np.testing.assert_allclose(found.astype(jnp.float32), expected.astype(jnp.float32), rtol=0.02, atol=0.02)
    assert jnp.abs(plain.key.astype(jnp.float32)[:, :, :, :3]).max() > 0.1


@pytest.mark.parametrize(("scoring", "sink", "at_once"), [
    (Scoring(window=4, soft_cap=1.5, scale=0.4), SINK, 512),
    (Scoring(window=4, soft_cap=1.5, scale=0.4), SINK, 3),
    (Scoring(window=1), None, 512),
    (Scoring(soft_cap=0.8), SINK, 512),
    (Scoring(soft_cap=0.8), SINK, 2),
    (Scoring(soft_cap=0.8), SINK, 4),
], ids=str)  # fmt: skip
def test_cached_attention_knows_windows_soft_caps_sinks_and_values_of_another_width(
    scoring, sink, at_once, monkeypatch
):
    """A prompt of 6 tokens, of whose queries some take turns, in a longer cache, then one token at a time."""
    monkeypatch.setattr(decoding, "_QUERIES", at_once)
    q, k, v, _ = inputs(12)
    v = v[..., :6]
    want = by_loops(q, k, v, np.ones((2, 12), np.int32), sink, scoring)
    cache = KVCache.empty(
        num_layers=3, num_sequences=2, num_positions=20, num_kv_heads=2, key_dim=16, value_dim=6, dtype=jnp.float32
    )
    assert (cache.key.shape, cache.value.shape) == ((3, 2, 2, 20, 16), (3, 2, 2, 20, 6))
    run = jax.jit(lambda q, k, v, position, cache: CachedAttend(position, cache, 1, scoring)(q, k, v, sink))
    for first, end in ((0, 6), *((t, t + 1) for t in range(6, 12))):
        position = jnp.tile(jnp.arange(first, end), (2, 1))
        context, cache = run(*(x[:, first:end] for x in (q, k, v)), position, cache)
        np.testing.assert_allclose(context, want[:, first:end], rtol=1e-5, atol=1e-6)
    for layers in cache:  # the others are as they were
        assert not np.asarray(layers)[[0, 2]].any()
        assert np.asarray(layers)[1, :, :, :12].all()


@pytest.mark.parametrize("shape", [
    dataclasses.replace(SHAPE, num_layers=7, pattern=("local", "local", "global"), window=3),
    dataclasses.replace(
        SHAPE, num_layers=6, num_dense_layers=1, head_dim=6, rotary_dim=2, experts=ExpertShape(4, 2, 10),
        latent=Mla(q_lora_rank=0, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=5),
    ),
    dataclasses.replace(SHAPE, dtype=jnp.bfloat16, num_layers=12),
], ids=["windows", "latent", "bfloat16"])  # fmt: skip
def test_a_token_is_written_into_the_cache_and_nothing_else_of_it_is(shape):
    decoder = Decoder(shape)
    cache = jax.eval_shape(lambda: decoder.new_cache(3, 512))
    number, one_each = jax.ShapeDtypeStruct((3,), jnp.int32), jax.ShapeDtypeStruct((3, 1), jnp.int32)
    decode = jax.jit(decoder.decode, donate_argnums=3).lower(decoder.abstract_params, one_each, number, cache).compile()
    layer = min(x.size for x in jax.tree.leaves(cache)) // shape.num_layers
    # What one layer's attention reads is the most that is taken out of the cache, once each for keys and values.
    # Of two bytes a number it is made of bits, and for a CPU's matmul wider.
    made_of_bits = {"bitcast-convert", "convert"} if shape.dtype == jnp.bfloat16 else set()
    assert {line.split()[0] for line in rewritten(decode.as_text(), layer)} <= {"dynamic-slice", "slice"} | made_of_bits
    assert not rewritten(decode.as_text(), 2 * layer)
    memory = decode.memory_analysis()
    cache_bytes = sum(x.nbytes for x in jax.tree.leaves(decoder.new_cache(3, 512)))
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes / 2


LOGITS = np.log(np.array([0.5, 0.25, 0.15, 0.1]))


def _frequencies(sampling, draws=20_000):
    keys = jax.random.split(jax.random.key(0), draws)
    logits = jnp.broadcast_to(jnp.asarray(LOGITS, jnp.float32), (draws, 4))
    tokens, log_probabilities = jax.jit(lambda l, k: sample_token(l, k, sampling))(logits, keys)
    np.testing.assert_allclose(log_probabilities, LOGITS[tokens], rtol=1e-5)  # of the model, whatever the restriction
    return np.bincount(tokens, minlength=4) / draws


@pytest.mark.parametrize(("sampling", "expected"), [
    (Sampling(temperature=0), [1, 0, 0, 0]),
    (Sampling(temperature=1), [0.5, 0.25, 0.15, 0.1]),
    (Sampling(temperature=0.5), [0.25 / 0.345, 0.0625 / 0.345, 0.0225 / 0.345, 0.01 / 0.345]),  # p^2, normalised
    (Sampling(top_k=2), [2 / 3, 1 / 3, 0, 0]),
    (Sampling(top_k=100), [0.5, 0.25, 0.15, 0.1]),
    (Sampling(top_p=0.6), [2 / 3, 1 / 3, 0, 0]),  # 0.5 does not reach 0.6, 0.75 does
    (Sampling(top_p=0.01), [1, 0, 0, 0]),
    (Sampling(top_k=3, top_p=0.8), [2 / 3, 1 / 3, 0, 0]),  # of the three: 0.556, 0.833
], ids=str)  # fmt: skip
def test_draws_follow_the_asked_distribution(sampling, expected):
    np.testing.assert_allclose(_frequencies(sampling), expected, atol=0.015)


def test_of_equally_likely_tokens_top_p_keeps_the_fewest():
    keys, logits = jax.random.split(jax.random.key(0), 200), jnp.zeros((200, 8)).at[:, 5].set(-1)
    drawn, _ = jax.jit(lambda l, k: sample_token(l, k, Sampling(top_p=0.3)))(logits, keys)
    assert set(drawn.tolist()) == {0, 1, 2}  # 0.136 each


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.5), Sampling(temperature=0.5, top_k=2), Sampling(0)], ids=str
)
def test_log_probabilities_may_be_those_of_the_policy(sampling):
    """At temperature 0.5: p^2, normalised, over all tokens whatever the restriction; greedy: p."""
    logits = jnp.broadcast_to(jnp.asarray(LOGITS, jnp.float32), (200, 4))
    keys = jax.random.split(jax.random.key(1), 200)
    tokens, found = jax.jit(lambda l, k: sample_token(l, k, sampling, sampling.policy_temperature))(logits, keys)
    policy = [0.25 / 0.345, 0.0625 / 0.345, 0.0225 / 0.345, 0.01 / 0.345] if sampling.temperature else np.exp(LOGITS)
    np.testing.assert_allclose(found, np.log(policy)[tokens], rtol=1e-5)
