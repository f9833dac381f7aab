"""The least time of a step is that of its slowest resource, worked out by hand for round numbers."""

import pytest

from maxtext_lite.batching.devices import Device
from maxtext_lite.batching.roofline import roofline

DEVICE = Device(
    "toy", "tpu", ("toy",), {"bfloat16": 100.0, "int8": 200.0}, 1000, memory_bytes_per_second=50.0,
    link_bytes_per_second=10.0, clock_hz=None, source="made up",
)  # fmt: skip
AMOUNTS = {"dtype": "bfloat16", "model_flops": 300.0, "matmul_flops": {"bf16": 400.0, "s8": 200.0},
           "memory_bytes": 100.0, "sent_bytes": 20.0}  # fmt: skip


def test_each_resource_takes_its_time_and_the_slowest_bounds_mfu():
    found = roofline(DEVICE, **AMOUNTS)
    assert (found.matmul_seconds, found.memory_seconds, found.link_seconds) == (5.0, 2.0, 2.0)
    assert found.bound == ("matmuls", 5.0)
    assert found.most_mfu == pytest.approx(300 / 100 / 5)
    assert found.mfu_of(6.0) == pytest.approx(0.5)
    assert found.mfu_of(1.0) == 1.0  # a time without some of the work


def test_links_and_memory_bound_too():
    assert roofline(DEVICE, **AMOUNTS | {"sent_bytes": 100.0}).bound == ("links", 10.0)
    assert roofline(DEVICE, **AMOUNTS | {"memory_bytes": 1000.0}).bound == ("memory", 20.0)
    assert roofline(DEVICE, **AMOUNTS | {"sent_bytes": 0}).link_seconds == 0.0


@pytest.mark.parametrize(("operands", "seconds"), [
    ("bf16", 4.0), ("s8", 2.0), ("f32", 4.0), ("bf16xs8", 4.0), ("f8e4m3fn", 4.0),
])  # fmt: skip
def test_a_dtype_without_a_peak_counts_as_bfloat16_and_of_two_the_slower(operands, seconds):
    assert roofline(DEVICE, **AMOUNTS | {"matmul_flops": {operands: 400.0}}).matmul_seconds == seconds


def test_what_is_not_known_stays_so():
    found = roofline(None, **AMOUNTS)
    assert (found.matmul_seconds, found.bound, found.most_mfu, found.mfu_of(1.0)) == (None, None, None, None)
    found = roofline(DEVICE, **AMOUNTS | {"matmul_flops": {"bf16": None}, "sent_bytes": None})
    assert (found.matmul_seconds, found.link_seconds, found.bound) == (None, None, ("memory", 2.0))
    assert roofline(DEVICE, **AMOUNTS | {"dtype": "float32"}).most_mfu is None  # MFU is absent there in training too
