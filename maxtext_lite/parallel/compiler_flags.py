"""Flags of the accelerators' compilers that a run sets by itself, before jax starts them, and why."""

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True)
class Flag:
    """A flag of a compiler.

    Attributes:
      name: without dashes or value, as xla_gpu_enable_command_buffer.
      value: as it stands after the equals sign.
      why: what it brings, by the compiled program.
    """

    name: str
    value: str
    why: str


Compiler = Literal["gpu", "tpu"]

VARIABLES: Mapping[Compiler, str] = MappingProxyType({"gpu": "XLA_FLAGS", "tpu": "LIBTPU_INIT_ARGS"})
"""The environment variable that each compiler reads its flags from, once, when it starts."""

FLAGS: Mapping[Compiler, tuple[Flag, ...]] = MappingProxyType({
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
})  # fmt: skip
"""What is set on each platform unless its variable names the flag already. docs/performance.md has the figures."""


_LIBRARIES: Mapping[Compiler, tuple[str, ...]] = MappingProxyType(
    {"gpu": ("jax_cuda12_plugin", "jax_cuda13_plugin"), "tpu": ("libtpu",)}
)


def installed_compilers() -> tuple[Compiler, ...]:
    """Those whose library is installed, of which nothing is imported."""
    return tuple(compiler for compiler, names in _LIBRARIES.items() if any(map(importlib.util.find_spec, names)))


GPU_MEMORY = "XLA_CLIENT_MEM_FRACTION", "0.94"
"""The variable that says what share of a GPU's memory jax may use, and its value: the vendor's figure of an H100 or an
H200, which plans fill, as a GPU has 6 to 7 % more. jax's default is 0.75. The rest is left to CUDA and NCCL."""
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
    chosen = FLAGS[compiler] if flags is None else flags
    more = [f"--{flag.name}={flag.value}" for flag in chosen if flag.name not in named]
    if more:
        os.environ[variable] = " ".join([*given, *more])
