"""A plan as a table for people."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

from maxtext_lite.batching.ledger import PARTS, MemoryEstimate
from maxtext_lite.batching.plan import BatchPlan
from maxtext_lite.batching.schedule import BatchStage
from maxtext_lite.batching.topology import (
    mesh_text,
)
from maxtext_lite.config.errors import (
    bytes_text,
    counted,
    number_text,
    rounded_text,
    short_text,
)

_MOST_STAGES = 12
_WHEN = {"mlp": "during an mlp's backward pass", "attention": "during attention's backward pass"}


def format_plan(plan: BatchPlan, more: Sequence[tuple[str, str]] = ()) -> str:
    """The plan, one quantity a line: batch, loading, pipeline, length, ramp, memory and kernel; then the warnings.

    Args:
      more: further rows, after that of memory.
    """
    rows = [*_batch_rows(plan), *_pipeline_rows(plan), *_length_rows(plan), *_optimizer_rows(plan)]
    if plan.diloco_num_replicas is not None:
        replicas = plan.diloco_num_replicas
        shards = plan.mesh["data"]
        held = f"{_count(replicas, 'replica')}, {replicas // shards} on each part of the data axis ({shards})"
        rows.append(("local updates", f"{held}, synchronised every {plan.diloco_sync_period} steps"))
    rows += [*_rampup_rows(plan), *_memory_rows(plan.memory), *more]
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


def split_text(per_device_batch_size: float | Fraction, num_devices: int, accumulation: int) -> str:
    """`4 per device x 8 devices x 2 accumulation`."""
    per_device = f"{float(per_device_batch_size):g} per device"
    return f"{per_device} x {counted(num_devices, 'device')} x {accumulation} accumulation"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _decimal(value: Fraction) -> str:
    """A number for reading that is never a ratio such as 3/38269."""
    text = short_text(value)
    return rounded_text(float(value)) if "/" in text else text


def _batch_rows(plan: BatchPlan) -> Iterator[tuple[str, str]]:
    devices = _count(plan.num_devices, "device")
    accumulation = plan.gradient_accumulation_steps
    per_device = number_text(plan.per_device_batch_size)
    examples = _count(plan.global_batch_to_train, "example")
    micro = _count(plan.micro_batch_to_train, "example")
    slots = _count(plan.micro_batch_slots, "slot")
    mesh = mesh_text(plan.mesh, "all mesh axes 1")
    rows = plan.rows_per_example
    tokens = plan.max_target_length
    yield "num_devices", f"{plan.num_devices} = {mesh}, on {_count(plan.num_hosts, 'host')}"
    if plan.rl is not None:
        yield from plan.rl.rows()
    yield "micro_batch_to_train", f"{micro} = {per_device} per device x {devices}"
    shards = f"{slots} over {_count(plan.batch_shards, 'batch shard')}"
    yield "empty_slots_per_micro_batch", f"{plan.empty_slots_per_micro_batch} = {shards} - {micro}"
    yield "global_batch_to_train", f"{examples} = {per_device} per device x {devices} x {accumulation} accumulation"
    if rows > 1:
        step = plan.global_batch_to_train * rows
        yield "rows_per_example", f"{rows}, one of chosen and one of rejected answers: {step} rows per step"
    row = f"{tokens}" if rows == 1 else f"2 rows x {tokens}"
    yield "tokens_per_step", f"{plan.tokens_per_step} = {examples} x {row} tokens"
    if plan.rl is None:
        yield from _reading_rows(plan)
    if (shards := plan.mesh["context"]) > 1:
        chunk = f"an early and a late chunk of {tokens // (2 * shards)} of the {tokens} tokens of an example"
        yield "context shards", f"{shards}, each with {chunk}"


def _reading_rows(plan: BatchPlan) -> Iterator[tuple[str, str]]:
    per_device = number_text(plan.eval_per_device_batch_size)
    devices = _count(plan.num_devices, "device")
    yield "eval batch", f"{_count(plan.eval_batch_examples, 'example')} = {per_device} per device x {devices}"
    factor = plan.expansion_factor_real_data
    share = plan.examples_per_loading_host
    exact = plan.global_batch_to_train * factor
    rounded = "" if exact.denominator == 1 else f" = {short_text(exact)}, rounded up"
    examples = _count(plan.global_batch_to_train, "example")
    slots = _count(plan.global_batch_to_load, "slot")
    yield "global_batch_to_load", f"{slots} = {examples} x {number_text(factor)} expansion{rounded}"
    read = f"{short_text(share)} example{'' if share == 1 else 's'}{'' if share.denominator == 1 else ' on average'}"
    loads = _count(plan.loads_per_step, "load")
    yield (
        "loading_hosts",
        f"{len(plan.loading_hosts)} of {plan.num_hosts}, each reads {read} in each of {loads} per step",
    )


def _pipeline_rows(plan: BatchPlan) -> Iterator[tuple[str, str]]:
    micro = plan.micro_batch_to_train
    pieces = plan.num_pipeline_microbatches
    if plan.num_pipeline_stages == 1:
        return
    size = _count(plan.pipeline_microbatch_size, "example")
    uneven = "" if micro % pieces == 0 else ", rounded up"
    yield "pipeline_microbatch_size", f"{size} = micro-batch {micro} / {pieces} pipeline microbatches{uneven}"
    yield "pipeline_bubble_fraction", _bubble_text(plan)
    if len(plan.pipeline_schedules) > 1:
        for name, cost in plan.pipeline_schedules.items():
            bubble = f"bubble {float(cost.bubble_fraction):.4g}"
            bytes_held = "" if cost.activations is None else f", activations {bytes_text(cost.activations)}"
            yield f"with {name}", bubble + bytes_held


def _bubble_text(plan: BatchPlan) -> str:
    stages = plan.num_pipeline_stages
    pieces = plan.num_pipeline_microbatches
    repeats = plan.num_pipeline_repeats
    accumulation = plan.gradient_accumulation_steps
    bubble = f"{float(plan.pipeline_bubble_fraction):.4g}"
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
    total = plan.total_examples
    tokens = plan.rows_per_example * plan.max_target_length
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
    rate = plan.scaling.scaled["learning_rate"]
    groups = [(f"  of {group}", f"{rate * by:g} = {rate:g} x {by:g}") for group, by in plan.scaling.groups.items()]
    return [*_scaling_rows(plan), *groups]


def _scaling_rows(plan: BatchPlan) -> list[tuple[str, str]]:
    scaling = plan.scaling
    multiplier = plan.learning_rate_multiplier
    ratio = short_text(scaling.batch_ratio)
    rate = scaling.scaled["learning_rate"]
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
        old = scaling.configured[key]
        new = scaling.scaled[key]
        if new != old:
            rows.append((key, f"{old:g} -> {new:g} = {formula}"))
        elif key == "learning_rate":
            rows.append((key, f"{new:g} = {formula}"))
    return rows


def _rampup_rows(plan: BatchPlan) -> Iterator[tuple[str, str]]:
    ramp = plan.rampup
    if ramp is None:
        return
    done = plan.length.done[0]
    *stages, last = plan.length.stages_ahead
    if ramp.samples_per_increment is not None:
        per_device = plan.per_device_batch_size / plan.global_batch_to_train
        first, second = (stage.global_batch_to_train * per_device for stage in ramp.all_stages[:2])
        target, start, increment = map(number_text, (plan.per_device_batch_size, first, second - first))
        yield "num_increments", f"{ramp.num_increments} = ({target} - {start}) / {increment}"
        total = short_text(ramp.samples_per_increment * ramp.num_increments)
        each = short_text(ramp.samples_per_increment)
        yield "samples_per_increment", f"{each} = {total} / {ramp.num_increments}"
    name = "batch_schedule" if ramp.samples_per_increment is None else "ramp-up"
    steps = f"{_count(last.first_step - 1 - done, 'step')}{' left' if done else ''} before the target"
    yield name, f"{steps}; rampup_mode={ramp.mode}"
    shown = stages if len(stages) <= _MOST_STAGES else stages[: _MOST_STAGES - 1]
    for stage in shown:
        assert stage.num_steps is not None
        yield (
            "",
            f"from step {stage.first_step}: {_count(stage.num_steps, 'step')} of "
            f"{stage.global_batch_to_train} = {number_text(stage.per_device_batch_size)} per device x "
            f"{plan.num_devices} x {stage.gradient_accumulation_steps}{_rate_text(plan, stage)}",
        )
    if len(shown) < len(stages):
        yield "", f"... {len(stages) - len(shown)} more stages (--json has them all)"
    yield "", f"from step {last.first_step}: {last.global_batch_to_train}{_rate_text(plan, last)}"


def _rate_text(plan: BatchPlan, stage: BatchStage) -> str:
    rate = plan.learning_rate * plan.stage_multiplier(stage)
    return f", learning_rate {rate:.4g}" if plan.scales_by_stage else ""


def _memory_rows(memory: MemoryEstimate) -> Iterator[tuple[str, str]]:
    if not memory.is_known:
        return
    limit = "" if memory.limit is None else f" of {bytes_text(memory.limit)}"
    parts = [f"{name} {bytes_text(memory.at_peak(part))}" for part, name in PARTS.items() if memory.at_peak(part)]
    when = _WHEN.get(memory.peak, f"at the {memory.peak}")
    yield "memory per device", f"{bytes_text(memory.total)}{limit} = {' + '.join(parts)}, {when}"
    if memory.offloaded:
        yield "in host memory", f"{bytes_text(memory.offloaded)} per device"
