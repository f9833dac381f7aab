"""Local rollouts: draws, their log-probabilities, and that slots, neighbours and devices change nothing."""

import dataclasses

import jax
import numpy as np
import pytest

from maxtext_lite.config import Mla, UserError
from maxtext_lite.generation.sampler import Sampler
from maxtext_lite.models import Decoder, DecoderShape, ExpertShape, Sampling
from maxtext_lite.parallel import tree_shardings
from maxtext_lite.rl.rollout import LocalEngine, Request
from maxtext_lite.rl.transfer import sampling_mesh
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
    "gemma": dataclasses.replace(
        LLAMA,
        pattern=("local", "global"),
        window=3,
        soft_cap=2.0,
        final_soft_cap=3.0,
        norm="rms_norm_plus_one",
        norm_placement="both",
        tied=True,
        scaled_embeddings=True,
        activation="gelu_tanh",
    ),
    "experts": dataclasses.replace(
        LLAMA,
        num_layers=3,
        num_dense_layers=1,
        experts=ExpertShape(4, 2, 12, shared_dim=12, biased=True),
    ),
    "latent": dataclasses.replace(
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


def parameters(decoder):
    """On the host; norms and biases are random too."""
    made = jax.device_get(jax.jit(decoder.init)(jax.random.key(0)))
    random = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: x + (0.2 * random.standard_normal(x.shape)).astype(x.dtype), made
    )


def make_engine(
    shape, *, params=None, num_devices=1, tensor=1, fsdp=1, num_slots=4, stop=(), **more
):
    decoder = Decoder(shape)
    mesh = sampling_mesh(
        jax.devices()[:num_devices],
        {"data": num_devices // (tensor * fsdp), "fsdp": fsdp, "tensor": tensor},
    )
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
    rows = [
        [*request.token_ids, *response.token_ids]
        for request, response in zip(REQUESTS, responses, strict=True)
    ]
    token_BT = np.array([[*row, *[0] * (width - len(row))] for row in rows], np.int32)
    segment_BT = np.array(
        [[1] * len(row) + [0] * (width - len(row)) for row in rows], np.int32
    )
    position_BT = np.tile(np.arange(width, dtype=np.int32), (len(rows), 1))

    def logits(params):
        return decoder.logits(
            params, decoder.hidden(params, token_BT, segment_BT, position_BT)
        )

    scaled_BTV = (
        np.asarray(jax.jit(logits)(parameters(decoder)), np.float64) / temperature
    )
    largest_BT1 = scaled_BTV.max(-1, keepdims=True)
    table_BTV = (
        scaled_BTV
        - largest_BT1
        - np.log(np.exp(scaled_BTV - largest_BT1).sum(-1, keepdims=True))
    )
    found = []
    for number, (request, row) in enumerate(zip(REQUESTS, rows, strict=True)):
        at = range(len(request.token_ids) - 1, len(row) - 1)
        found.append([table_BTV[number, place, row[place + 1]] for place in at])
    return found


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        pytest.param("llama", FREE, marks=pytest.mark.fast),
        ("gemma", Sampling(temperature=0.6, top_p=0.8)),
        ("experts", Sampling(temperature=1.4, top_k=20, top_p=0.9)),
        ("latent", Sampling(temperature=0)),
    ],
    ids=str,
)
def test_log_probabilities_are_those_that_training_finds(name, sampling, engine):
    """With a capacity, training drops tokens of popular experts; sampling never does."""
    shape = SHAPES[name]
    if shape.experts:
        shape = dataclasses.replace(
            shape, experts=dataclasses.replace(shape.experts, capacity_factor=0.25)
        )
    made = (
        engine
        if name == "llama"
        else make_engine(shape, params=parameters(Decoder(SHAPES[name])))
    )
    responses = made.generate(REQUESTS, sampling=sampling, max_new_tokens=MOST_NEW)
    expected = recomputed(SHAPES[name], responses, sampling.temperature or 1)
    for response, wanted in zip(responses, expected, strict=True):
        assert len(response.token_ids) == MOST_NEW
        # In norm: at one place of these the rounding of a few numbers counts fifty times, on some CPUs more.
        apart = np.linalg.norm(np.subtract(response.log_probabilities, wanted))
        assert apart <= 1e-5 * (np.linalg.norm(wanted) + np.sqrt(MOST_NEW))


