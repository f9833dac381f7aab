"""A server that answers as vLLM and SGLang do, of a Hugging Face directory and our own engine: python FILE DIR STOP_ID.

It prints its port, then serves until it is ended. POST /misbehave {"status": 500, "times": 2} makes it fail so many
times, {"without": "token_ids"} leaves that out of its answers, {"choice": {"token_ids": [-5]}} puts that into them, {}
makes it behave. GET /requests counts completions.
"""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from maxtext_lite.config import UserError
from maxtext_lite.config.hf.model_directory import hf_config
from maxtext_lite.generation.sampler import load_on_mesh
from maxtext_lite.models import Sampling
from maxtext_lite.rl.rollout import LocalEngine, Request

MOST_TOKENS = 16  # of prompts, and of responses


class Served:
    """The engine, and how the server misbehaves."""

    def __init__(self, directory: Path, stop_token_id: int):
        self.lock, self.stop_token_id = threading.Lock(), stop_token_id
        self.misbehaviour, self.completions = {}, 0
        self.load(directory)

    def load(self, directory: Path) -> None:
        decoder, params, mesh = load_on_mesh(directory, hf_config(directory), {})
        self.engine = LocalEngine(
            decoder, mesh, num_slots=1, max_prompt_tokens=MOST_TOKENS, max_new_tokens=MOST_TOKENS,
            stop_token_ids=[self.stop_token_id], seed=0,
        )  # fmt: skip
        self.engine.update(params, 0)

    def completion(self, body: dict) -> dict:
        self.completions += 1
        assert (body["n"], body["stop_token_ids"], body["logprobs"]) == (1, [self.stop_token_id], 1)
        sampling = Sampling(body["temperature"], max(body["top_k"], 0), body["top_p"])
        request = Request(body["prompt"], (body["seed"],))
        (response,) = self.engine.generate([request], sampling=sampling, max_new_tokens=body["max_tokens"])
        choice = {
            "index": 0,
            "text": "",
            "finish_reason": "stop" if response.ended else "length",
            "logprobs": {"token_logprobs": response.log_probabilities},
            "token_ids": response.token_ids if body["return_token_ids"] else None,
            "prompt_token_ids": body["prompt"] if body["return_token_ids"] else None,
            **self.misbehaviour.get("choice", {}),
        }
        choice.pop(self.misbehaviour.get("without", ""), None)
        return {"object": "text_completion", "choices": [choice]}


class Handler(BaseHTTPRequestHandler):
    """Reads requests, writes answers."""

    served: Served

    def log_message(self, *_) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        self.answer(200, {"completions": self.served.completions})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        served = self.served
        with served.lock:
            if self.path == "/misbehave":
                served.misbehaviour = body
                return self.answer(200, {})
            if served.misbehaviour.get("times", 0):
                served.misbehaviour["times"] -= 1
                return self.answer(served.misbehaviour["status"], {"error": "as asked"})
            if self.path == "/v1/completions":
                return self.answer(200, served.completion(body))
            if self.path == "/update_weights_from_disk":
                try:
                    served.load(Path(body["model_path"]))
                except UserError as error:
                    return self.answer(200, {"success": False, "message": str(error)})
                return self.answer(200, {"success": True, "message": "done"})
        return self.answer(404, {"error": "no such path"})

    def answer(self, status: int, body: dict) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


if __name__ == "__main__":
    Handler.served = Served(Path(sys.argv[1]), int(sys.argv[2]))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
