"""The private part of jax's coordination service: its client, before any device is used, and its cluster detection.

Tested with jax 0.10.2 and 0.11.2.
"""

from typing import Any

from jax._src import clusters, distributed

_TEXTS = "maxtext_lite_texts/"
_LONGEST_WAIT_SECONDS = 7 * 24 * 3600


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
            break
    return "", 1, 0


def wait_for_text(key: str) -> str:
    """The text of a key, once a process has put it there; the watchdog ends a wait that is too long."""
    return _client().blocking_key_value_get(_TEXTS + key, _LONGEST_WAIT_SECONDS * 1000)


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