@pytest.mark.parametrize(
    "how",
    [
        {"num_slots": 1},
        {"num_slots": 5, "refill_fraction": 0.6},
        {"num_devices": 8, "fsdp": 2, "tensor": 2, "num_slots": 8},
    ],
    ids=str,
)
def test_a_response_is_the_same_for_any_slots_and_devices(how, free_responses):
    other = make_engine(LLAMA, **how)
    responses = other.generate(REQUESTS, sampling=FREE, max_new_tokens=MOST_NEW)
    assert tokens(responses) == tokens(free_responses)
    for one, two in zip(responses, free_responses, strict=True):
        # Parameters that change by half a unit in their last place move these by up to 2.6e-5.
        np.testing.assert_allclose(
            one.log_probabilities, two.log_probabilities, rtol=0, atol=3e-5
        )


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


def test_the_sampler_that_streams_draws_the_same(engine):
    decoder, sampling = Decoder(LLAMA), Sampling(temperature=0.9, top_k=6)
    mesh = sampling_mesh(jax.devices()[:1], {"data": 1, "fsdp": 1, "tensor": 1})
    streaming = Sampler(
        decoder,
        jax.device_put(parameters(decoder), tree_shardings(mesh, decoder.axes)),
        mesh,
    )
    prompts = [request.token_ids for request in REQUESTS]
    expected = [[] for _ in prompts]
    for number, token, _ in streaming.stream(
        prompts, max_new_tokens=6, seed=5, sampling=sampling
    ):
        expected[number].append(token)
    numbered = [Request(prompt, (number,)) for number, prompt in enumerate(prompts)]
    assert (
        tokens(engine.generate(numbered, sampling=sampling, max_new_tokens=6))
        == expected
    )


def test_responses_end_at_a_stop_token_or_at_the_most_new_tokens(
    free_responses, engine
):
    stop = [free_responses[0].token_ids[3], free_responses[1].token_ids[0]]
    responses = make_engine(LLAMA, stop=stop).generate(
        REQUESTS, sampling=FREE, max_new_tokens=9
    )
    for cut, whole in zip(responses, free_responses, strict=True):
        places = [
            place for place, token in enumerate(whole.token_ids[:9]) if token in stop
        ]
        length = places[0] + 1 if places else 9
        assert cut.token_ids == whole.token_ids[:length]
        assert cut.ended == bool(places)
        np.testing.assert_allclose(
            cut.log_probabilities, whole.log_probabilities[:length], atol=1e-5
        )
    assert {response.ended for response in responses} == {True, False}
    assert len(responses[1].token_ids) == 1
    single = engine.generate(REQUESTS, sampling=FREE, max_new_tokens=1)
    assert tokens(single) == [response.token_ids[:1] for response in free_responses]


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
    made = make_engine(
        shape, params=params, stop=[STOP], num_slots=4, max_new_tokens=40
    )
    requests = [
        Request([FOREVER if number % 4 == 0 else THREE], (number,))
        for number in range(24)
    ]
    greedy = Sampling(temperature=0)
    responses = made.generate(requests, sampling=greedy, max_new_tokens=40)
    for number, response in enumerate(responses):
        assert response.token_ids == (
            [FOREVER] * 40 if number % 4 == 0 else [3, 2, STOP]
        )
        assert response.ended == (number % 4 != 0)
    assert sum(len(response.token_ids) for response in responses) == 6 * 40 + 18 * 3
    busy = 6 * 39 + 18 * 2  # the first token of each comes with its prompt
    assert busy / 4 <= made.decode_steps <= 2 * 39 + 10
    made.generate(
        [Request([THREE], (number,)) for number in range(3)],
        sampling=greedy,
        max_new_tokens=40,
    )
    assert made.decode_steps == 2, "it stops as soon as the last response has ended"


def test_slots_that_devices_cannot_share_are_refused():
    with pytest.raises(UserError, match=r"rollout_slots=5 .*: 4 or 6"):
        make_engine(LLAMA, num_devices=2, num_slots=5)
