"""Predicted and compiled figures stand side by side, with the compiler replaced by one whose answers are known."""

import types

import pytest

from maxtext_lite import load_config, make_plan
from maxtext_lite.aot import against
from maxtext_lite.batching import Topology, rank
from maxtext_lite.batching.devices import device_named

DEVICE = device_named("v5e", option="--device")


@pytest.mark.parametrize(("name", "devices", "topology"), [
    ("v5e", 64, "v5e:8x8"), ("v5e", 8, "v5e:2x4"), ("v6e", 256, "v6e:16x16"), ("v5p", 64, "v5p:4x4x4"),
    ("v5p", 256, "v5p:4x8x8"), ("v5p", 16, "v5p:2x2x4"), ("h100", 8, "h100:8"), ("v5e", 1, "v5e:1x1"),
])  # fmt: skip
def test_a_slice_is_as_square_as_it_can_be(name, devices, topology):
    assert against.topology_of(device_named(name, option="--device"), devices) == topology


@pytest.fixture
def ranked():
    config = load_config(None, ["global_batch_size=8", "per_device_batch_size=-1", "gradient_accumulation_steps=-1",
                                "dtype=bfloat16"])  # fmt: skip
    return rank(config, Topology(4), DEVICE, lambda each: make_plan(each, num_devices=4, platform="tpu"), most=2)


@pytest.mark.parametrize("silent", [(), ("splash",)])
def test_attention_is_left_out_of_both_where_its_kernel_does_not_tell(ranked, silent, monkeypatch):
    asked = []

    def compile_for(config, *, topology):
        asked.append((config, topology))
        return types.SimpleNamespace(
            roofline=types.SimpleNamespace(matmul_seconds=1e-3, memory_seconds=None, link_seconds=2e-3),
            work=types.SimpleNamespace(silent_kernels=silent),
            memory=types.SimpleNamespace(total=10**9),
        )

    monkeypatch.setattr(against, "compile_for", compile_for)
    compared = against.compare(ranked, DEVICE)
    assert asked == [(each.config, "v5e:2x2") for each in ranked]
    time, found = ranked[0].time, compared[0]
    assert time.attention_seconds > 0
    left_out = time.attention_seconds if silent else 0
    assert found["matmul_seconds"] == {"predicted": time.matmul_seconds - left_out, "compiled": 1e-3}
    assert found["memory"] == {"predicted": ranked[0].plan.memory.total, "compiled": 10**9}
    assert found["collectives_seconds"]["compiled"] == 2e-3
    lines = against.comparison_text(compared).splitlines()
    assert lines[0] == f"compiled: {' '.join(ranked[0].settings)}"
    share = ranked[0].plan.memory.total / 1e9 - 1
    assert lines[1].endswith(f"predicted, 1.0 compiled, {share:+.1%}")
    assert lines[3].endswith("predicted, not known")
    assert len(lines) == 10
