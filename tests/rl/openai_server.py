"""A server that answers as vLLM and SGLang do, of a Hugging Face directory and our own engine: python FILE DIR.

It prints its port, then serves until it is ended. POST /misbehave {"status": 500, "times": 2} makes it fail twice,
{"without": "token_ids"} removes that field from its answers, {"choice": {"token_ids": [-5]}} puts that value into them,
{"route": {"/resume": {}}} sets the answer of a route, {"shift": -0.5} adds that to log-probabilities, {"noise": 0.1}
samples from parameters with that much noise after the next update, {} makes it behave. GET /requests lists the requests
since the last POST /misbehave that are no completions, with their bodies; and the last completion's request and answer.
"""

import json
import sys
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jax

from maxtext_lite.config.hf.model_directory import hf_config
from maxtext_lite.generation.sampler import load_on_mesh
from maxtext_lite.models import Sampling
from maxtext_lite.rl.rollout import LocalEngine, Request

MOST_TOKENS = 16  # of prompts, and of responses


class Served:
    """The engine, and how the server misbehaves."""

    def __init__(self, directory: Path):
        self.lock, self.engines = threading.Lock(), {}
        self.misbehaviour, self.told, self.last = {}, [], {}
        self.weight_version, self.logprobs_mode, self.is_paused = "default", "raw_logprobs", False
        self.load(directory)

    def load(self, directory: Path) -> None:
        decoder, params, mesh = load_on_mesh(directory, hf_config(directory), {})
        if noise := self.misbehaviour.get("noise", 0):
            leaves, tree = jax.tree.flatten(params)
            keys = jax.random.split(jax.random.key(7), len(leaves))
            pairs = zip(leaves, keys, strict=True)
            params = jax.tree.unflatten(tree, [x + noise * jax.random.normal(key, x.shape) for x, key in pairs])
        self.decoder, self.params, self.mesh = decoder, params, mesh
        self.current = None

    def engine(self, stop_token_ids: tuple[int, ...]) -> LocalEngine:
        """With the parameters of now; one for each model, so that it is compiled once."""
        key = self.decoder.shape, stop_token_ids
        if key not in self.engines:
            self.engines[key] = LocalEngine(
                self.decoder, self.mesh, num_slots=1, max_prompt_tokens=MOST_TOKENS, max_new_tokens=MOST_TOKENS,
                stop_token_ids=stop_token_ids, seed=0,
            )  # fmt: skip
        if self.current != key:
            self.engines[key].update(self.params, 0)
            self.current = key
        return self.engines[key]

    def drawn(self, prompt, seed, max_new_tokens, sampling: dict) -> tuple:
        """Tokens, log-probabilities and why it ended; `sampling` as both interfaces have it."""
        assert sampling["n"] == 1
        assert not self.is_paused, "a real server waits, or says 503"
        how = Sampling(sampling["temperature"], max(sampling["top_k"], 0), sampling["top_p"])
        (response,) = self.engine(tuple(sampling["stop_token_ids"])).generate(
            [Request(prompt, (seed,))], sampling=how, max_new_tokens=max_new_tokens
        )
        values = [min(x + self.misbehaviour.get("shift", 0), 0.0) for x in response.log_probabilities]
        return response.token_ids, values, "stop" if response.ended else "length"

    def changed(self, answer: dict, part: dict) -> dict:
        """The answer with its part misbehaving, and remembered."""
        part.update(self.misbehaviour.get("choice", {}))
        part.pop(self.misbehaviour.get("without", ""), None)
        self.last["answer"] = answer
        return answer

    def completion(self, body: dict) -> dict:
        """As OpenAI's protocol has it, with what vLLM adds where that is asked for."""
        token_ids, values, reason = self.drawn(body["prompt"], body["seed"], body["max_tokens"], body)
        names = [f"token_id:{token_id}" for token_id in token_ids]
        scored = {"text_offset": [0] * len(values), "token_logprobs": values, "tokens": names}
        scored["top_logprobs"] = [{name: value} for name, value in zip(names, values, strict=True)]
        choice = {"index": 0, "text": "", "finish_reason": reason, "stop_reason": None, "logprobs": scored}
        if body["return_token_ids"]:
            choice |= {"token_ids": token_ids, "prompt_token_ids": body["prompt"]}
        if body.get("return_weight_versions"):
            choice["weight_versions"] = [{"version": self.weight_version, "start": 0, "end": len(token_ids)}]
        counts = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(token_ids)}
        counts["total_tokens"] = sum(counts.values())
        about = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "model", "usage": counts}
        return self.changed({**about, "choices": [choice]}, choice)

    def generation(self, body: dict) -> dict:
        """As SGLang's /generate."""
        asked, prompt = body["sampling_params"], body["input_ids"]
        token_ids, values, reason = self.drawn(prompt, asked["sampling_seed"], asked["max_new_tokens"], asked)
        scored = [[value, token_id, None] for value, token_id in zip(values, token_ids, strict=True)]
        matched = {"type": "stop", "matched": token_ids[-1]}
        about = {
            "id": "0", "finish_reason": matched if reason == "stop" else {"type": "length", "length": len(token_ids)},
            "prompt_tokens": len(prompt), "completion_tokens": len(token_ids), "weight_version": self.weight_version,
            "output_token_logprobs": scored, "output_token_logprobs_length": len(scored),
        }  # fmt: skip
        answer = {"text": "", "output_ids": token_ids, "prompt_token_ids": prompt, "meta_info": about}
        return self.changed(answer, about)

    def control(self, path: str, body: dict) -> tuple[int, dict]:
        """Status and answer of a route that draws nothing."""
        if path in ("/pause", "/pause_generation"):
            self.is_paused = True
            return 200, {"status": "paused"} if path == "/pause" else {"status": "ok", "message": "paused"}
        if path in ("/resume", "/continue_generation"):
            self.is_paused = False
            return 200, {"status": "resumed"} if path == "/resume" else {"status": "ok", "message": "continued"}
        if path == "/update_weights_from_disk":
            self.load(Path(body["model_path"]))
            self.weight_version = body.get("weight_version", self.weight_version)
            return 200, {"success": True, "message": "done", "num_paused_requests": 0}
        if path == "/collective_rpc":
            assert self.is_paused
            assert body["method"] == "reload_weights"
            self.load(Path(body["kwargs"]["weights_path"]))
            return 200, {"results": [None]}
        if path == "/update_weight_version":
            self.weight_version = body["new_version"]
            return 200, {"success": True, "new_version": self.weight_version}
        if path == "/reset_prefix_cache":
            return 200, {"success": True}
        return 404, {"error": "no such path"}


