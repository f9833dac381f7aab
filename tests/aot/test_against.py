"""Predicted and compiled figures stand side by side, with the compiler replaced by one whose answers are known."""

import types

import pytest

from maxtext_lite import load_config, make_plan
from maxtext_lite.aot import against
from maxtext_lite.aot.program import Traffic
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
                                "dtype=bfloat16", "ici_fsdp_parallelism=2", "ici_data_parallelism=2"])  # fmt: skip
    return rank(config, Topology(4), DEVICE, lambda each: make_plan(each, num_devices=4, platform="tpu"), most=2)


@pytest.mark.parametrize("memory_seconds", [None, 1e-6, 1.0])
@pytest.mark.parametrize("silent", [(), ("splash",)])
def test_attention_is_left_out_of_both_where_its_kernel_does_not_tell(ranked, silent, memory_seconds, monkeypatch):
    asked = []

    def compile_for(config, *, topology):
        asked.append((config, topology))
        return types.SimpleNamespace(
            roofline=types.SimpleNamespace(matmul_seconds=1e-3, memory_seconds=memory_seconds),
            collectives=[
                Traffic("all-gather", ("fsdp",), 1, 1, 0, 10**8, {}, sent_bytes=1e8),
                Traffic("all-reduce", ("data", "fsdp"), 1, 1, 0, 10**8, {}, sent_bytes=2e8),
            ],
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
    # Of the links of 200 GB/s a ring has its share of the two dims, in logarithms; data x fsdp is all four devices.
    links = {2: 1e8 / 100e9, 4: 1e8 / 200e9}.get(ranked[0].plan.mesh["fsdp"], 1e8 / 100e9) + 2e8 / 200e9
    assert found["collectives_seconds"]["compiled"] == pytest.approx(links)
    attention = time.attention_seconds if silent else 0
    step = None if memory_seconds is None else pytest.approx(max(1e-3 + attention, memory_seconds) + links)
    assert found["step_seconds"] == {"predicted": time.seconds, "compiled": step}
    lines = against.comparison_text(compared).splitlines()
    assert lines[0] == f"compiled: {' '.join(ranked[0].settings)}"
    share = ranked[0].plan.memory.total / 1e9 - 1
    assert lines[1].endswith(f"predicted, 1.0 compiled, {share:+.1%}")
    assert lines[3].endswith("predicted, not known") == (memory_seconds is None)
    assert len(lines) == 12


@pytest.mark.parametrize(("steps", "expected"), [
    ([(1, 5), (2, 6), (3, 7), (4, 8)], 1.0), ([(1, 8), (2, 7), (3, 6)], -1.0), ([(1, 10), (2, 30), (3, 20)], 0.5),
    ([(1, 5), (2, 6)], None), ([(1, 5), (2, None), (3, 6)], None), ([(1, 5), (2, 5), (3, 5)], None),
])  # fmt: skip
def test_ranks_agree_as_far_as_spearman_says(steps, expected):
    compared = [{"step_seconds": {"predicted": a, "compiled": b}} for a, b in steps]
    assert against.rank_correlation(compared) == (None if expected is None else pytest.approx(expected))
