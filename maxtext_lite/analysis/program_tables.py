"""A compiled program as text tables and as JSON; all bytes are per device."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from maxtext_lite.analysis.program import Program, Traffic
from maxtext_lite.batching.table import aligned
from maxtext_lite.batching.topology import mesh_text
from maxtext_lite.config.errors import bytes_text


def program_json(program: Program) -> dict[str, object]:
    """The output of `compile --json`."""
    plan, work, roof = program.plan, program.work, program.roofline
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
            "plan_error_percent": {name: _error(planned, size) for name, size, planned in _beside_plan(program)},
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
    return [dataclasses.asdict(row) for row in rows]


def program_text(program: Program) -> str:
    """The output of `compile`."""
    plan = program.plan
    stage = plan.stages[-1]
    axes = mesh_text(plan.mesh)
    hosts = f"{plan.num_hosts} host{'' if plan.num_hosts == 1 else 's'}"
    lines = [
        f"compiled for {plan.num_devices} x {program.device_kind} ({axes}) on {hosts}: "
        f"a step of {stage.gradient_accumulation_steps} x {plan.rows_per_micro_batch} rows x "
        f"{plan.max_target_length} tokens"
    ]
    if len(plan.stages) > 1:
        lines.append(f"of the {len(plan.stages)} stages of the ramp, this is the step of the last")
    lines.append("")
    lines += _table(
        ("parameter", "shape", "dtype", "logical axes", "split over", "bytes per device"),
        [
            (
                parameter.name,
                " x ".join(map(str, parameter.shape)),
                parameter.dtype,
                " ".join(axis or "-" for axis in parameter.axes),
                " ".join("+".join(entry) or "-" for entry in parameter.partition_spec),
                f"{parameter.bytes_per_device:,}",
            )
            for parameter in program.parameters
        ],
    )
    lines.append("")
    lines += _traffic_lines("in a step", program.collectives)
    if program.synchronization is not None:
        lines += ["", *_traffic_lines(f"every {plan.diloco_sync_period} steps", program.synchronization)]
    kernels = [(k.name, _known(k.times), _known(k.flops, ".4g")) for k in program.work.kernels]
    lines += ["", *(_table(("kernel", "times", "FLOPs"), kernels, numbers=(1, 2)) if kernels else ["no kernels"])]
    lines.append(f"attention kernel: {plan.attention_kernel}")
    arrays = [(array.type, bytes_text(array.num_bytes), array.made_by) for array in program.work.largest_arrays]
    lines += ["", *_table(("largest arrays", "bytes", "made by"), arrays, numbers=(1,))]
    assumed = (f"assumed: {words}" for words in program.assumed)
    return "\n".join([*lines, "", *_memory_lines(program), "", *time_lines(program), *assumed])


def _known(amount: float | None, form: str = ",") -> str:
    return "not known" if amount is None else format(amount, form)


def _milliseconds(seconds: float | None) -> str:
    return _known(seconds and 1e3 * seconds, ",.3f")


def _traffic_lines(when: str, rows: Sequence[Traffic]) -> list[str]:
    if not rows:
        return [f"nothing crosses the mesh {when}"]
    return _table(
        (f"collectives {when}", "over", "operations", "times", "bytes per device", "asynchronous", "by dtype"),
        [
            (
                row.kind,
                " x ".join(row.axes),
                str(row.operations),
                _known(row.times),
                _known(row.bytes),
                _known(row.times and (row.async_times or 0) / row.times, ".0%"),
                " ".join(f"{dtype} {size:,}" for dtype, size in sorted((row.bytes_by_dtype or {}).items()))
                or _known(None),
            )
            for row in rows
        ],
    )


def _beside_plan(program: Program) -> list[tuple[str, int, int | None]]:
    """(part of the memory, bytes by XLA, bytes by the plan if it counts that part)."""
    memory, planned = program.memory, program.plan.memory
    held = planned.held
    return [
        ("arguments", memory.arguments, held),
        ("outputs", memory.outputs - memory.aliased, None),
        ("temporaries", memory.temporaries, planned.total - held),
        ("code", memory.generated_code, None),
        ("total", memory.total, planned.total),
    ]


_PARTS = {
    "arguments": ("state and batch", "parameters and optimizer state"),
    "outputs": ("results beside the state", ""),
    "temporaries": ("temporaries", "all else at its peak"),
    "code": ("code", ""),
    "total": ("total", ""),
}


def _error(planned: int | None, actual: int) -> float | None:
    """Signed error of the plan against XLA, in percent."""
    return None if planned is None or not actual else 100 * (planned / actual - 1)


def _memory_lines(program: Program) -> list[str]:
    rows = []
    for name, size, planned in _beside_plan(program):
        label, counted = _PARTS[name]
        error = _error(planned, size)
        estimate = "not counted" if planned is None else f"{bytes_text(planned)} {counted}".strip()
        rows.append((label, bytes_text(size), "" if error is None else f"{error:+.1f} %", estimate))
    lines = _table(("memory per device", "XLA", "error", "the plan's estimate"), rows, numbers=(1, 2))
    planned_memory = program.plan.memory
    limit = planned_memory.limit
    if limit is not None:
        lines.append(f"of {bytes_text(limit)} that the device has: {program.memory.total / limit:.0%}")
    at_peak = sorted(planned_memory.at(planned_memory.peak), key=lambda line: -line.bytes)
    parts = [(line.name, f"{line.bytes:,}", line.why) for line in at_peak]
    return [*lines, "", *_table(("in the plan's total", "bytes per device", "why"), parts, numbers=(1,))]


def time_lines(program: Program) -> list[str]:
    """FLOPs, the least time of a step by each resource, and the compiler's own estimate."""
    done, roof = program.work, program.roofline
    by_dtype = ", ".join(f"{dtype} {_known(flops, '.4g')}" for dtype, flops in done.matmul_flops.items()) or "0"
    by_dtype += " FLOPs"
    if done.kernel_flops:
        by_dtype += f", {done.kernel_flops:.4g} in kernels"
    if done.silent_kernels:
        by_dtype += f"; not known: {', '.join(done.silent_kernels)}"
    memory, sent = (
        _known(None) if amount is None else bytes_text(int(amount))
        for amount in (done.memory_bytes, program.sent_bytes)
    )
    cycles = _known(done.cycles, ",.0f") + (" cycles, without kernels and links" if done.cycles is not None else "")
    lines = _table(
        ("a step on one device", "least ms", "of"),
        [
            ("matmuls", _milliseconds(roof.matmul_seconds), by_dtype),
            ("memory", _milliseconds(roof.memory_seconds), f"{memory} read and written"),
            ("links", _milliseconds(roof.link_seconds), f"{sent} sent"),
            ("by the compiler", _milliseconds(program.compiler_seconds), cycles),
        ],
        numbers=(1,),
    )
    each = program.model_flops / program.plan.num_devices
    lines.append(f"FLOPs of a step: {program.model_flops:.4g} by the model, {each:.4g} per device")
    if roof.bound is None or roof.most_mfu is None:
        return [*lines, "bound on MFU: not known, as the device's figures are not"]
    if roof.most_mfu == 1:  # FLOPs of kernels that do not state them are missing
        return [*lines, "bound on MFU: none below 100 %"]
    by_compiler = ""
    if program.compiler_seconds:
        by_compiler = f"; at most {roof.mfu_of(program.compiler_seconds):.1%} in the compiler's own time"
    return [*lines, f"bound on MFU: {roof.most_mfu:.1%}, by {roof.bound[0]}{by_compiler}"]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] | None = None) -> list[str]:
    """Aligned lines; columns in `numbers` (default: those whose cells all begin with a digit) are right-aligned."""
    columns = enumerate(zip(header, *rows, strict=True))
    right = [at for at, (_, *cells) in columns if all(cell[:1].isdigit() and "x" not in cell for cell in cells)]
    return aligned([header, *rows], right if numbers is None else numbers)
