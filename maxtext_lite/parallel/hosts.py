"""Exchanges between the processes of a run outside the train step."""

import hashlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from maxtext_lite.config.errors import writing
from maxtext_lite.config.phases import phases
from maxtext_lite.parallel.mesh import over_all_devices, sharding

_EXIT_SECONDS = 5.0


def end_soon(code: int) -> None:
    """Call it when one of several processes is about to exit because it failed.

    At exit jax waits for the other processes, which wait for this one in a collective: minutes, and then abort().
    Processes with the same failure, such as a wrong config, need a moment; after a few seconds this process ends with
    `code`. A single process has nothing to wait for, so this does nothing.
    """
    if jax.distributed.is_initialized():
        watch = threading.Timer(_EXIT_SECONDS, os._exit, (code,))
        watch.daemon = True
        watch.start()


Result = TypeVar("Result")

_FIRST_BYTES = 2**10  # of every message, including its length; most messages are no longer
_MOST_BYTES = 2**26  # sent at once, because they pass through the memory of the devices


def exchange(value: Any) -> list[Any]:
    """The value of every host, by host number. All hosts must call it, in the same order; values are JSON.

    Each distinct value is sent once, and none if all hosts have the same.
    """
    if jax.process_count() == 1:
        return [value]
    phases.advance()
    text = json.dumps(value).encode()
    digest = np.frombuffer(hashlib.sha256(text).digest(), np.uint8)
    digests = [each.tobytes() for each in np.asarray(multihost_utils.process_allgather(digest))]
    texts = {digest.tobytes(): text}
    if len(set(digests)) > 1:
        texts = {each: bytes_of_host(digests.index(each), text) for each in dict.fromkeys(digests)}
    return [json.loads(texts[each]) for each in digests]


def value_of_host(host: int, value: Any) -> Any:
    """One host's value on every host. All hosts must call it, in the same order; the value is JSON."""
    if jax.process_count() == 1:
        return value
    return json.loads(bytes_of_host(host, json.dumps(value).encode() if jax.process_index() == host else b""))


def on_first_host(path: str | Path, work: Callable[[], Result]) -> Result:
    """The first host's `work()` result, a JSON value, on every host. All hosts must call it, in the same order.

    The others wait until the work is done. If it fails, the first host raises the error, and its end ends them.

    Args:
      path: what `work` writes.
    Raises:
      WriteError: in place of an OSError.
    """
    result: Any = None
    if jax.process_index() == 0:
        with writing(path):
            result = work()
    return value_of_host(0, result)


def bytes_of_host(host: int, data: bytes) -> bytes:
    """The bytes of one host, on every host. All hosts must call it, in the same order; `data` of others is ignored.

    They travel in pieces padded to powers of two, which keeps the number of compiled programs small.
    """
    if jax.process_count() == 1:
        return data
    phases.advance()
    is_source = jax.process_index() == host
    message = len(data).to_bytes(8, "big") + data if is_source else b""
    found = _piece_of_host(message[:_FIRST_BYTES], _FIRST_BYTES, is_source)
    length = 8 + int.from_bytes(found[:8], "big")
    for start in range(_FIRST_BYTES, length, _MOST_BYTES):
        here = min(length - start, _MOST_BYTES)
        found += _piece_of_host(message[start : start + here], here, is_source)
    return found[8:length]


def _piece_of_host(piece: bytes, num_bytes: int, is_source: bool) -> bytes:
    padded = np.zeros(1 << (num_bytes - 1).bit_length(), np.uint8)
    padded[: len(piece)] = np.frombuffer(piece, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(padded, is_source)).tobytes()[:num_bytes]


def make_largest_of_hosts(mesh: Mesh) -> Callable[[int], jax.Array]:
    """A function from this host's number to the largest of all hosts' numbers, on the devices.

    All hosts must call it, in the same order as their other device work; it does not wait.
    """
    split = over_all_devices(mesh)
    largest = jax.jit(jnp.max, out_shardings=sharding(mesh))

    def largest_of_hosts(number: int) -> jax.Array:
        return largest(jax.make_array_from_callback((mesh.size,), split, lambda index: np.full(1, number, np.int32)))

    return largest_of_hosts
