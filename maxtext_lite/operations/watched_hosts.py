"""What the watchdog needs of jax's private coordination service, which the other processes of a run see too.

Tested with jax 0.10.2 and 0.11.2.
"""

import ctypes
import signal
import socket
from collections.abc import Callable
from typing import Any

from jax._src import distributed

HEARTBEAT_SECONDS = 7 * 24 * 3600
"""Silence of one process after which jax aborts all others; the watchdog speaks long before."""

_PREFIX = "maxtext_lite/"
_CONNECT_SECONDS = 2.0


class CoordinationStore:
    """The key-value store that process 0 keeps for all processes; see `watchdog.Store`.

    It works only once jax has connected: a client that calls before makes its process abort.
    """

    def __init__(self, process: int, num_processes: int):
        self.process, self.num_processes = process, num_processes

    def put(self, key: str, value: str) -> None:
        """Sets a key, whether or not it exists."""
        _client().key_value_set(_PREFIX + key, value, allow_overwrite=True)

    def all(self) -> dict[str, str]:
        """Every key set by `put`, with its value."""
        return {key.removeprefix(_PREFIX): value for key, value in _client().key_value_dir_get(_PREFIX)}


def _client() -> Any:
    client = distributed.global_state.client
    if client is None:
        raise ConnectionError("jax has left")
    return client


def watched_arguments(process: int, coordinator_is_gone: Callable[[], object]) -> dict[str, Any]:
    """Arguments for `jax.distributed.initialize` in a process that is watched.

    Args:
      coordinator_is_gone: called, in any thread, before jax aborts this process because process 0 is unreachable.
    """
    global _if_gone
    _if_gone = coordinator_is_gone
    if process:
        _LIBC.signal(signal.SIGABRT, _on_abort)
    return {"heartbeat_timeout_seconds": HEARTBEAT_SECONDS}


def coordinator_answers() -> bool:
    """Whether anything listens at the address of process 0."""
    host, _, port = (distributed.global_state.coordinator_address or "").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, ValueError):
        return False
    return True


# jax's client aborts its process as soon as the connection to process 0 ends, in a thread of its own, and the callback
# that it could use instead cannot be written in Python. But abort() first runs a handler of SIGABRT. Python's handlers
# wait for the main thread, so this one is C's. If process 0 does answer, the abort has another cause and proceeds.
@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _on_abort(number: int) -> None:
    if coordinator_answers():
        _LIBC.signal(number, _DEFAULT)
    else:
        _if_gone()


_if_gone: Callable[[], object] = lambda: None  # noqa: E731
_LIBC = ctypes.CDLL(None)
_LIBC.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
_DEFAULT = None  # SIG_DFL is 0
