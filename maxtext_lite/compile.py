"""The command `compile`: the train step, compiled ahead of time for a real or a described machine. Trains nothing."""

import json
import sys
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from maxtext_lite.batching import BatchPlan, make_plan
from maxtext_lite.batching.memory import bytes_text
from maxtext_lite.cli import ArgumentParser, config_arguments, run_command, whole_number
from maxtext_lite.config import Config, UserError, load_config
from maxtext_lite.config.errors import value_text

if TYPE_CHECKING:
    from maxtext_lite.training.program import Program, Traffic


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
    parser.add_argument("--topology", metavar="NAME", help="for a TPU slice, such as v5e:4x4; needs libtpu, but no TPU")
    parser.add_argument(
        "--slices", type=whole_number, metavar="S", help="with --topology: slices, all alike (default 1)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse(argv)
    _refuse_contradictions(arguments)
    config = _without_data(load_config(arguments.config, arguments.overrides))
    if arguments.devices is not None:  # before jax: what cannot be planned needs no devices
        plan = _plan(config, arguments.devices, arguments.hosts or 1, "cpu")
    import jax  # only once the config is known to be right

    from maxtext_lite.parallel import accelerator_of, simulated_devices, start_devices, topology_devices
    from maxtext_lite.training.program import compile_program

    if arguments.devices is not None:
        devices = simulated_devices(arguments.devices)
    elif arguments.topology is not None:
        devices = topology_devices(arguments.topology, arguments.slices or 1)
        plan = _plan(config, len(devices), len({device.process_index for device in devices}), "tpu")
    else:
        devices = start_devices()
        plan = _plan(config, len(devices), jax.process_count(), accelerator_of(devices[0]))
    program = compile_program(config, plan, devices)
    if jax.process_index() == 0:
        print(json.dumps(to_json(program, plan), indent=2) if arguments.json else format_program(program, plan))
    return 0


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


def _plan(config: Config, num_devices: int, num_hosts: int, platform: Any) -> BatchPlan:
    return make_plan(config, num_devices=num_devices, num_hosts=num_hosts, platform=platform)


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
        },
        "flops": {
            "xla_per_device_loop_bodies_once": program.xla_flops,
            "model_per_step": program.model_flops,
            "model_per_device_and_step": program.model_flops / plan.num_devices,
        },
    }


def _traffic_json(rows: Sequence["Traffic"]) -> list[dict[str, Any]]:
    return [
        {
            "kind": row.kind,
            "axes": list(row.axes),
            "operations": row.operations,
            "times": row.times,
            "bytes": row.payload_bytes,
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
    return "\n".join([*lines, "", *_memory_lines(program, plan), "", *_flops_lines(program, plan)])


def _traffic_lines(when: str, rows: Sequence["Traffic"]) -> list[str]:
    if not rows:
        return [f"nothing crosses the mesh {when}"]
    return _table(
        (f"collectives {when}", "over", "operations", "times", "bytes per device"),
        [
            (
                row.kind,
                " x ".join(row.axes),
                str(row.operations),
                "unknown" if row.times is None else f"{row.times:,}",
                "unknown" if row.payload_bytes is None else f"{row.payload_bytes:,}",
            )
            for row in rows
        ],
    )


def _memory_lines(program: "Program", plan: BatchPlan) -> list[str]:
    memory, planned = program.memory, plan.memory
    held = planned.params + planned.optimizer_state
    rows = [
        ("state and batch", memory.arguments, f"{bytes_text(held)} parameters and optimizer state"),
        (
            "temporaries",
            memory.temporaries,
            f"{bytes_text(planned.total - held)} gradients, activations and logits",
        ),
        ("results beside the state", memory.outputs - memory.aliased, "not counted"),
        ("code", memory.generated_code, "not counted"),
        ("total", memory.total, bytes_text(planned.total)),
    ]
    shown = [(name, bytes_text(size), estimate) for name, size, estimate in rows]
    return _table(("memory per device", "XLA", "the plan's estimate"), shown, numbers=(1,))


def _flops_lines(program: "Program", plan: BatchPlan) -> list[str]:
    each = program.model_flops / plan.num_devices
    counted = "does not say" if program.xla_flops is None else f"counts {program.xla_flops:.4g}"
    return [
        f"FLOPs of a step: {program.model_flops:.4g} by the model, {each:.4g} per device; XLA {counted} per device, "
        "with the body of each loop once"
    ]


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
