"""Unattached devices to compile for: TPU slices by libtpu, the GPUs of a host by jax's CUDA plugin."""

import os
import re
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from maxtext_lite.batching.devices import Device, device_named, devices
from maxtext_lite.config import UserError
from maxtext_lite.config.errors import did_you_mean, install_text, value_text
from maxtext_lite.parallel.devices import Flag, installed_compilers, set_compiler_flags, set_gpu_memory

_FORM = re.compile(r"(?:(\d+)\*)?([\w-]+):(\d+(?:x\d+){0,2})")
_WITHOUT_TPU = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else two compiles at once abort on a lock
    "TPU_SKIP_MDS_QUERY": "1",  # else it queries Google Cloud's metadata server
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",  # any: it complains if there is none
    "TPU_WORKER_HOSTNAMES": "localhost",
}
_NOTHING_CAN_BE_TIMED = (
    Flag("xla_gpu_autotune_level", "0", "the fastest of several kernels cannot be found without running them"),
    Flag("xla_gpu_shard_autotuning", "false", "there are no other hosts to share that work with"),
    Flag("xla_gpu_enable_triton_gemm", "false", "XLA has no default tiles for its own matmuls; cuBLAS has its own"),
)

# What XLA needs to know of a GPU to generate code for it, as reported by an H100 SXM with 80 GB. An H200 differs in
# its memory only.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 registers_per_core_limit: 65536
  registers_per_block_limit: 65536 memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 cuda_compute_capability { major: 9 }
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } runtime_version { major: 12 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
_GPUS = {
    "h100": _H100,
    "h200": _H100.replace("3352320000000", "4800000000000")
    .replace("84929347584", "150754820096")
    .replace("H100 80GB HBM3", "H200"),
}

_ASSUMED = {
    "gpu": (
        "GPUs like an SXM of the kind, an H100 with 80 GB and an H200 with 141, with CUDA 12.8 and cuDNN 9.10",
        "every matmul by cuBLAS: nothing can be timed, so XLA's autotuning and its own matmuls are off",
    )
}
"""Assumptions of programs compiled for a machine by name, by platform."""

NAMES = (*(device.name for device in devices() if device.platform == "tpu"), *_GPUS)
"""Short names of the devices that can be compiled for."""


@dataclass(frozen=True)
class Described:
    """A machine as named on the command line.

    Attributes:
      shape: chips of a slice along its axes, such as 4x4; for GPUs, their number.
    """

    name: str
    device: Device
    shape: str
    num_slices: int


def described(name: str, num_slices: int | None = None) -> Described:
    """A machine by name: v5e:4x4, 2*v5e:2x2 (slices) or h100:8.

    Args:
      num_slices: the value of --slices.
    Raises:
      UserError: the name is malformed, names no device that can be compiled for, or contradicts `num_slices`.
    """
    match = _FORM.fullmatch(name)
    option = f"--topology={value_text(name)}"
    if match is None:
        raise UserError(f"{option} is not of the form v5e:4x4, 2*v5e:2x2 (slices) or h100:8.")
    if match[2] not in NAMES:
        raise UserError(
            f"{option} names no device that can be compiled for here.{did_you_mean(match[2], NAMES)} "
            f"There are: {', '.join(NAMES)}."
        )
    device = device_named(match[2], option="--topology")
    slices = int(match[1]) if match[1] else None
    if slices is not None and num_slices is not None and slices != num_slices:
        raise UserError(f"{option} and --slices={num_slices} contradict each other; give one of them.")
    slices = slices or num_slices or 1
    if device.platform == "gpu" and (slices != 1 or "x" in match[3]):
        raise UserError(f"{option}: GPUs are those of one host, by their number. Nearest that works: h100:8.")
    sizes = [int(size) for size in match[3].split("x")]
    if min(sizes) < 1 or match[1] == "0":
        raise UserError(f"{option} has no devices: every size must be at least 1.")
    return Described(name, device, match[3], slices)


def assumed_of(name: str) -> tuple[str, ...]:
    """The assumptions of compiling for a machine by name, in words."""
    return _ASSUMED.get(described(name).device.platform, ())


def topology_devices(name: str, num_slices: int | None = None) -> list[Any]:
    """The devices of a machine by name (`described`), to compile for; jax itself runs on the CPU.

    Call it before jax initializes its devices.

    Raises:
      UserError: there is no such machine, or the library that compiles for it is not installed.
    """
    machine = described(name, num_slices)
    jax.config.update("jax_platforms", "cpu")
    return _tpu_devices(machine) if machine.device.platform == "tpu" else _gpu_devices(machine)


def _tpu_devices(machine: Described) -> list[Any]:
    if "tpu" not in installed_compilers():
        raise _missing(machine, "libtpu", f"the extra tpu brings it: {install_text('tpu')}")
    for variable, value in _WITHOUT_TPU.items():
        os.environ.setdefault(variable, value)
    set_compiler_flags("tpu")
    generation = {"7x": "tpu7x"}.get(machine.device.name, machine.device.name)
    options = {"chip_config_name": "megacore"} if generation == "v4" else {}  # one jax device per chip
    name = f"{generation}:{machine.shape}"
    try:
        return list(topologies.get_topology_desc(name, "tpu", num_slices=machine.num_slices, **options).devices)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        why = str(error).strip().split("\n")[0][:200].rstrip(".")
        raise UserError(
            f"--topology={machine.name} cannot be compiled for here: {why}. Names that work are such as v5e:4x4, "
            "v6e:4x4 or v5p:2x2x2."
        ) from None


def _gpu_devices(machine: Described) -> list[Any]:
    if "gpu" not in installed_compilers():
        raise _missing(
            machine,
            "jax's CUDA plugin",
            f"the extra cuda12 or cuda13 brings it: {install_text('cuda13')} (no driver is needed)",
        )
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    set_compiler_flags("gpu", _NOTHING_CAN_BE_TIMED)
    set_compiler_flags("gpu")
    set_gpu_memory()
    target = _GPUS[machine.device.name]
    found = topologies.get_topology_desc(platform="cuda", target_config=target, topology=f"1x1x{machine.shape}")
    return list(found.devices)


def _missing(machine: Described, library: str, remedy: str) -> UserError:
    return UserError(f"--topology={machine.name} needs {library}, which is not installed; {remedy}.")
