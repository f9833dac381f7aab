"""Which host reads which rows of a batch, and how they reach the devices that compute with them.

If the devices of each host have row slots that no other host has, every host reads the rows of its own devices straight
into the arrays of the step. Otherwise (only some hosts read, or a tensor, context or stage axis spans hosts), the
reading hosts take equal shares of the rows into a load array, which is split over all devices of the mesh, and one
jitted function distributes the rows. Hosts that do not read contribute slots from which nothing is taken.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from maxtext_lite.parallel import devices_share_threads, over_all_devices

Index = tuple[slice, ...]
"""A device's part of a global array."""


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """The rows of one batch shape, [A, B, T] or [B, T]: B row slots, of which the first `filled_slots` have examples.

    Attributes:
      sharding: sharding of a step's arrays.
      slots_of_host: for each host, the row slots of every micro-batch that it reads; increasing and disjoint.
      load_positions: for each filled slot, its row in the load array; None if there is no load array.
      load_rows: rows of the load array.
    """

    shape: tuple[int, ...]
    sharding: NamedSharding
    slots_of_host: tuple[np.ndarray, ...]
    load_positions: np.ndarray | None
    load_rows: int

    @property
    def slot_dim(self) -> int:
        """The dim that counts row slots."""
        return len(self.shape) - 2

    @property
    def load_sharding(self) -> NamedSharding:
        """Sharding of the load array, whose rows are split over all devices in the order of the mesh."""
        return over_all_devices(_mesh(self.sharding), self.slot_dim)

    def to_devices(self, host: int, fields: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """This host's part of the global arrays, on its devices: the step's arrays, or load arrays for `hand_out`.

        Args:
          fields: this host's rows, in the shape `shape` with only the slots `slots_of_host[host]`.
        """
        if self.load_positions is None:
            return {name: self._own_slots(rows, self.slots_of_host[host]) for name, rows in fields.items()}
        return {name: self._load_array(rows, host) for name, rows in fields.items()}

    def hand_out(self, loaded: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The arrays of the step. All hosts call it, in the same order as their other device work."""
        if self.load_positions is None:
            return loaded
        handed_out = self._handing_out(loaded)
        if devices_share_threads():
            jax.block_until_ready(handed_out)
        return handed_out

    @functools.cached_property
    def _handing_out(self) -> Callable[..., Any]:
        assert self.load_positions is not None
        return _hand_out(self.sharding, self.shape, self.slot_dim, tuple(self.load_positions.tolist()))

    def _own_slots(self, rows: np.ndarray, host_slots: np.ndarray) -> jax.Array:
        dim = self.slot_dim

        def part(index: Index | None) -> np.ndarray:
            assert index is not None
            # The host's slots are increasing and contain every device's whole range, so that range is contiguous here.
            start, stop, _ = index[dim].indices(self.shape[dim])
            first, last = np.searchsorted(host_slots, (start, stop))
            return rows[(*index[:dim], slice(first, last), *index[dim + 1 :])]

        return jax.make_array_from_callback(self.shape, self.sharding, part)

    def _load_array(self, rows: np.ndarray, host: int) -> jax.Array:
        assert self.load_positions is not None
        dim = self.slot_dim
        shape = (*self.shape[:dim], self.load_rows, *self.shape[dim + 1 :])
        whole = np.zeros(shape, rows.dtype)  # only this host's rows are ever read
        slots = self.slots_of_host[host]
        whole[(*[slice(None)] * dim, self.load_positions[slots])] = rows
        return jax.make_array_from_callback(shape, self.load_sharding, lambda index: whole[index])


@functools.cache
def _hand_out(
    sharding: NamedSharding, shape: tuple[int, ...], slot_dim: int, positions: tuple[int, ...]
) -> Callable[..., Any]:
    first, count = positions[0], len(positions)
    in_order = positions == tuple(range(first, first + count))

    def rows_of(loaded: jax.Array) -> jax.Array:
        if in_order:
            rows = jax.lax.slice_in_dim(loaded, first, first + count, axis=slot_dim)
        else:
            rows = jnp.take(loaded, np.asarray(positions), axis=slot_dim)
        empty = [(0, 0)] * len(shape)
        empty[slot_dim] = (0, shape[slot_dim] - count)
        return jnp.pad(rows, empty)

    return jax.jit(lambda loaded: jax.tree.map(rows_of, loaded), out_shardings=sharding)


def row_layout(
    shape: tuple[int, ...],
    sharding: NamedSharding,
    *,
    filled_slots: int,
    loading_hosts: Sequence[int],
    host_of: Callable[[Any], int] = lambda device: device.process_index,
) -> RowLayout:
    """The layout of [A, B, T] or [B, T] arrays whose first `filled_slots` row slots have examples.

    Args:
      loading_hosts: the hosts that read.
      host_of: number of the host of a device; all hosts have equally many devices.
    """
    dim = len(shape) - 2
    indices = sharding.devices_indices_map(shape)
    hosts = sorted({host_of(device) for device in indices})
    held = [
        slots_of((at for device, at in indices.items() if host_of(device) == host), slot_dim=dim, num_slots=shape[dim])
        for host in hosts
    ]
    if len(loading_hosts) == len(hosts) and sum(map(len, held)) == shape[dim]:
        return RowLayout(shape, sharding, tuple(held), None, 0)
    shares = dict(zip(loading_hosts, np.array_split(np.arange(filled_slots), len(loading_hosts)), strict=True))
    nothing = np.zeros(0, np.int64)
    slots_of_host = tuple(shares.get(host, nothing) for host in hosts)

    devices = list(_mesh(sharding).devices.flat)
    rows_of_device = -(-max(map(len, slots_of_host)) * len(hosts) // len(devices))  # enough for the largest share
    positions = np.zeros(filled_slots, np.int64)
    for host, slots in zip(hosts, slots_of_host, strict=True):
        own = np.array([at for at, device in enumerate(devices) if host_of(device) == host])
        rows = (own[:, None] * rows_of_device + np.arange(rows_of_device)).ravel()
        positions[slots] = rows[: len(slots)]
    return RowLayout(shape, sharding, slots_of_host, positions, len(devices) * rows_of_device)


def _mesh(sharding: NamedSharding) -> Mesh:
    assert isinstance(sharding.mesh, Mesh)  # of devices, not an abstract one
    return sharding.mesh


def slots_of(indices: Iterable[Index], *, slot_dim: int, num_slots: int) -> np.ndarray:
    """The row slots of a set of devices, each once: int64, increasing.

    Args:
      indices: each device's part of the global array, as in `Sharding.devices_indices_map`.
      slot_dim: the dim of the array that counts row slots.
    """
    held = np.zeros(num_slots, bool)
    for index in indices:
        held[index[slot_dim]] = True
    return np.flatnonzero(held)
