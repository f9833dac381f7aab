#!/usr/bin/env python3
"""Draws docs/images/{rampup,loading_hosts,accumulation}.svg, the pictures of docs/batch_size.md, from real plans.

python scripts/draw_batch_size.py [DIRECTORY]
"""

import html
import sys
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path

from maxtext_lite import load_config, make_plan
from maxtext_lite.batching import BatchPlan, BatchStage
from maxtext_lite.config.errors import number_text

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"

_COLORS = {  # of light and dark pages; c0 to c3 are tints that text can stand on
    "paper": ("fill", "#fbfaf8", "#1b1f23"),
    "ink": ("fill", "#1f2328", "#e6e4df"),
    "quiet": ("fill", "#5d6570", "#9aa3ad"),
    "rule": ("stroke", "#d9d6cf", "#3a4249"),
    "axis": ("stroke", "#5d6570", "#9aa3ad"),
    "curve": ("stroke", "#0072b2", "#56b4e9"),
    "area": ("fill", "#e1eef6", "#20384a"),
    "empty": ("stroke", "#8b919a", "#7b848e"),
    "box": ("stroke", "#b5b1a8", "#4b545d"),
    "c0": ("fill", "#bcd9ee", "#1f5278"),
    "c1": ("fill", "#fbd3b4", "#7a431c"),
    "c2": ("fill", "#b9e3d6", "#17604b"),
    "c3": ("fill", "#ecc9e1", "#6d3d62"),
    "s0": ("stroke", "#0072b2", "#56b4e9"),
    "s1": ("stroke", "#d55e00", "#f0884a"),
    "s2": ("stroke", "#00806a", "#2fc09c"),
    "s3": ("stroke", "#b0508b", "#e096c2"),
}
_CELL = 20


def _style() -> str:
    light = "".join(f".{name}{{{key}:{color}}}" for name, (key, color, _) in _COLORS.items())
    dark = "".join(f".{name}{{{key}:{color}}}" for name, (key, _, color) in _COLORS.items())
    return (
        "text{font:12px system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif}"
        ".strong{font-weight:600}.small{font-size:11px}.middle{text-anchor:middle}.end{text-anchor:end}"
        ".rule,.axis,.box,.empty{fill:none}.curve{fill:none;stroke-width:2.5}.empty{stroke-dasharray:3 2}"
        f".s0,.s1,.s2,.s3{{fill:none;stroke-width:1.5}}{light}@media(prefers-color-scheme:dark){{{dark}}}"
    )


def svg(name: str, title: str, description: str, width: int, height: int, body: Iterable[str]) -> str:
    """A whole picture, one element per line; light or dark as the reader's page is."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-labelledby="{name}-title {name}-desc">',
        f'<title id="{name}-title">{html.escape(title)}</title>',
        f'<desc id="{name}-desc">{html.escape(description)}</desc>',
        f"<style>{_style()}</style>",
        f'<rect class="paper" width="{width}" height="{height}" rx="8"/>',
        *body,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _px(value: float | Fraction) -> str:
    return f"{float(value):.1f}".removesuffix(".0")


def words(x: float, y: float, text: str, classes: str = "ink") -> str:
    return f'<text class="{classes}" x="{_px(x)}" y="{_px(y)}">{html.escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, classes: str, radius: float = 3) -> str:
    return (
        f'<rect class="{classes}" x="{_px(x)}" y="{_px(y)}" width="{_px(width)}" height="{_px(height)}" '
        f'rx="{_px(radius)}"/>'
    )


def curve(path: str, classes: str) -> str:
    return f'<path class="{classes}" d="{path}"/>'


def _row(x: float, y: float, number: int, color: int) -> list[str]:
    """A numbered row (an example) as a square."""
    return [
        _rect(x + 1, y + 1, _CELL - 2, _CELL - 2, f"c{color}"),
        words(x + _CELL / 2, y + 14, str(number), "ink small middle"),
    ]


def _empty_slot(x: float, y: float) -> str:
    return _rect(x + 1.5, y + 1.5, _CELL - 3, _CELL - 3, "empty")


def plan_of(*overrides: str, num_devices: int, num_hosts: int = 1) -> BatchPlan:
    """The plan of configs/base.yml with these values."""
    return make_plan(load_config(None, overrides), num_devices=num_devices, num_hosts=num_hosts)


# Ramp-up

RAMP = (
    "enable_rampup_batch_size=true",
    "per_device_batch_size_start=1",
    "per_device_batch_size=4",
    "per_device_batch_size_increment=1",
    "gradient_accumulation_steps=4",
    "global_rampup_samples=960",
)
RAMP_DEVICES = 8
_RAMP_MODES = ("per_device_batch_size", "gradient_accumulation_steps")
_STEPS_AT_TARGET = 4


def _stage_name(index: int, stages: Sequence[BatchStage]) -> str:
    return "target" if index == len(stages) - 1 else f"stage {index + 1}"


def _staircase(
    left: float, starts: Sequence[int], end: int, batches: Sequence[int], names: Sequence[str], label: str
) -> list[str]:
    """Batch size over steps or samples, with the stages named; `starts` are the stages' first values of x."""
    top, bottom, width = 84.0, 244.0, 296.0

    def x(value: int) -> float:
        return left + (value - starts[0]) / (end - starts[0]) * width

    def y(batch: int) -> float:
        return bottom - batch / (max(batches) * 1.2) * (bottom - top)

    edges = [*starts, end]
    parts = [words(left, top - 22, f"over {label}", "ink strong")]
    line = f"M{_px(x(edges[0]))},{_px(y(batches[0]))}"
    for batch, first, after in zip(batches, edges, edges[1:], strict=False):
        parts.append(_rect(x(first), y(batch), x(after) - x(first), bottom - y(batch), "area", 0))
        line += f"V{_px(y(batch))}H{_px(x(after))}"
    for batch, name, first, after in zip(batches, names, edges, edges[1:], strict=False):
        parts += [
            curve(f"M{_px(x(first))},{_px(top)}V{_px(bottom + 4)}", "rule"),
            words(x(first), bottom + 18, f"{first:,}", "quiet small middle"),
            words((x(first) + x(after)) / 2, y(batch) - 7, str(batch), "ink strong middle"),
            words((x(first) + x(after)) / 2, top - 4, name, "quiet small middle"),
        ]
    parts.append(curve(f"M{_px(left)},{_px(bottom)}H{_px(left + width)}", "axis"))
    parts.append(curve(line, "curve"))
    return parts


