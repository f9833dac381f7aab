"""Rollouts over HTTP, from a server that is a process of its own."""

import socket

import jax
import numpy as np
import pytest

from maxtext_lite.config import UserError
from maxtext_lite.models import Decoder, Lora
from maxtext_lite.rl.http_engine import WEIGHTS, HttpEngine, _on_first_host
from maxtext_lite.rl.rollout import Request
from maxtext_lite.training.state import decoder_shape, make_plain_decoder
from tests.parallel.wire import joined_hosts
from tests.rl.served import (
    CONFIG,
    DRAWN,
    REQUESTS,
    engine_at,
    generate,
    local_responses,
    misbehave,
    parameters,
)


@pytest.fixture
def engine(server, tmp_path, request):
    made = engine_at(server, tmp_path, getattr(request, "param", "http"))
    yield made
    misbehave(server)
    made.close()


@pytest.mark.parametrize("engine", ["http", "vllm", "sglang"], indirect=True)
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
    other = engine_at(server, tmp_path, seed=1)
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
    """test_server_answers.py tests the checks; this tests that they are made."""
    engine.update(parameters(make_plain_decoder(CONFIG), 0), 0)
    misbehave(server, choice={"token_ids": [1, -5], "logprobs": {"token_logprobs": [-1, -1]}})
    with pytest.raises(UserError) as refused:
        generate(engine)
    (problem,) = refused.value.problems
    assert problem == (
        f"rollout_url={server}/v1 gives a completion that cannot be used: "
        "choices[0].token_ids[1]=-5 is not an id from 0 to 47."
    )


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
        nobody = HttpEngine("http", url, CONFIG, tmp_path, stop_token_ids=[], seed=0, attempts=2, wait_seconds=0.01)
        with pytest.raises(UserError, match=rf"rollout_url={url}: .* gives no answer after 2 attempts .*refused"):
            nobody.update(parameters(make_plain_decoder(CONFIG), 0), 0)
        nobody.close()
    with pytest.raises(UserError, match="rollout_url=localhost:8000 is not the address of a server"):
        HttpEngine("http", "localhost:8000", CONFIG, tmp_path, stop_token_ids=[], seed=0)


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
