"""The plan as a table for people: each quantity with its formula filled in."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from fractions import Fraction

from maxtext_lite.batching.batch_plan import BatchPlan, ScheduleCost
from maxtext_lite.batching.ledger import PARTS, MemoryEstimate
from maxtext_lite.batching.topology import mesh_text
from maxtext_lite.config.errors import bytes_text, number_text, rounded_text, short_text

_MOST_STAGES = 12


def format_plan(plan: BatchPlan, more: Sequence[tuple[str, str]] = ()) -> str:
    """The plan, one quantity a line: batch, loading, pipeline, length, ramp, memory and kernel; then the warnings.

    Args:
      more: further rows, after that of memory.
    """
    rows: list[tuple[str, str]] = [
        ("num_devices", f"{plan.num_devices} = {_mesh_text(plan)}, on {_count(plan.num_hosts, 'host')}"),
        *(plan.rl.rows() if plan.rl else ()),
        *(_batch_rows(plan) if plan.rl is None else _batch_rows(plan)[:-1]),
        *(_loading_rows(plan) if plan.rl is None else ()),
        *_context_rows(plan),
        *_pipeline_rows(plan),
        *_length_rows(plan),
        *_optimizer_rows(plan),
        *_diloco_rows(plan),
        *_rampup_rows(plan),
        *(_memory_rows(plan.memory) if plan.memory.is_known else ()),
        *more,
    ]
    warnings = (f"warning: {warning}" for warning in plan.warnings)
    return "\n".join([*aligned(rows), f"attention kernel: {plan.attention_kernel}", *warnings])


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """The rows of a table as lines; the columns with the numbers `right` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _mesh_text(plan: BatchPlan) -> str:
    return mesh_text(plan.mesh, "all mesh axes 1")


def _decimal(value: Fraction) -> str:
    """A number for reading that is never a ratio such as 3/38269."""
    text = short_text(value)
    return rounded_text(float(value)) if "/" in text else text


def _batch_rows(plan: BatchPlan) -> list[tuple[str, str]]:
    devices = _count(plan.num_devices, "device")
    per_device, accumulation = number_text(plan.per_device_batch_size), plan.gradient_accumulation_steps
    micro = _count(plan.micro_batch_to_train, "example")
    slots = f"{_count(plan.micro_batch_slots, 'slot')} over {_count(plan.batch_shards, 'batch shard')}"
    return [
        ("micro_batch_to_train", f"{micro} = {per_device} per device x {devices}"),
        ("empty_slots_per_micro_batch", f"{plan.empty_slots_per_micro_batch} = {slots} - {micro}"),
        (
            "global_batch_to_train",
            f"{_count(plan.global_batch_to_train, 'example')} = "
            f"{per_device} per device x {devices} x {accumulation} accumulation",
        ),
        *_example_rows(plan),
        (
            "tokens_per_step",
            f"{plan.tokens_per_step} = {_count(plan.global_batch_to_train, 'example')} x {_row_text(plan)} tokens",
        ),
        (
            "eval batch",
            f"{_count(plan.eval_batch_examples, 'example')} = "
            f"{number_text(plan.eval_per_device_batch_size)} per device x {devices}",
        ),
    ]


def _example_rows(plan: BatchPlan) -> list[tuple[str, str]]:
    """Rows per example, where an example has more than one."""
    rows = plan.rows_per_example
    if rows == 1:
        return []
    step = plan.global_batch_to_train * rows
    return [("rows_per_example", f"{rows}, one of chosen and one of rejected answers: {step} rows per step")]


def _row_text(plan: BatchPlan) -> str:
    """Tokens of an example, with its rows as a factor if it has several."""
    return f"{plan.max_target_length}" if plan.rows_per_example == 1 else f"2 rows x {plan.max_target_length}"