def draw_rampup() -> str:
    """Batch size over steps and samples, and the split in each mode."""
    plans = [plan_of(*RAMP, f"rampup_mode={mode}", num_devices=RAMP_DEVICES) for mode in _RAMP_MODES]
    stages, by_accumulation = (plan.stages for plan in plans)
    ramp = plans[0].rampup
    assert ramp is not None
    batches = [stage.global_batch_to_train for stage in stages]
    assert batches == [stage.global_batch_to_train for stage in by_accumulation]
    names = [_stage_name(index, stages) for index in range(len(stages))]
    last = stages[-1]
    body = [
        words(24, 30, f"global_batch_to_train on {RAMP_DEVICES} devices, {len(stages) - 1} stages of "
              f"{number_text(ramp.samples_per_increment)} samples each, rounded up to whole steps"),
        *_staircase(32, [stage.first_step for stage in stages], last.first_step + _STEPS_AT_TARGET, batches, names,
                    "steps (the first step of each stage)"),
        *_staircase(408, [stage.samples_before for stage in stages],
                    last.samples_before + _STEPS_AT_TARGET * last.global_batch_to_train, batches, names,
                    "samples (seen before each stage)"),
    ]  # fmt: skip
    columns = [24, 320, 422, 524, 626]
    rows = [
        ["", *names],
        ["steps x global batch = samples", *(_samples_text(stage) for stage in stages)],
        *(
            [f"rampup_mode={mode}:", *(_per_device_text(stage) for stage in plan.stages)]
            for mode, plan in zip(_RAMP_MODES, plans, strict=True)
        ),
    ]
    for line, row in enumerate(rows):
        y = 298 + 24 * line
        for column, (x, text) in enumerate(zip(columns, row, strict=True)):
            if text:
                body.append(words(x, y, text, "quiet" if column == 0 or line == 0 else "ink"))
        body.append(curve(f"M24,{y + 8}H704", "rule"))
    body.append(words(24, 298 + 24 * len(rows) + 2, "per_device_batch_size x gradient_accumulation_steps in each "
                      "stage: both modes have the same global batches", "quiet small"))  # fmt: skip
    description = f"A staircase of {len(stages)} steps. " + " ".join(
        f"{name}: from step {stage.first_step}, {stage.global_batch_to_train} examples per step."
        for name, stage in zip(names, stages, strict=True)
    )
    return svg("rampup", "Batch size during the ramp-up, over steps and over samples", description, 728, 412, body)


def _samples_text(stage: BatchStage) -> str:
    if stage.num_steps is None:
        return f"{stage.global_batch_to_train} a step"
    return f"{stage.num_steps} x {stage.global_batch_to_train} = {stage.samples}"


def _per_device_text(stage: BatchStage) -> str:
    return f"{number_text(stage.per_device_batch_size)} x {stage.gradient_accumulation_steps}"


# Loading hosts

