"""A server that answers as vLLM and SGLang do, with our own engine, in threads of this process; its clients for every
interface; and the local engine with the same model."""

import contextlib
import functools
import json
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jax
import numpy as np

from maxtext_lite.config import load_config
from maxtext_lite.hf.model_directory import hf_config
from maxtext_lite.inference.decoding import Sampling
from maxtext_lite.inference.sampler import load_on_mesh
from maxtext_lite.parallel import tree_shardings
from maxtext_lite.post_training.rollout import LocalEngine, Request, sampling_mesh
from maxtext_lite.post_training.servers import SERVER_KINDS, HttpEngine
from maxtext_lite.training.state import make_plain_decoder
from tests.training.conftest import TINY

STOP, MOST = 3, 16
GREEDY, DRAWN = Sampling(temperature=0), Sampling(temperature=0.8, top_k=40, top_p=0.95)
REQUESTS = [Request([5 + number, 40, 7], (0, number)) for number in range(6)]
CONFIG = load_config(
    None, [*TINY, "vocab_size=48", "initializer_range=0.4", "dataset_type=synthetic"]
)
MESH = sampling_mesh(jax.devices()[:1], {"data": 1, "fsdp": 1, "tensor": 1})
DONE = {
    "/pause": {"status": "paused"},
    "/resume": {"status": "resumed"},
    "/pause_generation": {"status": "ok", "message": "paused"},
    "/continue_generation": {"status": "ok", "message": "continued"},
    "/update_weight_version": {"success": True},
    "/reset_prefix_cache": {"success": True},
    "/collective_rpc": {"results": [None]},
    "/update_weights_from_disk": {
        "success": True,
        "message": "done",
        "num_paused_requests": 0,
    },
}


class Served:
    """The server. It has no model before the first update.

    Attributes:
      told: the requests since the last `misbehave` that are no completions, with their bodies.
      last: path and body of the last completion.
    """

    def __init__(self):
        self.lock, self.engines = threading.Lock(), {}
        self.weight_version, self.is_paused = "default", False
        self.misbehave()

    def misbehave(self, **how):
        """Fails `times` times with `status`, gives the answers of `route`, adds `shift` to log-probabilities, or
        samples from parameters with `noise` after the next update; without arguments, it behaves."""
        self.how, self.told, self.last = how, [], None

    def load(self, directory):
        decoder, params, mesh = load_on_mesh(
            Path(directory), hf_config(Path(directory)), {}
        )
        rng, noise = np.random.default_rng(7), self.how.get("noise", 0)

        def noisy(x):
            return jax.device_put(
                np.asarray(x)
                + np.float32(noise) * rng.normal(size=x.shape).astype("f4"),
                x.sharding,
            )

        params = jax.tree.map(noisy, params)
        if decoder.shape not in self.engines:
            self.engines[decoder.shape] = functools.cache(
                lambda stop: LocalEngine(
                    decoder,
                    mesh,
                    num_slots=1,
                    max_prompt_tokens=MOST,
                    max_new_tokens=MOST,
                    stop_token_ids=stop,
                    seed=0,
                )
            )
        self.engine, self.params = self.engines[decoder.shape], params

    def drawn(self, prompt, seed, max_new_tokens, asked):
        """Tokens, log-probabilities and why it ended; `asked` as both interfaces have it."""
        assert asked["n"] == 1
        assert not self.is_paused, "a real server waits, or says 503"
        how = Sampling(asked["temperature"], max(asked["top_k"], 0), asked["top_p"])
        engine = self.engine(tuple(asked["stop_token_ids"]))
        engine.update(self.params, 0)
        (response,) = engine.generate(
            [Request(prompt, (seed,))], sampling=how, max_new_tokens=max_new_tokens
        )
        values = [
            min(x + self.how.get("shift", 0), 0.0) for x in response.log_probabilities
        ]
        return response.token_ids, values, "stop" if response.ended else "length"

    def completion(self, body):
        """As OpenAI's protocol has it, with what vLLM adds where that is asked for."""
        token_ids, values, reason = self.drawn(
            body["prompt"], body["seed"], body["max_tokens"], body
        )
        scored = {
            "token_logprobs": values,
            "tokens": [f"token_id:{token_id}" for token_id in token_ids],
        }
        choice = {
            "index": 0,
            "text": "",
            "finish_reason": reason,
            "stop_reason": None,
            "logprobs": scored,
        }
        if body["return_token_ids"]:
            choice |= {"token_ids": token_ids, "prompt_token_ids": body["prompt"]}
        if body.get("return_weight_versions"):
            choice["weight_versions"] = [
                {"version": self.weight_version, "start": 0, "end": len(token_ids)}
            ]
        return {"choices": [choice]}

    def generation(self, body):
        """As SGLang's /generate."""
        asked, prompt = body["sampling_params"], body["input_ids"]
        token_ids, values, reason = self.drawn(
            prompt, asked["sampling_seed"], asked["max_new_tokens"], asked
        )
        scored = [
            [value, token_id, None]
            for value, token_id in zip(values, token_ids, strict=True)
        ]
        ends = {
            "stop": {"matched": token_ids[-1]},
            "length": {"length": len(token_ids)},
        }
        about = {
            "finish_reason": {"type": reason} | ends[reason],
            "prompt_tokens": len(prompt),
            "weight_version": self.weight_version,
            "output_token_logprobs": scored,
        }
        return {
            "text": "",
            "output_ids": token_ids,
            "prompt_token_ids": prompt,
            "meta_info": about,
        }

    def answer(self, path, body):
        """Status and answer of a POST."""
        route = urllib.parse.urlsplit(path).path
        if self.how.get("times", 0):
            self.how["times"] -= 1
            return self.how["status"], {"error": "as asked"}
        if route in ("/pause", "/pause_generation", "/resume", "/continue_generation"):
            self.is_paused = "pause" in route
        if route in self.how.get("route", {}):
            return 200, self.how["route"][route]
        if route in ("/v1/completions", "/generate"):
            found = (
                self.generation(body) if route == "/generate" else self.completion(body)
            )
            self.last = path, body
            return 200, found
        self.told.append([path, body])
        if route == "/update_weights_from_disk":
            self.load(body["model_path"])
        if route == "/collective_rpc":
            assert self.is_paused
            assert body["method"] == "reload_weights"
            self.load(body["kwargs"]["weights_path"])
        self.weight_version = body.get(
            "new_version", body.get("weight_version", self.weight_version)
        )
        return 200, DONE[route]


