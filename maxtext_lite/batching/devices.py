"""Accelerators by name and jax device kind: peak FLOP/s, memory, links and clock of one jax device."""

import dataclasses
import fnmatch
import functools
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
    clock_hz: float | None
    source: str
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
        share = max(1 / self.torus_dims, math.log(size) / math.log(in_slice)) if self.torus_dims and size > 1 else 1.0
        links = self.link_bytes_per_second
        rates: list[float | None] = [] if linked == 1 else [None if links is None else share * links]
        if size * slices > linked:
            network = self.network_bytes_per_second
            rates.append(None if network is None else linked * network)
        known = [rate for rate in rates if rate is not None]
        return min(known) if len(known) == len(rates) else None

    def peak(self, dtype: str) -> float | None:
        """FLOP/s of matmuls in a dtype; None if unknown. On NVIDIA float16 is as fast as bfloat16."""
        if dtype == "float16" and self.platform == "gpu":
            dtype = "bfloat16"
        return self.peak_flops.get("float8" if dtype.startswith("float8") else dtype)


def _peaks(bfloat16: float, *, float8: float = 0, int8: float = 0, float32: float = 0) -> dict[str, float]:
    """Peaks in FLOP/s from TFLOP/s; 0: no such units."""
    stated = {"bfloat16": bfloat16, "float8": float8, "int8": int8, "float32": float32}
    return {dtype: tflops * 1e12 for dtype, tflops in stated.items() if tflops}


def _device(
    platform: Platform,
    name: str,
    kinds: tuple[str, ...],
    peaks: Mapping[str, float],
    *,
    gigabytes: int,
    memory_gbs: float,
    links_gbs: float | None,
    linked: int,
    source: str,
    network_gbits: float | None = None,
    host_gbs: float | None = None,
    clock_ghz: float | None = None,
    torus: int = 0,
    on_chip_mib: int = 0,
    links_hosts: bool = False,
    per_chip: int = 1,
) -> Device:
    """A device in its vendor's units; `links_gbs` (None: PCIe only) is bidirectional, `host_gbs` is not."""
    links, network = links_gbs and links_gbs * 1e9 / 2, network_gbits and network_gbits * 1e9 / 8
    return Device(
        name, platform, kinds, peaks, gigabytes * 10**9, memory_gbs * 1e9, links, clock_ghz and clock_ghz * 1e9, source,
        linked, torus, network, host_gbs and host_gbs * 1e9, on_chip_mib << 20, links_hosts, per_chip,
    )  # fmt: skip


_tpu = functools.partial(_device, "tpu", links_hosts=True)
_gpu = functools.partial(_device, "gpu")
_H100 = _peaks(989.4, float8=1978.9, int8=1978.9, float32=494.7)
_A100 = _peaks(312, int8=624, float32=156)

