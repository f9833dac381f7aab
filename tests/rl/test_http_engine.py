"""Rollouts from a server that is a process of its own, by each interface: as by the local engine, as published, and
measured where the server is off."""

import contextlib
import json
import urllib.parse
from pathlib import Path

import jax
import numpy as np
import pytest

from maxtext_lite.config import UserError
from maxtext_lite.inference.decoding import Sampling
from maxtext_lite.models import Decoder
from maxtext_lite.post_training import servers
from maxtext_lite.post_training.rollout import Request
from maxtext_lite.post_training.rollout_steps import open_rl_run, train_rl
from maxtext_lite.training import Callback
from maxtext_lite.training.state import decoder_shape, make_plain_decoder
from tests.rl.conftest import WHOLE, steps
from tests.rl.served import (
    CONFIG,
    DONE,
    DRAWN,
    REQUESTS,
    engine_at,
    generate,
    local_responses,
    parameters,
)

DECODER = make_plain_decoder(CONFIG)
ADAPTED = Decoder(decoder_shape(CONFIG.model_copy(update={"lora_rank": 2})))
PUBLISHED = json.loads((Path(__file__).parent / "server_schemas.json").read_text())
UPDATES = {
    "vllm": "/pause?mode=abort /collective_rpc /update_weight_version /reset_prefix_cache /resume",
    "sglang": "/pause_generation /update_weights_from_disk /continue_generation",
}
SINCE_0_33 = {"return_weight_versions"}
"""What vLLM ignores before."""


@pytest.fixture
def engine(server, tmp_path, request):
    made = engine_at(server.url, tmp_path, getattr(request, "param", "vllm"))
    yield made
    server.misbehave()
    made.close()


@pytest.mark.parametrize("engine", ["vllm", "sglang"], indirect=True)
def test_greedy_responses_are_those_of_the_local_engine_after_every_update(
    engine, tmp_path
):
    """Of parameters, of others with adapters, and of the first again."""
    found = []
    for step, decoder in enumerate((DECODER, ADAPTED, DECODER)):
        params = parameters(decoder, 0)
        if decoder is ADAPTED:
            params = jax.tree.map(
                lambda x: jax.device_put(np.asarray(x) + 0.1, x.sharding), params
            )
        engine.update(params, step)
        responses, expected = generate(engine), local_responses(params)
        assert [(r.token_ids, r.ended) for r in responses] == [
            (r.token_ids, r.ended) for r in expected
        ]
        for one, other in zip(responses, expected, strict=True):
            np.testing.assert_allclose(
                one.log_probabilities, other.log_probabilities, atol=1e-5
            )
        found.append([response.token_ids for response in responses])
    assert found[0] == found[2] != found[1]
    assert sorted(path.name for path in (tmp_path / servers.WEIGHTS).iterdir()) == [
        "0",
        "1",
    ]


def test_draws_depend_on_seed_and_key(engine, server, tmp_path):
    engine.update(parameters(DECODER, 0), 0)
    first = generate(engine, DRAWN)
    assert generate(engine, DRAWN, REQUESTS[::-1]) == first[::-1]
    same = [Request([5, 40, 7], (0, number)) for number in range(4)]
    ids = {tuple(each.token_ids) for each in generate(engine, DRAWN, same)}
    assert len(ids) > 1
    with contextlib.closing(engine_at(server.url, tmp_path, seed=1)) as other:
        other.update(parameters(DECODER, 0), 0)
        assert generate(other, DRAWN) != first


def test_failures_that_pass_are_tried_again_and_others_are_told(engine, server):
    engine.update(parameters(DECODER, 0), 0)
    (expected,) = generate(engine, requests=REQUESTS[:1])
    server.misbehave(status=500, times=2)
    assert generate(engine, requests=REQUESTS[:1]) == [expected]
    server.misbehave(status=503, times=3)
    with pytest.raises(UserError, match=rf"rollout_url={server.url}/v1.*/completions"):
        generate(engine, requests=REQUESTS[:1])
    server.misbehave(status=404, times=1)
    with pytest.raises(UserError, match="/pause"):
        engine.update(parameters(DECODER, 0), 1)
    with pytest.raises(UserError, match="last update"):
        generate(engine)


@pytest.mark.parametrize(
    ("kind", "route", "answer"),
    [
        ("vllm", "/collective_rpc", {"results": [None, "failed"]}),
        ("vllm", "/resume", {}),
        ("sglang", "/update_weights_from_disk", {"success": False, "message": "no"}),
    ],
)
def test_an_update_that_is_not_done_ends_the_run(
    kind, route, answer, server, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        servers,
        "export_model",
        lambda directory, *_, **__: directory.mkdir(parents=True),
    )
    server.misbehave(route=DONE | {route: answer})
    with contextlib.closing(engine_at(server.url, tmp_path, kind)) as engine:
        with pytest.raises(
            UserError, match=rf"^rollout_url={server.url}.*({route}|step 3)"
        ):
            engine.update({}, 3)
    assert not server.is_paused
    server.misbehave()


