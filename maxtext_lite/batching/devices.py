"""Accelerators by name and jax device kind: peak FLOP/s, memory, links and clock of one jax device."""

import dataclasses
import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass

from maxtext_lite.config import UserError
from maxtext_lite.config.errors import did_you_mean, value_text
from maxtext_lite.config.kernels import Platform


@dataclass(frozen=True)
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
    link_bytes_per_second: float | None
    source: str
    clock_hz: float | None = None
    most_linked: int = 1
    torus_dims: int = 0
    network_bytes_per_second: float | None = None
    host_bytes_per_second: float | None = None
    on_chip_bytes: int = 0
    links_hosts: bool = False
    per_chip: int = 1

    def in_hosts(self, num_devices: int, num_hosts: int) -> "Device":
        """The same device on a machine with that many: links that end at a host join no more than its devices."""
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


def _peaks(bfloat16: float, *, float8: float = 0, int8: float = 0, float32: float = 0) -> dict[str, float]:
    """Peaks in FLOP/s from TFLOP/s; 0: no such units."""
    stated = {"bfloat16": bfloat16, "float8": float8, "int8": int8, "float32": float32}
    return {dtype: tflops * 1e12 for dtype, tflops in stated.items() if tflops}


_H100 = _peaks(989.4, float8=1978.9, int8=1978.9, float32=494.7)
_A100 = _peaks(312, int8=624, float32=156)

