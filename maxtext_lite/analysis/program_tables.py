"""A compiled program as text tables and as JSON; all bytes are per device."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from maxtext_lite.analysis.program import Program, Traffic
from maxtext_lite.batching.table import aligned
from maxtext_lite.batching.topology import mesh_text
from maxtext_lite.config.errors import bytes_text, counted


def program_json(program: Program) -> dict[str, object]:
    """The output of `compile --json`."""
    plan = program.plan
    work = program.work
    roof = program.roofline
    synchronization = program.synchronization
    return {
        "num_devices": plan.num_devices,
        "num_hosts": plan.num_hosts,
        "device_kind": program.device_kind,
        "mesh": dict(plan.mesh),
        "compile_seconds": program.compile_seconds,
        "rows_per_micro_batch": plan.rows_per_micro_batch,
        "gradient_accumulation_steps": plan.stages[-1].gradient_accumulation_steps,
        "max_target_length": plan.max_target_length,
        "parameters": _fields(program.parameters),
        "state_bytes": program.state_bytes,
        "collectives": _fields(program.collectives),
        "diloco_synchronisation": None
        if synchronization is None
        else {"every_steps": plan.diloco_sync_period, "collectives": _fields(synchronization)},
        "memory": {
            **dataclasses.asdict(program.memory),
            "total": program.memory.total,
            "plan": plan.memory.to_json(),
            "plan_error_percent": {name: part.error for name, part in _memory_parts(program).items()},
        },
        "flops": {
            "model_per_step": program.model_flops,
            "model_per_device_and_step": program.model_flops / plan.num_devices,
            "matmuls_per_device_by_dtype": dict(work.matmul_flops),
            "kernels_per_device": work.kernel_flops,
            "kernels_not_known": list(work.silent_kernels),
        },
        "attention_kernel": plan.attention_kernel.to_json(),
        "kernels": _fields(work.kernels),
        "largest_arrays": _fields(work.largest_arrays),
        "memory_traffic_bytes": work.memory_bytes,
        "sent_bytes": program.sent_bytes,
        "compiler": {"cycles": work.cycles, "seconds": program.compiler_seconds},
        "roofline": {
            "matmul_seconds": roof.matmul_seconds,
            "memory_seconds": roof.memory_seconds,
            "link_seconds": roof.link_seconds,
            "bound_by": None if roof.bound is None else roof.bound[0],
            "most_mfu": roof.most_mfu,
        },
        "versions": program.versions,
        "assumed": program.assumed,
    }


def _fields(rows: Sequence[Any]) -> list[dict[str, object]]:
    return [row._asdict() for row in rows]


def program_text(program: Program) -> str:
    """The output of `compile`."""
    plan = program.plan
    step = f"{plan.stages[-1].gradient_accumulation_steps} x {plan.rows_per_micro_batch} rows"
    lines = [
        f"compiled for {plan.num_devices} x {program.device_kind} ({mesh_text(plan.mesh)}) on "
        f"{counted(plan.num_hosts, 'host')}: a step of {step} x {plan.max_target_length} tokens"
    ]
    if len(plan.stages) > 1:
        lines.append(f"of the {len(plan.stages)} stages of the ramp, this is the step of the last")
    rows: list[tuple[str, ...]] = []
    for each in program.parameters:
        shape = " x ".join(map(str, each.shape))
        axes = " ".join(axis or "-" for axis in each.axes)
        split = " ".join("+".join(entry) or "-" for entry in each.partition_spec)
        rows.append((each.name, shape, each.dtype, axes, split, f"{each.bytes_per_device:,}"))
    heads = ("parameter", "shape", "dtype", "logical axes", "split over", "bytes per device")
    lines += ["", *_table(heads, rows), "", *_traffic_lines("in a step", program.collectives)]
    if program.synchronization is not None:
        lines += ["", *_traffic_lines(f"every {plan.diloco_sync_period} steps", program.synchronization)]
    kernels = [(k.name, _known(k.times), _known(k.flops, ".4g")) for k in program.work.kernels]
    lines += ["", *(_table(("kernel", "times", "FLOPs"), kernels, numbers=(1, 2)) if kernels else ["no kernels"])]
    lines.append(f"attention kernel: {plan.attention_kernel}")
    arrays = [(array.type, bytes_text(array.num_bytes), array.made_by) for array in program.work.largest_arrays]
    lines += ["", *_table(("largest arrays", "bytes", "made by"), arrays, numbers=(1,))]
    assumed = (f"assumed: {words}" for words in program.assumed)
    return "\n".join([*lines, "", *_memory_lines(program), "", *time_lines(program), *assumed])


def _known(amount: float, form: str = ",") -> str:
    return "not known" if math.isnan(amount) else format(amount, form)


def _bytes(size: float) -> str:
    return _known(size) if math.isnan(size) else bytes_text(int(size))


def _traffic_lines(when: str, traffic: Sequence[Traffic]) -> list[str]:
    if not traffic:
        return [f"nothing crosses the mesh {when}"]
    rows: list[tuple[str, ...]] = []
    for each in traffic:
        asynchronous = _known(each.async_times / each.times if each.times else 0, ".0%")
        by_dtype = " ".join(f"{dtype} {size:,}" for dtype, size in sorted((each.bytes_by_dtype or {}).items()))
        axes = " x ".join(each.axes)
        numbers = (str(each.operations), _known(each.times), _known(each.bytes), asynchronous)
        rows.append((each.kind, axes, *numbers, by_dtype or _known(math.nan)))
    heads = ("over", "operations", "times", "bytes per device", "asynchronous", "by dtype")
    return _table((f"collectives {when}", *heads), rows)


class _Part(NamedTuple):
    """A part of the memory of a device: bytes by XLA, and by the plan if it counts that part."""

    label: str
    size: int
    planned: int | None = None
    counted: str = ""

    @property
    def error(self) -> float | None:
        """Signed error of the plan against XLA, in percent."""
        return None if self.planned is None or not self.size else 100 * (self.planned / self.size - 1)


def _memory_parts(program: Program) -> dict[str, _Part]:
    memory = program.memory
    planned = program.plan.memory
    held = planned.held
    return {
        "arguments": _Part("state and batch", memory.arguments, held, " parameters and optimizer state"),
        "outputs": _Part("results beside the state", memory.outputs - memory.aliased),
        "temporaries": _Part("temporaries", memory.temporaries, planned.total - held, " all else at its peak"),
        "code": _Part("code", memory.generated_code),
        "total": _Part("total", memory.total, planned.total),
    }


def _memory_lines(program: Program) -> list[str]:
    rows: list[tuple[str, str, str, str]] = []
    for part in _memory_parts(program).values():
        estimate = "not counted" if part.planned is None else bytes_text(part.planned) + part.counted
        error = "" if part.error is None else f"{part.error:+.1f} %"
        rows.append((part.label, bytes_text(part.size), error, estimate))
    lines = _table(("memory per device", "XLA", "error", "the plan's estimate"), rows, numbers=(1, 2))
    planned = program.plan.memory
    if planned.limit is not None:
        lines.append(f"of {bytes_text(planned.limit)} that the device has: {program.memory.total / planned.limit:.0%}")
    at_peak = sorted(planned.at(planned.peak), key=lambda line: -line.bytes)
    parts = [(line.name, f"{line.bytes:,}", line.why) for line in at_peak]
    return [*lines, "", *_table(("in the plan's total", "bytes per device", "why"), parts, numbers=(1,))]


def time_lines(program: Program) -> list[str]:
    """FLOPs, the least time of a step by each resource, and the compiler's own estimate."""
    done = program.work
    roof = program.roofline
    by_dtype = ", ".join(f"{dtype} {_known(flops, '.4g')}" for dtype, flops in done.matmul_flops.items()) or "0"
    by_dtype += " FLOPs"
    if done.kernel_flops:
        by_dtype += f", {done.kernel_flops:.4g} in kernels"
    if done.silent_kernels:
        by_dtype += f"; not known: {', '.join(done.silent_kernels)}"
    cycles = _known(done.cycles, ",.0f") + " cycles, without kernels and links" * (not math.isnan(done.cycles))
    rows = [
        ("matmuls", roof.matmul_seconds, by_dtype),
        ("memory", roof.memory_seconds, f"{_bytes(done.memory_bytes)} read and written"),
        ("links", roof.link_seconds, f"{_bytes(program.sent_bytes)} sent"),
        ("by the compiler", program.compiler_seconds, cycles),
    ]
    cells = [(name, _known(1e3 * seconds, ",.3f"), of) for name, seconds, of in rows]
    lines = _table(("a step on one device", "least ms", "of"), cells, numbers=(1,))
    each = program.model_flops / program.plan.num_devices
    lines.append(f"FLOPs of a step: {program.model_flops:.4g} by the model, {each:.4g} per device")
    if roof.bound is None or math.isnan(roof.most_mfu):
        return [*lines, "bound on MFU: not known, as the device's figures are not"]
    if roof.most_mfu == 1:  # FLOPs of kernels that do not state them are missing
        return [*lines, "bound on MFU: none below 100 %"]
    by_compiler = ""
    if program.compiler_seconds > 0:
        by_compiler = f"; at most {roof.mfu_of(program.compiler_seconds):.1%} in the compiler's own time"
    return [*lines, f"bound on MFU: {roof.most_mfu:.1%}, by {roof.bound[0]}{by_compiler}"]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] | None = None) -> list[str]:
    """Aligned lines; columns in `numbers` (default: those whose cells all begin with a digit) are right-aligned."""
    columns = enumerate(zip(header, *rows, strict=True))
    right = [at for at, (_, *cells) in columns if all(cell[:1].isdigit() and "x" not in cell for cell in cells)]
    return aligned([header, *rows], right if numbers is None else numbers)