LOADING_FACTORS = ("-1", "2", "4", "0.5")
LOADING_HOSTS, LOADING_DEVICES = 4, 8


def loading_plan(factor: str) -> BatchPlan:
    """A plan of two rows on each device with this expansion_factor_real_data."""
    return plan_of(
        f"expansion_factor_real_data={factor}",
        "per_device_batch_size=2",
        num_devices=LOADING_DEVICES,
        num_hosts=LOADING_HOSTS,
    )


def rows_read(plan: BatchPlan) -> dict[tuple[int, int], list[int]]:
    """The rows of a step that each (load, host) reads: loading hosts have equal shares, split over the loads."""
    rows_of_host = plan.global_batch_to_train // len(plan.loading_hosts)
    rows_of_load = -(-rows_of_host // plan.loads_per_step)
    found: dict[tuple[int, int], list[int]] = {}
    for row in range(plan.global_batch_to_train):
        host = plan.loading_hosts[row // rows_of_host]
        found.setdefault((row % rows_of_host // rows_of_load, host), []).append(row)
    return found


def _loading_panel(left: float, top: float, factor: str) -> list[str]:
    plan = loading_plan(factor)
    rows_of_device = plan.global_batch_to_train // plan.num_devices
    devices_of_host = plan.num_devices // plan.num_hosts
    per_line = rows_of_device * devices_of_host  # the rows that stay with a host
    read = rows_read(plan)
    pitch, wide = 88.0, per_line * _CELL
    lines = max(4, 2 * plan.loads_per_step)
    devices_top = top + 58 + lines * _CELL + 66
    loads = f"{plan.loads_per_step} load{'s' if plan.loads_per_step > 1 else ''}"
    parts = [
        words(left, top, f"expansion_factor_real_data={factor}", "ink strong"),
        words(left, top + 18, f"{len(plan.loading_hosts)} of {plan.num_hosts} hosts read, {loads} of "
              f"{plan.global_batch_to_load} slots for {plan.global_batch_to_train} rows", "quiet"),
    ]  # fmt: skip
    for host in range(plan.num_hosts):
        x = left + host * pitch
        parts.append(words(x + wide / 2, top + 44, f"host {host}", "ink middle"))
        parts.append(_rect(x - 3, top + 52, wide + 6, lines * _CELL + 6, "box"))
        line = 0
        for load in range(plan.loads_per_step):
            rows = read.get((load, host), [])
            if plan.loads_per_step > 1 and rows:
                parts.append(words(x + wide / 2, top + 69 + line * _CELL, f"load {load + 1}", "quiet small middle"))
                line += 1
            for index, row in enumerate(rows):
                y = top + 55 + (line + index // per_line) * _CELL
                parts += _row(x + index % per_line * _CELL, y, row, row // per_line)
            line += -(-len(rows) // per_line)
        if not line:
            parts.append(words(x + wide / 2, top + 69 + _CELL, "reads", "quiet small middle"))
            parts.append(words(x + wide / 2, top + 69 + 2 * _CELL - 6, "nothing", "quiet small middle"))
    for target in range(plan.num_hosts):
        (source,) = {host for (_, host), rows in read.items() for row in rows if row // per_line == target}
        ways = [host for host in range(plan.num_hosts) if _reader(read, host * per_line) == source]
        spread = (ways.index(target) - (len(ways) - 1) / 2) * 14
        x0, y0 = left + source * pitch + wide / 2 + spread, top + 58 + lines * _CELL + 3
        x1, y1 = left + target * pitch + wide / 2, devices_top - 18
        middle = (y0 + y1) / 2
        parts.append(
            curve(f"M{_px(x0)},{_px(y0)}C{_px(x0)},{_px(middle)} {_px(x1)},{_px(middle)} {_px(x1)},{_px(y1)}"
                  f"m-4,-6l4,6l4,-6", f"s{target}")
        )  # fmt: skip
    for device in range(plan.num_devices):
        host, place = divmod(device, devices_of_host)
        x = left + host * pitch + place * rows_of_device * _CELL
        parts.append(words(x + rows_of_device * _CELL / 2, devices_top - 3, f"d{device}", "quiet small middle"))
        for index in range(rows_of_device):
            parts += _row(x + index * _CELL, devices_top + 3, device * rows_of_device + index, host)
        parts.append(_rect(x + 0.5, devices_top + 2, rows_of_device * _CELL - 1, _CELL + 2, "box"))
    return parts


def _reader(read: dict[tuple[int, int], list[int]], row: int) -> int:
    (host,) = {host for (_, host), rows in read.items() if row in rows}
    return host


def draw_loading_hosts() -> str:
    """Who reads which rows and where they go, for several factors."""
    width, height = 760, 560
    body: list[str] = []
    for index, factor in enumerate(LOADING_FACTORS):
        body += _loading_panel(28 + index % 2 * 376, 34 + index // 2 * 272, factor)
    plan = loading_plan(LOADING_FACTORS[0])
    description = (
        f"{plan.num_hosts} hosts with {plan.num_devices // plan.num_hosts} devices each and a batch of "
        f"{plan.global_batch_to_train} rows, of which each device always gets the same. "
    ) + " ".join(_factor_sentence(factor) for factor in LOADING_FACTORS)
    return svg("loading-hosts", "Which hosts read which rows, and where the rows go", description, width, height, body)


def _factor_sentence(factor: str) -> str:
    plan = loading_plan(factor)
    parts = [
        f"host {host} reads rows {rows[0]} to {rows[-1]}" + (f" in load {load + 1}" if plan.loads_per_step > 1 else "")
        for (load, host), rows in rows_read(plan).items()
    ]
    return f"Factor {factor}: {', '.join(parts)}."


# Accumulation

ACCUMULATION = (("2", "1"), ("1", "2"), ("0.5", "4"))
ACCUMULATION_DEVICES = 4


def accumulation_plan(per_device: str, accumulation: str) -> BatchPlan:
    """One of the equal global batches of the picture."""
    return plan_of(
        f"per_device_batch_size={per_device}",
        f"gradient_accumulation_steps={accumulation}",
        num_devices=ACCUMULATION_DEVICES,
    )


def micro_batches(plan: BatchPlan) -> list[list[int | None]]:
    """The example in each slot of each micro-batch, None where a slot is empty."""
    slots: list[list[int | None]] = [[None] * plan.micro_batch_slots for _ in range(plan.gradient_accumulation_steps)]
    for example in range(plan.global_batch_to_train):
        slots[example % plan.gradient_accumulation_steps][example // plan.gradient_accumulation_steps] = example
    return slots


def draw_accumulation() -> str:
    """One step's examples as micro-batch x slot, for equal global batches."""
    body: list[str] = []
    top, left, pitch = 34.0, 150.0, 132.0
    sentences: list[str] = []
    for per_device, accumulation in ACCUMULATION:
        plan = accumulation_plan(per_device, accumulation)
        slots_of_device = plan.micro_batch_slots // plan.num_devices
        body.append(words(24, top, f"per_device_batch_size={per_device}, gradient_accumulation_steps={accumulation}",
                          "ink strong"))  # fmt: skip
        empty = plan.empty_slots_per_micro_batch
        body.append(
            words(24, top + 18, f"{plan.micro_batch_to_train} examples a micro-batch x "
                  f"{plan.gradient_accumulation_steps} = {plan.global_batch_to_train} examples a step"
                  + (f"; {empty} of {plan.micro_batch_slots} slots stay empty (dashed)" if empty else ""), "quiet")
        )  # fmt: skip
        for device in range(plan.num_devices):
            body.append(words(left + device * pitch + 44, top + 42, f"device {device}", "quiet small middle"))
        for number, slots in enumerate(micro_batches(plan)):
            y = top + 50 + number * (_CELL + 8)
            body.append(words(24, y + 14, f"micro-batch {number}", "ink"))
            for device in range(plan.num_devices):
                body.append(_rect(left + device * pitch, y - 2, 88, _CELL + 4, "box"))
            for slot, example in enumerate(slots):
                device, place = divmod(slot, slots_of_device)
                x = left + device * pitch + 44 + (place - slots_of_device / 2) * _CELL
                body += [_empty_slot(x, y)] if example is None else _row(x, y, example, example // 2)
        sentences.append(
            f"With {accumulation} micro-batches: "
            + "; ".join(
                " ".join("empty" if example is None else str(example) for example in slots)
                for slots in micro_batches(plan)
            )
            + "."
        )
        top += 50 + plan.gradient_accumulation_steps * (_CELL + 8) + 34
    body.append(words(24, top - 8, "The gradients of a step's micro-batches are summed; then the weights change, once.",
                      "quiet"))  # fmt: skip
    description = (
        "Example j of a step is in micro-batch j mod A, slot j div A; devices have equal ranges of slots. "
        + " ".join(sentences)
    )
    return svg("accumulation", "One step's examples as micro-batches and slots, for equal global batches", description,
               700, int(top) + 12, body)  # fmt: skip


PICTURES = {"rampup": draw_rampup, "loading_hosts": draw_loading_hosts, "accumulation": draw_accumulation}


def main(argv: Sequence[str]) -> int:
    """Writes all pictures to docs/images, or to the directory given as an argument."""
    directory = Path(argv[0]) if argv else IMAGES
    directory.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (directory / f"{name}.svg").write_text(draw(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