class Handler(BaseHTTPRequestHandler):
    """Reads requests, writes answers."""

    served: Served

    def log_message(self, *_) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        served = self.served
        if self.path == "/server_info?config_format=json":
            about = {"vllm_config": {"model_config": {"logprobs_mode": served.logprobs_mode}}}
            return self.answer(200, about)
        return self.answer(200, {"told": served.told, "last": served.last})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        served, path = self.served, urllib.parse.urlsplit(self.path).path
        with served.lock:
            if path == "/misbehave":
                served.misbehaviour, served.told = body, []
                served.logprobs_mode = body.get("logprobs_mode", "raw_logprobs")
                return self.answer(200, {})
            if served.misbehaviour.get("times", 0):
                served.misbehaviour["times"] -= 1
                return self.answer(served.misbehaviour["status"], {"error": "as asked"})
            if path in served.misbehaviour.get("route", {}):
                return self.answer(200, served.misbehaviour["route"][path])
            if path in ("/v1/completions", "/generate"):
                served.last = {"path": path, "body": body}
                return self.answer(200, served.completion(body) if path[1] == "v" else served.generation(body))
            served.told.append([self.path, body])
            return self.answer(*served.control(path, body))

    def answer(self, status: int, body: dict) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


if __name__ == "__main__":
    Handler.served = Served(Path(sys.argv[1]))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
