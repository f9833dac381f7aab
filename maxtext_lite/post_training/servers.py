"""Rollouts from a vLLM or SGLang server beside the run.

A server continues prompts that are lists of tokens, returns the sampled tokens with their log-probabilities, and loads
new parameters from a directory that it shares with the run.

Sources: the packages vllm 0.33.0 and 0.32.0 (entrypoints/openai/completion/protocol.py, entrypoints/rl/online and
entrypoints/serve/dev) and sglang 0.5.23 (srt/entrypoints/http_server.py, srt/managers/io_struct.py). Their schemas of
the fields and routes in use are in tests/rl/server_schemas.json.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import http
import secrets
import shutil
from abc import abstractmethod
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, cast

import httpx2
import jax
import pydantic
from jax import Array
from pydantic import Field

from maxtext_lite.config import Config, UserError
from maxtext_lite.config.errors import counted, value_text, without_secrets
from maxtext_lite.hf.directory import files_of_model, run_config_json
from maxtext_lite.hf.weights import export_model
from maxtext_lite.inference.decoding import Sampling
from maxtext_lite.models import Adapted
from maxtext_lite.models.lora import merged
from maxtext_lite.parallel import Params, on_first_host
from maxtext_lite.post_training.rollout import ANSWER_SECONDS, Request, Response

WEIGHTS = "rollout_weights"
"""In the run directory: two alternating Hugging Face directories that the server reads parameters from."""

_CONNECTING_SECONDS = 60.0
_RESUMING_SECONDS = 10.0  # a server that hangs must not hold a failed run
_REQUESTS_IN_FLIGHT = 64

TokenId = Annotated[int, Field(strict=True)]
LogProbability = Annotated[float, Field(strict=True, ge=-1000, le=1e-4)]
"""Of a drawn token; float32 may round it above 0."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """One request to a server.

    Attributes:
      seed: of its draws.
      stop_token_ids: tokens after which the response ends; the server may have more of its own.
      weights: the label of the parameters to draw from.
    """

    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling
    seed: int
    stop_token_ids: list[int]
    vocab_size: int
    weights: str

    @property
    def settings(self) -> dict[str, Any]:
        """The part of the request that has the same names on every server.

        Explicit, because a server may otherwise use the defaults in the model's generation_config.json.
        """
        return {
            "n": 1,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "top_k": self.sampling.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "ignore_eos": False,
            "stop_token_ids": self.stop_token_ids,
        }


class Weights(NamedTuple):
    """A directory with the trainer's parameters after `step` steps, and their label."""

    directory: Path
    step: int
    label: str


