"""The command `compile`: the train step, compiled ahead of time for a real or a described machine. Trains nothing."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from maxtext_lite.batching import BatchPlan, make_plan
from maxtext_lite.batching.devices import device_of_kind
from maxtext_lite.batching.ledger import bytes_text
from maxtext_lite.cli import ArgumentParser, config_arguments, run_command, whole_number
from maxtext_lite.config import Config, UserError, load_config
from maxtext_lite.config.errors import value_text

if TYPE_CHECKING:
    from maxtext_lite.aot.program import Program, Traffic

_UNKNOWN = "not known"


def main(argv: Sequence[str]) -> int:
    """Prints what the train step of a config compiles to; returns the exit code.

    Raises:
      UserError: with every problem of the config or the arguments.
    """
    parser = ArgumentParser(prog="maxtext-lite compile", description=__doc__)
    config_arguments(parser)
    parser.add_argument(
        "--devices", type=whole_number, metavar="N", help="for N simulated CPU devices (default: the real ones)"
    )
    parser.add_argument(
        "--hosts", type=whole_number, metavar="H", help="with --devices: hosts that they are attached to"
    )
    parser.add_argument(
        "--topology",
        metavar="NAME",
        help="for a machine that is not there: v5e:4x4, 2*v5e:2x2 (slices; both need libtpu) or h100:8 (CUDA's plugin)",
    )
    parser.add_argument(
        "--slices", type=whole_number, metavar="S", help="with --topology: slices, all alike (default 1)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse(argv)
    _refuse_contradictions(arguments)
    config = _without_data(load_config(arguments.config, arguments.overrides))
    if arguments.devices is not None:  # before jax: what cannot be planned needs no devices
        plan = _plan(config, arguments.devices, arguments.hosts or 1, "cpu", "cpu")
    import jax  # only once the config is known to be right

    from maxtext_lite.parallel import accelerator_of, simulated_devices, start_devices
    from maxtext_lite.xla import assumed_of, topology_devices

    assumed: tuple[str, ...] = ()
    if arguments.devices is not None:
        devices = simulated_devices(arguments.devices)
    elif arguments.topology is not None:
        devices = topology_devices(arguments.topology, arguments.slices)
        num_hosts = len({device.process_index for device in devices})
        plan = _plan(config, len(devices), num_hosts, accelerator_of(devices[0]), devices[0].device_kind)
        assumed = assumed_of(arguments.topology)
    else:
        devices = start_devices()
        plan = _plan(config, len(devices), jax.process_count(), accelerator_of(devices[0]), devices[0].device_kind)
    program = _compiled(config, plan, devices)
    if jax.process_index() == 0:
        if arguments.json:
            print(json.dumps(to_json(program, plan) | {"assumed": assumed}, indent=2))
        else:
            print("\n".join([format_program(program, plan), *(f"assumed: {words}" for words in assumed)]))
    return 0


def _compiled(config: Config, plan: BatchPlan, devices: Sequence[Any]) -> "Program":
    import jax

    from maxtext_lite.aot.program import compile_program

    try:
        return compile_program(config, plan, devices)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        why = str(error).strip().split("\n")[0][:300].rstrip(".")
        raise UserError(
            f"the step does not fit on a {devices[0].device_kind}, by its compiler: {why}. The plan's estimate is "
            f"{bytes_text(plan.memory.total)}; remat_policy=full, a smaller per_device_batch_size or more devices on "
            "fsdp need less."
        ) from None


def _refuse_contradictions(arguments: Any) -> None:
    problems = []
    if arguments.devices is not None and arguments.topology is not None:
        problems.append("--devices and --topology contradict each other; give one of them.")
    for option, value, owner, owned in (
        ("--hosts", arguments.hosts, "--devices", arguments.devices),
        ("--slices", arguments.slices, "--topology", arguments.topology),
    ):
        if value is not None and owned is None:
            problems.append(f"{option}={value_text(value)} says something about {owner}, which is not given.")
        if value is not None and value < 1:
            problems.append(f"{option}={value_text(value)} must be at least 1. Nearest that works: 1.")
    if problems:
        raise UserError(problems)


def _without_data(config: Config) -> Config:
    """The config with a stated length: that of the data would only change constants of the schedule."""
    if not config.num_epochs:
        return config
    return config.model_copy(update={"num_epochs": Fraction(0), "steps": 10**6, "last_batch": "drop"})


def _plan(config: Config, num_devices: int, num_hosts: int, platform: Any, device_kind: str) -> BatchPlan:
    device = device_of_kind(device_kind)
    return make_plan(
        config,
        num_devices=num_devices,
        num_hosts=num_hosts,
        platform=platform,
        device_memory_gb=None if device is None else device.memory_bytes / 1e9,
    )


def _rows_per_micro_batch(plan: BatchPlan) -> int:
    return plan.rows_per_example * plan.slots_for(plan.stages[-1].micro_batch_to_train)


def to_json(program: "Program", plan: BatchPlan) -> dict[str, Any]:
    """What --json prints; all bytes are of one device."""
    memory = program.memory
    return {
        "num_devices": plan.num_devices,
        "num_hosts": plan.num_hosts,
        "device_kind": program.mesh.devices.flat[0].device_kind,
        "mesh": dict(plan.mesh),
        "compile_seconds": program.compile_seconds,
        "rows_per_micro_batch": _rows_per_micro_batch(plan),
        "gradient_accumulation_steps": plan.stages[-1].gradient_accumulation_steps,
        "max_target_length": plan.max_target_length,
        "parameters": [
            {
                "name": parameter.name,
                "shape": list(parameter.shape),
                "dtype": parameter.dtype,
                "axes": list(parameter.axes),
                "partition_spec": [list(entry) for entry in parameter.partition_spec],
                "bytes_per_device": parameter.bytes_per_device,
            }
            for parameter in program.parameters
        ],
        "state_bytes": program.state_bytes,
        "collectives": _traffic_json(program.collectives),
        "diloco_synchronisation": None
        if program.meeting is None
        else {"every_steps": plan.diloco_sync_period, "collectives": _traffic_json(program.meeting)},
        "memory": {
            "arguments": memory.arguments,
            "outputs": memory.outputs,
            "aliased": memory.aliased,
            "temporaries": memory.temporaries,
            "generated_code": memory.generated_code,
            "total": memory.total,
            "plan": plan.memory.to_json(),
            "plan_error_percent": {name: _error(planned, size) for name, size, planned in _beside_plan(program, plan)},
        },
        "flops": {
            "xla_per_device_loop_bodies_once": program.xla_flops,
            "model_per_step": program.model_flops,
            "model_per_device_and_step": program.model_flops / plan.num_devices,
            "matmuls_per_device_by_dtype": dict(program.work.matmul_flops),
            "kernels_per_device": program.work.kernel_flops,
            "kernels_not_known": list(program.work.silent_kernels),
        },
        "attention_kernel": plan.attention_kernel.to_json(),
        "kernels": [dataclasses.asdict(kernel) for kernel in program.work.kernels],
        "largest_arrays": [dataclasses.asdict(array) for array in program.work.largest_arrays],
        "memory_traffic_bytes": program.work.memory_bytes,
        "sent_bytes": program.sent_bytes,
        "compiler": {"cycles": program.work.cycles, "seconds": program.compiler_seconds},
        "roofline": {
            "matmul_seconds": program.roofline.matmul_seconds,
            "memory_seconds": program.roofline.memory_seconds,
            "link_seconds": program.roofline.link_seconds,
            "bound_by": None if program.roofline.bound is None else program.roofline.bound[0],
            "most_mfu": program.roofline.most_mfu,
        },
        "versions": program.versions,
    }


def _traffic_json(rows: Sequence["Traffic"]) -> list[dict[str, Any]]:
    return [
        {
            "kind": row.kind,
            "axes": list(row.axes),
            "operations": row.operations,
            "times": row.times,
            "async_times": row.async_times,
            "bytes": row.payload_bytes,
            "bytes_by_dtype": row.payload,
            "sent_bytes": row.sent_bytes,
        }
        for row in rows
    ]


def format_program(program: "Program", plan: BatchPlan) -> str:
    """The tables that the command prints."""
    stage = plan.stages[-1]
    axes = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items() if size > 1) or "one device"
    hosts = f"{plan.num_hosts} host{'' if plan.num_hosts == 1 else 's'}"
    lines = [
        f"compiled for {plan.num_devices} x {program.mesh.devices.flat[0].device_kind} ({axes}) on {hosts}: "
        f"a step of {stage.gradient_accumulation_steps} x {_rows_per_micro_batch(plan)} rows x "
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
    if program.meeting is not None:
        lines += ["", *_traffic_lines(f"every {plan.diloco_sync_period} steps", program.meeting)]
    kernels = [(k.name, _count(k.times), _flops(k.flops)) for k in program.work.kernels]
    lines += ["", *(_table(("kernel", "times", "FLOPs"), kernels, numbers=(1, 2)) if kernels else ["no kernels"])]
    lines.append(f"attention kernel: {plan.attention_kernel}")
    arrays = [(array.type, bytes_text(array.num_bytes), array.made_by) for array in program.work.largest_arrays]
    lines += ["", *_table(("largest arrays", "bytes", "made by"), arrays, numbers=(1,))]
    return "\n".join([*lines, "", *_memory_lines(program, plan), "", *time_lines(program, plan)])


def _count(times: int | None) -> str:
    return _UNKNOWN if times is None else f"{times:,}"


def _flops(flops: float | None) -> str:
    return _UNKNOWN if flops is None else f"{flops:.4g}"


def _seconds(seconds: float | None) -> str:
    return _UNKNOWN if seconds is None else f"{1e3 * seconds:,.3f}"


def _traffic_lines(when: str, rows: Sequence["Traffic"]) -> list[str]:
    if not rows:
        return [f"nothing crosses the mesh {when}"]
    return _table(
        (f"collectives {when}", "over", "operations", "times", "bytes per device", "asynchronous", "by dtype"),
        [
            (
                row.kind,
                " x ".join(row.axes),
                str(row.operations),
                _count(row.times),
                _count(row.payload_bytes),
                _UNKNOWN if row.times is None or row.async_times is None else f"{row.async_times / row.times:.0%}",
                " ".join(f"{dtype} {size:,}" for dtype, size in sorted((row.payload or {}).items())) or _UNKNOWN,
            )
            for row in rows
        ],
    )


def _beside_plan(program: "Program", plan: BatchPlan) -> list[tuple[str, int, int | None]]:
    """(part of the memory, bytes by XLA, bytes by the plan where it counts that part)."""
    memory, planned = program.memory, plan.memory
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
    """By how many percent the plan says more (+) or less (-) than XLA."""
    return None if planned is None or not actual else 100 * (planned / actual - 1)


def _memory_lines(program: "Program", plan: BatchPlan) -> list[str]:
    rows = []
    for name, size, planned in _beside_plan(program, plan):
        label, counted = _PARTS[name]
        error = _error(planned, size)
        estimate = "not counted" if planned is None else f"{bytes_text(planned)} {counted}".strip()
        rows.append((label, bytes_text(size), "" if error is None else f"{error:+.1f} %", estimate))
    lines = _table(("memory per device", "XLA", "error", "the plan's estimate"), rows, numbers=(1, 2))
    limit = plan.memory.limit
    if limit is not None:
        lines.append(f"of {bytes_text(limit)} that the device has: {program.memory.total / limit:.0%}")
    at_peak = sorted(plan.memory.at(plan.memory.peak), key=lambda line: -line.bytes)
    parts = [(line.name, f"{line.bytes:,}", line.why) for line in at_peak]
    return [*lines, "", *_table(("in the plan's total", "bytes per device", "why"), parts, numbers=(1,))]


def time_lines(program: "Program", plan: BatchPlan) -> list[str]:
    """FLOPs, and the least time of a step by each resource; beside it the time by the compiler's own estimate."""
    done, roof = program.work, program.roofline
    by_dtype = ", ".join(f"{dtype} {_flops(flops)}" for dtype, flops in done.matmul_flops.items()) or "0"
    by_dtype += " FLOPs"
    if done.kernel_flops:
        by_dtype += f", {_flops(done.kernel_flops)} in kernels"
    if done.silent_kernels:
        by_dtype += f"; not known: {', '.join(done.silent_kernels)}"
    memory = _UNKNOWN if done.memory_bytes is None else bytes_text(int(done.memory_bytes))
    sent = _UNKNOWN if program.sent_bytes is None else bytes_text(int(program.sent_bytes))
    cycles = _UNKNOWN if done.cycles is None else f"{done.cycles:,.0f} cycles, without kernels and links"
    lines = _table(
        ("a step on one device", "least ms", "of"),
        [
            ("matmuls", _seconds(roof.matmul_seconds), by_dtype),
            ("memory", _seconds(roof.memory_seconds), f"{memory} read and written"),
            ("links", _seconds(roof.link_seconds), f"{sent} sent"),
            ("by the compiler", _seconds(program.compiler_seconds), cycles),
        ],
        numbers=(1,),
    )
    each = program.model_flops / plan.num_devices
    lines.append(f"FLOPs of a step: {program.model_flops:.4g} by the model, {each:.4g} per device")
    if roof.bound is None or roof.most_mfu is None:
        return [*lines, f"bound on MFU: {_UNKNOWN}, as the device's figures are not"]
    if roof.most_mfu == 1:  # what silent kernels multiply is missing
        return [*lines, "bound on MFU: none below 100 %"]
    by_compiler = ""
    if program.compiler_seconds:
        by_compiler = f"; at most {roof.mfu_of(program.compiler_seconds):.1%} in the compiler's own time"
    return [*lines, f"bound on MFU: {roof.most_mfu:.1%}, by {roof.bound[0]}{by_compiler}"]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] | None = None) -> list[str]:
    """Aligned lines; the columns of `numbers` (default: all with a digit first everywhere) to the right."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = {
        at for at, column in enumerate(columns) if all(cell[:1].isdigit() and "x" not in cell for cell in column[1:])
    }
    right = right if numbers is None else set(numbers)
    return [
        "  ".join(
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    ]


if __name__ == "__main__":
    sys.exit(run_command(main))
