"""Predicted times follow from shapes, worked out by hand for round rates: 1 FLOP/s, 1 byte/s of memory and of links."""

import dataclasses

import pytest
import yaml

from maxtext_lite import load_config, make_plan
from maxtext_lite.batching import Topology, flops_per_example
from maxtext_lite.batching.devices import Device
from maxtext_lite.batching.parameters import count_parameters
from maxtext_lite.batching.solve import resolve
from maxtext_lite.batching.step_time import StepModel
from tests.source_tree import REPOSITORY

ROWS_OF_TABLE = yaml.safe_load(
    (REPOSITORY / "tests" / "batching" / "seconds.yml").read_text(encoding="utf-8")
)
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
    sizes, _ = resolve(config, Topology(devices))
    model = StepModel(config, sizes.mesh, device, plan.memory)
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


def arithmetic(text, names):
    return eval(text, {"__builtins__": {}}, names)


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


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_frozen_weights_have_no_bytes_of_gradients(platform, shards):
    """64 more columns of gate and up, which are made again, and rows of down, which is not."""
    device = dataclasses.replace(DEVICE, platform=platform)
    keys = (
        "lora_rank=1",
        "lora_targets=query",
        "remat_policy=full",
        f"ici_fsdp_parallelism={shards}",
    )

    def memory(mlp):
        held = make_plan(
            load_config(None, [*MODEL, *keys, f"base_mlp_dim={mlp}"]),
            num_devices=shards,
        ).memory.params
        return (
            step(
                *keys, f"base_mlp_dim={mlp}", devices=shards, device=device
            ).memory_seconds
            - 2 * held
        )

    weights = (
        L * D * 64 * 2 * (3 + 3 + 2 + (2 * 3 if shards > 1 else 0))
    )  # read in each pass, gathered in two
    tokens = (
        ROWS * T * L * 64 * 2 * (3 + 3 + 2 + 4 * 3)
    )  # read or written, and in four passes of the activation
    assert memory(F + 64) - memory(F) == pytest.approx(weights + tokens)


def test_muon_makes_matrices_orthogonal_once_a_step():
    """Five steps of 2 m^2 n + m^3 products; with fsdp on m = D of mlp, query and out, and on n = D of key and value."""
    heads = "base_num_query_heads=8"
    shapes = [(D, 8 * H)] * 2 + [(K * H, D)] * 2 + [(D, F)] * 3
    for steps in (1, 2):
        times = [
            step(heads, f"optimizer={name}", f"gradient_accumulation_steps={steps}")
            for name in ("sgd", "muon")
        ]
        more = times[1].matmul_seconds - times[0].matmul_seconds
        assert more == pytest.approx(
            2 * 5 * L * sum(2 * m * m * n + m**3 for m, n in shapes)
        )
    plain, muon = (
        step(heads, f"optimizer={name}", "ici_fsdp_parallelism=4", devices=4)
        for name in ("sgd", "muon")
    )
    gathered = (
        5 * L * 4 * sum(2 * m * n + m * m for m, n in shapes if m == D)
    )  # X twice and X X^T, in float32
    reduced = 5 * L * 2 * 4 * sum(m * m for m, _ in shapes if m != D)
    sent = muon.collectives_seconds - plain.collectives_seconds
    assert sent == pytest.approx((gathered + reduced) * 3 / 4)
    more = muon.matmul_seconds - plain.matmul_seconds
    products = [2 * m * m * n / 4 + m**3 / (4 if m == D else 1) for m, n in shapes]
    assert more == pytest.approx(2 * 5 * L * sum(products))


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


