"""Messages among the hosts of a run, outside the train step."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from maxtext_lite.config.errors import UserError, writing
from maxtext_lite.config.phases import phases
from maxtext_lite.parallel.axes import over_all_devices, sharding

Result = TypeVar("Result")

_FIRST_BYTES = 2**10  # of every message, including its length; most messages are no longer
_MOST_BYTES = 2**26  # sent at once, because they pass through the memory of the devices


def exchange(value: Any) -> list[Any]:
    """The value of every host, by host number. All hosts must call it, in the same order; values are JSON.

    Each distinct value is sent once, and none if all hosts have the same.
    """
    if jax.process_count() == 1:
        return [value]
    phases.arrive()
    text = json.dumps(value).encode()
    digest = np.frombuffer(hashlib.sha256(text).digest(), np.uint8)
    digests = [each.tobytes() for each in np.asarray(multihost_utils.process_allgather(digest))]
    texts = {digest.tobytes(): text}
    if len(set(digests)) > 1:
        texts = {each: bytes_of_host(digests.index(each), text) for each in dict.fromkeys(digests)}
    return [json.loads(texts[each]) for each in digests]


def value_of_host(host: int, value: Any) -> Any:
    """The value of one host, on every host. All hosts must call it, in the same order; that host's value is JSON."""
    if jax.process_count() == 1:
        return value
    return json.loads(bytes_of_host(host, json.dumps(value).encode() if jax.process_index() == host else b""))


def on_first_host(path: str | Path, work: Callable[[], Result]) -> Result:
    """The result of `work()` on the first host, on every host; it is JSON. All hosts must call it, in the same order.

    Args:
      path: what `work` writes.
    Raises:
      UserError: on all hosts, if the first one raises an exception; that host raises the exception, or a UserError in
        place of an OSError.
    """
    result, problems, failure = None, None, None
    if jax.process_index() == 0:
        try:
            with writing(path):
                result = work()
        except Exception as error:  # noqa: BLE001  (whatever it is, the others must not wait for this host)
            failure = error
            problems = error.problems if isinstance(error, UserError) else [f"Host 0 failed: {error!r}."]
    result, problems = value_of_host(0, [result, problems])
    if failure is not None:
        raise failure
    if problems is not None:
        raise UserError(problems)
    return result


def bytes_of_host(host: int, data: bytes) -> bytes:
    """The bytes of one host, on every host. All hosts must call it, in the same order; `data` of others is ignored.

    They travel in pieces padded to powers of two, so that few programs are compiled.
    """
    if jax.process_count() == 1:
        return data
    phases.arrive()
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


def make_any_host(mesh: Mesh) -> Callable[[bool], jax.Array]:
    """A function from this host's flag to whether any host raised its own, a bool on the devices.

    All hosts must call it, in the same order as their other device work; it does not wait.
    """
    split = over_all_devices(mesh)
    any_flag = jax.jit(jnp.any, out_shardings=sharding(mesh))

    def any_host(flag: bool) -> jax.Array:
        return any_flag(jax.make_array_from_callback((mesh.size,), split, lambda index: np.full(1, flag)))

    return any_host