class Server:
    """A client of one server, connected inside `async with`. It bypasses proxies: the server belongs to the run.

    Args:
      key: the config's key that names it.
      url: of the server or of its v1, perhaps with a user name and a password.
      attempts: how often to try a request that gets no answer, or a failure or "busy".
      wait_seconds: before the second attempt; doubles with each.
      timeout_seconds: for a request with all of its attempts.

    Attributes:
      name: `key=url` for messages, without the password.
    """

    def __init__(
        self,
        key: str,
        url: str,
        *,
        attempts: int = 6,
        wait_seconds: float = 0.5,
        timeout_seconds: float = ANSWER_SECONDS,
    ):
        self.name = f"{key}={without_secrets(url)}"
        self._root = url.rstrip("/").removesuffix("/v1")
        self._attempts = attempts
        self._wait_seconds = wait_seconds
        self._timeout_seconds = timeout_seconds

    async def __aenter__(self) -> Self:
        timeout = httpx2.Timeout(self._timeout_seconds, connect=_CONNECTING_SECONDS)
        limits = httpx2.Limits(max_connections=None)
        self._client = httpx2.AsyncClient(base_url=self._root, timeout=timeout, limits=limits, trust_env=False)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._client.aclose()

    async def ask(self, method: str, route: str, body: object = None, *, attempts: int | None = None) -> dict[str, Any]:
        """The server's answer, a JSON object.

        Raises:
          UserError: no answer came in time, or it is a refusal, a redirect or not a JSON object.
        """
        failure = "it takes too long"
        attempt = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_seconds):
                for attempt in range(1, (attempts or self._attempts) + 1):
                    if attempt > 1:
                        await asyncio.sleep(self._wait_seconds * 2 ** (attempt - 2))
                    try:
                        response = await self._client.request(method, route, json=body)
                    except httpx2.TransportError as error:
                        failure = str(error) or type(error).__name__
                        continue
                    if response.status_code == http.HTTPStatus.OK:
                        return self._object(route, response)
                    failure = f"HTTP {response.status_code}: {value_text(response.text)}"
                    if response.status_code < 500 and response.status_code != http.HTTPStatus.TOO_MANY_REQUESTS:
                        raise UserError(f"{self.name}: {route} refuses a request ({failure}).")
        raise UserError(
            f"{self.name}: {route} gives no answer after {counted(attempt, 'attempt')} in {self._timeout_seconds:g} s "
            f"({failure})."
        )

    def _object(self, route: str, response: httpx2.Response) -> dict[str, Any]:
        try:
            return _OBJECT.validate_json(response.content)
        except pydantic.ValidationError:
            what = value_text(response.text)
            raise UserError(f"{self.name}: {route} answers what is not a JSON object: {what}.") from None


_OBJECT = pydantic.TypeAdapter(dict[str, Any])


