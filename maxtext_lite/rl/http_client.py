"""JSON over HTTP, asked of a server that may do anything: what it answers is bounded in bytes and in seconds.

The standard library's connections, but for what it leaves open: redirects are not followed, a time-out is one for the
whole answer and not for each of its bytes, and requests that nobody waits for any more are cancelled at once.
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

_LOOK_UP_SECONDS = 0.5  # how often a request that waits asks whether it still should
_CONNECTING_SECONDS = 60.0
_PASSWORD = re.compile("//[^ ]*@")
_SHOWN = 200  # letters of what a server said


class Server:
    """A server, to which JSON is posted. Not through a proxy: it is one of the run's own.

    Args:
      key: the config's key that names it.
      url: http:// or https://, a host, and where they are needed a name and password, a port and a path.
      attempts: times that a request is made when there is no answer, or one that the server failed or is busy.
      wait_seconds: before the second attempt; it doubles with each.
      timeout_seconds: for a request, all of its attempts and the last byte of its answer.

    Attributes:
      name: `key=url` as messages have it, without the password.
      path: of the url, without a slash at its end.
    Raises:
      UserError: the url is none.
    """

    def __init__(self, key: str, url: str, *, attempts: int, wait_seconds: float, timeout_seconds: float):
        self.name = f"{key}={_shown(url.rstrip('/'))}"
        parts = _parts_of(url)
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
        """As `post`, without a body, and until it is answered."""
        return self.post(path, None, most_bytes=most_bytes, ends=threading.Event())

    def post(
        self,
        path: str,
        body: Mapping[str, Any] | None,
        *,
        most_bytes: int,
        ends: threading.Event,
        attempts: int | None = None,
    ) -> dict[str, Any]:
        """The object that the server answers, of at most `most_bytes`.

        Args:
          path: from the host on.
          body: None: it is a GET.
          ends: once it is set, the request is cancelled.
          attempts: others than the server's.
        Raises:
          UserError: there is no answer in time, or it is a refusal, a redirect, too long or no object of JSON.
        """
        data, failure = None if body is None else json.dumps(body).encode(), ""
        deadline, made, most = time.monotonic() + self._timeout_seconds, 0, attempts or self._attempts
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
                if status < 500 and status != http.client.TOO_MANY_REQUESTS:  # again it would say the same
                    raise self._problem(path, f"refuses a request ({failure})")
            if made < most:
                ends.wait(min(self._wait_seconds * 2 ** (made - 1), max(deadline - time.monotonic(), 0)))
        tried = f"after {made} attempt{'' if made == 1 else 's'}"
        raise self._problem(path, f"gives no answer {tried} within {self._timeout_seconds:g} s ({failure})")

    def _ask(
        self, path: str, data: bytes | None, most_bytes: int, seconds_left: Callable[[], float]
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Status, headers and at most one byte more of the body than it may have."""
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
        except (ValueError, RecursionError):  # bytes that are no UTF-8 are a ValueError too
            answer = None
        if isinstance(answer, dict):
            return cast(dict[str, Any], answer)
        raise self._problem(path, f"answers what is not a JSON object: {_shown(text)}")

    def _problem(self, path: str, what: str) -> UserError:
        return UserError(f"{self.name}: {self._origin}{path} {what}.")


class _Wire(io.RawIOBase):
    """What comes over a socket while there are seconds left. It stands for the socket where a response is read."""

    def __init__(self, sock: socket.socket, seconds_left: Callable[[], float]):
        self._sock, self._seconds_left = sock, seconds_left

    def makefile(self, _: str) -> io.BufferedReader:
        """The reader that a response asks its socket for."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """As of any raw stream. Raises TimeoutError where no seconds are left."""
        while True:
            self._sock.settimeout(min(self._seconds_left(), _LOOK_UP_SECONDS))
            try:
                return self._sock.recv_into(buffer)
            except TimeoutError:
                continue


def _still_wanted(deadline: float, ends: threading.Event) -> Callable[[], float]:
    """The seconds until the deadline, as long as there are some and somebody waits; else it raises TimeoutError."""

    def seconds_left() -> float:
        left = deadline - time.monotonic()
        if left <= 0 or ends.is_set():
            raise TimeoutError("it took too long")
        return left

    return seconds_left


def _parts_of(url: str) -> urllib.parse.SplitResult | None:
    """The parts of an address; None where it is none."""
    # Some control characters are dropped where a url is split, and the line of a request ends at a space.
    if not (url.isascii() and url.isprintable() and " " not in url):
        return None
    try:
        parts = urllib.parse.urlsplit(url)
        named = bool(parts.hostname) and parts.port != 0  # a port that is no number, or too large, is a ValueError
    except ValueError:
        return None
    return parts if named and parts.scheme in ("http", "https") and not (parts.query or parts.fragment) else None


def _shown(said: str | bytes) -> str:
    """The beginning of an address or of what a server said, on one line and without a password."""
    text = said[: 4 * _SHOWN].decode(errors="replace") if isinstance(said, bytes) else said
    text = _PASSWORD.sub("//", text)
    return value_text(text[:_SHOWN], most=4 * _SHOWN) + ("..." if len(text) > _SHOWN else "")
