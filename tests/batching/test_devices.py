"""Accelerators are known by jax's words and by short ones; the least time of a step is that of its slowest resource."""

import pytest

from maxtext_lite.analysis.step_time import roofline
from maxtext_lite.batching.devices import (
    Device,
    device_named,
    device_of_kind,
    devices,
    peak_tflops,
)
from maxtext_lite.config import UserError
from tests.source_tree import REPOSITORY
from tests.tables import read_table

TABLE = read_table("batching/devices.yml")


def test_what_jax_calls_a_device_is_known_with_its_peaks():
    found = {kind: device_of_kind(kind) for kind in TABLE["kinds"]}
    assert {kind: device and device.name for kind, device in found.items()} == TABLE[
        "kinds"
    ]
    for kind, peaks in TABLE["peaks"].items():
        assert {dtype: peak_tflops(kind, dtype) for dtype in peaks} == peaks
    with pytest.raises(UserError, match="--device=v5 "):
        device_named("v5", option="--device")


@pytest.mark.parametrize("device", devices(), ids=lambda device: device.name)
def test_the_figures_of_a_device_are_those_of_the_page(device):
    assert device_named(device.name.upper(), option="--device") is device
    peaks = [
        device.peak_flops.get(dtype)
        for dtype in ("bfloat16", "float8", "int8", "float32")
    ]
    rates = [device.network_bytes_per_second, device.host_bytes_per_second]
    figures = [
        *(peak and f"{peak / 1e12:,g}" for peak in peaks),
        f"{device.memory_bytes / 1e9:g}",
        f"{device.memory_bytes_per_second / 1e9:,g}",
        device.link_bytes_per_second and f"{device.link_bytes_per_second / 1e9:g}",
        device.clock_hz and f"{device.clock_hz / 1e9:g}",
        f"{device.most_linked:,}",
        *(rate and f"{rate / 1e9:g}" for rate in rates),
    ]
    assert device.source
    row = " | ".join([device.name, *(figure or "" for figure in figures)])
    assert f"| {row} |\n" in (REPOSITORY / "docs" / "performance.md").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize("row", TABLE["rates"], ids=str)
def test_an_axis_has_the_links_or_the_network_that_its_neighbours_are_on(row):
    device = device_named(row["device"], option="--device")
    if "of" in row:
        device = device.in_hosts(*row["of"])
    more = {"slices": row["slices"]} if "slices" in row else {}
    rate = device.axis_bytes_per_second(
        row["size"], stride=row.get("stride", 1), in_slice=row["in_slice"], **more
    )
    assert rate == (row["rate"] and pytest.approx(row["rate"] * 1e9))


# ---- The roofline, worked out by hand for round numbers ------------------------------------------------------------

TOY = Device(
    "toy",
    "tpu",
    ("toy",),
    {"bfloat16": 100.0, "int8": 200.0},
    1000,
    memory_bytes_per_second=50.0,
    link_bytes_per_second=10.0,
    clock_hz=None,
    source="made up",
)
AMOUNTS = {
    "dtype": "bfloat16",
    "model_flops": 300.0,
    "matmul_flops": {"bf16": 400.0, "s8": 200.0},
    "memory_bytes": 100.0,
    "sent_bytes": 20.0,
}


@pytest.mark.fast
def test_each_resource_takes_its_time_and_the_slowest_bounds_mfu():
    found = roofline(TOY, **AMOUNTS)
    assert (found.matmul_seconds, found.memory_seconds, found.link_seconds) == (
        5.0,
        2.0,
        2.0,
    )
    assert found.bound == ("matmuls", 5.0)
    assert found.most_mfu == pytest.approx(300 / 100 / 5)
    assert found.mfu_of(6.0) == pytest.approx(0.5)
    assert found.mfu_of(1.0) == 1.0  # a time without some of the work
    assert roofline(TOY, **AMOUNTS | {"sent_bytes": 100.0}).bound == ("links", 10.0)
    assert roofline(TOY, **AMOUNTS | {"memory_bytes": 1000.0}).bound == ("memory", 20.0)
