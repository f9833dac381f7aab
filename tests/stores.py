"""Stores for tests: fsspec's memory in the place of a bucket, in which anything may fail; and moto's server, as s3."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from maxtext_lite.preparation import fetched


class Memory:
    """A bucket in memory.

    Attributes:
      calls: (method, name of the object) of what was read and written, in order.
      before: is told of each, and may raise.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from fsspec.implementations.memory import MemoryFileSystem

        class Isolated(MemoryFileSystem):
            store: dict[str, Any] = {}  # noqa: RUF012  (of this bucket, not of all in the process)
            pseudo_dirs = [""]  # noqa: RUF012
            cachable = False

        self.files = Isolated()
        self.calls: list[tuple[str, str]] = []
        self.before: Callable[[str, str], None] = lambda method, name: None
        for method in ("get_file", "put_file", "cat_file", "pipe_file"):
            monkeypatch.setattr(
                self.files, method, self._told(method, getattr(self.files, method))
            )
        monkeypatch.setattr(fetched, "file_system", self._file_system)

    def _file_system(self, url: str, key: str) -> tuple[Any, str]:
        del key
        return self.files, "/" + url.partition("://")[2]

    def _told(self, method: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def told(first: str, *args: Any, **kwargs: Any) -> Any:
            name = args[0] if method == "put_file" else first
            self.before(method, name.rpartition("/")[2])
            result = function(first, *args, **kwargs)
            self.calls.append((method, name.rpartition("/")[2]))
            return result

        return told

    def content(self, url: str) -> dict[str, bytes]:
        """What stands below a path, by its name from there."""
        root = "/" + url.partition("://")[2]
        return {
            name[len(root) + 1 :]: self.files.store[name].getvalue()
            for name in self.files.find(root)
        }


@contextlib.contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Serves an empty bucket of the name `bucket`; gives what a process needs in its environment."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "anybody",
            "AWS_SECRET_ACCESS_KEY": "anything",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        server.stop()