def test_with_several_rounds_a_stage_copies_the_weights_of_each_tick():
    keys = (
        "ici_pipeline_parallelism=2",
        "ici_fsdp_parallelism=1",
        "num_pipeline_microbatches=4",
        "remat_policy=full",
    )
    one, two = (
        step(*keys, f"num_layers_per_pipeline_stage={layers}", devices=2)
        for layers in (2, 1)
    )
    idle = {1: 5 / 4, 2: 9 / 8}  # of four pieces in each round, one tick more in all
    held = make_plan(
        load_config(None, [*MODEL, *keys, "num_layers_per_pipeline_stage=2"]),
        num_devices=2,
    ).memory
    update = (
        2 * (held.params + held.optimizer_state)
        + 8 * count_parameters(load_config(None, MODEL), stage=2).total
    )
    copies = 4 * 10 * 2 * L / 2 * LAYER
    assert (two.memory_seconds - update) / idle[2] - (
        one.memory_seconds - update
    ) / idle[1] == pytest.approx(copies)


def test_a_gpu_merges_the_attention_of_each_other_context_shard():
    """With each other shard, a forward pass moves 15 bytes per element of queries and 14 of keys and values, the
    backward pass 2.2 times as much; a recomputed forward pass as much again."""

    def more(platform, policy, shards):
        device = dataclasses.replace(DEVICE, platform=platform)
        keys = (
            f"ici_context_parallelism={shards}",
            f"ici_fsdp_parallelism={8 // shards}",
        )
        return step(
            *keys, f"remat_policy={policy}", devices=8, device=device
        ).memory_seconds

    for policy, passes in (("none", 3.2), ("full", 4.2)):
        of_gpu, of_tpu = (
            more(platform, policy, 4) - more(platform, policy, 2)
            for platform in ("gpu", "tpu")
        )
        tokens = ROWS * T  # of a device, whatever splits them
        merged = passes * L * H * (15 * N + 14 * 2 * K) * tokens
        assert of_gpu - of_tpu == pytest.approx(merged * (3 - 1))


def test_of_an_array_that_fits_on_the_chip_its_share_of_that_size_is_moved():
    def memory(on_chip):
        return step(
            device=dataclasses.replace(DEVICE, on_chip_bytes=on_chip)
        ).memory_seconds

    assert memory(1) == memory(0)
    large = (
        ROWS * T * V * 2
    )  # no array is larger: what is moved of them halves with each doubling
    first, second, third = (memory(large * times) for times in (1, 2, 4))
    assert first < memory(0)
    assert first - second == pytest.approx(2 * (second - third))


def test_heads_with_a_norm_of_their_own_are_read_once_more_and_on_a_tpu_pass_in_float32():
    def memory(platform, *keys):
        return step(
            *keys, device=dataclasses.replace(DEVICE, platform=platform)
        ).memory_seconds

    heads = ROWS * T * L * (N + K) * H * 2
    for platform, times in (("gpu", 1), ("tpu", 4)):
        more = memory(platform, "qk_norm=head") - memory(platform)
        passes, kept, weights = (
            3 * times * heads,
            3 * heads,
            2 * L * H * 40,
        )  # at most; the norms are small
        assert passes + kept <= more <= passes + kept + weights


def test_an_unknown_rate_is_refused_where_it_is_needed():
    alone = dataclasses.replace(DEVICE, link_bytes_per_second=None, most_linked=1)
    assert step(device=alone).collectives_seconds == 0
    for axis in ("data", "fsdp", "tensor", "context", "pipeline"):
        config = load_config(
            None, [*MODEL, "ici_fsdp_parallelism=1", f"ici_{axis}_parallelism=2"]
        )
        sizes, _ = resolve(config, Topology(2))
        with pytest.raises(
            ValueError, match="what it sends"
        ):  # before any time is asked for
            StepModel(
                config, sizes.mesh, alone, make_plan(config, num_devices=2).memory
            )
    with pytest.raises(ValueError, match="its peak in bfloat16"):
        step(device=dataclasses.replace(DEVICE, peak_flops={}))
    cut_off = dataclasses.replace(DEVICE, host_bytes_per_second=None)
    assert step("remat_policy=full", device=cut_off).host_seconds == 0
    for key in ("remat_policy=minimal_offloaded", "optimizer_memory_host_offload=true"):
        with pytest.raises(ValueError, match="what it sends to its host"):
            step(key, device=cut_off)
