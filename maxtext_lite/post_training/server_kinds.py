"""The interfaces of inference servers: their requests, routes, and updates of parameters.

Sources: the packages vllm 0.33.0 and 0.32.0 (entrypoints/openai/completion/protocol.py, entrypoints/rl/online and
entrypoints/serve/dev) and sglang 0.5.23 (srt/entrypoints/http_server.py, srt/managers/io_struct.py). Their schemas of
the fields and routes in use are in tests/rl/server_schemas.json.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from maxtext_lite.config import UserError
from maxtext_lite.models import Sampling
from maxtext_lite.post_training.http_client import Server
from maxtext_lite.post_training.rollout import Response
from maxtext_lite.post_training.server_answers import (
    Asked,
    read_completion,
    read_generation,
    read_vllm_completion,
    shown,
)

_MORE_BYTES = 2**20  # of an answer about the server itself
_RESUME_SECONDS = 10.0  # after a failure


class Weights(NamedTuple):
    """A directory with the trainer's parameters after `step` steps, and their label."""

    directory: Path
    step: int
    label: str


@dataclasses.dataclass(frozen=True)
class ServerKind:
    """One interface.

    Attributes:
      route: of requests for responses, after the url without its v1.
      body: makes the body of a request.
      read: parses the response in an answer; raises ValueError.
      take: has the server load parameters under their label; raises UserError.
      check: refuses a server that does not report the policy's log-probabilities; raises UserError.
    """

    route: str
    body: Callable[[Asked], dict[str, Any]]
    read: Callable[[Mapping[str, Any], Asked], Response]
    take: Callable[[Server, Weights], None]
    check: Callable[[Server, Sampling], None]

    def path(self, server: Server) -> str:
        """The path of the route on a server."""
        return _root(server) + self.route


def _root(server: Server) -> str:
    """The url's path without the v1 of OpenAI's protocol."""
    return server.path.removesuffix("/v1")


def _tell(server: Server, route: str, body: Mapping[str, Any], **limits: Any) -> dict[str, Any]:
    return server.post(_root(server) + route, body, most_bytes=_MORE_BYTES, ends=threading.Event(), **limits)


def _expect(server: Server, route: str, body: Mapping[str, Any], **expected: Any) -> None:
    """Raises UserError if the server's answer lacks these entries."""
    answer = _tell(server, route, body)
    if any(answer.get(name) != value for name, value in expected.items()):
        raise UserError(f"{server.name}: {route} answers {shown(answer, 500)}, not {shown(expected)}.")


def _openai_body(asked: Asked) -> dict[str, Any]:
    sampling = asked.sampling
    return {
        "prompt": asked.prompt,
        "n": 1,
        "max_tokens": asked.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        # Explicit, as a server may otherwise use the defaults in the model's generation_config.json.
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": asked.seed,
        "logprobs": 1,
        "stop_token_ids": asked.stop_token_ids,
        "return_token_ids": True,
    }


def _vllm_body(asked: Asked) -> dict[str, Any]:
    more = {
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "min_tokens": 0,
        "ignore_eos": False,
        "watermarking": False,
        "logprobs": 0,  # of the drawn token only
        "return_tokens_as_token_ids": True,
        "return_weight_versions": True,
    }
    return _openai_body(asked) | more


def _sglang_body(asked: Asked) -> dict[str, Any]:
    sampling = asked.sampling
    return {
        "input_ids": asked.prompt,
        "sampling_params": {
            "n": 1,
            "max_new_tokens": asked.max_new_tokens,
            "min_new_tokens": 0,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": asked.stop_token_ids,
            "ignore_eos": False,
            "no_stop_trim": True,
            "sampling_seed": asked.seed,
        },
        "return_logprob": True,
        "logprob_start_len": -1,
        "return_text_in_logprobs": False,
        "return_prompt_token_ids": True,
        "stream": False,
    }


@contextlib.contextmanager
def _resuming(server: Server, route: str) -> Generator[None]:
    """A block that pauses a server, which is asked to resume by this route if the block fails."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(UserError):
            _tell(server, route, {}, attempts=1, seconds=_RESUME_SECONDS)
        raise


def _take_as_sglang(server: Server, weights: Weights) -> None:
    """Aborts running requests and pauses new ones; cached keys and values are flushed with the old parameters."""
    with _resuming(server, "/continue_generation"):
        _expect(server, "/pause_generation", {"mode": "abort"}, status="ok")
        _update_from_disk(server, weights, flush_cache=True, weight_version=weights.label)
    _expect(server, "/continue_generation", {}, status="ok")


def _update_from_disk(server: Server, weights: Weights, **more: Any) -> None:
    """By SGLang's route; without `more`, in the one form that all of its versions accept."""
    answer = _tell(server, "/update_weights_from_disk", {"model_path": str(weights.directory), **more})
    if answer.get("success") is not True:
        said = shown(answer.get("message", answer), 500)
        must = "It must answer /update_weights_from_disk as SGLang does, and see that directory"
        raise _not_taken(server, weights, f"{said}. {must}")


def _not_taken(server: Server, weights: Weights, why: str) -> UserError:
    return UserError(
        f"{server.name}: the server did not take the parameters of step {weights.step} from {weights.directory}: {why}."
    )


def _take_as_vllm(server: Server, weights: Weights) -> None:
    """By vLLM's routes under VLLM_SERVER_DEV_MODE=1. A server that fails to read the parameters exits."""
    with _resuming(server, "/resume"):
        _expect(server, "/pause?mode=abort", {}, status="paused")
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(weights.directory)}}
        answer = _tell(server, "/collective_rpc", body, attempts=1)
        results = cast(list[Any], answer["results"]) if isinstance(answer.get("results"), list) else []
        if not results or any(result is not None for result in results):  # one result per worker
            raise _not_taken(server, weights, shown(answer, 500))
        _expect(server, "/update_weight_version", {"new_version": weights.label}, success=True)
        _expect(server, "/reset_prefix_cache", {}, success=True)
    _expect(server, "/resume", {}, status="resumed")


def _no_check(server: Server, sampling: Sampling) -> None:
    del server, sampling


def _check_vllm(server: Server, sampling: Sampling) -> None:
    """Refuses a vLLM whose mode, raw or processed log-probabilities, does not give the policy's."""
    right = {"raw_logprobs"} if sampling.temperature == 1 else {"processed_logprobs"}
    if sampling.temperature == 1 and not sampling.top_k and sampling.top_p == 1:
        right.add("processed_logprobs")
    about = server.get(f"{_root(server)}/server_info?config_format=json", most_bytes=_MORE_BYTES)
    for name in ("vllm_config", "model_config"):
        about = cast(dict[str, Any], about.get(name)) if isinstance(about.get(name), dict) else {}
    mode = about.get("logprobs_mode")
    if mode not in right:
        raise UserError(
            f"{server.name} reports logprobs_mode={shown(mode)}: with decode_sampling_temperature="
            f"{sampling.temperature:g}, top_k={sampling.top_k} and nucleus_p={sampling.top_p:g} they are not those of "
            f"the policy. Start it with --logprobs-mode {max(right)}."
        )


SERVER_KINDS = {
    "http": ServerKind("/v1/completions", _openai_body, read_completion, _update_from_disk, _no_check),
    "vllm": ServerKind("/v1/completions", _vllm_body, read_vllm_completion, _take_as_vllm, _check_vllm),
    "sglang": ServerKind("/generate", _sglang_body, read_generation, _take_as_sglang, _no_check),
}
"""By value of `rollout_engine`."""
