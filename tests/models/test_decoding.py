"""The cache gives what the whole sequence gives; draws follow temperature, top-k and top-p."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from maxtext_lite.config import Mla
from maxtext_lite.inference import cache as kv_cache
from maxtext_lite.inference.decoding import Sampling, decode, new_cache, sample_token
from maxtext_lite.models import Decoder, DecoderShape, ExpertShape
from tests.models.in_place import rewritten

SHAPE = DecoderShape(
    vocab_size=31,
    emb_dim=16,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_dim=24,
    num_layers=2,
)
LATENT = dataclasses.replace(
    SHAPE,
    head_dim=6,
    rotary_dim=2,
    num_kv_heads=4,
    latent=Mla(
        q_lora_rank=0,
        kv_lora_rank=8,
        qk_nope_head_dim=4,
        qk_rope_head_dim=2,
        v_head_dim=5,
    ),
)


def random_params(decoder):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: rng.normal(size=x.shape).astype(np.float32) / 4,
        decoder.abstract_params,
    )


@pytest.mark.parametrize(
    "shape",
    [
        dataclasses.replace(
            SHAPE, pattern=("local", "chunked"), window=3, chunk=5, soft_cap=1.5
        ),
        dataclasses.replace(
            LATENT,
            num_dense_layers=1,
            experts=ExpertShape(6, 2, 10, shared_dim=10, biased=True),
        ),
    ],
    ids=["windows and chunks", "latent, experts"],
)
@pytest.mark.fast
def test_decoding_from_the_cache_equals_the_whole_sequence(shape, monkeypatch):
    """Prompts of different lengths, padded with junk that must be overwritten and never seen; in blocks of queries."""
    monkeypatch.setattr(kv_cache, "_QUERIES", 3)
    decoder = Decoder(shape)
    lengths, total = np.array([3, 7]), 12
    tokens = np.random.default_rng(0).integers(0, 31, (2, total)).astype(np.int32)
    prompt = np.where(np.arange(7)[None] < lengths[:, None], tokens[:, :7], 30)
    position = np.tile(np.arange(total), (2, 1))

    @jax.jit
    def run(params):
        whole = decoder.hidden(params, tokens, np.ones_like(tokens), position)
        of_prompt, cache = decode(
            decoder, params, prompt, jnp.zeros(2, jnp.int32), new_cache(decoder, 2, 16)
        )

        def step(cache, added):
            at = lengths + added
            x, cache = decode(
                decoder,
                params,
                jnp.asarray(tokens)[jnp.arange(2), at][:, None],
                at,
                cache,
            )
            return cache, x[:, 0]

        return whole, of_prompt, jax.lax.scan(step, cache, jnp.arange(total - 7))[1]

    whole, of_prompt, steps = jax.device_get(run(random_params(decoder)))
    for row, length in enumerate(lengths):
        assert_allclose(
            of_prompt[row, :length], whole[row, :length], rtol=1e-4, atol=1e-5
        )
        assert_allclose(
            steps[:, row], whole[row, length : length + 5], rtol=1e-4, atol=1e-5
        )


def test_latent_attention_keeps_one_head_whatever_the_heads():
    cache = jax.eval_shape(lambda: new_cache(Decoder(LATENT), 3, 16))
    assert cache.value is None
    assert cache.key.shape == (
        2,
        3,
        1,
        16,
        8 + 2,
    )  # the latent vector and what is rotated


def test_a_token_is_written_into_the_cache_and_nothing_else_of_it_is():
    decoder = Decoder(
        dataclasses.replace(
            SHAPE,
            num_layers=12,
            pattern=("local", "global"),
            window=3,
            dtype=jnp.bfloat16,
        )
    )
    cache = jax.eval_shape(lambda: new_cache(decoder, 3, 512))
    number, one_each = (
        jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((3,), (3, 1))
    )
    compiled = (
        jax.jit(functools.partial(decode, decoder), donate_argnums=3)
        .lower(decoder.abstract_params, one_each, number, cache)
        .compile()
    )
    layer = min(x.size for x in jax.tree.leaves(cache)) // 12
    # What one layer's attention reads is the most that is taken out of the cache, once each for keys and values. Of
    # two bytes a number it is made of bits, and for a CPU's matmul wider.
    assert {line.split()[0] for line in rewritten(compiled.as_text(), layer)} <= {
        "dynamic-slice",
        "slice",
        "bitcast-convert",
        "convert",
    }
    assert not rewritten(compiled.as_text(), 2 * layer)
    memory = compiled.memory_analysis()
    cache_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes / 2


# ---- Sampling -------------------------------------------------------------------------------------------------------

PROBABILITY = np.array([0.5, 0.25, 0.15, 0.1])
SQUARED = np.array([0.25, 0.0625, 0.0225, 0.01]) / 0.345
CASES = [
    (Sampling(temperature=0), [1, 0, 0, 0]),
    (Sampling(temperature=1), PROBABILITY),
    (Sampling(temperature=0.5), SQUARED),
    (Sampling(temperature=0.5, top_k=2), [0.8, 0.2, 0, 0]),
    (Sampling(top_k=100), PROBABILITY),
    (Sampling(top_p=0.6), [2 / 3, 1 / 3, 0, 0]),  # 0.5 does not reach 0.6, 0.75 does
    (Sampling(top_p=0.01), [1, 0, 0, 0]),
    (Sampling(top_k=3, top_p=0.8), [2 / 3, 1 / 3, 0, 0]),  # of the three: 0.556, 0.833
]


def test_draws_follow_the_asked_distribution_and_log_probabilities_those_of_the_model_or_the_policy():
    draws = 20_000

    @jax.jit
    def draw(logits, key):
        logits, keys = (
            jnp.broadcast_to(logits, (draws, 4)),
            jax.random.split(key, draws),
        )
        of_model = [sample_token(logits, keys, sampling) for sampling, _ in CASES]
        return of_model, [
            sample_token(logits, keys, each, each.policy_temperature)[1]
            for each, _ in CASES
        ]

    found, of_policy = jax.device_get(
        draw(np.float32(np.log(PROBABILITY)), jax.random.key(0))
    )
    for (sampling, expected), (tokens, of_model), policy in zip(
        CASES, found, of_policy, strict=True
    ):
        assert_allclose(
            np.bincount(tokens, minlength=4) / draws,
            expected,
            atol=0.015,
            err_msg=sampling,
        )
        # Over all tokens, whatever the restriction; greedy draws are the model's own.
        assert_allclose(of_model, np.log(PROBABILITY)[tokens], rtol=1e-5)
        right = SQUARED if sampling.temperature == 0.5 else PROBABILITY
        assert_allclose(policy, np.log(right)[tokens], rtol=1e-5)


def test_of_equally_likely_tokens_top_p_keeps_the_fewest():
    logits = np.where(np.arange(8) == 5, np.float32(-1), 0)

    @jax.jit
    def draw(logits, key):
        return sample_token(
            jnp.broadcast_to(logits, (200, 8)),
            jax.random.split(key, 200),
            Sampling(top_p=0.3),
        )[0]

    assert set(np.asarray(draw(logits, jax.random.key(0))).tolist()) == {
        0,
        1,
        2,
    }  # 0.136 each
