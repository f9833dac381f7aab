"""Ranked plans compared with their programs, compiled ahead of time."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from maxtext_lite.analysis.hlo import (
    MEMORY_SPACES,
    Collective,
    Computation,
    Instruction,
    collectives,
    instruction_work,
    known_or_0,
    scheduled_seconds,
)
from maxtext_lite.analysis.program import Program, Traffic, compile_for
from maxtext_lite.analysis.ranking import RankedPlan
from maxtext_lite.analysis.step_time import matmul_peak, ring_bytes_per_second
from maxtext_lite.batching.devices import Device
from maxtext_lite.batching.topology import MeshSizes, resolve_mesh
from maxtext_lite.config import UserError
from maxtext_lite.config.errors import divisors


def topology_of(device: Device, num_devices: int, num_slices: int = 1) -> str:
    """The name of a machine with that many devices, as for `compile --topology`: slices as square as possible.

    Raises:
      UserError: the devices are not whole chips.
    """
    chips, rest = divmod(num_devices // num_slices, device.per_chip)
    if rest:
        raise UserError(
            f"--compile for {num_devices // num_slices} of {device.name}: a chip has {device.per_chip} of these "
            f"devices. Nearest that works: {(chips + 1) * device.per_chip}."
        )
    sizes: list[int] = []
    for dims in range(device.torus_dims, 1, -1):
        sizes.append(max(size for size in divisors(chips) if size**dims <= chips))
        chips //= sizes[-1]
    slices = f"{num_slices}*" if num_slices > 1 else ""
    return f"{slices}{device.name}:{'x'.join(map(str, [*sizes, chips]))}"


def compare(ranked: Sequence[RankedPlan], device: Device) -> list[dict[str, Any]]:
    """Bytes and seconds of each plan, predicted and compiled; None where the compiled figure is unknown.

    Where kernels do not state their FLOPs, as splash attention, matmuls are those outside of attention, of both, and
    the compiled step has the predicted attention. Links have the rate of their mesh axes, as in the prediction.

    Raises:
      UserError: the library that compiles for the device is not installed, its compiler says a step does not fit, or
        the devices are not whole chips.
    """
    rows: list[dict[str, Any]] = []
    for each in ranked:
        slices = math.prod(each.plan.dcn_mesh.values()) if device.platform == "tpu" else 1
        program = compile_for(each.config, topology=topology_of(device, each.plan.num_devices, slices))
        device = device.in_hosts(each.plan.num_devices, each.plan.num_hosts)
        mesh = resolve_mesh(each.config, each.plan.num_devices)
        assert isinstance(mesh, MeshSizes)  # it is planned
        roof = program.roofline
        time = each.time
        links = _links_seconds(program.collectives, device, mesh)
        silent = time.attention_seconds if program.work.silent_kernels else 0
        step = math.nan
        if not math.isnan(roof.matmul_seconds + roof.memory_seconds + links):
            step = step_seconds(program, device, mesh, each.config.dtype, silent_seconds=silent)
        rows.append(
            {
                "keys": " ".join(each.settings),
                "memory": _beside(each.plan.memory.total, program.memory.total),
                "matmul_seconds": _beside(time.matmul_seconds - silent, roof.matmul_seconds),
                "memory_seconds": _beside(time.memory_seconds, roof.memory_seconds),
                "collectives_seconds": _beside(time.collectives_seconds, links),
                "step_seconds": _beside(time.seconds, step),
            }
        )
    return rows


def _beside(predicted: float, compiled: float) -> dict[str, float | None]:
    return {"predicted": predicted, "compiled": None if math.isnan(compiled) else compiled}


def _links_seconds(collectives: Sequence[Traffic], device: Device, mesh: MeshSizes) -> float:
    """Time of a step's collectives one after the other, each at the link rate of its mesh axes; NaN if unknown."""
    return sum(each.sent_bytes / (ring_bytes_per_second(device, mesh, each.axes) or math.nan) for each in collectives)


def step_seconds(program: Program, device: Device, sizes: MeshSizes, dtype: str, *, silent_seconds: float) -> float:
    """The time of a compiled step, in the order and with the overlap that the compiler scheduled. Each instruction
    takes as long as its FLOPs or its memory traffic, and each collective as long as its bytes.

    Args:
      dtype: of the activations, in which kernels compute.
      silent_seconds: of the kernels that do not state their FLOPs, all together.
    """
    module = program.module
    spaces = frozenset(MEMORY_SPACES[device.platform])
    silent = sum(known_or_0(kernel.times) for kernel in program.work.kernels if math.isnan(kernel.flops))

    def busy(computation: Computation, it: Instruction) -> float:
        each = instruction_work(it, computation, module, spaces)
        matmuls = sum(flops / (matmul_peak(device, operands) or 1) for operands, flops in each.matmul_flops.items())
        kernels = sum(
            silent_seconds / silent if math.isnan(flops) else flops / (matmul_peak(device, dtype) or 1)
            for _, flops in each.kernels
        )
        return max(matmuls + kernels, each.memory_bytes / device.memory_bytes_per_second)

    def sent(collective: Collective) -> float:
        rate = ring_bytes_per_second(device, sizes, collective.axes(program.mesh))
        return known_or_0(collective.sent_bytes) / rate if rate else 0.0

    return scheduled_seconds(module, collectives(module), busy=busy, sent=sent)


def rank_correlation(compared: Sequence[dict[str, Any]]) -> float | None:
    """Spearman's, of predicted and compiled steps; None for fewer than three, all equal, or any unknown."""
    steps = [each["step_seconds"] for each in compared]
    columns = [[step[side] for step in steps] for side in ("predicted", "compiled")]
    if len(steps) < 3 or any(None in column or len(set(column)) == 1 for column in columns):
        return None
    ranks = ([sum((b < a) + (b == a) / 2 for b in column) for a in column] for column in columns)
    return statistics.correlation(*ranks)


_LINES = {
    "memory": ("GB of a device", 1e9),
    "matmul_seconds": ("ms of matmuls", 1e-3),
    "memory_seconds": ("ms of memory", 1e-3),
    "collectives_seconds": ("ms of collectives", 1e-3),
    "step_seconds": ("ms of a step", 1e-3),
}


def comparison_text(compared: Sequence[dict[str, Any]]) -> str:
    """The rows of `compare` as text, with signed errors of the predictions."""
    lines: list[str] = []
    for each in compared:
        lines.append(f"compiled: {each['keys']}")
        for key, (name, unit) in _LINES.items():
            predicted = each[key]["predicted"]
            compiled = each[key]["compiled"]
            beside = f"{compiled / unit:,.1f} compiled, {predicted / compiled - 1:+.1%}" if compiled else "not known"
            lines.append(f"  {name:<17}  {predicted / unit:,.1f} predicted, {beside}")
    correlation = rank_correlation(compared)
    if correlation is not None:
        lines.append(f"rank correlation of predicted with compiled steps: {correlation:.2f}")
    return "\n".join(lines)
