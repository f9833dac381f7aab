"""Rollouts from a server beside the run: a client of the OpenAI-compatible servers of inference engines.

The standard library's HTTP is all that it takes. What a server must do is what vLLM and SGLang do: go on from prompts
that are lists of tokens, return the tokens it drew and their log-probabilities; and, as SGLang does at
/update_weights_from_disk, take new parameters from a directory that it can read too.
"""

import hashlib
import http.client
import json
import shutil
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from pydantic import BaseModel, Field, ValidationError

from maxtext_lite.config import Config, UserError
from maxtext_lite.config.hf_config import run_config_json
from maxtext_lite.interop import export_model
from maxtext_lite.models import Adapted, Sampling, merged
from maxtext_lite.parallel import exchange
from maxtext_lite.rl.rollout import Request, Response

WEIGHTS = "rollout_weights"
"""In the run directory: the Hugging Face directories, two in turn, that the server reads parameters from."""


class _LogProbabilities(BaseModel):
    token_logprobs: list[float]


class _Choice(BaseModel):
    token_ids: list[int] = Field(min_length=1)
    logprobs: _LogProbabilities
    finish_reason: str | None


class _Answer(BaseModel):
    """What is read of a completion; servers say more."""

    choices: list[_Choice] = Field(min_length=1)


