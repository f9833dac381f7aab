"""Rollouts from a server beside the run: a client of vLLM, SGLang, and other servers with OpenAI's protocol.

A server must continue prompts that are lists of tokens, return the sampled tokens and their log-probabilities, and load
new parameters from a directory that it shares with the run (`server_kinds`).
"""

import hashlib
import secrets
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import cast

import jax

from maxtext_lite.config import Config, UserError
from maxtext_lite.hf.directory import files_of_model, run_config_json
from maxtext_lite.hf.weights import export_model
from maxtext_lite.models import Adapted, Sampling, merged
from maxtext_lite.parallel import Params, on_first_host
from maxtext_lite.post_training.http_client import Server
from maxtext_lite.post_training.rollout import Request, Response
from maxtext_lite.post_training.server_answers import Asked
from maxtext_lite.post_training.server_kinds import SERVER_KINDS, Weights

WEIGHTS = "rollout_weights"
"""In the run directory: two alternating Hugging Face directories from which the server reads parameters."""

ANSWER_SECONDS = 1800.0
"""The longest time for an answer, with all attempts."""

_TOKEN_BYTES = 2**10  # of an answer: id, text and log-probability of the token, and of the likeliest one
_MORE_BYTES = 2**20  # of the rest of an answer


class HttpEngine:
    """A `RolloutEngine` that samples on a server. All hosts call it; the first one sends the requests.

    The returned log-probabilities must be those of the policy, softmax(logits / temperature) over the whole vocabulary.
    SGLang's are. vLLM's are those of the model, or with --logprobs-mode processed_logprobs those of its sampling
    distribution.

    Args:
      kind: a key of `SERVER_KINDS`.
      sampling: of the responses to train on.
      url: of the server, such as http://host:8000, or of its API, such as http://host:8000/v1.
      config: the run's, whose model the server has.
      run_directory: at a path that is the same for the server.
      stop_token_ids: tokens after which a response ends; the server may have more of its own.
      seed: of the draws, together with each request's key.
      requests_in_flight: the most at a time, each in a thread.
      attempts, wait_seconds, timeout_seconds: see `http_client.Server`.
    Raises:
      UserError: the url is invalid, no Hugging Face family expresses the model, or the server does not report the
        log-probabilities of `sampling`.
    """

    def __init__(
        self,
        kind: str,
        url: str,
        config: Config,
        run_directory: Path,
        *,
        sampling: Sampling,
        stop_token_ids: Sequence[int],
        seed: int,
        requests_in_flight: int = 64,
        attempts: int = 6,
        wait_seconds: float = 0.5,
        timeout_seconds: float = ANSWER_SECONDS,
    ):
        self._kind = SERVER_KINDS[kind]
        self._server = Server(
            "rollout_url", url, attempts=attempts, wait_seconds=wait_seconds, timeout_seconds=timeout_seconds
        )
        self._dtype = "bfloat16" if config.dtype == "bfloat16" else "float32"
        self._fields = run_config_json(
            files_of_model(config), config, num_positions=config.max_target_length, dtype=self._dtype
        )
        self._directory, self._turn = (run_directory / WEIGHTS).absolute(), 0
        self._stop_token_ids, self._seed = list(stop_token_ids), seed
        self._vocab_size = config.vocab_size
        self._pool = ThreadPoolExecutor(requests_in_flight, thread_name_prefix="rollout")
        self._label, self._updates = secrets.token_hex(4), 0  # the label tells this run's parameters from others'
        self._is_current = False
        on_first_host(self._directory, lambda: self._kind.check(self._server, sampling))

    def update(self, params: Params, step: int) -> None:
        """Writes the parameters for the server, and returns once it has loaded them.

        Raises:
          UserError: they cannot be written, or the server did not load them; `generate` then refuses to sample from
            other parameters.
        """
        self._is_current = False
        unfinished = self._directory / f".{self._turn}.unfinished"
        on_first_host(unfinished, lambda: _remove(unfinished))
        export_model(unfinished, _merged_where_they_are(params), self._fields, dtype=self._dtype)
        directory = unfinished.with_name(str(self._turn))
        self._turn = 1 - self._turn  # never the directory that the server has read last
        self._updates += 1
        on_first_host(directory, lambda: self._offer(unfinished, Weights(directory, step, self._weights)))
        self._is_current = True

    def generate(self, requests: Sequence[Request], *, sampling: Sampling, max_new_tokens: int) -> list[Response]:
        """The responses, in the order of the requests, several of which are in flight at a time.

        Raises:
          UserError: the server gives no valid answer, or has not loaded the parameters of the last `update`.
        """
        if not self._is_current:
            raise UserError(f"{self._server.name} has not taken the parameters of the last update: it has others.")
        answers = on_first_host(WEIGHTS, lambda: self._responses(requests, sampling, max_new_tokens))
        return [Response(*answer) for answer in answers]

    def close(self) -> None:
        """Ends the threads; the server keeps running."""
        self._pool.shutdown(cancel_futures=True)

    @property
    def _weights(self) -> str:
        """The label of the parameters of the last update."""
        return f"{self._label}-{self._updates}"

    def _offer(self, written: Path, weights: Weights) -> None:
        """Gives the written directory its name, and has the server load it."""
        _remove(weights.directory)
        written.rename(weights.directory)
        self._kind.take(self._server, weights)

    def _responses(self, requests: Sequence[Request], sampling: Sampling, max_new_tokens: int) -> list[Response]:
        ends = threading.Event()  # set once a request fails, to cancel the others
        futures = [self._pool.submit(self._response, request, sampling, max_new_tokens, ends) for request in requests]
        try:
            done = wait(futures, return_when=FIRST_EXCEPTION).done
            return [future.result() for future in futures if future in done]
        finally:
            ends.set()
            for future in futures:
                future.cancel()

    def _response(self, request: Request, sampling: Sampling, max_new_tokens: int, ends: threading.Event) -> Response:
        prompt = list(request.token_ids)
        seed = _seed_of(self._seed, request.key)
        asked = Asked(
            prompt, max_new_tokens, sampling, seed, self._stop_token_ids, self._vocab_size, weights=self._weights
        )
        most_bytes = _MORE_BYTES + _TOKEN_BYTES * (len(prompt) + max_new_tokens)
        answer = self._server.post(
            self._kind.path(self._server), self._kind.body(asked), most_bytes=most_bytes, ends=ends
        )
        try:
            return self._kind.read(answer, asked)
        except ValueError as error:
            raise UserError(f"{self._server.name} gives a completion that cannot be used: {error}.") from None


def _remove(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)


def _merged_where_they_are(params: Params) -> Params:
    leaves = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, Adapted))
    if not any(isinstance(leaf, Adapted) for leaf in leaves):
        return params

    def where(leaf: Adapted | jax.Array) -> jax.sharding.Sharding:
        return (leaf.weight if isinstance(leaf, Adapted) else leaf).sharding

    shardings = jax.tree.map(where, params, is_leaf=lambda node: isinstance(node, Adapted))
    return cast(Params, jax.jit(merged, out_shardings=shardings)(params))


def _seed_of(seed: int, key: tuple[int, ...]) -> int:
    """A seed of 31 bits, as servers accept, for this seed and key; the same in every process."""
    return int.from_bytes(hashlib.sha256(repr((seed, *key)).encode()).digest()[:4], "big") >> 1
