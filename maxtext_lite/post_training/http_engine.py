"""Rollouts from a server beside the run.

A server must continue prompts that are lists of tokens, return the sampled tokens and their log-probabilities, and load
new parameters from a directory that it shares with the run (`server_kinds`).
"""

import asyncio
import hashlib
import secrets
import shutil
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import jax
from jax import Array

from maxtext_lite.config import Config, UserError
from maxtext_lite.hf.directory import files_of_model, run_config_json
from maxtext_lite.hf.weights import export_model
from maxtext_lite.models import Adapted
from maxtext_lite.models.decoding import Sampling
from maxtext_lite.models.lora import merged
from maxtext_lite.parallel import Params, on_first_host
from maxtext_lite.post_training.rollout import Request, Response
from maxtext_lite.post_training.server_answers import Asked
from maxtext_lite.post_training.server_kinds import RolloutServer, Weights

WEIGHTS = "rollout_weights"
"""In the run directory: two alternating Hugging Face directories that the server reads parameters from."""

_REQUESTS_IN_FLIGHT = 64


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
                seed=_seed_of(self._seed, request.key),
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


def _seed_of(seed: int, key: tuple[int, ...]) -> int:
    """A 31-bit seed, which servers accept, for this seed and key; the same in every process."""
    return int.from_bytes(hashlib.sha256(repr((seed, *key)).encode()).digest()[:4], "big") >> 1
