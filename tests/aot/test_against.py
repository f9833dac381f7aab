"""Predicted and compiled figures stand side by side, with the compiler replaced by one whose answers are known."""

import math
import types

import numpy as np
import pytest

from maxtext_lite import load_config, make_plan
from maxtext_lite.analysis import program_difference as against
from maxtext_lite.analysis.hlo import KernelCalls, parse
from maxtext_lite.analysis.program import Traffic
from maxtext_lite.analysis.ranking import rank
from maxtext_lite.batching import Topology
from maxtext_lite.batching.devices import device_named
from maxtext_lite.config import UserError

DEVICE = device_named("v5e", option="--device")
HLO = """HloModule m, is_scheduled=true, num_partitions=4

%body (x: bf16[8192,8192]) -> bf16[8192,8192] {{
  %x = bf16[8192,8192]{{1,0}} parameter(0)
  %g = (f32[250000000], f32[500000000]) all-gather-start(%x), dimensions={{0}}, replica_groups={{{{0,1}},{{2,3}}}}
  %k = bf16[8,8]{{1,0}} custom-call(%x), custom_call_target="{kernel}"
  %d = bf16[8192,8192]{{1,0}} dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %e = f32[500000000] all-gather-done(%g)
  ROOT %y = bf16[8192,8192]{{1,0}} bitcast(%d)
}}

%test (y: bf16[8192,8192]) -> pred[] {{
  %z = bf16[8192,8192]{{1,0}} parameter(0)
  ROOT %t = pred[] constant(true)
}}

ENTRY %main (p: bf16[8192,8192]) -> bf16[8192,8192] {{
  %p = bf16[8192,8192]{{1,0}} parameter(0)
  ROOT %l = bf16[8192,8192] while(%p), condition=%test, body=%body, backend_config={{"known_trip_count":{{"n":"2"}}}}
}}
"""


@pytest.mark.parametrize(
    ("name", "devices", "slices", "topology"),
    [
        ("v5e", 8, 1, "v5e:2x4"),
        ("v5p", 256, 1, "v5p:4x8x8"),
        ("h100", 8, 1, "h100:8"),
        ("v5e", 16, 2, "2*v5e:2x4"),
        ("7x", 8, 1, "7x:1x2x2"),  # whose chips have two devices
    ],
)
def test_a_slice_is_as_square_as_it_can_be(name, devices, slices, topology):
    assert (
        against.topology_of(device_named(name, option="--device"), devices, slices)
        == topology
    )


@pytest.mark.fast
def test_half_a_chip_is_refused():
    with pytest.raises(UserError, match=r"7x.*Nearest that works: 8\."):
        against.topology_of(device_named("7x", option="--device"), 7)


def ranked_on_four(*keys, most):
    open_batch = (
        "global_batch_size=8",
        "per_device_batch_size=-1",
        "gradient_accumulation_steps=-1",
        "dtype=bfloat16",
    )
    config = load_config(None, [*open_batch, *keys])
    return rank(
        config,
        Topology(4),
        DEVICE,
        lambda each: make_plan(each, num_devices=4, platform="tpu"),
        most=most,
    )


def test_the_slices_are_those_of_the_mesh(monkeypatch):
    found = ranked_on_four("dcn_data_parallelism=2", most=1)

    def compile_for(config, *, topology):
        raise UserError(topology)

    monkeypatch.setattr(against, "compile_for", compile_for)
    with pytest.raises(UserError, match=r"^2\*v5e:1x2$"):
        against.compare(found, DEVICE)


@pytest.mark.parametrize(
    ("silent", "memory_seconds"), [((), 1e-6), (("splash",), 1e-6), ((), math.nan)]
)
def test_attention_is_left_out_of_both_where_its_kernel_does_not_tell(
    silent, memory_seconds, monkeypatch
):
    ranked = ranked_on_four("ici_fsdp_parallelism=2", "ici_data_parallelism=2", most=2)
    asked, plan, module = (
        [],
        ranked[0].plan,
        parse(HLO.format(kernel="splash" if silent else "Sharding")),
    )
    devices = np.arange(4).reshape([*plan.mesh.values()])

    def compile_for(config, *, topology):
        asked.append((config, topology))
        return types.SimpleNamespace(
            module=module,
            mesh=types.SimpleNamespace(
                devices=devices, axis_names=tuple(plan.mesh), size=4
            ),
            roofline=types.SimpleNamespace(
                matmul_seconds=1e-3, memory_seconds=memory_seconds
            ),
            collectives=[
                Traffic("all-gather", ("fsdp",), 1, 1, 0, 10**8, {}, sent_bytes=1e8),
                Traffic(
                    "all-reduce", ("data", "fsdp"), 1, 1, 0, 10**8, {}, sent_bytes=2e8
                ),
            ],
            work=types.SimpleNamespace(
                silent_kernels=silent,
                kernels=tuple(KernelCalls(name, 2, math.nan) for name in silent),
            ),
            memory=types.SimpleNamespace(total=10**9),
        )

    monkeypatch.setattr(against, "compile_for", compile_for)
    compared = against.compare(ranked, DEVICE)
    assert asked == [(each.config, "v5e:2x2") for each in ranked]
    time, found = ranked[0].time, compared[0]
    left_out = time.attention_seconds if silent else 0
    assert found["matmul_seconds"] == {
        "predicted": time.matmul_seconds - left_out,
        "compiled": 1e-3,
    }
    assert found["memory"] == {"predicted": plan.memory.total, "compiled": 10**9}
    # Of the links of 200 GB/s a ring has its share of the two dims, in logarithms; data x fsdp is all four devices.
    rate = {2: 100e9, 4: 200e9}.get(plan.mesh["fsdp"], 100e9)
    assert found["collectives_seconds"]["compiled"] == pytest.approx(
        1e8 / rate + 2e8 / 200e9
    )
    # Two trips, each with a matmul of 2 x 8192^3 FLOPs and one of two kernels, beside or before a gather of 2 GB.
    trip = max(2 * 8192**3 / 197e12 + left_out / 2, 1e9 / rate)
    step = None if math.isnan(memory_seconds) else pytest.approx(2 * trip, rel=1e-6)
    assert found["step_seconds"] == {"predicted": time.seconds, "compiled": step}
    lines = against.comparison_text(compared).splitlines()
    assert lines[0] == f"compiled: {' '.join(ranked[0].settings)}"
    assert len(lines) == 12


@pytest.mark.parametrize(
    ("compiled", "expected"),
    [
        ([5, 6, 7, 8], 1.0),
        ([10, 30, 20], 0.5),
        ([5, None, 6], None),
    ],
)
def test_ranks_agree_as_far_as_spearman_says(compiled, expected):
    compared = [
        {"step_seconds": {"predicted": a, "compiled": b}}
        for a, b in enumerate(compiled)
    ]
    assert against.rank_correlation(compared) == (
        None if expected is None else pytest.approx(expected)
    )
