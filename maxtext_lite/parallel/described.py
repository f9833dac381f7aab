"""Devices to compile for that need not be there: TPU slices by libtpu, one host's GPUs by jax's CUDA plugin."""

import importlib.util
import os
import re
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from maxtext_lite.batching.devices import DEVICES, Device, device_named
from maxtext_lite.config import UserError
from maxtext_lite.config.errors import did_you_mean, value_text

_FORM = re.compile(r"(?:(\d+)\*)?([\w-]+):(\d+(?:x\d+){0,2})")
_WITHOUT_TPU = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else two compiles at once abort on a lock
    "TPU_SKIP_MDS_QUERY": "1",  # else it asks Google Cloud's metadata server what machine this is
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",  # any: it complains where it finds none
    "TPU_WORKER_HOSTNAMES": "localhost",
}
_NOTHING_CAN_BE_TIMED = ("--xla_gpu_autotune_level=0", "--xla_gpu_shard_autotuning=false")

# What XLA must know of a GPU to generate code for it, where none can be asked: as an H100 SXM with 80 GB answers.
_GPUS = {
    "h100": """
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
}

NAMES = (*(device.name for device in DEVICES if device.platform == "tpu"), *_GPUS)
"""Short names of the devices that can be described."""


@dataclass(frozen=True)
class Described:
    """A machine by its name on the command line.

    Attributes:
      shape: chips of a slice along its axes, as 4x4; of GPUs, their number.
    """

    name: str
    device: Device
    shape: str
    num_slices: int


def described(name: str, num_slices: int | None = None) -> Described:
    """A machine by name: v5e:4x4, 2*v5e:2x2 (slices) or h100:8.

    Args:
      num_slices: as the option --slices says it.
    Raises:
      UserError: the name has another form, names no device that can be compiled for, or contradicts `num_slices`.
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


def topology_devices(name: str, num_slices: int | None = None) -> list[Any]:
    """The devices of a machine by name (`described`), to compile for; jax itself runs on the CPU.

    Call it before jax is asked for a device.

    Raises:
      UserError: there is no such machine, or the library that compiles for it is not installed.
    """
    machine = described(name, num_slices)
    jax.config.update("jax_platforms", "cpu")
    return _tpu_devices(machine) if machine.device.platform == "tpu" else _gpu_devices(machine)


def _tpu_devices(machine: Described) -> list[Any]:
    if importlib.util.find_spec("libtpu") is None:
        raise _missing(machine, "libtpu", "the extra tpu brings it: pip install 'maxtext-lite[tpu]'")
    for variable, value in _WITHOUT_TPU.items():
        os.environ.setdefault(variable, value)
    generation = {"7x": "tpu7x"}.get(machine.device.name, machine.device.name)
    options = {"chip_config_name": "megacore"} if generation == "v4" else {}  # one device for a chip, as jax has it
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
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        raise _missing(
            machine,
            "jax's CUDA plugin",
            "the extra cuda12 or cuda13 brings it: pip install 'maxtext-lite[cuda13]' (no driver is needed)",
        )
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    given = os.environ.get("XLA_FLAGS", "")
    more = [flag for flag in _NOTHING_CAN_BE_TIMED if flag.partition("=")[0] not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *more]).strip()
    target = _GPUS[machine.device.name]
    found = topologies.get_topology_desc(platform="cuda", target_config=target, topology=f"1x1x{machine.shape}")
    return list(found.devices)


def _missing(machine: Described, library: str, remedy: str) -> UserError:
    return UserError(f"--topology={machine.name} needs {library}, which is not installed; {remedy}.")