class RolloutServer(Server):
    """A server that samples responses."""

    @abstractmethod
    async def sample(self, asked: Asked) -> Response:
        """The response to a request.

        Raises:
          ValueError: the server's completion cannot be used.
          UserError: it gives no answer.
        """

    @abstractmethod
    async def load(self, weights: Weights) -> None:
        """Has the server load parameters under their label; raises UserError if it does not."""

    async def check(self, sampling: Sampling) -> None:
        """Refuses a server that does not report the log-probabilities of the policy."""

    async def _tell(self, route: str, body: Mapping[str, Any], **expected: Any) -> None:
        """Posts; raises UserError if the answer lacks these entries."""
        answer = await self.ask("POST", route, body)
        if not expected.items() <= answer.items():
            raise UserError(f"{self.name}: {route} answers {value_text(answer)}, not {value_text(expected)}.")

    @contextlib.asynccontextmanager
    async def _resuming(self, route: str) -> AsyncGenerator[None]:
        """A block that pauses the server, which is asked to resume by this route if the block fails."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(UserError, TimeoutError):
                async with asyncio.timeout(_RESUMING_SECONDS):
                    await self.ask("POST", route, {}, attempts=1)
            raise

    def _not_loaded(self, weights: Weights, answer: object) -> UserError:
        return UserError(
            f"{self.name}: the server did not load the parameters of step {weights.step} from {weights.directory}: "
            f"{value_text(answer, 500)}."
        )


class VllmServer(RolloutServer):
    """vLLM, under VLLM_SERVER_DEV_MODE=1."""

    async def sample(self, asked: Asked) -> Response:
        body = asked.settings | {
            "prompt": asked.prompt,
            "max_tokens": asked.max_new_tokens,
            "min_tokens": 0,
            "watermarking": False,
            "seed": asked.seed,
            "logprobs": 0,  # of the drawn token only
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "return_weight_versions": True,
        }
        return read_vllm_completion(await self.ask("POST", "/v1/completions", body), asked)

    async def load(self, weights: Weights) -> None:
        async with self._resuming("/resume"):
            await self._tell("/pause?mode=abort", {}, status="paused")
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(weights.directory)}}
            # A server that fails to read them exits.
            answer = await self.ask("POST", "/collective_rpc", body, attempts=1)
            results = answer.get("results")
            if not results or any(result is not None for result in results):  # one result per worker
                raise self._not_loaded(weights, answer)
            await self._tell("/update_weight_version", {"new_version": weights.label}, success=True)
            await self._tell("/reset_prefix_cache", {}, success=True)
        await self._tell("/resume", {}, status="resumed")

    async def check(self, sampling: Sampling) -> None:
        modes = ["raw_logprobs"] if sampling.temperature == 1 else ["processed_logprobs"]
        if sampling == Sampling():
            modes.append("processed_logprobs")
        about = await self.ask("GET", "/server_info?config_format=json")
        mode = about.get("vllm_config", {}).get("model_config", {}).get("logprobs_mode")
        if mode not in modes:
            raise UserError(
                f"{self.name} reports logprobs_mode={mode}: with decode_sampling_temperature={sampling.temperature:g}, "
                f"top_k={sampling.top_k} and nucleus_p={sampling.top_p:g} they are not those of the policy. "
                f"Start it with --logprobs-mode {modes[0]}."
            )


class SglangServer(RolloutServer):
    """SGLang."""

    async def sample(self, asked: Asked) -> Response:
        settings = {
            "max_new_tokens": asked.max_new_tokens,
            "min_new_tokens": 0,
            "no_stop_trim": True,
            "sampling_seed": asked.seed,
        }
        body = {
            "input_ids": asked.prompt,
            "sampling_params": asked.settings | settings,
            "return_logprob": True,
            "logprob_start_len": -1,
            "return_text_in_logprobs": False,
            "return_prompt_token_ids": True,
            "stream": False,
        }
        return read_generation(await self.ask("POST", "/generate", body), asked)

    async def load(self, weights: Weights) -> None:
        async with self._resuming("/continue_generation"):
            await self._tell("/pause_generation", {"mode": "abort"}, status="ok")
            body = {"model_path": str(weights.directory), "flush_cache": True, "weight_version": weights.label}
            answer = await self.ask("POST", "/update_weights_from_disk", body)
            if answer.get("success") is not True:
                raise self._not_loaded(weights, answer)
        await self._tell("/continue_generation", {}, status="ok")


SERVER_KINDS: dict[str, type[RolloutServer]] = {"vllm": VllmServer, "sglang": SglangServer}
"""By value of `rollout_engine`."""


class _Span(pydantic.BaseModel):
    """Some tokens of a response, and the label of the parameters that drew them."""

    version: str


class _Logprobs(pydantic.BaseModel):
    token_logprobs: list[LogProbability]
    tokens: list[str]


class _Choice(pydantic.BaseModel):
    prompt_token_ids: list[TokenId]
    token_ids: list[TokenId]
    logprobs: _Logprobs
    finish_reason: Literal["stop", "length"]
    stop_reason: Any = None
    weight_versions: list[_Span] | None = None  # from vLLM 0.33 on


class _Completion(pydantic.BaseModel):
    """vLLM's answer to /v1/completions."""

    choices: tuple[_Choice]


class _Finish(pydantic.BaseModel):
    type: Literal["stop", "length"]
    matched: Any = None


class _Meta(pydantic.BaseModel):
    finish_reason: _Finish
    output_token_logprobs: list[tuple[LogProbability, TokenId, Any]]
    weight_version: str | None = None
    weight_versions: list[_Span] | None = None


class _Generation(pydantic.BaseModel):
    """SGLang's answer to /generate."""

    prompt_token_ids: list[TokenId]
    output_ids: list[TokenId]
    meta_info: _Meta


def read_vllm_completion(answer: dict[str, Any], asked: Asked) -> Response:
    """The response in vLLM's answer.

    Raises:
      ValueError: it is not a completion of the prompt by tokens of the vocabulary, each with a log-probability, the
        token that ended it included.
    """
    (choice,) = _Completion.model_validate(answer).choices
    if choice.logprobs.tokens != [f"token_id:{token_id}" for token_id in choice.token_ids]:
        raise ValueError("logprobs.tokens are not its token_ids")
    versions = [span.version for span in choice.weight_versions or ()]
    _check_source(choice.prompt_token_ids, versions, asked)
    return _response(choice.token_ids, choice.logprobs.token_logprobs, choice.finish_reason, choice.stop_reason, asked)


