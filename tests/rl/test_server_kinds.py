"""Each interface: requests and answers fit the package's published schema, and a run through it learns the same."""

import json
import re
import urllib.parse
from pathlib import Path

import numpy as np
import pytest

from maxtext_lite.config import UserError
from maxtext_lite.models import Sampling
from maxtext_lite.rl import http_engine
from maxtext_lite.rl.http_client import Server
from maxtext_lite.rl.rollout_steps import train_rl
from maxtext_lite.rl.server_kinds import SERVER_KINDS
from maxtext_lite.training import Callback
from maxtext_lite.training.state import make_plain_decoder
from tests.rl.conftest import steps
from tests.rl.served import CONFIG, GREEDY, REQUESTS, engine_at, generate, heard, misbehave, parameters

PUBLISHED = json.loads((Path(__file__).parent / "server_schemas.json").read_text())
UPDATES = {
    "vllm": ["/pause?mode=abort", "/collective_rpc", "/update_weight_version", "/reset_prefix_cache", "/resume"],
    "sglang": ["/pause_generation", "/update_weights_from_disk", "/continue_generation"],
}
SINCE_0_33 = {"return_weight_versions"}
"""What vLLM ignores before."""


def refusals(value, schema, at=""):
    """Where a JSON value violates a schema, by the parts of JSON Schema in PUBLISHED."""
    if "anyOf" in schema:
        branches = [refusals(value, branch, at) for branch in schema["anyOf"]]
        return min(branches, key=len)
    kinds = {"integer": int, "number": (int, float), "string": str, "boolean": bool, "array": list, "object": dict}
    kind = schema.get("type")
    if kind == "null" or (kind and not isinstance(value, kinds[kind])):
        return [] if kind == "null" and value is None else [f"{at}={value!r} is no {kind}"]
    if kind in ("integer", "number") and isinstance(value, bool):
        return [f"{at}={value!r} is no {kind}"]
    wrong = [
        f"{at}={value!r}" for key in ("enum", "const") if key in schema and value not in np.atleast_1d(schema[key])
    ]
    if kind in ("integer", "number") and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        wrong.append(f"{at}={value!r} is out of range")
    if kind == "array":
        of = schema.get("prefixItems") or [schema["items"]] * len(value)
        wrong += [] if len(of) == len(value) else [f"{at} has {len(value)} items"]
        pairs = zip(value, of, strict=False)
        return wrong + [x for number, (each, one) in enumerate(pairs) for x in refusals(each, one, f"{at}[{number}]")]
    if kind == "object":
        wrong += [f"{at}.{name} is missing" for name in schema.get("required", ()) if name not in value]
        known = schema.get("properties", {})
        wrong += [x for name in value if name in known for x in refusals(value[name], known[name], f"{at}.{name}")]
        if schema.get("additionalProperties") is False:
            wrong += [f"{at}.{name} is not known" for name in value if name not in known]
    return wrong


@pytest.mark.fast
def test_the_check_of_schemas_finds_what_is_wrong():
    body = PUBLISHED["vllm 0.33.0"]["POST /v1/completions"]["body"]
    assert refusals({"prompt": [1, 2], "seed": 3, "top_p": 1}, body) == []
    for wrong in ({"prompt": [1, -2]}, {"prompt": [1.5]}, {"n": "1"}, {"n": True}, {"ignore_eos": 1}, {"seed": 2**64}):
        assert len(refusals(wrong, body)) == 1, wrong
    sglang = PUBLISHED["sglang 0.5.23"]
    assert refusals({"sampling_params": {"n": 1, "best_of": 2}}, sglang["POST /generate"]["body"])
    assert refusals({"mode": "stop"}, sglang["POST /pause_generation"]["body"])
    assert refusals({}, sglang["POST /update_weights_from_disk"]["body"]) == [".model_path is missing"]
    answer = {"meta_info": {"output_token_logprobs": [[-1.0, 2]]}}
    assert refusals(answer, sglang["POST /generate"]["answer"])


@pytest.mark.parametrize("kind", UPDATES)
def test_what_is_sent_and_answered_is_what_the_package_publishes(kind, server, tmp_path):
    """Of every route that is used: query parameters and body, each field known, and the answer that the server of these
    tests gives."""
    misbehave(server, logprobs_mode="processed_logprobs")
    engine = engine_at(server, tmp_path, kind)
    engine.update(parameters(make_plain_decoder(CONFIG), 0), 0)
    generate(engine, Sampling(temperature=0.8), REQUESTS[:1])
    engine.close()
    said = heard(server)
    assert [path for path, _ in said["told"]] == UPDATES[kind]
    versions = [version for version in PUBLISHED if version.startswith(kind)]
    assert len(versions) == {"vllm": 2, "sglang": 1}[kind]
    for version in versions:
        check_exchange(said, version)


