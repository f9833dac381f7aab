"""Ranked plans beside what the compiler makes of them ahead of time."""

from collections.abc import Sequence
from typing import Any

from maxtext_lite.aot.program import compile_for
from maxtext_lite.batching import RankedPlan
from maxtext_lite.batching.devices import Device
from maxtext_lite.config.violation import divisors


def topology_of(device: Device, num_devices: int) -> str:
    """The name of a machine of so many devices, as `compile --topology` takes it: slices as square as they can be."""
    sizes: list[int] = []
    for dims in range(device.torus_dims, 1, -1):
        sizes.append(max(size for size in divisors(num_devices) if size**dims <= num_devices))
        num_devices //= sizes[-1]
    return f"{device.name}:{'x'.join(map(str, [*sizes, num_devices]))}"


def compare(ranked: Sequence[RankedPlan], device: Device) -> list[dict[str, Any]]:
    """Bytes and seconds of each plan, predicted and compiled; None where the compiler does not tell.

    Where kernels do not state their FLOPs, as splash attention, matmuls are those outside of attention, of both.

    Raises:
      UserError: the library that compiles for the device is not installed, or a step does not fit by its compiler.
    """
    rows: list[dict[str, Any]] = []
    for each in ranked:
        program = compile_for(each.config, topology=topology_of(device, each.plan.num_devices))
        roof, time = program.roofline, each.time
        matmul = time.matmul_seconds - (time.attention_seconds if program.work.silent_kernels else 0)
        rows.append(
            {
                "keys": " ".join(each.settings),
                "memory": {"predicted": each.plan.memory.total, "compiled": program.memory.total},
                "matmul_seconds": {"predicted": matmul, "compiled": roof.matmul_seconds},
                "memory_seconds": {"predicted": time.memory_seconds, "compiled": roof.memory_seconds},
                "collectives_seconds": {"predicted": time.collectives_seconds, "compiled": roof.link_seconds},
            }
        )
    return rows


_LINES = {
    "memory": ("GB of a device", 1e9),
    "matmul_seconds": ("ms of matmuls", 1e-3),
    "memory_seconds": ("ms of memory", 1e-3),
    "collectives_seconds": ("ms of collectives", 1e-3),
}


def comparison_text(compared: Sequence[dict[str, Any]]) -> str:
    """Lines of `compare`, with the signed error of what was predicted."""
    lines: list[str] = []
    for each in compared:
        lines.append(f"compiled: {each['keys']}")
        for key, (name, unit) in _LINES.items():
            predicted, compiled = each[key]["predicted"], each[key]["compiled"]
            beside = f"{compiled / unit:,.1f} compiled, {predicted / compiled - 1:+.1%}" if compiled else "not known"
            lines.append(f"  {name:<17}  {predicted / unit:,.1f} predicted, {beside}")
    return "\n".join(lines)