def read_generation(answer: dict[str, Any], asked: Asked) -> Response:
    """The response in SGLang's answer; raises ValueError as `read_vllm_completion` does."""
    generation = _Generation.model_validate(answer)
    meta = generation.meta_info
    if [token_id for _, token_id, _ in meta.output_token_logprobs] != generation.output_ids:
        raise ValueError("output_token_logprobs are not of its output_ids")
    versions = [span.version for span in meta.weight_versions or ()]
    if meta.weight_version is not None:
        versions.append(meta.weight_version)
    _check_source(generation.prompt_token_ids, versions, asked)
    log_probabilities = [value for value, _, _ in meta.output_token_logprobs]
    finish = meta.finish_reason
    return _response(generation.output_ids, log_probabilities, finish.type, finish.matched, asked)


def _check_source(prompt: list[int], versions: Sequence[str], asked: Asked) -> None:
    """Raises ValueError if the response continues another prompt or was drawn from other parameters."""
    if prompt != asked.prompt:
        raise ValueError(f"prompt_token_ids={value_text(prompt)} is not the prompt that was sent")
    for version in versions:
        if version != asked.weights:
            raise ValueError(f"it was drawn from the parameters {version}, not from the last update, {asked.weights}")


def _response(
    token_ids: list[int], log_probabilities: list[float], reason: str, ended_by: Any, asked: Asked
) -> Response:
    """The response, after checking its tokens and its end.

    Args:
      reason: stop or length.
      ended_by: the token or tokens that ended the response, if the server says so.
    """
    if not 1 <= len(token_ids) <= asked.max_new_tokens:
        raise ValueError(f"it has {len(token_ids)} tokens, not 1 to {asked.max_new_tokens}")
    if len(token_ids) != len(log_probabilities):
        raise ValueError(f"it has {len(token_ids)} tokens and {len(log_probabilities)} log-probabilities")
    if not 0 <= min(token_ids) <= max(token_ids) < asked.vocab_size:
        raise ValueError(f"token ids {value_text(token_ids)} are not all within the vocabulary of {asked.vocab_size}")
    if not set(token_ids[:-1]).isdisjoint(asked.stop_token_ids):
        raise ValueError(f"it continues after one of stop_token_ids={asked.stop_token_ids}")
    ended = reason == "stop" or token_ids[-1] in asked.stop_token_ids
    if not ended and len(token_ids) < asked.max_new_tokens:
        raise ValueError(f"it ends after {len(token_ids)} of {asked.max_new_tokens} tokens: raise the server's limit")
    if ended and ended_by is not None:
        ends = ended_by if isinstance(ended_by, list) else [ended_by]
        if token_ids[-len(ends) :] != ends:
            raise ValueError(f"it was ended by {value_text(ended_by)}, which its token ids do not include")
    return Response(token_ids, log_probabilities, ended)


