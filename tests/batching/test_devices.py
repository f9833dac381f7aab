"""Accelerators are known by jax's words and by short ones, with figures that agree with each other."""

import pytest

from maxtext_lite.batching.devices import DEVICES, device_named, device_of_kind, peak_tflops
from maxtext_lite.config import UserError
from tests.source_tree import REPOSITORY


@pytest.mark.parametrize(("kind", "name"), [
    ("TPU v4", "v4"), ("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU v6 lite", "v6e"), ("TPU7x", "7x"),
    ("NVIDIA A100-SXM4-40GB", "a100-40"), ("NVIDIA A100-SXM4-80GB", "a100-80"), ("NVIDIA A100 80GB PCIe", "a100-80"),
    ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA H100 NVL", "h100-nvl"),
    ("NVIDIA H200", "h200"), ("NVIDIA B200", "b200"), ("NVIDIA GB200", "gb200"), ("NVIDIA L4", "l4"),
    ("cpu", None), ("NVIDIA L40S", None), ("NVIDIA GeForce RTX 4090", None), ("TPU v3", None),
])  # fmt: skip
def test_what_jax_calls_it(kind, name):
    found = device_of_kind(kind)
    assert (found and found.name) == name


def test_peaks_are_known_by_device_and_dtype():
    assert peak_tflops("NVIDIA H100 80GB HBM3", "bfloat16") == 989.4
    assert peak_tflops("NVIDIA H100 80GB HBM3", "float16") == 989.4
    assert peak_tflops("NVIDIA H100 80GB HBM3", "float8_e4m3fn") == 1978.9
    assert peak_tflops("NVIDIA H100 PCIe", "bfloat16") == 756.0
    assert peak_tflops("TPU v5 lite", "bfloat16") == 197.0
    assert peak_tflops("TPU v5 lite", "int8") == 393.0
    assert peak_tflops("TPU v5", "bfloat16") == 459.0
    assert peak_tflops("TPU v5 lite", "float32") is None
    assert peak_tflops("TPU v5 lite", "float16") is None
    assert peak_tflops("cpu", "float32") is None


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_the_figures_of_a_device_agree(device):
    assert device_named(device.name.upper(), option="--device") is device
    assert device_of_kind(device.kinds[0].replace("*", "")) in (device, None) or "*" in device.kinds[0]
    assert device.source
    bfloat16 = device.peak_flops["bfloat16"]
    for dtype, most in (("int8", 2.01), ("float8", 2.01), ("float32", 0.501)):
        assert device.peak_flops.get(dtype, most * bfloat16) <= most * bfloat16
    # A matmul of this many products for each byte of memory keeps the device busy; none is far from the others.
    assert 100 < bfloat16 / device.memory_bytes_per_second < 600
    assert 8e9 <= device.memory_bytes < 2e11
    assert device.link_bytes_per_second is None or device.link_bytes_per_second < device.memory_bytes_per_second
    if device.clock_hz is not None:  # whole matmul units of 128 x 128
        units = bfloat16 / device.clock_hz / (2 * 128 * 128)
        assert units == pytest.approx(round(units), rel=0.01)


@pytest.mark.parametrize(("name", "axis", "gigabytes"), [
    ("h100", {"size": 8, "stride": 1, "in_slice": 64}, 450), ("h100", {"size": 64, "stride": 1, "in_slice": 64}, 400),
    ("h100", {"size": 8, "stride": 8, "in_slice": 64}, 50), ("h100", {"size": 16, "stride": 2, "in_slice": 64}, 200),
    ("gb200", {"size": 64, "stride": 1, "in_slice": 64}, 900), ("l4", {"size": 8, "stride": 1, "in_slice": 8}, None),
    ("v5e", {"size": 16, "stride": 1, "in_slice": 16}, 200), ("v5e", {"size": 4, "stride": 1, "in_slice": 16}, 100),
    ("v5p", {"size": 2, "stride": 1, "in_slice": 64}, 200),
    ("v6e", {"size": 1, "stride": 4, "in_slice": 4, "slices": 2}, 12.5),
    ("v5e", {"size": 4, "stride": 1, "in_slice": 4, "slices": 2}, 12.5),
    ("v4", {"size": 4, "stride": 1, "in_slice": 4, "slices": 2}, None),
])  # fmt: skip
def test_an_axis_has_the_links_or_the_network_that_its_neighbours_are_on(name, axis, gigabytes):
    rate = device_named(name, option="--device").axis_bytes_per_second(**axis)
    assert rate == (None if gigabytes is None else pytest.approx(gigabytes * 1e9))


@pytest.mark.parametrize(("name", "devices", "hosts", "gigabytes"), [
    ("h100", 8, 1, 450), ("h100", 8, 2, 200), ("h100", 8, 8, 50), ("h100", 64, 1, 450), ("h100-nvl", 8, 8, None),
    ("gb200", 8, 2, 900), ("v5e", 8, 2, 200),
])  # fmt: skip
def test_links_end_at_the_host_except_on_tpus_and_gb200(name, devices, hosts, gigabytes):
    device = device_named(name, option="--device").in_hosts(devices, hosts)
    rate = device.axis_bytes_per_second(8, stride=1, in_slice=8)
    assert rate == (None if gigabytes is None else gigabytes * 1e9)


def test_a_name_that_is_none_is_refused_with_the_nearest():
    with pytest.raises(UserError, match=r"--device=v5 is no device\. Did you mean 'v5"):
        device_named("v5", option="--device")


def test_the_page_lists_every_device_as_the_table_has_it():
    page = (REPOSITORY / "docs" / "performance.md").read_text(encoding="utf-8")
    for device in DEVICES:
        peaks = [device.peak_flops.get(dtype) for dtype in ("bfloat16", "float8", "int8", "float32")]
        cells = [
            device.name,
            *("" if peak is None else f"{peak / 1e12:,g}" for peak in peaks),
            f"{device.memory_bytes / 1e9:g}",
            f"{device.memory_bytes_per_second / 1e9:,g}",
            "" if device.link_bytes_per_second is None else f"{device.link_bytes_per_second / 1e9:g}",
            "" if device.clock_hz is None else f"{device.clock_hz / 1e9:g}",
            f"{device.most_linked:,}",
            "" if device.network_bytes_per_second is None else f"{device.network_bytes_per_second / 1e9:g}",
            "" if device.host_bytes_per_second is None else f"{device.host_bytes_per_second / 1e9:g}",
            device.source,
        ]
        assert f"| {' | '.join(cells)} |\n" in page
