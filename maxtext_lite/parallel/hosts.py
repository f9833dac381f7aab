"""What the hosts of a run tell each other outside the train step."""

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from maxtext_lite.parallel.axes import over_all_devices, sharding


def exchange(value: Any) -> list[Any]:
    """Every host's value, by host number. All hosts call it, in the same order; values are JSON."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    longest = int(np.max(multihost_utils.process_allgather(np.array([len(text)], np.int32))))
    padded = np.full(longest, ord(" "), np.uint8)
    padded[: len(text)] = text
    texts = np.asarray(multihost_utils.process_allgather(padded)).reshape(jax.process_count(), longest)
    return [json.loads(row.tobytes()) for row in texts]


def make_any_host(mesh: Mesh) -> Callable[[bool], jax.Array]:
    """A function from this host's flag to whether any host raised its own, a bool on the devices.

    All hosts call it, in the same order as their other work on devices; it does not wait.
    """
    split = over_all_devices(mesh)
    any_flag = jax.jit(jnp.any, out_shardings=sharding(mesh))

    def any_host(flag: bool) -> jax.Array:
        return any_flag(jax.make_array_from_callback((mesh.size,), split, lambda index: np.full(1, flag)))

    return any_host
