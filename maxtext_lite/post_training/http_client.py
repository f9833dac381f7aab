"""JSON over HTTP from a server that is not trusted: answers are limited in bytes and in seconds.

It uses the standard library's connections with stricter rules: redirects are not followed, a time-out covers the whole
answer instead of each read, and requests that nobody waits for are cancelled at once.
"""

import base64
import http.client
import io
import json
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any, cast

from maxtext_lite.config import UserError
from maxtext_lite.config.errors import value_text
from maxtext_lite.post_training.keys import server_address

_LOOK_UP_SECONDS = 0.5  # between checks whether a waiting request is still wanted
_CONNECTING_SECONDS = 60.0
_PASSWORD = re.compile("//[^ ]*@")
_SHOWN = 200  # characters of a server's text


class Server:
    """A server that takes JSON by POST. Proxies are bypassed: the server belongs to the run.

    Args:
      key: the config's key that names it.
      url: http:// or https:// and a host; optionally a user name and password, a port and a path.
      attempts: how often to try a request that gets no answer, or a failure or "busy".
      wait_seconds: before the second attempt; doubles with each.
      timeout_seconds: for a request, with all of its attempts, up to the last byte of the answer.

    Attributes:
      name: `key=url` for messages, without the password.
      path: of the url, without a trailing slash.
    Raises:
      UserError: the url is invalid.
    """

    def __init__(self, key: str, url: str, *, attempts: int, wait_seconds: float, timeout_seconds: float):
        self.name = f"{key}={_shown(url.rstrip('/'))}"
        parts = server_address(url)
        if parts is None:
            raise UserError(f"{self.name} is not the address of a server. One that works: http://HOST:8000/v1.")
        assert parts.hostname is not None
        self._host, self._port, self._is_secure = parts.hostname, parts.port, parts.scheme == "https"
        self.path = parts.path.rstrip("/")
        self._origin = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self._headers = {"Content-Type": "application/json", "Accept": "application/json", "Connection": "close"}
        if parts.username is not None:
            secret = ":".join(urllib.parse.unquote(part or "") for part in (parts.username, parts.password))
            self._headers["Authorization"] = "Basic " + base64.b64encode(secret.encode()).decode()
        self._attempts, self._wait_seconds, self._timeout_seconds = attempts, wait_seconds, timeout_seconds

    def get(self, path: str, *, most_bytes: int) -> dict[str, Any]:
        """As `post`, but a GET, which is not cancelled."""
        return self.post(path, None, most_bytes=most_bytes, ends=threading.Event())

    def post(
        self,
        path: str,
        body: Mapping[str, Any] | None,
        *,
        most_bytes: int,
        ends: threading.Event,
        attempts: int | None = None,
        seconds: float | None = None,
    ) -> dict[str, Any]:
        """The server's answer, a JSON object of at most `most_bytes`.

        Args:
          path: everything after the host.
          body: None: the request is a GET.
          ends: cancels the request once it is set.
          attempts, seconds: None: the server's defaults.
        Raises:
          UserError: no answer came in time, or it is a refusal, a redirect, too long or not a JSON object.
        """
        data, failure = None if body is None else json.dumps(body).encode(), ""
        seconds, most, made = seconds or self._timeout_seconds, attempts or self._attempts, 0
        deadline = time.monotonic() + seconds
        while made < most and time.monotonic() < deadline and not ends.is_set():
            made += 1
            try:
                status, headers, text = self._ask(path, data, most_bytes, _still_wanted(deadline, ends))
            except (OSError, http.client.HTTPException) as error:
                failure = _shown(str(error) or type(error).__name__)
            else:
                if status == http.client.OK:
                    return self._object(path, headers, text, most_bytes)
                failure = f"HTTP {status}: {_shown(text)}"
                if 300 <= status < 400:
                    where = _shown(headers.get("Location", "nowhere"))
                    raise self._problem(path, f"redirects to {where} (HTTP {status}), which is not followed")
                if status < 500 and status != http.client.TOO_MANY_REQUESTS:  # another attempt would not help
                    raise self._problem(path, f"refuses a request ({failure})")
            if made < most:
                ends.wait(min(self._wait_seconds * 2 ** (made - 1), max(deadline - time.monotonic(), 0)))
        tried = f"after {made} attempt{'' if made == 1 else 's'}"
        raise self._problem(path, f"gives no answer {tried} within {seconds:g} s ({failure})")

    def _ask(
        self, path: str, data: bytes | None, most_bytes: int, seconds_left: Callable[[], float]
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Status, headers and the body, at most one byte over the limit."""
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=min(seconds_left(), _CONNECTING_SECONDS))
        try:
            method = "GET" if data is None else "POST"
            connection.request(method, path, data, self._headers)
            response = http.client.HTTPResponse(_Wire(connection.sock, seconds_left), method=method)  # type: ignore[arg-type]
            response.begin()
            text = response.read(most_bytes + 1)
            if response.length and len(text) <= most_bytes:
                raise http.client.IncompleteRead(text, response.length)
            return response.status, response.headers, text
        finally:
            connection.close()

    def _object(self, path: str, headers: http.client.HTTPMessage, text: bytes, most_bytes: int) -> dict[str, Any]:
        if len(text) > most_bytes:
            raise self._problem(path, f"answers with more than the {most_bytes:,} bytes that it may take")
        kind = headers.get_content_type() if "Content-Type" in headers else "application/json"
        if kind != "application/json":
            raise self._problem(path, f"answers with {_shown(kind)}, not with application/json: {_shown(text)}")
        try:
            answer: Any = json.loads(text.decode())
        except (ValueError, RecursionError):  # invalid UTF-8 is a ValueError too
            answer = None
        if isinstance(answer, dict):
            return cast(dict[str, Any], answer)
        raise self._problem(path, f"answers what is not a JSON object: {_shown(text)}")

    def _problem(self, path: str, what: str) -> UserError:
        return UserError(f"{self.name}: {self._origin}{path} {what}.")


class _Wire(io.RawIOBase):
    """The stream from a socket while there are seconds left; `HTTPResponse` reads it in place of the socket."""

    def __init__(self, sock: socket.socket, seconds_left: Callable[[], float]):
        self._sock, self._seconds_left = sock, seconds_left

    def makefile(self, _: str) -> io.BufferedReader:
        """The reader that `HTTPResponse` asks for."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """As for any raw stream; raises TimeoutError once no seconds are left."""
        while True:
            self._sock.settimeout(min(self._seconds_left(), _LOOK_UP_SECONDS))
            try:
                return self._sock.recv_into(buffer)
            except TimeoutError:
                continue


def _still_wanted(deadline: float, ends: threading.Event) -> Callable[[], float]:
    """A function that gives the seconds left, and raises TimeoutError after the deadline or once `ends` is set."""

    def seconds_left() -> float:
        left = deadline - time.monotonic()
        if left <= 0 or ends.is_set():
            raise TimeoutError("it took too long")
        return left

    return seconds_left


def _shown(said: str | bytes) -> str:
    """The beginning of a url or of a server's text, on one line and without a password."""
    text = said[: 4 * _SHOWN].decode(errors="replace") if isinstance(said, bytes) else said
    text = _PASSWORD.sub("//", text)
    return value_text(text[:_SHOWN], most=4 * _SHOWN) + ("..." if len(text) > _SHOWN else "")
