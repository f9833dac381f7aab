"""Rollouts over HTTP, from a server that is a process of its own."""

import json
import math
import re
import socket
import subprocess
import sys
import urllib.request

import jax
import numpy as np
import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.config.hf.config import run_config_json
from maxtext_lite.hf import export_model
from maxtext_lite.models import Decoder, Lora, Sampling
from maxtext_lite.parallel import tree_shardings
from maxtext_lite.rl.http_engine import WEIGHTS, HttpEngine, _on_first_host, read_completion
from maxtext_lite.rl.rollout import LocalEngine, Request
from maxtext_lite.rl.transfer import sampling_mesh
from maxtext_lite.training.state import decoder_shape, make_plain_decoder
from tests.parallel.wire import joined_hosts
from tests.processes import environment
from tests.source_tree import REPOSITORY
from tests.training.conftest import TINY

STOP, MOST = 3, 16
GREEDY, DRAWN = Sampling(temperature=0), Sampling(temperature=0.8, top_k=40, top_p=0.95)
REQUESTS = [Request([5 + number, 40, 7], (0, number)) for number in range(6)]
CONFIG = load_config(None, [*TINY, "vocab_size=48", "initializer_range=0.4", "dataset_type=synthetic"])
MESH = sampling_mesh(jax.devices()[:2], {"data": 1, "fsdp": 2, "tensor": 1})


def parameters(decoder, seed):
    """On a mesh, as a trainer has them."""
    return jax.jit(decoder.init, out_shardings=tree_shardings(MESH, decoder.axes))(jax.random.key(seed))