def _loading_rows(plan: BatchPlan) -> list[tuple[str, str]]:
    factor, hosts = plan.expansion_factor_real_data, len(plan.loading_hosts)
    exact = plan.global_batch_to_train * factor
    rounded = "" if exact.denominator == 1 else f" = {short_text(exact)}, rounded up"
    share = plan.examples_per_loading_host
    about = "" if share.denominator == 1 else " on average"
    return [
        (
            "global_batch_to_load",
            f"{_count(plan.global_batch_to_load, 'slot')} = "
            f"{_count(plan.global_batch_to_train, 'example')} x {number_text(factor)} expansion{rounded}",
        ),
        (
            "loading_hosts",
            f"{hosts} of {plan.num_hosts}, each reads {short_text(share)} example{'' if share == 1 else 's'}{about} "
            f"in each of {_count(plan.loads_per_step, 'load')} per step",
        ),
    ]


def _context_rows(plan: BatchPlan) -> list[tuple[str, str]]:
    shards, tokens = plan.mesh["context"], plan.max_target_length
    if shards == 1:
        return []
    return [
        (
            "context shards",
            f"{shards}, each with an early and a late chunk of {tokens // (2 * shards)} of the {tokens} tokens of an "
            "example",
        )
    ]


def _pipeline_rows(plan: BatchPlan) -> list[tuple[str, str]]:
    stages, pieces = plan.num_pipeline_stages, plan.num_pipeline_microbatches
    if stages == 1:
        return []
    uneven = "" if plan.micro_batch_to_train % pieces == 0 else ", rounded up"
    return [
        (
            "pipeline_microbatch_size",
            f"{_count(plan.pipeline_microbatch_size, 'example')} = "
            f"micro-batch {plan.micro_batch_to_train} / {pieces} pipeline microbatches{uneven}",
        ),
        ("pipeline_bubble_fraction", _bubble_text(plan)),
        *(
            (f"with {name}", _cost_text(cost))
            for name, cost in plan.pipeline_schedules.items()
            if len(plan.pipeline_schedules) > 1
        ),
    ]


def _cost_text(cost: ScheduleCost) -> str:
    bubble = f"bubble {float(cost.bubble_fraction):.4g}"
    return bubble if cost.activations is None else f"{bubble}, activations {bytes_text(cost.activations)}"


def _bubble_text(plan: BatchPlan) -> str:
    stages, pieces, repeats = plan.num_pipeline_stages, plan.num_pipeline_microbatches, plan.num_pipeline_repeats
    accumulation, bubble = plan.gradient_accumulation_steps, f"{float(plan.pipeline_bubble_fraction):.4g}"
    if plan.pipeline_schedule == "1f1b":
        return (
            f"{bubble} = 2 x ({stages} stages - 1) / ({accumulation} accumulation x {pieces} microbatches + "
            f"2 x ({stages} stages - 1)), once in a step"
        )
    text = (
        f"{bubble} = ({stages} stages - 1) / ({_count(repeats, 'repeat')} x {pieces} microbatches + {stages} "
        "stages - 1), in every micro-batch"
    )
    if accumulation == 1:
        return text
    merged = replace(plan.pipeline_shape, num_microbatches=pieces * accumulation, gradient_accumulation_steps=1)
    return (
        f"{text}; as one micro-batch of {pieces * accumulation} microbatches it would be "
        f"{float(merged.bubble_fraction('gpipe')):.4g}, with {accumulation} times the activations"
    )


def _length_rows(plan: BatchPlan) -> list[tuple[str, str]]:
    total, tokens = plan.total_examples, plan.rows_per_example * plan.max_target_length
    rows = [("steps", f"{plan.steps}: {_count(total, 'example')}, {total * tokens} tokens")]
    step, seen = plan.length.done
    if step:
        left = f"{_count(plan.steps - step, 'step')} and {_count(total - seen, 'example')} are left"
        rows.append(("already done", f"{step}: {_count(seen, 'example')}, {seen * tokens} tokens; {left}"))
    if plan.epochs is not None and plan.steps_per_epoch is not None:
        rows.append(("epochs", f"{_decimal(plan.epochs)}; steps_per_epoch {_decimal(plan.steps_per_epoch)}"))
    batch = plan.stage_at(plan.total_examples).global_batch_to_train
    if plan.last_batch_examples is not None:
        rows.append(("last batch", f"the last step has {plan.last_batch_examples} of {batch} examples"))
    elif dropped := plan.dropped_examples:
        verb = "is" if dropped == 1 else "are"
        rows.append(("last batch", f"{_count(dropped, 'example')} at the end, of {batch}, {verb} dropped"))
    return rows