class HttpEngine:
    """A `RolloutEngine` that samples on a server. All hosts call it; the first one sends the requests.

    The returned log-probabilities must be those of the policy, softmax(logits / temperature) over the whole vocabulary.
    SGLang's are. vLLM's come from the model, or with --logprobs-mode processed_logprobs from its sampling distribution.

    Args:
      config: the run's, whose model the server has.
      run_directory: at a path that is the same for the server.
      sampling: of the responses to train on.
      stop_token_ids: tokens after which a response ends; the server may have more of its own.
      seed: of the draws, together with each request's key.
    Raises:
      UserError: no Hugging Face family expresses the model, or the server does not report the log-probabilities of
        `sampling`.
    """

    def __init__(
        self,
        server: RolloutServer,
        config: Config,
        run_directory: Path,
        *,
        sampling: Sampling,
        stop_token_ids: Sequence[int],
        seed: int,
    ):
        self._server = server
        self._dtype = "bfloat16" if config.dtype == "bfloat16" else "float32"
        self._fields = run_config_json(
            files_of_model(config), config, num_positions=config.max_target_length, dtype=self._dtype
        )
        self._directory = (run_directory / WEIGHTS).absolute()
        self._stop_token_ids = list(stop_token_ids)
        self._seed = seed
        self._vocab_size = config.vocab_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout")  # the caller's may have an event loop
        self._run_label = secrets.token_hex(4)  # tells this run's parameters from others'
        self._updates = 0
        self._is_current = False
        on_first_host(self._directory, lambda: self._ask(server.check(sampling)))

    def update(self, params: Params, step: int) -> None:
        """Writes the parameters for the server, and returns once it has loaded them.

        Raises:
          UserError: they cannot be written, or the server did not load them; `generate` then refuses to sample from
            other parameters.
        """
        self._is_current = False
        self._updates += 1
        directory = self._directory / str(self._updates % 2)  # never the one that the server has read last
        unfinished = directory.with_name(f".{directory.name}.unfinished")
        on_first_host(unfinished, lambda: shutil.rmtree(unfinished, ignore_errors=True))
        export_model(unfinished, _merged_where_they_are(params), self._fields, dtype=self._dtype)

        def load() -> None:
            shutil.rmtree(directory, ignore_errors=True)
            unfinished.rename(directory)
            self._ask(self._server.load(Weights(directory, step, self._label)))

        on_first_host(directory, load)
        self._is_current = True

    def generate(self, requests: Sequence[Request], *, sampling: Sampling, max_new_tokens: int) -> list[Response]:
        """The responses, in the order of the requests; several requests are in flight at a time.

        Raises:
          UserError: the server gives no valid answer, or has not loaded the parameters of the last `update`.
        """
        if not self._is_current:
            raise UserError(f"{self._server.name} has not taken the parameters of the last update: it has others.")
        asked = [
            Asked(
                list(request.token_ids),
                max_new_tokens,
                sampling,
                # 31 bits, which servers accept; the same in every process.
                seed=int.from_bytes(hashlib.sha256(repr((self._seed, *request.key)).encode()).digest()[:4], "big") >> 1,
                stop_token_ids=self._stop_token_ids,
                vocab_size=self._vocab_size,
                weights=self._label,
            )
            for request in requests
        ]
        answers = on_first_host(WEIGHTS, lambda: self._ask(self._sample(asked)))
        return [Response(*answer) for answer in answers]

    def close(self) -> None:
        """Ends the thread; the server keeps running."""
        self._thread.shutdown(cancel_futures=True)

    @property
    def _label(self) -> str:
        """The label of the parameters of the last update."""
        return f"{self._run_label}-{self._updates}"

    def _ask(self, work: Coroutine[Any, Any, Any]) -> Any:
        async def connected() -> Any:
            async with self._server:
                return await work

        return self._thread.submit(asyncio.run, connected()).result()

    async def _sample(self, all_asked: list[Asked]) -> list[Response]:
        in_flight = asyncio.Semaphore(_REQUESTS_IN_FLIGHT)

        async def sample(asked: Asked) -> Response:
            async with in_flight:
                try:
                    return await self._server.sample(asked)
                except ValueError as error:
                    raise UserError(f"{self._server.name} gives a completion that cannot be used: {error}.") from None

        return await asyncio.gather(*map(sample, all_asked))


def _merged_where_they_are(params: Params) -> Params:
    leaves = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, Adapted))
    if not any(isinstance(leaf, Adapted) for leaf in leaves):
        return params

    def where(leaf: Adapted | Array) -> jax.sharding.Sharding:
        return (leaf.weight if isinstance(leaf, Adapted) else leaf).sharding

    shardings = jax.tree.map(where, params, is_leaf=lambda node: isinstance(node, Adapted))
    return cast(Params, jax.jit(merged, out_shardings=shardings)(params))