@contextlib.contextmanager
def serving():
    """The server, at its `url`."""
    served = Served()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            """Says nothing."""

        def do_GET(self):
            assert self.path == "/server_info?config_format=json"
            mode = served.how.get("logprobs_mode", "raw_logprobs")
            self.send(200, {"vllm_config": {"model_config": {"logprobs_mode": mode}}})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with served.lock:
                self.send(*served.answer(self.path, body))

        def send(self, status, answer):
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        served.url = f"http://127.0.0.1:{listener.server_address[1]}"
        yield served
        listener.shutdown()


@functools.cache
def parameters(decoder, seed):
    """Parameters on a mesh, as a trainer has them."""
    return jax.jit(decoder.init, out_shardings=tree_shardings(MESH, decoder.axes))(
        jax.random.key(seed)
    )


@functools.cache
def local_engine():
    return LocalEngine(
        make_plain_decoder(CONFIG),
        MESH,
        num_slots=4,
        max_prompt_tokens=MOST,
        max_new_tokens=MOST,
        stop_token_ids=[STOP],
        seed=0,
    )


def local_responses(params):
    engine = local_engine()
    engine.update(params, 0)
    return generate(engine)


def engine_at(url, directory, kind="vllm", seed=0):
    """A client that does not wait long."""
    url = url if kind == "sglang" else f"{url}/v1"  # either will do
    server = SERVER_KINDS[kind]("rollout_url", url, attempts=3, wait_seconds=0.01)
    return HttpEngine(
        server,
        CONFIG,
        directory,
        sampling=Sampling(),
        stop_token_ids=[STOP],
        seed=seed,
    )


def generate(engine, sampling=GREEDY, requests=REQUESTS):
    return engine.generate(requests, sampling=sampling, max_new_tokens=MOST)