def check_exchange(said, version):
    routes = PUBLISHED[version]
    for path, body in [*said["told"], [said["last"]["path"], said["last"]["body"]]]:
        parts = urllib.parse.urlsplit(path)
        published = routes[f"POST {parts.path}"]
        for name, value in urllib.parse.parse_qsl(parts.query):
            assert refusals(value, published["query"][name], name) == []
        if published["body"] is None:
            continue
        assert refusals(body, published["body"]) == []
        known = set(published["body"]["properties"])
        assert set(body) - known <= (SINCE_0_33 if version == "vllm 0.32.0" else set()), path
    answer = routes[f"POST {said['last']['path']}"]["answer"]
    assert refusals(said["last"]["answer"], answer) == []
    if version.startswith("vllm"):
        assert "json" in routes["GET /server_info"]["query"]["config_format"]["enum"]
        assert set(said["last"]["answer"]["choices"][0]) - {"weight_versions"} <= set(
            answer["properties"]["choices"]["items"]["properties"]
        )


class Told:
    """A server with one answer to every GET."""

    name, path = "rollout_url=http://x", ""

    def __init__(self, answer):
        self.answer = answer

    def get(self, path, *, most_bytes):
        assert (path, most_bytes > 100_000) == ("/server_info?config_format=json", True)
        return self.answer


@pytest.mark.fast
def test_vllm_must_report_the_log_probabilities_of_the_policy():
    def outcome(mode, *sampling):
        answer = {"vllm_config": {"model_config": {"logprobs_mode": mode}}}
        try:
            SERVER_KINDS["vllm"].check(Told(answer), Sampling(*sampling))
        except UserError as error:
            return str(error)
        return None

    assert outcome("raw_logprobs", 1.0) is outcome("processed_logprobs", 1.0) is None
    assert outcome("processed_logprobs", 0.7) is None
    assert outcome("raw_logprobs", 1.0, 40) is outcome("raw_logprobs", 1.0, 0, 0.9) is None
    assert outcome("raw_logprobs", 0.7) == (
        'rollout_url=http://x reports logprobs_mode="raw_logprobs": with decode_sampling_temperature=0.7, top_k=0 and '
        "nucleus_p=1 they are not those of the policy. Start it with --logprobs-mode processed_logprobs."
    )
    assert "top_k=40" in outcome("processed_logprobs", 1.0, 40)
    assert outcome("processed_logprobs", 1.0, 0, 0.9).endswith("Start it with --logprobs-mode raw_logprobs.")
    for mode in ("raw_logits", None, 3):
        assert "Start it with --logprobs-mode" in outcome(mode, 1.0)
    for answer in ({}, {"vllm_config": "VllmConfig(...)"}, {"vllm_config": {"model_config": 1}}):
        with pytest.raises(UserError, match="logprobs_mode=null"):
            SERVER_KINDS["vllm"].check(Told(answer), Sampling(1.0))


@pytest.mark.parametrize(("kind", "route", "answer", "wrong"), [
    ("vllm", "/pause", {"status": "busy"}, '/pause?mode=abort answers {"status": "busy"}, not {"status": "paused"}'),
    ("vllm", "/collective_rpc", {"results": [None, "failed"]}, "did not take the parameters of step 3 from"),
    ("vllm", "/collective_rpc", {"results": []}, "did not take the parameters of step 3 from"),
    ("vllm", "/collective_rpc", {}, "did not take the parameters of step 3 from"),
    ("vllm", "/update_weight_version", {"success": False}, '/update_weight_version answers {"success": false}'),
    ("vllm", "/reset_prefix_cache", {"success": False}, "/reset_prefix_cache answers"),
    ("vllm", "/resume", {}, "/resume answers {}"),
    ("sglang", "/pause_generation", {}, "/pause_generation answers {}"),
    ("sglang", "/update_weights_from_disk", {"success": False, "message": "no"}, "of step 3 from .*\"no\""),
    ("sglang", "/continue_generation", {"status": 1}, "/continue_generation answers"),
])  # fmt: skip
def test_an_update_that_is_not_done_ends_the_run(kind, route, answer, wrong, server, tmp_path, monkeypatch):
    monkeypatch.setattr(http_engine, "export_model", lambda directory, *_, **__: directory.mkdir(parents=True))
    others = {path.partition("?")[0] for path in UPDATES[kind]} - {route}
    fine = {"status": "ok", "success": True, "results": [None]}
    words = {"/pause": "paused", "/resume": "resumed"}
    misbehave(server, route={route: answer} | {path: fine | {"status": words.get(path, "ok")} for path in others})
    engine = engine_at(server, tmp_path, kind)
    pattern = wrong if ".*" in wrong else re.escape(wrong)
    with pytest.raises(UserError, match=pattern) as refused:
        engine.update({}, 3)
    assert str(refused.value).startswith(f"rollout_url={server}")
    with pytest.raises(UserError, match="has not taken the parameters of the last update"):
        generate(engine)
    engine.close()
    misbehave(server)


