"""The interfaces of inference servers: their requests, routes, and updates of parameters.

Sources: the packages vllm 0.33.0 and 0.32.0 (entrypoints/openai/completion/protocol.py, entrypoints/rl/online and
entrypoints/serve/dev) and sglang 0.5.23 (srt/entrypoints/http_server.py, srt/managers/io_struct.py). Their schemas of
the fields and routes in use are in tests/rl/server_schemas.json.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from maxtext_lite.config import UserError
from maxtext_lite.config.errors import value_text
from maxtext_lite.models.decoding import Sampling
from maxtext_lite.post_training.http_client import Server
from maxtext_lite.post_training.rollout import Response
from maxtext_lite.post_training.server_answers import Asked, read_generation, read_vllm_completion

_RESUMING_SECONDS = 10.0  # a server that hangs must not hold a failed run


class Weights(NamedTuple):
    """A directory with the trainer's parameters after `step` steps, and their label."""

    directory: Path
    step: int
    label: str


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
        answer = await self.post(route, body)
        if any(answer.get(name) != value for name, value in expected.items()):
            raise UserError(f"{self.name}: {route} answers {value_text(answer)}, not {value_text(expected)}.")

    @contextlib.asynccontextmanager
    async def _resuming(self, route: str) -> AsyncGenerator[None]:
        """A block that pauses the server, which is asked to resume by this route if the block fails."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(UserError, TimeoutError):
                async with asyncio.timeout(_RESUMING_SECONDS):
                    await self.post(route, {}, attempts=1)
            raise

    def _not_loaded(self, weights: Weights, answer: object) -> UserError:
        return UserError(
            f"{self.name}: the server did not load the parameters of step {weights.step} from {weights.directory}: "
            f"{value_text(answer, 500)}."
        )


class VllmServer(RolloutServer):
    """vLLM, under VLLM_SERVER_DEV_MODE=1."""

    async def sample(self, asked: Asked) -> Response:
        sampling = asked.sampling
        body = {
            "prompt": asked.prompt,
            "n": 1,
            "max_tokens": asked.max_new_tokens,
            "min_tokens": 0,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            # Explicit, because the server may otherwise use the defaults in the model's generation_config.json.
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "ignore_eos": False,
            "watermarking": False,
            "seed": asked.seed,
            "stop_token_ids": asked.stop_token_ids,
            "logprobs": 0,  # of the drawn token only
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "return_weight_versions": True,
        }
        return read_vllm_completion(await self.post("/v1/completions", body), asked)

    async def load(self, weights: Weights) -> None:
        async with self._resuming("/resume"):
            await self._tell("/pause?mode=abort", {}, status="paused")
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(weights.directory)}}
            answer = await self.post("/collective_rpc", body, attempts=1)  # a server that fails to read them exits
            results = answer.get("results")
            if not results or any(result is not None for result in results):  # one result per worker
                raise self._not_loaded(weights, answer)
            await self._tell("/update_weight_version", {"new_version": weights.label}, success=True)
            await self._tell("/reset_prefix_cache", {}, success=True)
        await self._tell("/resume", {}, status="resumed")

    async def check(self, sampling: Sampling) -> None:
        modes = ["raw_logprobs"] if sampling.temperature == 1 else ["processed_logprobs"]
        if sampling.temperature == 1 and not sampling.top_k and sampling.top_p == 1:
            modes.append("processed_logprobs")
        about = await self.get("/server_info?config_format=json")
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
        sampling = asked.sampling
        body = {
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
        return read_generation(await self.post("/generate", body), asked)

    async def load(self, weights: Weights) -> None:
        async with self._resuming("/continue_generation"):
            await self._tell("/pause_generation", {"mode": "abort"}, status="ok")
            body = {"model_path": str(weights.directory), "flush_cache": True, "weight_version": weights.label}
            answer = await self.post("/update_weights_from_disk", body)
            if answer.get("success") is not True:
                raise self._not_loaded(weights, answer)
        await self._tell("/continue_generation", {}, status="ok")


SERVER_KINDS: dict[str, type[RolloutServer]] = {"vllm": VllmServer, "sglang": SglangServer}
"""By value of `rollout_engine`."""
