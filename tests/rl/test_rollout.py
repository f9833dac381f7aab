"""Local rollouts: draws, their log-probabilities, and that slots, neighbours and devices change nothing."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from maxtext_lite.config import Mla
from maxtext_lite.inference.decoding import Sampling
from maxtext_lite.models import Decoder, DecoderShape, ExpertShape
from maxtext_lite.parallel import tree_shardings
from maxtext_lite.post_training.rollout import LocalEngine, Request, sampling_mesh
from tests.models.in_place import rewritten

LLAMA = DecoderShape(
    vocab_size=32,
    emb_dim=16,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_dim=24,
    num_layers=2,
    initializer_range=0.5,
)
SHAPES = {
    "llama": LLAMA,
    "latent experts": dataclasses.replace(
        LLAMA,
        num_kv_heads=4,
        head_dim=6,
        rotary_dim=2,
        latent=Mla(
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_nope_head_dim=4,
            qk_rope_head_dim=2,
            v_head_dim=5,
        ),
        experts=ExpertShape(4, 2, 12, shared_dim=12, biased=True),
    ),
}
MOST_PROMPT, MOST_NEW = 8, 12
_RANDOM = np.random.default_rng(0)
REQUESTS = [
    Request(
        _RANDOM.integers(0, 32, _RANDOM.integers(1, MOST_PROMPT + 1)).tolist(),
        (7, number),
    )
    for number in range(13)
]
FREE = Sampling(temperature=0.8)


@functools.cache
def parameters(decoder):
    """On the host; norms and biases are random too."""
    made = jax.device_get(jax.jit(decoder.init)(jax.random.key(0)))
    random = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: x + (0.2 * random.standard_normal(x.shape)).astype(x.dtype), made
    )


def make_engine(shape, *, params=None, num_slots=4, stop=(), **more):
    decoder = Decoder(shape)
    mesh = sampling_mesh(jax.devices()[:1], {"data": 1, "fsdp": 1, "tensor": 1})
    sizes = {"max_prompt_tokens": MOST_PROMPT, "max_new_tokens": MOST_NEW, "seed": 5}
    made = LocalEngine(
        decoder, mesh, num_slots=num_slots, stop_token_ids=stop, **(sizes | more)
    )
    params = parameters(decoder) if params is None else params
    made.update(jax.device_put(params, tree_shardings(mesh, decoder.axes)), 0)
    return made


@pytest.fixture(scope="module")
def engine():
    return make_engine(LLAMA)


@pytest.fixture(scope="module")
def free_responses(engine):
    return engine.generate(REQUESTS, sampling=FREE, max_new_tokens=MOST_NEW)


def test_the_loop_over_tokens_writes_them_into_the_slots_and_nothing_else(
    engine, free_responses
):
    assert free_responses
    slots = engine._empty()
    loop = engine._decode.lower(
        engine._params, slots, 0, MOST_NEW, sampling=FREE
    ).compile()
    key = slots.cache.key
    assert not rewritten(loop.as_text(), key.size)
    memory = loop.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * key.nbytes


def tokens(responses):
    return [response.token_ids for response in responses]


def recomputed(shape, responses, temperature):
    """Log-probabilities of the responses' tokens, of a forward pass of the whole rows as training does it."""
    decoder, width = Decoder(shape), MOST_PROMPT + MOST_NEW
    token_BT = np.zeros((len(REQUESTS), width), np.int32)
    segment_BT = np.zeros_like(token_BT)
    for number, (request, response) in enumerate(zip(REQUESTS, responses, strict=True)):
        row = [*request.token_ids, *response.token_ids]
        token_BT[number, : len(row)] = row
        segment_BT[number, : len(row)] = 1
    position_BT = np.tile(np.arange(width, dtype=np.int32), (len(REQUESTS), 1))

    @jax.jit
    def logits(params):
        x = decoder.hidden(params, token_BT, segment_BT, position_BT)
        return decoder.logits(params, x)

    scaled_BTV = np.asarray(logits(parameters(decoder)), np.float64) / temperature
    table_BTV = scaled_BTV - np.log(np.exp(scaled_BTV).sum(-1, keepdims=True))
    found = []
    for number, request in enumerate(REQUESTS):
        first = len(request.token_ids)
        new = range(first, first + MOST_NEW)
        found.append([table_BTV[number, at - 1, token_BT[number, at]] for at in new])
    return found


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        pytest.param("llama", FREE, marks=pytest.mark.fast),
        ("latent experts", Sampling(temperature=1.4, top_k=20, top_p=0.9)),
    ],
    ids=str,
)
def test_log_probabilities_are_those_that_training_finds(name, sampling, engine):
    """With a capacity, training drops tokens of popular experts; sampling never does."""
    shape = SHAPES[name]
    made = engine
    if shape.experts:
        experts = dataclasses.replace(shape.experts, capacity_factor=0.25)
        with_drops = dataclasses.replace(shape, experts=experts)
        made = make_engine(with_drops, params=parameters(Decoder(shape)))
    responses = made.generate(REQUESTS, sampling=sampling, max_new_tokens=MOST_NEW)
    expected = recomputed(shape, responses, sampling.temperature)
    for response, wanted in zip(responses, expected, strict=True):
        assert len(response.token_ids) == MOST_NEW
        # In norm: at one place of these the rounding of a few numbers counts fifty times, on some CPUs more.
        apart = np.linalg.norm(np.subtract(response.log_probabilities, wanted))
        assert apart <= 1e-5 * (np.linalg.norm(wanted) + np.sqrt(MOST_NEW))


