"""Accelerators by name and jax device kind: peak FLOP/s, memory, links and clock of one jax device."""

import dataclasses
import fnmatch
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pydantic.dataclasses

from maxtext_lite.config import UserError
from maxtext_lite.config.errors import did_you_mean, value_text
from maxtext_lite.config.kernels import Platform
from maxtext_lite.config.yaml import parse_mapping


@pydantic.dataclasses.dataclass(frozen=True)
class Device:
    """The peak rates of one jax device, by its vendor.

    Attributes:
      name: the short name on the command line: v5e, h100.
      kinds: patterns of jax's `device_kind`, with * for any text.
      peak_flops: FLOP/s of dense matmuls by the dtype of their operands: bfloat16, float8, int8, and float32 if the
        hardware multiplies it (NVIDIA: as TF32). A TPU multiplies float32 in several passes of bfloat16: no figure.
      memory_bytes: the vendor's figure, in units of 1e9 bytes; a program can use up to 7 % more.
      memory_bytes_per_second: bandwidth of that memory.
      link_bytes_per_second: send rate to other devices of its slice or host, over all links, while receiving as much:
        half of a bidirectional figure.
      clock_hz: of the cycles that a compiler counts; None if unknown.
      source: of the figures.
      most_linked: devices joined by these links: a TPU pod, an NVIDIA host, a GB200 rack.
      torus_dims: of the links; 0: a switch, which gives each device its full rate to any other.
      network_bytes_per_second: send rate per device beyond the links, likewise.
      host_bytes_per_second: send rate to the memory of its host, likewise.
      links_hosts: whether these links also join hosts.
      per_chip: jax devices of a chip.
      on_chip_bytes: on-chip memory in which XLA keeps arrays between operations: of a v5e's and v6e's 128 MiB
        (jax's tpu_info), what `xla.compiler_flags` leaves of it to arrays. 0: none, or unknown.
    """

    name: str
    platform: Platform
    kinds: tuple[str, ...]
    peak_flops: Mapping[str, float]
    memory_bytes: int
    memory_bytes_per_second: float
    source: str
    link_bytes_per_second: float | None = None
    clock_hz: float | None = None
    most_linked: int = 1
    torus_dims: int = 0
    network_bytes_per_second: float | None = None
    host_bytes_per_second: float | None = None
    on_chip_bytes: int = 0
    links_hosts: bool = False
    per_chip: int = 1

    def in_hosts(self, num_devices: int, num_hosts: int) -> "Device":
        """The same device on a machine with that many; links within a host join only the host's devices."""
        if self.links_hosts:
            return self
        return dataclasses.replace(self, most_linked=min(self.most_linked, max(num_devices // num_hosts, 1)))

    def axis_bytes_per_second(self, size: int, *, stride: int, in_slice: int, slices: int = 1) -> float | None:
        """Send rate of a device in a ring along a mesh axis; None if unknown.

        A ring that extends beyond the links has all its linked devices send over the network at once. On a torus an
        axis gets its share of the dims, by logarithm of its size, and at least one.

        Args:
          size: devices along the axis, in one slice.
          stride: distance of neighbours: the product of the faster axes.
          in_slice: devices of one slice.
          slices: along the axis.
        """
        linked = min(size, max(self.most_linked // stride, 1))
        rate = math.inf
        if linked > 1:
            if self.link_bytes_per_second is None:
                return None
            share = 1.0
            if self.torus_dims:
                share = max(1 / self.torus_dims, math.log(size) / math.log(in_slice))
            rate = share * self.link_bytes_per_second
        if size * slices > linked:
            if self.network_bytes_per_second is None:
                return None
            rate = min(rate, linked * self.network_bytes_per_second)
        return rate

    def peak(self, dtype: str) -> float | None:
        """FLOP/s of matmuls in a dtype; None if unknown. On NVIDIA float16 is as fast as bfloat16."""
        if dtype == "float16" and self.platform == "gpu":
            dtype = "bfloat16"
        return self.peak_flops.get("float8" if dtype.startswith("float8") else dtype)


@functools.cache
def devices() -> tuple[Device, ...]:
    """Every known accelerator, from devices.yml. The first pattern that matches a kind counts."""
    table = parse_mapping(Path(__file__).with_name("devices.yml").read_text(encoding="utf-8"))
    found: list[Device] = []
    for name, row in table:
        found.append(Device(name, **cast("dict[str, Any]", row.value)))
    return tuple(found)


def device_of_kind(device_kind: str) -> Device | None:
    """The device with this jax `device_kind`; None if unknown, such as a CPU."""
    for device in devices():
        if any(fnmatch.fnmatchcase(device_kind, pattern) for pattern in device.kinds):
            return device
    return None


def device_named(name: str, *, option: str) -> Device:
    """The device with a short name, such as v5e or h100.

    Args:
      option: the command-line option that names it, for the message.
    Raises:
      UserError: no device has that name.
    """
    for device in devices():
        if device.name == name.lower():
            return device
    names = [device.name for device in devices()]
    raise UserError(
        f"{option}={value_text(name)} is no device.{did_you_mean(name, names)} There are: {', '.join(names)}."
    )


def peak_tflops(device_kind: str, dtype: str) -> float | None:
    """Peak TFLOP/s of a device for matmuls in a dtype; None if unknown."""
    device = device_of_kind(device_kind)
    peak = device.peak(dtype) if device else None
    return None if peak is None else peak / 1e12