DEVICES: tuple[Device, ...] = (
    Device(
        "v4",
        "tpu",
        ("TPU v4",),
        _peaks(275, int8=275),
        memory_bytes=32_000_000_000,
        memory_bytes_per_second=1200e9,
        link_bytes_per_second=600e9 / 2,
        clock_hz=1.05e9,
        links_hosts=True,
        most_linked=4096,
        torus_dims=3,
        host_bytes_per_second=16e9,
        source="Jouppi et al. 2023, arXiv:2304.01433, table 4: six links of 50 GB/s each way, 1050 MHz"
        "; host: Austin et al. 2025, How to Scale Your Model, part 2",
    ),
    Device(
        "v5e",
        "tpu",
        ("TPU v5 lite", "TPU v5e"),
        _peaks(197, int8=393),
        memory_bytes=16_000_000_000,
        memory_bytes_per_second=819e9,
        link_bytes_per_second=400e9 / 2,
        clock_hz=1.5e9,
        links_hosts=True,
        most_linked=256,
        torus_dims=2,
        network_bytes_per_second=25e9 / 8,
        host_bytes_per_second=16e9,
        on_chip_bytes=32 << 20,
        source="Google Cloud's page on v5e; clock: the peak over 4 x 128 x 128 products a cycle; "
        "network: the pod's over its chips; host: as v4",
    ),
    Device(
        "v5p",
        "tpu",
        ("TPU v5", "TPU v5p"),
        _peaks(459, int8=918),
        memory_bytes=95_000_000_000,
        memory_bytes_per_second=2765e9,
        link_bytes_per_second=1200e9 / 2,
        clock_hz=1.75e9,
        links_hosts=True,
        most_linked=8960,
        torus_dims=3,
        network_bytes_per_second=50e9 / 8,
        host_bytes_per_second=16e9,
        source="Google Cloud's page on v5p; clock: the peak over 8 x 128 x 128 products a cycle; host: as v4",
    ),
    Device(
        "v6e",
        "tpu",
        ("TPU v6 lite", "TPU v6e"),
        _peaks(918, int8=1836),
        memory_bytes=32_000_000_000,
        memory_bytes_per_second=1638e9,
        link_bytes_per_second=800e9 / 2,
        clock_hz=1.75e9,
        links_hosts=True,
        most_linked=256,
        torus_dims=2,
        network_bytes_per_second=100e9 / 8,
        host_bytes_per_second=32e9,
        on_chip_bytes=32 << 20,
        source="Google Cloud's page on v6e; clock: the peak over 4 x 256 x 256 products a cycle, the fewest with "
        "which the compiler's cycles of a large matmul stay below that peak; network: the pod's over its chips; "
        "host: as v4",
    ),
    Device(
        "7x",
        "tpu",
        ("TPU7x", "TPU v7x"),
        _peaks(2307 / 2, float8=4614 / 2),
        memory_bytes=96_000_000_000,
        memory_bytes_per_second=7380e9 / 2,
        link_bytes_per_second=1200e9 / 4,
        links_hosts=True,
        most_linked=18432,
        torus_dims=3,
        per_chip=2,
        source="Google Cloud's page on TPU7x (Ironwood), halved: jax has two devices for each chip",
    ),
    Device(
        "a100-40",
        "gpu",
        ("NVIDIA A100*40GB*",),
        _A100,
        memory_bytes=40_000_000_000,
        memory_bytes_per_second=1555e9,
        link_bytes_per_second=600e9 / 2,
        most_linked=8,
        network_bytes_per_second=200e9 / 8,
        host_bytes_per_second=32e9,
        source="NVIDIA's data sheet of the A100; network: an eighth of its DGX A100",
    ),
    Device(
        "a100-80",
        "gpu",
        ("NVIDIA A100*80GB*",),
        _A100,
        memory_bytes=80_000_000_000,
        memory_bytes_per_second=2039e9,
        link_bytes_per_second=600e9 / 2,
        most_linked=8,
        network_bytes_per_second=200e9 / 8,
        host_bytes_per_second=32e9,
        source="NVIDIA's data sheet of the A100 (SXM); network: an eighth of its DGX A100",
    ),
    Device(
        "h100-pcie",
        "gpu",
        ("NVIDIA H100 PCIe*",),
        _peaks(756, float8=1513, int8=1513, float32=378),
        memory_bytes=80_000_000_000,
        memory_bytes_per_second=2000e9,
        link_bytes_per_second=None,
        most_linked=1,
        host_bytes_per_second=64e9,
        source="NVIDIA's data sheet of the H100, column PCIe",
    ),
    Device(
        "h100-nvl",
        "gpu",
        ("NVIDIA H100 NVL*",),
        _peaks(835, float8=1671, int8=1671, float32=417.5),
        memory_bytes=94_000_000_000,
        memory_bytes_per_second=3900e9,
        link_bytes_per_second=600e9 / 2,
        most_linked=2,
        host_bytes_per_second=64e9,
        source="NVIDIA's data sheet of the H100, column NVL, without sparsity",
    ),
    Device(
        "h100",
        "gpu",
        ("NVIDIA H100*",),
        _H100,
        memory_bytes=80_000_000_000,
        memory_bytes_per_second=3350e9,
        link_bytes_per_second=900e9 / 2,
        most_linked=8,
        network_bytes_per_second=400e9 / 8,
        host_bytes_per_second=64e9,
        source="NVIDIA's data sheet of the H100, column SXM, without sparsity; network: an eighth of its DGX H100",
    ),
    Device(
        "h200",
        "gpu",
        ("NVIDIA H200*",),
        _H100,
        memory_bytes=141_000_000_000,
        memory_bytes_per_second=4800e9,
        link_bytes_per_second=900e9 / 2,
        most_linked=8,
        network_bytes_per_second=400e9 / 8,
        host_bytes_per_second=64e9,
        source="NVIDIA's data sheet of the H200, without sparsity; network: an eighth of its DGX H200",
    ),
    Device(
        "b200",
        "gpu",
        ("NVIDIA B200*",),
        _peaks(2250, float8=4500, int8=4500, float32=1125),
        memory_bytes=180_000_000_000,
        memory_bytes_per_second=8000e9,
        link_bytes_per_second=1800e9 / 2,
        most_linked=8,
        network_bytes_per_second=400e9 / 8,
        host_bytes_per_second=64e9,
        source="NVIDIA's data sheet of the HGX B200, an eighth of it, without sparsity; network: likewise of "
        "its DGX B200",
    ),
    Device(
        "gb200",
        "gpu",
        ("NVIDIA GB200*",),
        _peaks(2500, float8=5000, int8=5000, float32=1250),
        memory_bytes=186_000_000_000,
        memory_bytes_per_second=8000e9,
        link_bytes_per_second=1800e9 / 2,
        most_linked=72,
        links_hosts=True,
        network_bytes_per_second=400e9 / 8,
        host_bytes_per_second=225e9,
        source="NVIDIA's data sheet of the GB200 NVL72, a 72nd, without sparsity; network: ConnectX-7; "
        "host: half a Grace",
    ),
    Device(
        "l4",
        "gpu",
        ("NVIDIA L4",),
        _peaks(121, float8=242.5, int8=242.5, float32=60),
        memory_bytes=24_000_000_000,
        memory_bytes_per_second=300e9,
        link_bytes_per_second=None,
        most_linked=1,
        host_bytes_per_second=32e9,
        source="NVIDIA's data sheet of the L4, without sparsity",
    ),
)
"""Every known accelerator; the first one whose pattern matches a kind counts."""


def device_of_kind(device_kind: str) -> Device | None:
    """The device with this jax `device_kind`; None if unknown, such as a CPU."""
    for device in DEVICES:
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
    for device in DEVICES:
        if device.name == name.lower():
            return device
    names = [device.name for device in DEVICES]
    raise UserError(
        f"{option}={value_text(name)} is no device.{did_you_mean(name, names)} There are: {', '.join(names)}."
    )


def peak_tflops(device_kind: str, dtype: str) -> float | None:
    """Peak TFLOP/s of a device for matmuls in a dtype; None if unknown."""
    device = device_of_kind(device_kind)
    peak = device.peak(dtype) if device else None
    return None if peak is None else peak / 1e12
