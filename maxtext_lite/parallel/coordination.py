"""The private part of jax's coordination service, through which the processes of a run know each other.

Tested with jax 0.10.2 and 0.11.2.
"""

import ctypes
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

from jax._src import clusters, distributed

HEARTBEAT_SECONDS = 7 * 24 * 3600
"""One process's silence that makes jax abort all others; the watchdog reports long before."""

_TEXTS = "maxtext_lite_texts/"
_STAMPS = "maxtext_lite/"
_LONGEST_WAIT_SECONDS = 7 * 24 * 3600
_CONNECT_SECONDS = 2.0


def _client() -> Any:
    client = distributed.global_state.client
    if client is None:
        raise ConnectionError("jax has left")
    return client


def put_text(key: str, text: str) -> None:
    """Sets a key, once, that any process may wait for. It needs no device."""
    _client().key_value_set(_TEXTS + key, text)


def detected_tpus() -> tuple[str, int, int]:
    """The `cluster_detection_method` for the TPU slices of this host, their hosts, and this one's number.

    ("", 1, 0) for a machine that is in neither GKE nor a TPU VM.
    """
    for cluster in (clusters.GkeTpuCluster, clusters.GceTpuCluster):
        try:
            if cluster.is_env_present():
                return cluster.name, cluster.get_process_count(), cluster.get_process_id()
        except OSError:  # no metadata server answers: this is no TPU VM
            if "," in os.environ.get("TPU_PROCESS_ADDRESSES", os.environ.get("TPU_WORKER_HOSTNAMES", "")):
                raise  # one of several hosts, which must not train alone
            break
    return "", 1, 0


def wait_for_text(key: str) -> str:
    """The text of a key, once a process has put it there; the watchdog ends too long a wait."""
    return _client().blocking_key_value_get(_TEXTS + key, _LONGEST_WAIT_SECONDS * 1000)


class Store:
    """Keys and values that process 0 keeps for all processes. Without it both methods may block or raise anything.

    It works only once jax has connected: a client that calls before makes its process abort.
    """

    def __init__(self, process: int, num_processes: int):
        self.process = process
        self.num_processes = num_processes

    def put(self, key: str, value: str) -> None:
        """Sets a key, whether or not it exists."""
        _client().key_value_set(_STAMPS + key, value, allow_overwrite=True)

    def all(self) -> dict[str, str]:
        """Every key set by `put`, with its value."""
        return {key.removeprefix(_STAMPS): value for key, value in _client().key_value_dir_get(_STAMPS)}


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
    host, _, port = address.rpartition(":")
    return f"[{host}]:{port}" if ":" in host.strip("[]") and host[0] != "[" else address


def coordinator_answers() -> bool:
    """Whether anything listens at the address of process 0."""
    host, _, port = (distributed.global_state.coordinator_address or "").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, ValueError):
        return False
    return True


def call_if_coordinator_goes(call: Callable[[], object]) -> None:
    """Registers `call` for any thread to call before jax aborts this process because process 0 is unreachable."""
    global _if_gone
    _if_gone = call
    _LIBC.signal(signal.SIGABRT, _on_abort)


# jax's client aborts its process as soon as the connection to process 0 ends, in a thread of its own, and the callback
# that it could use instead cannot be written in Python. But abort() first runs a handler of SIGABRT. Python's handlers
# wait for the main thread, so this one is C's. If process 0 does answer, the abort has another cause and proceeds.
@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _on_abort(number: int) -> None:
    if coordinator_answers():
        _LIBC.signal(number, None)  # SIG_DFL is 0
    else:
        _if_gone()


_if_gone: Callable[[], object] = lambda: None  # noqa: E731
_LIBC = ctypes.CDLL(None)
_LIBC.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