DEVICES: tuple[Device, ...] = (
    _tpu(
        "v4", ("TPU v4",), _peaks(275, int8=275), gigabytes=32, memory_gbs=1200, links_gbs=600, clock_ghz=1.05,
        linked=4096, torus=3, network_gbits=None, host_gbs=16,
        source="Jouppi et al. 2023, arXiv:2304.01433, table 4: six links of 50 GB/s each way, 1050 MHz"
        "; host: Austin et al. 2025, How to Scale Your Model, part 2",
    ),
    _tpu(
        "v5e", ("TPU v5 lite", "TPU v5e"), _peaks(197, int8=393), gigabytes=16, memory_gbs=819, links_gbs=400,
        clock_ghz=1.5, linked=256, torus=2, network_gbits=25, host_gbs=16, on_chip_mib=32,
        source="Google Cloud's page on v5e; clock: the peak over 4 x 128 x 128 products a cycle; "
        "network: the pod's over its chips; host: as v4",
    ),
    _tpu(
        "v5p", ("TPU v5", "TPU v5p"), _peaks(459, int8=918), gigabytes=95, memory_gbs=2765, links_gbs=1200,
        clock_ghz=1.75, linked=8960, torus=3, network_gbits=50, host_gbs=16,
        source="Google Cloud's page on v5p; clock: the peak over 8 x 128 x 128 products a cycle; "
        "host: as v4",
    ),
    _tpu(
        "v6e", ("TPU v6 lite", "TPU v6e"), _peaks(918, int8=1836), gigabytes=32, memory_gbs=1638, links_gbs=800,
        clock_ghz=1.75, linked=256, torus=2, network_gbits=100, host_gbs=32, on_chip_mib=32,
        source="Google Cloud's page on v6e; clock: the peak over 4 x 256 x 256 products a cycle, the fewest with "
        "which the compiler's cycles of a large matmul stay below that peak; network: the pod's over its chips; "
        "host: as v4",
    ),
    _tpu(
        "7x", ("TPU7x", "TPU v7x"), _peaks(2307 / 2, float8=4614 / 2), gigabytes=96, memory_gbs=7380 / 2,
        links_gbs=1200 / 2, clock_ghz=None, linked=18432, torus=3, network_gbits=None, host_gbs=None, per_chip=2,
        source="Google Cloud's page on TPU7x (Ironwood), halved: jax has two devices for each chip",
    ),
    _gpu(
        "a100-40", ("NVIDIA A100*40GB*",), _A100, gigabytes=40, memory_gbs=1555, links_gbs=600,
        linked=8, network_gbits=200, host_gbs=32,
        source="NVIDIA's data sheet of the A100; network: an eighth of its DGX A100",
    ),
    _gpu(
        "a100-80", ("NVIDIA A100*80GB*",), _A100, gigabytes=80, memory_gbs=2039, links_gbs=600,
        linked=8, network_gbits=200, host_gbs=32,
        source="NVIDIA's data sheet of the A100 (SXM); network: an eighth of its DGX A100",
    ),
    _gpu(
        "h100-pcie", ("NVIDIA H100 PCIe*",), _peaks(756, float8=1513, int8=1513, float32=378), gigabytes=80,
        memory_gbs=2000, links_gbs=None, linked=1, host_gbs=64, source="NVIDIA's data sheet of the H100, column PCIe",
    ),
    _gpu(
        "h100-nvl", ("NVIDIA H100 NVL*",), _peaks(835, float8=1671, int8=1671, float32=417.5), gigabytes=94,
        memory_gbs=3900, links_gbs=600, linked=2, host_gbs=64,
        source="NVIDIA's data sheet of the H100, column NVL, without sparsity",
    ),
    _gpu(
        "h100", ("NVIDIA H100*",), _H100, gigabytes=80, memory_gbs=3350, links_gbs=900,
        linked=8, network_gbits=400, host_gbs=64,
        source="NVIDIA's data sheet of the H100, column SXM, without sparsity; network: an eighth of its DGX H100",
    ),
    _gpu(
        "h200", ("NVIDIA H200*",), _H100, gigabytes=141, memory_gbs=4800, links_gbs=900,
        linked=8, network_gbits=400, host_gbs=64,
        source="NVIDIA's data sheet of the H200, without sparsity; network: an eighth of its DGX H200",
    ),
    _gpu(
        "b200", ("NVIDIA B200*",), _peaks(2250, float8=4500, int8=4500, float32=1125), gigabytes=180, memory_gbs=8000,
        links_gbs=1800, linked=8, network_gbits=400, host_gbs=64,
        source="NVIDIA's data sheet of the HGX B200, an eighth of it, without sparsity; network: likewise of "
        "its DGX B200",
    ),
    _gpu(
        "gb200", ("NVIDIA GB200*",), _peaks(2500, float8=5000, int8=5000, float32=1250), gigabytes=186,
        memory_gbs=8000, links_gbs=1800, linked=72, links_hosts=True, network_gbits=400, host_gbs=225,
        source="NVIDIA's data sheet of the GB200 NVL72, a 72nd, without sparsity; network: ConnectX-7; "
        "host: half a Grace",
    ),
    _gpu(
        "l4", ("NVIDIA L4",), _peaks(121, float8=242.5, int8=242.5, float32=60), gigabytes=24, memory_gbs=300,
        links_gbs=None, linked=1, host_gbs=32, source="NVIDIA's data sheet of the L4, without sparsity",
    ),
)  # fmt: skip
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