def test_a_server_that_others_took_the_parameters_for_is_found_out(server, tmp_path):
    """As behind an address with two servers, only one of which took the last update."""
    engine = engine_at(server, tmp_path, "vllm")
    engine.update(parameters(make_plain_decoder(CONFIG), 0), 0)
    other = engine_at(server, tmp_path / "other", "vllm")
    other.update(parameters(make_plain_decoder(CONFIG), 1), 0)
    with pytest.raises(UserError, match=r"weight_versions=.*it sampled from other parameters"):
        generate(engine, GREEDY)
    assert generate(other, GREEDY)
    engine.close()
    other.close()


GRPO = (
    "rollout_engine=vllm", "steps=3", "eval_interval=-1", "ici_fsdp_parallelism=8", "enable_checkpointing=false",
    "rollout_correction=truncated", "initializer_range=0.3",
)  # fmt: skip


def test_grpo_by_vllm_s_interface_measures_what_the_server_is_off_by(server, tmp_path, config_of, monkeypatch, capsys):
    """At the first step it is exact; at the second it reports log-probabilities that are 0.5 too low; at the third it
    draws from other parameters, and how far these are from the trainer's, transformers says in double precision."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sampled = []
    generate_by = http_engine.HttpEngine.generate

    def recorded(self, requests, **how):
        responses = generate_by(self, requests, **how)
        sampled.extend(zip(requests, responses, strict=True))
        return responses

    class Worse(Callback):
        def after_step(self, step, record, state):
            misbehave(server, **({"shift": -0.5} if step == 1 else {"noise": 0.15}))
            if step < 3:
                sampled.clear()

    monkeypatch.setattr(http_engine.HttpEngine, "generate", recorded)
    result = train_rl(config_of(tmp_path, *GRPO, f"rollout_url={server}"), callbacks=[Worse()])
    misbehave(server)
    exact, shifted, noisy = steps(result.run_directory)
    assert exact["rollout_mismatch"] < 1e-5
    assert 0 <= exact["rollout_kl"] < 1e-9
    assert exact["rollout_truncated"] == 0
    assert exact["rollout_token_nll"] == pytest.approx(exact["token_nll"], abs=1e-5)
    # Probabilities that are exp(0.5) as large by the trainer.
    assert shifted["rollout_mismatch"] == pytest.approx(0.5, abs=1e-4)
    assert shifted["rollout_kl"] == pytest.approx(np.exp(0.5) - 1.5, abs=1e-4)
    assert shifted["rollout_truncated"] == 0
    # The trainer's parameters of the third step lie where the server has read them.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "rl" / "rollout_weights" / "0", dtype=torch.float64
    )
    away = []
    for request, response in sampled:
        token_ids = torch.tensor([[*request.token_ids, *response.token_ids]])
        with torch.no_grad():
            by_trainer = torch.log_softmax(model(token_ids).logits[0, len(request.token_ids) - 1 : -1], -1)
        own = by_trainer.gather(1, torch.tensor(response.token_ids)[:, None])[:, 0].numpy()
        away.append(own - np.array(response.log_probabilities))
    away = np.concatenate(away)
    assert np.abs(away).mean() > 0.1
    assert noisy["rollout_mismatch"] == pytest.approx(np.abs(away).mean(), rel=1e-3)
    assert noisy["rollout_kl"] == pytest.approx((np.exp(away) - 1 - away).mean(), rel=1e-3)
    assert noisy["rollout_truncated"] == pytest.approx((np.exp(away) > 2).mean(), abs=1e-6)
    assert noisy["rollout_truncated"] > 0
    out = capsys.readouterr()
    assert (out.out + out.err).count("differ from the trainer's by 0.5 a token") == 1  # once, and not of the third


def test_a_server_that_reports_others_is_refused_before_it_is_believed(server, tmp_path):
    """Not for greedy responses, which are not trained on."""
    engine = engine_at(server, tmp_path, "vllm")
    engine.update(parameters(make_plain_decoder(CONFIG), 0), 0)
    misbehave(server, logprobs_mode="raw_logprobs")
    assert generate(engine, GREEDY, REQUESTS[:1])
    for _ in range(2):
        with pytest.raises(UserError, match="Start it with --logprobs-mode processed_logprobs"):
            generate(engine, Sampling(temperature=0.7), REQUESTS[:1])
    misbehave(server, logprobs_mode="processed_logprobs")
    assert generate(engine, Sampling(temperature=0.7), REQUESTS[:1])
    engine.close()


@pytest.mark.parametrize(
    "url", ["http://host:8000", "http://host:8000/", "http://host:8000/v1", "http://host:8000/v1/"]
)
def test_a_url_may_be_the_servers_or_its_apis(url):
    server = Server("rollout_url", url, attempts=1, wait_seconds=0, timeout_seconds=1)
    paths = {name: kind.path(server) for name, kind in SERVER_KINDS.items()}
    assert paths == {"http": "/v1/completions", "vllm": "/v1/completions", "sglang": "/generate"}
