"""Requests to an inference server, as JSON over HTTP."""

from __future__ import annotations

import asyncio
import http
from collections.abc import Mapping
from typing import Any, Self

import httpx2

from maxtext_lite.config import UserError
from maxtext_lite.config.errors import value_text, without_secrets
from maxtext_lite.post_training.rollout import ANSWER_SECONDS

_CONNECTING_SECONDS = 60.0


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

    async def get(self, route: str) -> dict[str, Any]:
        """As `post`, but a GET."""
        return await self._ask("GET", route, None, self._attempts)

    async def post(self, route: str, body: Mapping[str, Any], *, attempts: int | None = None) -> dict[str, Any]:
        """The server's answer, a JSON object.

        Raises:
          UserError: no answer came in time, or it is a refusal, a redirect or not a JSON object.
        """
        return await self._ask("POST", route, body, attempts or self._attempts)

    async def _ask(self, method: str, route: str, body: Mapping[str, Any] | None, attempts: int) -> dict[str, Any]:
        failure = ""
        made = 0
        try:
            async with asyncio.timeout(self._timeout_seconds):
                while made < attempts:
                    if made:
                        await asyncio.sleep(self._wait_seconds * 2 ** (made - 1))
                    made += 1
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
        except TimeoutError:
            failure = failure or "it takes too long"
        attempts_made = f"{made} attempt{'' if made == 1 else 's'}"
        raise UserError(
            f"{self.name}: {route} gives no answer after {attempts_made} in {self._timeout_seconds:g} s ({failure})."
        )

    def _object(self, route: str, response: httpx2.Response) -> dict[str, Any]:
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise UserError(f"{self.name}: {route} answers what is not a JSON object: {value_text(response.text)}.")
        return answer