def test_a_response_depends_on_its_prompt_its_key_and_the_seed_only(
    engine, free_responses
):
    how = {"sampling": FREE, "max_new_tokens": MOST_NEW}
    backwards = engine.generate(REQUESTS[::-1], **how)
    assert tokens(backwards) == tokens(free_responses)[::-1]
    assert tokens(engine.generate(REQUESTS[4:7], **how)) == tokens(free_responses)[4:7]
    same, other = (Request(REQUESTS[4].token_ids, key) for key in ((7, 4), (8, 4)))
    found = tokens(engine.generate([same, other, same], **how))
    assert found[0] == found[2] == free_responses[4].token_ids != found[1]
    assert engine.generate([], **how) == []
    reseeded = make_engine(LLAMA, seed=5 + 2**32)
    assert tokens(reseeded.generate(REQUESTS, **how)) != tokens(free_responses)


FOREVER, STOP, THREE = 0, 1, 4


def counting_down():
    """A model that counts down from 4 to 1, and repeats 0 after 0."""
    shape = dataclasses.replace(LLAMA, emb_dim=32, num_layers=1)
    params = jax.tree.map(np.zeros_like, parameters(Decoder(shape)))
    params["final_norm"]["scale"] += 1
    params["embedding"]["table"] += np.eye(32, dtype=np.float32)
    for token in range(32):
        params["head"]["projection"][token, max(token - 1, 0)] = 9
    return shape, params


def test_a_long_response_keeps_no_slot_busy_but_its_own():
    """24 requests, of which every fourth has a response of 40 tokens and the others of 3. In consecutive groups of 4,
    every group would take the 39 decode steps of its longest: 234."""
    shape, params = counting_down()
    sizes = {"num_slots": 4, "max_new_tokens": 40}
    made = make_engine(shape, params=params, stop=[STOP], **sizes)
    first = [FOREVER, THREE, THREE, THREE] * 6
    requests = [Request([token], (number,)) for number, token in enumerate(first)]
    how = {"sampling": Sampling(temperature=0), "max_new_tokens": 40}
    responses = made.generate(requests, **how)
    for token, response in zip(first, responses, strict=True):
        expected = [FOREVER] * 40 if token == FOREVER else [3, 2, STOP]
        assert response.token_ids == expected
        assert response.ended == (token != FOREVER)
    busy = 6 * 39 + 18 * 2  # the first token of each comes with its prompt
    assert busy / 4 <= made.decode_steps <= 2 * 39 + 10


def test_responses_in_any_slots_end_at_a_stop_token_or_at_the_most_new_tokens(
    free_responses,
):
    stop = [free_responses[0].token_ids[3], free_responses[1].token_ids[0]]
    made = make_engine(LLAMA, stop=stop, num_slots=5, refill_fraction=0.6)
    responses = made.generate(REQUESTS, sampling=FREE, max_new_tokens=9)
    for cut, whole in zip(responses, free_responses, strict=True):
        ids = whole.token_ids[:9]
        places = [place for place, token in enumerate(ids) if token in stop]
        length = places[0] + 1 if places else 9
        assert cut.token_ids == ids[:length]
        assert cut.ended == bool(places)
        np.testing.assert_allclose(
            cut.log_probabilities, whole.log_probabilities[:length], atol=1e-5
        )
    assert {response.ended for response in responses} == {True, False}
    assert len(responses[1].token_ids) == 1
