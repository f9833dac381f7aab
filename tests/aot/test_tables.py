"""Times and bounds are what follows from a device's figures, and what is not known is called that."""

import math

import pytest

from maxtext_lite.analysis.hlo import KernelCalls, ProgramWork
from maxtext_lite.analysis.program_tables import time_lines
from maxtext_lite.analysis.step_time import roofline
from maxtext_lite.batching.devices import device_named


class Anything:
    """A program and its plan that know what an accelerator's do."""

    def __init__(self, **attributes):
        self.__dict__ = attributes


@pytest.mark.fast
def test_times_and_the_bound_follow_from_the_devices_figures():
    device = device_named("v5e", option="--device")
    traffic = {"memory_bytes": 819e9, "sent_bytes": 100e9}
    flops = {"bf16": 197e12, "s8": math.nan}
    kernels = KernelCalls("splash", 4, math.nan), KernelCalls("gmm", 3, 300.0)
    program = Anything(
        plan=Anything(num_devices=8),
        model_flops=8 * 98.5e12,
        sent_bytes=100e9,
        compiler_seconds=2.0,
        work=ProgramWork({"bf16": 197e12}, kernels, 819e9, 3e9, ()),
        roofline=roofline(
            device,
            dtype="bfloat16",
            model_flops=98.5e12,
            matmul_flops={"bf16": 197e12},
            **traffic,
        ),
    )
    lines = time_lines(program)
    assert [line.split()[1] for line in lines[1:4]] == [
        "1,000.000",
        "1,000.000",
        "500.000",
    ]
    assert lines[1].endswith("bf16 1.97e+14 FLOPs, 300 in kernels; not known: splash")
    assert lines[4].split()[3:5] == ["2,000.000", "3,000,000,000"]
    assert (
        lines[-1]
        == "bound on MFU: 50.0%, by matmuls; at most 25.0% in the compiler's own time"
    )
    program.roofline = roofline(
        device,
        dtype="bfloat16",
        model_flops=400e12,
        matmul_flops={"bf16": 197e12},
        **traffic,
    )
    assert time_lines(program)[-1] == "bound on MFU: none below 100 %"
    unknown = roofline(
        device, dtype="bfloat16", model_flops=98.5e12, matmul_flops=flops, **traffic
    )
    assert math.isnan(unknown.matmul_seconds)
