"""The devices of a run, and what must be set before jax starts them."""

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax

from maxtext_lite.config.errors import UserError
from maxtext_lite.config.kernels import Accelerator, installed_tokamax
from maxtext_lite.config.phases import status_line


@dataclass(frozen=True)
class Flag:
    """A flag of a compiler.

    Attributes:
      name: without dashes or value, as xla_gpu_enable_command_buffer.
      value: the text after the equals sign.
      why: its benefit, by the compiled program.
    """

    name: str
    value: str
    why: str


Compiler = Literal["gpu", "tpu"]

VARIABLES: Mapping[Compiler, str] = {"gpu": "XLA_FLAGS", "tpu": "LIBTPU_INIT_ARGS"}
"""The environment variable that each compiler reads its flags from, once, when it starts."""

FLAGS: Mapping[Compiler, tuple[Flag, ...]] = {
    "gpu": (Flag(
        "xla_gpu_reduce_scatter_combine_threshold_bytes",
        str(2 << 20),
        "a layer's gradients are reduced one by one beside its matmuls, not all at once after them: 1 to 7 % less of a "
        "step is spent waiting",
    ),),
    "tpu": (Flag(
        "xla_tpu_scoped_vmem_limit_kib",
        "98304",
        "fusions around matmuls may hold larger tiles on the chip: 9 to 11 % fewer cycles of a dense layer",
    ),),
}  # fmt: skip
"""What is set on each platform unless its variable names the flag already. docs/performance.md has the figures."""


_LIBRARIES: Mapping[Compiler, tuple[str, ...]] = {
    "gpu": ("jax_cuda12_plugin", "jax_cuda13_plugin"),
    "tpu": ("libtpu",),
}


def installed_compilers() -> tuple[Compiler, ...]:
    """Compilers whose library is installed; imports none of them."""
    return tuple(compiler for compiler, names in _LIBRARIES.items() if any(map(importlib.util.find_spec, names)))


GPU_MEMORY = "XLA_CLIENT_MEM_FRACTION", "0.94"
"""The variable for the share of a GPU's memory that jax may use, and its value. Plans fill the vendor's figure of an
H100 or an H200, and a GPU has 6 to 7 % more. jax's default is 0.75. The rest is left to CUDA and NCCL."""
_OLDER_NAME = "XLA_PYTHON_CLIENT_MEM_FRACTION"

SCHEDULED_MEMORY = Flag(
    "xla_gpu_memory_limit_slop_factor",
    "115",
    "XLA may fill 115 % of 80 % of the memory, within the share above; beyond its own 95 % of 80 % it overlaps no "
    "collectives: a program of 82 to 90 % of an H200 takes 5 % less time, and 3 % more memory",
)
"""What XLA's scheduler may fill. It does not know how much jax may use."""


def set_gpu_memory() -> None:
    """Sets the shares of a GPU's memory for jax and for XLA's scheduler, unless the environment says that for jax.

    Call it before jax starts.
    """
    variable, share = GPU_MEMORY
    if not os.environ.get(variable) and not os.environ.get(_OLDER_NAME):
        os.environ[variable] = share
        set_compiler_flags("gpu", (SCHEDULED_MEMORY,))


def set_compiler_flags(compiler: Compiler, flags: tuple[Flag, ...] | None = None) -> None:
    """Adds flags to the variable that a compiler reads, but those that it names already. Call it before jax starts.

    Args:
      flags: None: those of FLAGS.
    """
    variable = VARIABLES[compiler]
    given = os.environ.get(variable, "").split()
    named = {flag.lstrip("-").partition("=")[0] for flag in given}
    more = [f"--{flag.name}={flag.value}" for flag in flags or FLAGS[compiler] if flag.name not in named]
    if more:
        os.environ[variable] = " ".join([*given, *more])


_SIMULATED = "--xla_force_host_platform_device_count="

_OF_LAUNCHERS = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "SLURM_STEP_NODELIST", "OMPI_COMM_WORLD_SIZE")
"""A launcher of several processes sets one of these variables."""


def start_devices(*, timeout_seconds: float = 300) -> list[Any]:
    """All devices of the run, once the runtime is up. Call it before anything else asks jax for a device.

    One of several processes first joins the others, and then sees their devices too: see `processes`. A
    process that is alone starts nothing.

    A CPU that simulates N devices gets 2 N threads. By default XLA gives it one for each core or device; inside a
    collective every device blocks one, and if work then finds none left, XLA aborts after 40 seconds.

    Args:
      timeout_seconds: how long to wait for the other processes before the process ends with exit code 1.
    Raises:
      UserError: the environment describes the processes incompletely or wrongly.
    """
    for compiler in installed_compilers():
        set_compiler_flags(compiler)
        if compiler == "gpu":
            set_gpu_memory()
    for flag in os.environ.get("XLA_FLAGS", "").split():
        if flag.startswith(_SIMULATED):
            os.environ.setdefault("NPROC", str(2 * int(flag.removeprefix(_SIMULATED))))
    if not jax.distributed.is_initialized():
        on_tpu = _uses_tpu()
        if on_tpu or any(name in os.environ for name in _OF_LAUNCHERS):
            from maxtext_lite.parallel.processes import join_the_others

            join_the_others(on_tpu=on_tpu, timeout_seconds=timeout_seconds)
    devices = jax.devices()
    status_line.is_first = jax.process_index() == 0
    return devices


def accelerator_of(device: Any) -> Accelerator:
    """The kind of a device that decides the choice of a kernel."""
    if device.platform != "gpu":
        return Accelerator(device.platform)
    return Accelerator("gpu", device.compute_capability, installed_tokamax())


def simulated_devices(num_devices: int) -> list[Any]:
    """CPU devices that this process simulates, without joining others; call it before jax is asked for any device.

    Raises:
      UserError: jax is already running with fewer.
    """
    kept = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_SIMULATED)]
    os.environ["XLA_FLAGS"] = " ".join([*kept, f"{_SIMULATED}{num_devices}"])
    jax.config.update("jax_platforms", "cpu")
    devices = jax.devices()
    if len(devices) < num_devices:
        raise UserError(
            f"--devices={num_devices}: jax has started with {len(devices)}. Nearest that works: {len(devices)}."
        )
    return devices[:num_devices]


def devices_share_threads() -> bool:
    """Whether they are simulated CPU devices: there one program must end before the next begins.

    They share a few threads: with two programs running, a collective of one can wait forever for a device whose thread
    the other holds.
    """
    return jax.default_backend() == "cpu" and jax.device_count() > 1


def _uses_tpu() -> bool:
    """Whether this process will use TPUs: jax lists them in its platforms if it finds any."""
    platforms: str | None = jax.config.jax_platforms  # type: ignore[attr-defined]
    return "tpu" in (platforms or "").split(",")
