"""Rollouts from a server beside the run: a client of the OpenAI-compatible servers of inference engines.

What a server must do is what vLLM and SGLang do: go on from prompts
that are lists of tokens, return the tokens it drew and their log-probabilities; and, as SGLang does at
/update_weights_from_disk, take new parameters from a directory that it can read too.
"""

# pyright: reportUnknownMemberType=false
# jax declares some of its functions in part.

import hashlib
import json
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar, cast

import jax

from maxtext_lite.config import Config, UserError
from maxtext_lite.config.errors import value_text, writing
from maxtext_lite.config.hf.config import run_config_json
from maxtext_lite.hf import export_model
from maxtext_lite.models import Adapted, Sampling, merged
from maxtext_lite.models.decoder import Params
from maxtext_lite.parallel import value_of_host
from maxtext_lite.rl.http_client import Server
from maxtext_lite.rl.rollout import Request, Response

Result = TypeVar("Result")

WEIGHTS = "rollout_weights"
"""In the run directory: the Hugging Face directories, two in turn, that the server reads parameters from."""


_LEAST, _MOST = -1000.0, 1e-4  # log-probability of a token that was drawn, with what float32 rounds above 0
_TOKEN_BYTES = 2**10  # of an answer: id, text, log-probability, and as much again for the likeliest token there
_SHOWN = 80  # letters of a value
_MORE_BYTES = 2**20  # of whatever else an answer says


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
      timeout_seconds: for a request, until all of its answer is there.
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
        self._server = Server(
            "rollout_url", url, attempts=attempts, wait_seconds=wait_seconds, timeout_seconds=timeout_seconds
        )
        self._dtype = "bfloat16" if config.dtype == "bfloat16" else "float32"
        # What the model came with: at its first start the run has not taken that over yet.
        origin = Path(config.load_parameters_path) if config.load_parameters_path else run_directory
        self._fields = run_config_json(origin, config, num_positions=config.max_target_length, dtype=self._dtype)
        self._directory, self._turn = (run_directory / WEIGHTS).absolute(), 0
        self._stop_token_ids, self._seed = list(stop_token_ids), seed
        self._vocab_size = config.vocab_size
        self._pool = ThreadPoolExecutor(requests_in_flight, thread_name_prefix="rollout")
        self._is_current = False

    def update(self, params: Params, step: int) -> None:
        """Writes the parameters where the server can read them, and returns once it has.

        Raises:
          UserError: they cannot be written, or the server did not take them; `generate` then refuses, as it would
            sample from others.
        """
        self._is_current = False
        unfinished = self._directory / f".{self._turn}.unfinished"
        _on_first_host(lambda: _remove(unfinished))
        with writing(unfinished):
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
            raise UserError(f"{self._server.name} has not taken the parameters of the last update: it has others.")
        answers = _on_first_host(lambda: self._responses(requests, sampling, max_new_tokens))
        return [Response(*answer) for answer in answers]

    def close(self) -> None:
        """Ends the threads; the server runs on."""
        self._pool.shutdown(cancel_futures=True)

    def _offer(self, written: Path, directory: Path, step: int) -> None:
        """Gives a directory its name, and the server what is in it."""
        _remove(directory)
        written.rename(directory)
        path = self._server.path.removesuffix("/v1") + "/update_weights_from_disk"
        body = {"model_path": str(directory)}
        answer = self._server.post(path, body, most_bytes=_MORE_BYTES, ends=threading.Event())
        if answer.get("success") is not True:
            raise UserError(
                f"{self._server.name}: the server did not take the parameters of step {step} from {directory}: "
                f"{_shown(answer.get('message', answer), 500)}. It must answer {path} as SGLang does, and see that "
                "directory."
            )

    def _responses(self, requests: Sequence[Request], sampling: Sampling, max_new_tokens: int) -> list[Response]:
        ends = threading.Event()  # set when one has failed: the others are cancelled
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
        body = {
            "prompt": prompt,
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
        answer = self._server.post(
            f"{self._server.path}/completions",
            body,
            most_bytes=_MORE_BYTES + _TOKEN_BYTES * (len(prompt) + max_new_tokens),
            ends=ends,
        )
        try:
            return read_completion(
                answer,
                prompt=prompt,
                max_new_tokens=max_new_tokens,
                vocab_size=self._vocab_size,
                stop_token_ids=self._stop_token_ids,
            )
        except ValueError as error:
            raise UserError(f"{self._server.name} gives a completion that cannot be used: {error}.") from None


def read_completion(
    answer: Mapping[str, Any],
    *,
    prompt: list[int],
    max_new_tokens: int,
    vocab_size: int,
    stop_token_ids: Sequence[int],
) -> Response:
    """The response in a server's answer, of which nothing is believed that can be checked.

    Raises:
      ValueError: it is not a completion of the prompt by tokens of the vocabulary, each with a log-probability; says
        what is wrong, as the rest of a sentence.
    """
    choices = _entry(answer, "choices", list, "")
    if len(choices) != 1 or not isinstance(choices[0], dict):
        raise ValueError(f"choices={_shown(choices)} is not a list of the one choice that was asked for")
    choice, at = choices[0], "choices[0]."
    if "index" in choice and (type(choice["index"]) is not int or choice["index"] != 0):
        raise ValueError(f"{at}index={_shown(choice['index'])}, where the only choice has 0")
    for place, echo in (("", answer.get("prompt_token_ids")), (at, choice.get("prompt_token_ids"))):
        if echo is not None and (echo != prompt or any(type(token_id) is not int for token_id in echo)):
            raise ValueError(
                f"{place}prompt_token_ids={_shown(echo)} is not the prompt that was sent, {_shown(prompt)}"
            )
    token_ids = _entry(choice, "token_ids", list, at)
    values = _entry(_entry(choice, "logprobs", dict, at), "token_logprobs", list, f"{at}logprobs.")
    if not 1 <= len(token_ids) <= max_new_tokens:
        raise ValueError(f"{at}token_ids has {len(token_ids):,} tokens, where 1 to {max_new_tokens:,} were asked for")
    if len(token_ids) != len(values):
        raise ValueError(f"{len(token_ids):,} token_ids with {len(values):,} token_logprobs")
    for number, (token_id, value) in enumerate(zip(token_ids, values, strict=True)):
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise ValueError(f"{at}token_ids[{number}]={_shown(token_id)} is not an id from 0 to {vocab_size - 1}")
        if type(value) not in (int, float) or not _LEAST <= value <= _MOST:  # which NaN is not
            raise ValueError(
                f"{at}logprobs.token_logprobs[{number}]={_shown(value)} is not the log-probability of a token that "
                f"was drawn, from {_LEAST:g} to 0"
            )
    reason, stopped = choice.get("finish_reason"), token_ids[-1] in stop_token_ids
    if reason not in ("stop", "length"):
        raise ValueError(f"{at}finish_reason={_shown(reason)} is neither stop nor length")
    if any(token_id in stop_token_ids for token_id in token_ids[:-1]):
        raise ValueError(f"{at}token_ids goes on after one of stop_token_ids={_shown(list(stop_token_ids))}")
    if reason == "length" and not stopped and len(token_ids) < max_new_tokens:
        raise ValueError(
            f"{at}finish_reason=length after {len(token_ids):,} tokens, where max_tokens={max_new_tokens} were asked "
            "for: the server has a limit of its own, which must be raised"
        )
    return Response(token_ids, [float(value) for value in values], reason == "stop" or stopped)


def _entry(of: Mapping[str, Any], name: str, kind: type, place: str) -> Any:
    """An entry that must be there and of that kind."""
    if isinstance(of.get(name), kind):
        return of[name]
    wrong = f"={_shown(of[name])} is not {'an object' if kind is dict else 'a list'}" if name in of else " is missing"
    raise ValueError(
        f"{place}{name}{wrong}. The server must return, in each of choices, token_ids with the ids of all new tokens "
        "where it is asked return_token_ids=true, as vLLM and SGLang do from some version on, and "
        "logprobs.token_logprobs with a log-probability of each"
    )


def _shown(value: object, most: int = _SHOWN) -> str:
    """The beginning of a value of JSON, as it stood there."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return "(something nested too deeply)"
    return text if len(text) <= most else f"{text[:most]}..."


def _remove(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)


def _on_first_host(work: Callable[[], Result]) -> Result:
    """What it gives, on every host; or the UserError that it raises."""
    given, problems = None, None
    if jax.process_index() == 0:
        try:
            given = work()
        except UserError as error:
            problems = list(error.problems)
        except OSError as error:
            problems = [f"{value_text(error.filename or WEIGHTS)} cannot be written: {error.strerror}."]
    given, problems = value_of_host(0, [given, problems])
    if problems:
        raise UserError(problems)
    return given


def _merged_where_they_are(params: Params) -> Params:
    leaves = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, Adapted))
    if not any(isinstance(leaf, Adapted) for leaf in leaves):
        return params

    def where(leaf: Adapted | jax.Array) -> jax.sharding.Sharding:
        return (leaf.weight if isinstance(leaf, Adapted) else leaf).sharding

    shardings = jax.tree.map(where, params, is_leaf=lambda node: isinstance(node, Adapted))
    return cast(Params, jax.jit(merged, out_shardings=shardings)(params))


def _seed_of(seed: int, key: tuple[int, ...]) -> int:
    """31 bits, as servers take: others for each seed and key, the same in every process."""
    return int.from_bytes(hashlib.sha256(repr((seed, *key)).encode()).digest()[:4], "big") >> 1
