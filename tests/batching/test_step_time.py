"""Predicted times follow from shapes, worked out by hand for round rates: 1 FLOP/s, 1 byte/s of memory and of links."""

import dataclasses

import pytest

from maxtext_lite import load_config, make_plan
from maxtext_lite.analysis.step_time import StepModel, flops_of_example
from maxtext_lite.batching import flops_per_example
from maxtext_lite.batching.devices import Device
from maxtext_lite.batching.topology import MeshSizes
from tests.tables import arithmetic, read_table

ROWS_OF_TABLE = read_table("batching/seconds.yml")
DEVICE = Device(
    "toy",
    "gpu",
    ("toy",),
    {"bfloat16": 1.0, "int8": 2.0},
    10**12,
    memory_bytes_per_second=1.0,
    link_bytes_per_second=1.0,
    clock_hz=None,
    source="made up",
    most_linked=64,
    host_bytes_per_second=0.5,
)
D, F, N, K, H, L, V, T = 64, 192, 4, 2, 16, 4, 512, 128
MODEL = [
    f"base_emb_dim={D}",
    f"base_mlp_dim={F}",
    f"base_num_query_heads={N}",
    f"base_num_kv_heads={K}",
    f"head_dim={H}",
    f"base_num_decoder_layers={L}",
    f"vocab_size={V}",
    f"max_target_length={T}",
    "dtype=bfloat16",
    "grad_dtype=bfloat16",
    "per_device_batch_size=2",
    "remat_policy=none",
]
QKVO = D * N * H + 2 * D * K * H + N * H * D
LAYER = QKVO + 3 * D * F
ROWS = 2
SCORES = (
    N * 2 * H * T**2 / 2
)  # products of scores and of values, of the keys that come no later


def step(*keys, devices=1, device=DEVICE):
    config = load_config(None, [*MODEL, *keys])
    plan = make_plan(config, num_devices=devices)
    mesh = MeshSizes(plan.ici_mesh, plan.dcn_mesh)
    model = StepModel(config, mesh, device, plan.memory, flops=flops_of_example(config))
    return model.step(
        config, plan.micro_batch_slots, plan.global_batch_to_train, plan.pipeline_shape
    )


TIMES = (
    "seconds",
    "matmul_seconds",
    "memory_seconds",
    "collectives_seconds",
    "host_seconds",
)
NAMES = {
    "D": D,
    "F": F,
    "N": N,
    "K": K,
    "H": H,
    "L": L,
    "V": V,
    "T": T,
    "QKVO": QKVO,
    "LAYER": LAYER,
    "ROWS": ROWS,
    "SCORES": SCORES,
}


def times_of(row):
    """The times of a row that it names, some of them as differences."""
    device = dataclasses.replace(DEVICE, **row.get("device", {}))
    time = step(*row["keys"], devices=row.get("devices", 1), device=device)
    found = {name: getattr(time, name) for name in TIMES}
    return {text: arithmetic(text, found) for text in row["seconds"]}


@pytest.mark.fast
@pytest.mark.parametrize(
    "row", ROWS_OF_TABLE, ids=lambda row: f"{row['keys']} {row.get('device', '')}"
)
def test_times_are_as_worked_out_by_hand(row):
    found = times_of(row)
    before = times_of(row | row["than"]) if "than" in row else {}
    for name, text in row["seconds"].items():
        expected = pytest.approx(arithmetic(text, NAMES), rel=row.get("within", 1e-6))
        assert found[name] - before.get(name, 0) == expected, name


def test_matmuls_are_the_models_and_the_scores_once_more():
    time, examples = step(), flops_per_example(load_config(None, MODEL), T)
    # Of attention's seven matmuls, model FLOPs count six.
    assert time.matmul_seconds == pytest.approx(ROWS * (examples + 2 * L * SCORES / 2))
    assert time.attention_seconds == pytest.approx(ROWS * L * 2 * 3.5 * SCORES)
    assert time.mfu == pytest.approx(ROWS * examples / time.seconds)


def test_stages_wait_for_each_other():
    keys = (
        "ici_fsdp_parallelism=1",
        "ici_pipeline_parallelism=2",
        "num_layers_per_pipeline_stage=2",
    )
    few, many = (
        step(*keys, f"num_pipeline_microbatches={pieces}", devices=2)
        for pieces in (2, 4)
    )
    # (S - 1) / (M + S - 1) of the ticks, beside those that work
    assert few.bubble_seconds > many.bubble_seconds > 0
    busy = few.seconds - few.bubble_seconds
    update = step(*keys, "gradient_accumulation_steps=2", devices=2)
    passes = update.seconds - update.bubble_seconds - busy  # one more
    assert few.bubble_seconds == pytest.approx(passes / 2, rel=0.05)


def test_an_unknown_rate_is_refused_where_it_is_needed():
    alone = dataclasses.replace(DEVICE, link_bytes_per_second=None, most_linked=1)
    assert step(device=alone).collectives_seconds == 0
    with pytest.raises(ValueError, match="what it sends"):
        step("ici_fsdp_parallelism=2", devices=2, device=alone)
    with pytest.raises(ValueError, match="its peak in bfloat16"):
        step(device=dataclasses.replace(DEVICE, peak_flops={}))
    cut_off = dataclasses.replace(DEVICE, host_bytes_per_second=None)
    assert step("remat_policy=full", device=cut_off).host_seconds == 0
    for key in ("remat_policy=minimal_offloaded", "optimizer_memory_host_offload=true"):
        with pytest.raises(ValueError, match="what it sends to its host"):
            step(key, device=cut_off)