def _optimizer_rows(plan: BatchPlan) -> list[tuple[str, str]]:
    scaling, multiplier = plan.scaling, plan.learning_rate_multiplier
    ratio, rate = short_text(scaling.batch_ratio), scaling.scaled["learning_rate"]
    if scaling.rule == "none":
        return [("learning_rate", f"{rate:g} = {plan.learning_rate:g} x {multiplier:g}")]
    root = "root of " if scaling.rule == "sqrt" else ""
    how = {
        "learning_rate": f"{plan.learning_rate:g} x {multiplier:g}, the {root}m",
        "adam_b1": f"1 - m x (1 - {scaling.configured['adam_b1']:g})",
        "adam_b2": f"1 - m x (1 - {scaling.configured['adam_b2']:g})",
        "adam_eps": f"{scaling.configured['adam_eps']:g} / root of m",
    }
    base = plan.global_batch_to_train / scaling.batch_ratio
    rows = [("batch ratio m", f"{ratio} = {plan.global_batch_to_train} / base_global_batch_size={short_text(base)}")]
    for key, formula in how.items():
        old, new = scaling.configured[key], scaling.scaled[key]
        if new != old:
            rows.append((key, f"{old:g} -> {new:g} = {formula}"))
        elif key == "learning_rate":
            rows.append((key, f"{new:g} = {formula}"))
    return rows


def _diloco_rows(plan: BatchPlan) -> list[tuple[str, str]]:
    replicas = plan.diloco_num_replicas
    if replicas is None:
        return []
    held = replicas // plan.mesh["data"]
    return [
        (
            "local updates",
            f"{_count(replicas, 'replica')}, {held} on each part of the data axis ({plan.mesh['data']}), "
            f"synchronised every {plan.diloco_sync_period} steps",
        )
    ]


def _rampup_rows(plan: BatchPlan) -> list[tuple[str, str]]:
    ramp = plan.rampup
    if ramp is None:
        return []
    done, (*stages, last) = plan.length.done[0], plan.length.stages_ahead
    target, start = number_text(ramp.per_device_batch_size), number_text(ramp.per_device_batch_size_start)
    rows = [
        (
            "num_increments",
            f"{ramp.num_increments} = ({target} - {start}) / {number_text(ramp.per_device_batch_size_increment)}",
        ),
        (
            "samples_per_increment",
            f"{short_text(ramp.samples_per_increment)} = {ramp.global_rampup_samples} / {ramp.num_increments}",
        ),
        ("ramp-up", f"{_count(last.first_step - 1 - done, 'step')}{' left' * (done > 0)}; rampup_mode={ramp.mode}"),
    ]
    shown = stages if len(stages) <= _MOST_STAGES else stages[: _MOST_STAGES - 1]
    for stage in shown:
        assert stage.num_steps is not None
        rows.append(
            (
                "",
                f"from step {stage.first_step}: {_count(stage.num_steps, 'step')} of "
                f"{stage.global_batch_to_train} = {number_text(stage.per_device_batch_size)} per device x "
                f"{plan.num_devices} x {stage.gradient_accumulation_steps}",
            )
        )
    if len(shown) < len(stages):
        rows.append(("", f"... {len(stages) - len(shown)} more stages (--json has them all)"))
    return [*rows, ("", f"from step {last.first_step}: {last.global_batch_to_train}")]


def _memory_rows(memory: MemoryEstimate) -> list[tuple[str, str]]:
    limit = "" if memory.limit is None else f" of {bytes_text(memory.limit)}"
    parts = [(name, memory.at_peak(part)) for part, name in PARTS.items()]
    when = {"mlp": "during an mlp's backward pass", "attention": "during attention's backward pass"}.get(
        memory.peak, f"at the {memory.peak}"
    )
    text = f"{bytes_text(memory.total)}{limit} = " + " + ".join(
        f"{name} {bytes_text(size)}" for name, size in parts if size
    )
    text += f", {when}"
    rows = [("memory per device", text)]
    if memory.offloaded:
        rows.append(("in host memory", f"{bytes_text(memory.offloaded)} per device"))
    return rows
