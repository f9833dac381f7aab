"""What a plan's step is expected to take on a device: its bound, times what steps took beside theirs."""

from typing import Any

from maxtext_lite.analysis.step_time import StepModel, StepTime, flops_of_example
from maxtext_lite.batching.devices import Device
from maxtext_lite.batching.parameters import count_parameters
from maxtext_lite.batching.plan import BatchPlan
from maxtext_lite.batching.topology import MeshSizes
from maxtext_lite.config import Config

MEASURED = (1.64, 1.80)
"""The smallest and largest ratio of a measured step to its bound, of five points on one H200: docs/performance.md."""


def least_step(config: Config, plan: BatchPlan, device: Device | None) -> StepTime | None:
    """The least time of a plan's step, at the peaks of a device; None for one whose figures are not known."""
    if device is None:
        return None
    mesh = MeshSizes(plan.ici_mesh, plan.dcn_mesh)
    try:
        model = StepModel(config, mesh, device, plan.memory, flops=flops_of_example(config))
    except ValueError:  # a rate of the device is not known
        return None
    return model.step(config, plan.rows_per_micro_batch, plan.global_batch_to_train, plan.pipeline_shape)


def expected(config: Config, plan: BatchPlan, device: Device | None) -> dict[str, Any]:
    """The parameters of a plan's model, and the time, throughput and MFU of its step on a device.

    Each of the three has a `bound`, at the peaks of the device, and what is `expected`, from the best to the worst of
    the measured ratios. They are missing without a device, for one whose figures do not suffice, and in reinforcement
    learning, where most of a step is spent on sampling.
    """
    found: dict[str, Any] = {"parameters": count_parameters(config).total}
    if device is None or plan.rl is not None:
        return found
    least = least_step(config, plan, device.in_hosts(plan.num_devices, plan.num_hosts))
    if least is None:
        return found
    rate = plan.tokens_per_step / least.seconds
    found["step_seconds"] = {"expected": [ratio * least.seconds for ratio in MEASURED], "bound": least.seconds}
    found["tokens_per_second"] = {"expected": [rate / ratio for ratio in MEASURED], "bound": rate}
    found["mfu"] = {"expected": [least.mfu / ratio for ratio in MEASURED], "bound": least.mfu}
    return found


def expected_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows of the plan's table for what `expected` found."""
    rows = [("parameters", f"{found['parameters']:,}")]
    if "step_seconds" in found:
        ratios = f"{MEASURED[0]:.2f} to {MEASURED[1]:.2f} x the bound was measured on one H200"
        rows.append(("step time", f"{_range(found['step_seconds'], '{:.4g} s')} ({ratios})"))
        rows.append(("tokens per second", _range(found["tokens_per_second"], "{:,.0f}")))
        rows.append(("MFU", _range(found["mfu"], "{:.1%}")))
    return rows


def _range(values: dict[str, Any], form: str) -> str:
    first, last = (form.format(value) for value in values["expected"])
    return f"{first} to {last} expected, bound {form.format(values['bound'])}"
