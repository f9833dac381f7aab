"""The expected time of a plan's step on a device: its bound, times measured ratios of steps to their bounds."""

from dataclasses import replace
from typing import Any

from maxtext_lite.analysis.step_time import StepModel, StepTime, flops_of_example
from maxtext_lite.batching.devices import Device
from maxtext_lite.batching.parameters import count_parameters
from maxtext_lite.batching.plan import BatchPlan
from maxtext_lite.batching.schedule import BatchStage
from maxtext_lite.batching.topology import MeshSizes
from maxtext_lite.config import Config

MEASURED = (1.64, 1.80)
"""The smallest and largest ratio of a measured step to its bound, of five points on one H200: docs/performance.md."""


def least_step(
    config: Config, plan: BatchPlan, device: Device | None, stage: BatchStage | None = None
) -> StepTime | None:
    """A lower bound on a stage's step time, at the device's peak rates; None if they are unknown.

    Args:
      stage: None: the last one, at the target.
    """
    if device is None:
        return None
    mesh = MeshSizes(plan.ici_mesh, plan.dcn_mesh)
    try:
        model = StepModel(config, mesh, device, plan.memory, flops=flops_of_example(config))
    except ValueError:  # a rate of the device is not known
        return None
    stage = stage or plan.stages[-1]
    rows = plan.rows_per_example * plan.slots_for(stage.micro_batch_to_train)
    shape = replace(plan.pipeline_shape, gradient_accumulation_steps=stage.gradient_accumulation_steps)
    return model.step(config, rows, stage.global_batch_to_train, shape)


def expected(config: Config, plan: BatchPlan, device: Device | None, price: float | None = None) -> dict[str, Any]:
    """The parameters of a plan's model, and the time, throughput and MFU of its step on a device.

    With stages, or a price of an hour of a device, also what is left of each stage: its tokens, time and price.

    Each of the three has a `bound`, at the peaks of the device, and what is `expected`, from the best to the worst of
    the measured ratios. They are missing without a device, for one whose figures do not suffice, and in reinforcement
    learning, where most of a step is spent on sampling.
    """
    found: dict[str, Any] = {"parameters": count_parameters(config).total}
    if device is None or plan.rl is not None:
        return found
    device = device.in_hosts(plan.num_devices, plan.num_hosts)
    least = least_step(config, plan, device)
    if least is None:
        return found
    rate = plan.tokens_per_step / least.seconds
    found["step_seconds"] = {"expected": [ratio * least.seconds for ratio in MEASURED], "bound": least.seconds}
    found["tokens_per_second"] = {"expected": [rate / ratio for ratio in MEASURED], "bound": rate}
    found["mfu"] = {"expected": [least.mfu / ratio for ratio in MEASURED], "bound": least.mfu}
    if plan.rampup is not None or price is not None:
        found["stages"] = _stages(config, plan, device, price)
    return found


def _stages(config: Config, plan: BatchPlan, device: Device, price: float | None) -> list[dict[str, Any]]:
    """What the run has before it in each stage that it reaches."""
    found: list[dict[str, Any]] = []
    for stage in plan.length.stages_ahead:
        num_steps = plan.steps - stage.first_step + 1
        if stage.num_steps is not None:
            num_steps = min(num_steps, stage.num_steps)
        least = least_step(config, plan, device, stage)
        if num_steps <= 0 or least is None:
            continue
        examples = min(num_steps * stage.global_batch_to_train, plan.total_examples - stage.samples_before)
        seconds = [ratio * num_steps * least.seconds for ratio in MEASURED]
        entry: dict[str, Any] = {"first_step": stage.first_step, "num_steps": num_steps}
        entry["tokens"] = examples * config.tokens_per_example
        entry["seconds"] = {"expected": seconds, "bound": num_steps * least.seconds}
        if price is not None:
            entry["price"] = [each / 3600 * plan.num_devices * price for each in seconds]
        found.append(entry)
    return found


def expected_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows of the plan's table for what `expected` found."""
    rows = [("parameters", f"{found['parameters']:,}")]
    if "step_seconds" in found:
        ratios = f"{MEASURED[0]:.2f} to {MEASURED[1]:.2f} x the bound was measured on one H200"
        rows.append(("step time", f"{_range(found['step_seconds'], '{:.4g} s')} ({ratios})"))
        rows.append(("tokens per second", _range(found["tokens_per_second"], "{:,.0f}")))
        rows.append(("MFU", _range(found["mfu"], "{:.1%}")))
    name = "time of each stage"
    for stage in found.get("stages", []):
        rows.append((name, _stage_text(stage)))
        name = ""
    return rows


def _stage_text(stage: dict[str, Any]) -> str:
    """The tokens, hours and price of a stage."""
    hours = " to ".join(f"{seconds / 3600:.3g}" for seconds in stage["seconds"]["expected"])
    text = f"from step {stage['first_step']}: {stage['tokens']} tokens, {hours} hours"
    if "price" not in stage:
        return text
    return f"{text}, at a price of {' to '.join(f'{price:.4g}' for price in stage['price'])}"


def _range(values: dict[str, Any], form: str) -> str:
    first, last = (form.format(value) for value in values["expected"])
    return f"{first} to {last} expected, bound {form.format(values['bound'])}"
