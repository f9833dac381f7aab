"""jax's coordination service, as far as jax keeps it to itself: the only module that touches its client.

Tested with jax 0.10.2 and 0.11.2.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# What is private has no types.

import ctypes
import signal
import socket
from typing import Any

import jax
from jax._src import clusters, distributed

from maxtext_lite.process.watchdog import watchdog

HEARTBEAT_SECONDS = 7 * 24 * 3600
"""After which jax aborts all processes of a run in which one is silent, where the watchdog says so long before."""

_PREFIX = "maxtext_lite/"
_CONNECT_SECONDS = 2.0


class CoordinationStore:
    """The key-value store that process 0 keeps for all; see `process.watchdog.Store`.

    To be used once jax has connected: what a client asks before makes it abort its process.
    """

    def __init__(self, process: int, num_processes: int):
        self.process, self.num_processes = process, num_processes

    @property
    def _client(self) -> Any:
        client = distributed.global_state.client
        if client is None:
            raise ConnectionError("jax has left")
        return client

    def put(self, key: str, value: str) -> None:
        """Sets a key, also where it has been set."""
        self._client.key_value_set(_PREFIX + key, value, allow_overwrite=True)

    def all(self) -> dict[str, str]:
        """Every key that was `put`, and its value."""
        return {key.removeprefix(_PREFIX): value for key, value in self._client.key_value_dir_get(_PREFIX)}


def watched_arguments(process: int) -> dict[str, Any]:
    """What `jax.distributed.initialize` is to be told where the watchdog is on; else {}.

    SIGTERM is ours: jax's preemption service would take it, and wants each host to ask it for the step to save after.
    """
    jax.config.update("jax_enable_preemption_service", False)
    if not watchdog.is_on:
        return {}
    if process:
        _LIBC.signal(signal.SIGABRT, _on_abort)
    return {"heartbeat_timeout_seconds": HEARTBEAT_SECONDS}


def coordinator_address(method: str | None, timeout_seconds: float) -> str:
    """host:port of process 0 as jax finds it by a `cluster_detection_method`; waits until the host has an address.

    Raises:
      ValueError: jax does not find it.
    """
    detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
    known = 0  # how many processes there are, and which this one is
    address, *_ = detect(None, known, known, None, method, int(timeout_seconds))
    if address is None:
        raise ValueError(f"jax finds no cluster by the method {method}.")
    return address


def coordinator_answers() -> bool:
    """Whether something listens where process 0 is."""
    host, _, port = (distributed.global_state.coordinator_address or "").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, ValueError):
        return False
    return True


# jax's client aborts its process as soon as the connection to process 0 ends, in a thread of its own; what it could
# call instead cannot be written in Python. abort() runs a handler of SIGABRT first. Python's own kind of handler waits
# for the main thread, so this one is C's. Where process 0 does answer, the abort is another's, and goes on.
@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _on_abort(number: int) -> None:
    if coordinator_answers():
        _LIBC.signal(number, _DEFAULT)
    else:
        watchdog.coordinator_is_gone()


_LIBC = ctypes.CDLL(None)
_LIBC.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
_DEFAULT = None  # SIG_DFL is 0