@pytest.mark.parametrize("kind", UPDATES)
def test_what_is_sent_is_what_the_package_publishes(kind, server, tmp_path):
    """Of every route that is used: query parameters, and each field of the body."""
    server.misbehave()
    with contextlib.closing(engine_at(server.url, tmp_path, kind)) as engine:
        engine.update(parameters(DECODER, 0), 0)
        generate(engine, DRAWN, REQUESTS[:1])
    assert [path for path, _ in server.told] == UPDATES[kind].split()
    for version in [version for version in PUBLISHED if version.startswith(kind)]:
        ignored = SINCE_0_33 if version == "vllm 0.32.0" else set()
        for path, body in [*server.told, server.last]:
            parts = urllib.parse.urlsplit(path)
            published = PUBLISHED[version][f"POST {parts.path}"]
            for name, value in urllib.parse.parse_qsl(parts.query):
                assert value in published["query"][name]["enum"]
            fields = published["body"] and published["body"]["properties"]
            if fields:
                assert body.keys() - fields.keys() <= ignored, path
                assert body.keys() >= {*published["body"].get("required", ())}
            if "sampling_params" in body:
                (known, *_) = fields["sampling_params"]["anyOf"]
                assert body["sampling_params"].keys() <= known["properties"].keys()


@pytest.mark.parametrize(
    ("mode", "sampling", "start"),
    [
        ("processed_logprobs", Sampling(0.7), None),
        ("raw_logprobs", Sampling(0.7), "processed_logprobs"),
        ("processed_logprobs", Sampling(1.0, 0, 0.9), "raw_logprobs"),
        (None, Sampling(0.7), "processed_logprobs"),
    ],
)
def test_vllm_must_report_the_log_probabilities_of_the_policy(
    mode, sampling, start, engine, server
):
    server.misbehave(logprobs_mode=mode)
    expected = contextlib.nullcontext()
    if start:
        expected = pytest.raises(UserError, match=f"--logprobs-mode {start}")
    with expected:
        engine._ask(engine._server.check(sampling))


@pytest.mark.parametrize(("trained", "evaluated"), [(0.7, 1), (1, 0.7)])
def test_a_server_is_checked_at_the_start_with_the_sampling_that_is_trained_on(
    trained, evaluated, server, tmp_path, config_of
):
    words = f"rollout_engine=vllm rollout_url={server.url} eval_sampling_temperature={evaluated}"
    words += f" decode_sampling_temperature={trained}"
    server.misbehave(logprobs_mode="raw_logprobs")
    expected = contextlib.nullcontext()
    if trained != 1:
        expected = pytest.raises(UserError, match="--logprobs-mode processed_logprobs")
    with expected, contextlib.closing(open_rl_run(config_of(tmp_path, *words.split()))):
        pass
    server.misbehave()


def test_grpo_by_vllm_s_interface_measures_what_the_server_is_off_by(
    server, tmp_path, config_of, capsys, one_device
):
    """With the first batch it is exact; with the second it reports log-probabilities that are 0.5 too low; with the
    third it draws from other parameters."""

    class Worse(Callback):
        def after_step(self, step, record, state):
            if step in (2, 4):
                server.misbehave(**({"shift": -0.5} if step == 2 else {"noise": 0.15}))

    words = "rollout_engine=vllm eval_interval=-1 initializer_range=0.3 enable_checkpointing=false"
    words = [*WHOLE[:3], *words.split(), f"rollout_url={server.url}"]
    result = train_rl(config_of(tmp_path, *words), callbacks=[Worse()])
    server.misbehave()
    exact, shifted, noisy = steps(result.run_directory)[::2]
    assert exact["rollout_mismatch"] < 1e-5
    assert 0 <= exact["rollout_kl"] < 1e-9
    assert exact["rollout_token_nll"] == pytest.approx(exact["token_nll"], abs=1e-5)
    # Probabilities that are exp(0.5) as large by the trainer.
    assert shifted["rollout_mismatch"] == pytest.approx(0.5, abs=1e-4)
    assert shifted["rollout_kl"] == pytest.approx(np.exp(0.5) - 1.5, abs=1e-4)
    assert exact["rollout_truncated"] == shifted["rollout_truncated"] == 0
    assert noisy["rollout_mismatch"] > 0.1
    assert noisy["rollout_kl"] > 0
    assert noisy["rollout_truncated"] > 0
    out = capsys.readouterr()
    told = "differ from the trainer's by 0.5 a token"
    assert (out.out + out.err).count(told) == 1  # once, and not of the third