def local_responses(params, sampling=GREEDY):
    engine = LocalEngine(
        make_plain_decoder(CONFIG), MESH, num_slots=4, max_prompt_tokens=MOST, max_new_tokens=MOST,
        stop_token_ids=[STOP], seed=0,
    )  # fmt: skip
    engine.update(params, 0)
    return engine.generate(REQUESTS, sampling=sampling, max_new_tokens=MOST)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a server of a model that no test asks for."""
    directory = tmp_path_factory.mktemp("served")
    fields = run_config_json(directory, CONFIG, num_positions=32, dtype="float32")
    export_model(directory, parameters(make_plain_decoder(CONFIG), 99), fields, dtype="float32")
    command = [sys.executable, str(REPOSITORY / "tests" / "rl" / "openai_server.py"), str(directory), str(STOP)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(1)) as process:
        port = process.stdout.readline().strip()
        assert port, "the server ended before it listened"
        yield f"http://127.0.0.1:{port}"
        process.terminate()


@pytest.fixture
def engine(server, tmp_path):
    made = HttpEngine(f"{server}/v1", CONFIG, tmp_path, stop_token_ids=[STOP], seed=0, wait_seconds=0.01, attempts=3)
    yield made
    misbehave(server)
    made.close()


def misbehave(server, **how):
    with urllib.request.urlopen(urllib.request.Request(f"{server}/misbehave", json.dumps(how).encode())) as answered:
        assert answered.status == 200


def generate(engine, sampling=GREEDY, requests=REQUESTS):
    return engine.generate(requests, sampling=sampling, max_new_tokens=MOST)


def test_greedy_responses_are_those_of_the_local_engine_after_every_update(engine, tmp_path):
    found = []
    for step, seed in enumerate((0, 1, 0)):
        params = parameters(make_plain_decoder(CONFIG), seed)
        engine.update(params, step)
        responses, expected = generate(engine), local_responses(params)
        assert [(r.token_ids, r.ended) for r in responses] == [(r.token_ids, r.ended) for r in expected]
        for one, other in zip(responses, expected, strict=True):
            np.testing.assert_allclose(one.log_probabilities, other.log_probabilities, atol=1e-5)
        found.append([response.token_ids for response in responses])
    assert found[0] == found[2] != found[1]
    assert {response.ended for response in responses} == {True, False}
    assert sorted(path.name for path in (tmp_path / WEIGHTS).iterdir()) == ["0", "1"]


def test_draws_depend_on_seed_and_key(engine, server, tmp_path):
    engine.update(parameters(make_plain_decoder(CONFIG), 0), 0)
    first, again = (generate(engine, DRAWN) for _ in range(2))
    assert first == again
    backwards = generate(engine, DRAWN, REQUESTS[::-1])
    assert backwards == first[::-1]
    same_prompt = generate(engine, DRAWN, [Request([5, 40, 7], (0, number)) for number in range(4)])
    assert len({tuple(response.token_ids) for response in same_prompt}) > 1
    other = HttpEngine(f"{server}/v1", CONFIG, tmp_path, stop_token_ids=[STOP], seed=1)
    other.update(parameters(make_plain_decoder(CONFIG), 0), 0)
    assert generate(other, DRAWN) != first
    other.close()


def test_what_adapters_add_is_in_what_the_server_gets(engine):
    with_lora = CONFIG.model_copy(update={"lora_rank": 2})
    decoder = Decoder(decoder_shape(with_lora))
    assert isinstance(decoder.shape.lora, Lora)
    params = jax.tree.map(lambda x: x + 0.1, parameters(decoder, 0))  # b is zero in new adapters
    engine.update(params, 0)
    responses, expected = generate(engine), local_responses(params)
    assert [response.token_ids for response in responses] == [response.token_ids for response in expected]
    without = local_responses(decoder.frozen(params))
    assert [response.token_ids for response in responses] != [response.token_ids for response in without]


def test_failures_that_pass_are_tried_again_and_others_are_told(engine, server):
    engine.update(parameters(make_plain_decoder(CONFIG), 0), 0)
    expected = generate(engine, requests=REQUESTS[:1])
    misbehave(server, status=500, times=2)
    assert generate(engine, requests=REQUESTS[:1]) == expected
    misbehave(server, status=503, times=3)
    with pytest.raises(
        UserError, match=rf"rollout_url={server}/v1: .*/v1/completions gives no answer after 3 attempts"
    ):
        generate(engine, requests=REQUESTS[:1])
    misbehave(server, status=422, times=2)
    with pytest.raises(UserError, match=r"refuses a request \(HTTP 422: .*as asked"):
        generate(engine, requests=REQUESTS[:1])
    misbehave(server, status=200, times=1)  # and no completion in the answer
    with pytest.raises(UserError, match=r"cannot be used: choices is missing\. The server must"):
        generate(engine, requests=REQUESTS[:1])
    for field in ("token_ids", "logprobs"):
        misbehave(server, without=field)
        with pytest.raises(UserError, match=rf"choices\[0\]\.{field} is missing\..*return_token_ids=true"):
            generate(engine)


def test_a_completion_that_cannot_be_right_ends_the_run_in_one_line(engine, server):
    """All that is checked is in test_what_cannot_be_right_is_refused; here, that it is."""
    engine.update(parameters(make_plain_decoder(CONFIG), 0), 0)
    misbehave(server, choice={"token_ids": [1, -5], "logprobs": {"token_logprobs": [-1, -1]}})
    with pytest.raises(UserError) as refused:
        generate(engine)
    (problem,) = refused.value.problems
    assert problem == (
        f"rollout_url={server}/v1 gives a completion that cannot be used: "
        "choices[0].token_ids[1]=-5 is not an id from 0 to 47."
    )


PROMPT = [5, 40, 7]


def choice(*token_ids, **other):
    """What a server says of these tokens, but for what is given."""
    made = {"index": 0, "text": "", "finish_reason": "length", "token_ids": list(token_ids)}
    return made | {"logprobs": {"token_logprobs": [-0.5] * len(token_ids)}} | other


def logprobs(*values):
    return {"token_logprobs": list(values)}


def read(answer):
    return read_completion(answer, prompt=PROMPT, max_new_tokens=4, vocab_size=48, stop_token_ids=[STOP, 47])


@pytest.mark.parametrize(("said", "response"), [
    (choice(1, 0, 46, 5), ([1, 0, 46, 5], [-0.5] * 4, False)),
    (choice(1, STOP, finish_reason="stop"), ([1, STOP], [-0.5] * 2, True)),
    (choice(9, finish_reason="stop"), ([9], [-0.5], True)),  # after a token that the server itself knows
    (choice(1, 1, 1, 47), ([1, 1, 1, 47], [-0.5] * 4, True)),  # both, as an engine of ours says too
    (choice(1, 2, 4, 5, logprobs=logprobs(0, -3, 1e-7, -999.5)), ([1, 2, 4, 5], [0.0, -3.0, 1e-7, -999.5], False)),
    (choice(1, 2, 4, 5, prompt_token_ids=PROMPT, stop_reason=None), ([1, 2, 4, 5], [-0.5] * 4, False)),
])  # fmt: skip
def test_what_can_be_right_is_taken_as_it_is(said, response):
    for answer in ({"choices": [said]}, {"choices": [said], "prompt_token_ids": PROMPT, "usage": {}}):
        found = read(json.loads(json.dumps(answer)))
        assert found == response
        assert {type(value) for value in found.log_probabilities} == {float}


ONE = choice(1, 2, 4, 5)


@pytest.mark.parametrize(("answer", "wrong"), [
    ({}, "choices is missing"),
    ({"choices": None}, "choices=null is not a list"),
    ({"choices": {"0": ONE}}, 'choices={"0": {"index": 0'),
    ({"choices": []}, "choices=[] is not a list of the one choice"),
    ({"choices": [ONE, ONE]}, "is not a list of the one choice that was asked for"),
    ({"choices": ["text"]}, 'choices=["text"] is not a list of the one choice'),
    ({"choices": [choice(1, 2, 4, 5, index=1)]}, "choices[0].index=1, where the only choice has 0"),
    ({"choices": [choice(1, 2, 4, 5, index=False)]}, "choices[0].index=false"),
    ({"choices": [choice(1, 2, 4, 5, prompt_token_ids=[5, 40])]}, "prompt_token_ids=[5, 40] is not the prompt"),
    ({"choices": [choice(1, 2, 4, 5, prompt_token_ids=[5, 40, 7.0])]}, "prompt_token_ids=[5, 40, 7.0] is not"),
    ({"choices": [ONE], "prompt_token_ids": "5 40 7"}, 'prompt_token_ids="5 40 7" is not the prompt that was sent'),
    ({"choices": [ONE | {"token_ids": None}]}, "choices[0].token_ids=null is not a list"),
    ({"choices": [choice(finish_reason="stop")]}, "token_ids has 0 tokens, where 1 to 4 were asked for"),
    ({"choices": [choice(*[1] * 1000)]}, "token_ids has 1,000 tokens, where 1 to 4 were asked for"),
    *(({"choices": [choice(1, wrong, 4, 5)]}, f"token_ids[1]={json.dumps(wrong)[:80]}")
      for wrong in (-1, 48, -5, 10**30, 10**4000, "2", 2.0, True, None, [2], {})),
    *(({"choices": [choice(1, 2, logprobs=logprobs(-1, wrong))]}, f"token_logprobs[1]={json.dumps(wrong)}")
      for wrong in (math.nan, math.inf, -math.inf, 7, 7.0, 0.01, -9999.0, -1e300, "-1", True, None, [])),
    ({"choices": [choice(1, 2, logprobs=logprobs(-1))]}, "2 token_ids with 1 token_logprobs"),
    ({"choices": [choice(1, 2, logprobs=[-1, -1])]}, "choices[0].logprobs=[-1, -1] is not an object"),
    ({"choices": [choice(1, 2, logprobs=None)]}, "choices[0].logprobs=null is not an object"),
    ({"choices": [choice(1, 2, logprobs={})]}, "choices[0].logprobs.token_logprobs is missing"),
    *(({"choices": [choice(1, 2, finish_reason=wrong)]}, "is neither stop nor length")
      for wrong in (None, "abort", "", 1, ["stop"])),
    ({"choices": [choice(1, STOP, 4, 5)]}, "goes on after one of stop_token_ids=[3, 47]"),
    ({"choices": [choice(1, 2)]}, "finish_reason=length after 2 tokens, where max_tokens=4"),
])  # fmt: skip
def test_what_cannot_be_right_is_refused(answer, wrong):
    with pytest.raises(ValueError, match=re.escape(wrong)) as refused:
        read(answer)
    assert len(str(refused.value)) < 500
    assert str(refused.value).isprintable()


def test_all_hosts_have_what_the_first_one_was_answered_or_its_problems(monkeypatch):
    wire = joined_hosts(monkeypatch)

    def outcome(work):
        def on(_):
            try:
                return _on_first_host(work)
            except UserError as error:
                return error.problems

        return wire.on_all(on)

    def refused():
        raise UserError(["it refuses", "twice"])

    def full():
        raise OSError(28, "No space left on device", "/runs/rollout_weights/0")

    assert outcome(lambda: [[[1, 2], [-0.5, -1e-300], True]]) == [[[[1, 2], [-0.5, -1e-300], True]]] * 3
    assert outcome(refused) == [("it refuses", "twice")] * 3
    assert outcome(full) == [("/runs/rollout_weights/0 cannot be written: No space left on device.",)] * 3


@pytest.mark.fast
def test_no_server_is_one_clear_error(tmp_path):
    with socket.socket() as held:  # a port that nothing listens on
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}/v1"
        nobody = HttpEngine(url, CONFIG, tmp_path, stop_token_ids=[], seed=0, attempts=2, wait_seconds=0.01)
        with pytest.raises(UserError, match=rf"rollout_url={url}: .* gives no answer after 2 attempts .*refused"):
            nobody.update(parameters(make_plain_decoder(CONFIG), 0), 0)
        nobody.close()
    with pytest.raises(UserError, match="rollout_url=localhost:8000 is not the address of a server"):
        HttpEngine("localhost:8000", CONFIG, tmp_path, stop_token_ids=[], seed=0)


def test_nothing_is_sampled_from_parameters_that_the_server_did_not_take(engine, server, monkeypatch):
    params = parameters(make_plain_decoder(CONFIG), 0)
    engine.update(params, 0)
    misbehave(server, status=404, times=1)
    with pytest.raises(UserError, match=r"update_weights_from_disk refuses a request \(HTTP 404"):
        engine.update(params, 1)
    with pytest.raises(UserError, match="has not taken the parameters of the last update"):
        generate(engine)

    def export_half(directory, *_, **__):
        directory.mkdir(parents=True)
        (directory / "config.json").write_text("{}")

    monkeypatch.setattr("maxtext_lite.rl.http_engine.export_model", export_half)
    with pytest.raises(UserError, match=r"did not take the parameters of step 2 from .*/rollout_weights/0: .*no .saf"):
        engine.update(params, 2)
    with pytest.raises(UserError, match="has not taken the parameters of the last update"):
        generate(engine)