class HttpEngine:
    """A `RolloutEngine` that asks a server. Of several hosts all call it, and the first one asks.

    The log-probabilities that come back must be those of the policy, softmax(logits / temperature) over the whole
    vocabulary. A server that gives those of the model itself does so at temperature 1 only; others it says when asked
    (vLLM: --logprobs-mode processed_logprobs, with which top-k and top-p have to be off).

    Args:
      url: of the server's API, such as http://host:8000/v1.
      config: of the run, whose model the server has.
      run_directory: a place that the server sees under the same name.
      stop_token_ids: tokens after which a response ends; the server may know more of its own.
      seed: of the draws, with each request's key.
      requests_in_flight: at most, as threads.
      attempts: times that a request is made, when the server does not answer or answers that it failed.
      wait_seconds: before the second attempt; it doubles with each.
      timeout_seconds: for one answer.
    Raises:
      UserError: the url is none; or no Hugging Face family expresses the model.
    """

    def __init__(
        self,
        url: str,
        config: Config,
        run_directory: Path,
        *,
        stop_token_ids: Sequence[int],
        seed: int,
        requests_in_flight: int = 64,
        attempts: int = 6,
        wait_seconds: float = 0.5,
        timeout_seconds: float = 1800,
    ):
        if urllib.parse.urlsplit(url).scheme not in ("http", "https") or not urllib.parse.urlsplit(url).netloc:
            raise UserError(f"rollout_url={url} is not the address of a server. One that works: http://HOST:8000/v1.")
        self._url, self._root = url.rstrip("/"), url.rstrip("/").removesuffix("/v1")
        self._dtype = "bfloat16" if config.dtype == "bfloat16" else "float32"
        # What the model came with: at its first start the run has not taken that over yet.
        origin = Path(config.load_parameters_path) if config.load_parameters_path else run_directory
        self._fields = run_config_json(origin, config, num_positions=config.max_target_length, dtype=self._dtype)
        self._directory, self._turn = (run_directory / WEIGHTS).absolute(), 0
        self._stop_token_ids, self._seed = list(stop_token_ids), seed
        self._attempts, self._wait_seconds, self._timeout_seconds = attempts, wait_seconds, timeout_seconds
        self._pool = ThreadPoolExecutor(requests_in_flight, thread_name_prefix="rollout")
        self._is_current = False

    def update(self, params: Any, step: int) -> None:
        """Writes the parameters where the server can read them, and returns once it has.

        Raises:
          UserError: the server did not take them; `generate` then refuses, as it would sample from others.
        """
        self._is_current = False
        unfinished = self._directory / f".{self._turn}.unfinished"
        if jax.process_index() == 0 and unfinished.exists():
            shutil.rmtree(unfinished)
        export_model(unfinished, _merged_where_they_are(params), self._fields, dtype=self._dtype)
        directory = unfinished.with_name(str(self._turn))
        self._turn = 1 - self._turn  # never the one that the server has read last
        _on_first_host(lambda: self._offer(unfinished, directory, step))
        self._is_current = True

    def generate(self, requests: Sequence[Request], *, sampling: Sampling, max_new_tokens: int) -> list[Response]:
        """The responses, in the order of the requests; several are asked for at once.

        Raises:
          UserError: the server does not answer, or not with tokens and log-probabilities; or it has not taken the
            parameters of the last `update`.
        """
        if not self._is_current:
            raise UserError(f"rollout_url={self._url} has not taken the parameters of the last update: it has others.")
        answers = _on_first_host(lambda: self._responses(requests, sampling, max_new_tokens))
        return [Response(*answer) for answer in answers]

    def close(self) -> None:
        """Ends the threads; the server runs on."""
        self._pool.shutdown(cancel_futures=True)

    def _offer(self, written: Path, directory: Path, step: int) -> None:
        """Gives a directory its name, and the server what is in it."""
        if directory.exists():
            shutil.rmtree(directory)
        written.rename(directory)
        path = "/update_weights_from_disk"
        answer = self._post(self._root + path, {"model_path": str(directory)}, threading.Event())
        if answer.get("success") is not True:
            raise UserError(
                f"rollout_url={self._url}: the server did not take the parameters of step {step} from {directory}: "
                f"{answer.get('message', answer)}. It must answer {path} as SGLang does, and see that directory."
            )

    def _responses(self, requests: Sequence[Request], sampling: Sampling, max_new_tokens: int) -> list[Response]:
        ends = threading.Event()  # set when one has failed: the others wait no longer for their next attempt
        futures = [self._pool.submit(self._response, request, sampling, max_new_tokens, ends) for request in requests]
        try:
            return [future.result() for future in futures]
        finally:
            ends.set()
            for future in futures:
                future.cancel()

    def _response(self, request: Request, sampling: Sampling, max_new_tokens: int, ends: threading.Event) -> Response:
        body = {
            "prompt": list(request.token_ids),
            "n": 1,
            "max_tokens": max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            # Said, as a server may otherwise take those that a model's generation_config.json recommends.
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": _seed_of(self._seed, request.key),
            "logprobs": 1,
            "stop_token_ids": self._stop_token_ids,
            "return_token_ids": True,
        }
        return self._read(self._post(f"{self._url}/completions", body, ends))

    def _read(self, answer: Mapping[str, Any]) -> Response:
        try:
            choice = _Answer.model_validate(answer).choices[0]
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, at['loc']))}: {at['msg']}" for at in error.errors())
        else:
            if len(choice.token_ids) == len(choice.logprobs.token_logprobs):
                return Response(choice.token_ids, choice.logprobs.token_logprobs, choice.finish_reason == "stop")
            wrong = f"{len(choice.token_ids)} token_ids with {len(choice.logprobs.token_logprobs)} token_logprobs"
        raise UserError(
            f"rollout_url={self._url} answers without what it drew ({wrong}). The server must return, in each of "
            "choices, token_ids with the ids of all new tokens where it is asked return_token_ids=true, as vLLM and "
            "SGLang do from some version on, and logprobs.token_logprobs with a log-probability of each."
        )

    def _post(self, url: str, body: Mapping[str, Any], ends: threading.Event) -> dict[str, Any]:
        """The server's answer, when it has one, or says of the request that it is wrong."""
        data, failure = json.dumps(body).encode(), ""
        for attempt in range(self._attempts):
            if attempt and ends.wait(self._wait_seconds * 2 ** (attempt - 1)):
                break
            request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=self._timeout_seconds) as answered:
                    return self._object(url, answered.read())
            except urllib.error.HTTPError as error:
                failure = f"HTTP {error.code}: {error.read().decode(errors='replace')[:500]}"
                if error.code < 500 and error.code != http.client.TOO_MANY_REQUESTS:  # again it would say the same
                    raise UserError(f"{self._asked(url)} refuses a request ({failure}).") from None
            except (OSError, http.client.HTTPException) as error:
                failure = str(getattr(error, "reason", None) or error or type(error).__name__)
        raise UserError(f"{self._asked(url)} gives no answer after {self._attempts} attempts ({failure}).")

    def _object(self, url: str, text: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise UserError(f"{self._asked(url)} answers what is not a JSON object: {text[:200]!r}.")
        return answer

    def _asked(self, url: str) -> str:
        return f"rollout_url={self._url}: {url}"


def _on_first_host(work: Callable[[], Any]) -> Any:
    """What it gives, on every host; or the UserError that it raises."""
    given, problems = None, None
    if jax.process_index() == 0:
        try:
            given = work()
        except UserError as error:
            problems = list(error.problems)
    told = exchange({"given": given, "problems": problems})[0]
    if told["problems"]:
        raise UserError(told["problems"])
    return told["given"]


def _merged_where_they_are(params: Any) -> Any:
    leaves = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, Adapted))
    if not any(isinstance(leaf, Adapted) for leaf in leaves):
        return params

    def where(leaf: Any) -> Any:
        return leaf.weight.sharding if isinstance(leaf, Adapted) else leaf.sharding

    shardings = jax.tree.map(where, params, is_leaf=lambda node: isinstance(node, Adapted))
    return jax.jit(merged, out_shardings=shardings)(params)


def _seed_of(seed: int, key: tuple[int, ...]) -> int:
    """31 bits, as servers take: others for each seed and key, the same in every process."""
    return int.from_bytes(hashlib.sha256(repr((seed, *key)).encode()).digest()[:4], "big") >> 1
