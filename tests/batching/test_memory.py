"""The memory of a device is as worked out in memory.yml; its peak is the fullest moment; and steps made smaller."""

import pytest

from maxtext_lite.analysis.memory import estimate_memory
from maxtext_lite.analysis.smaller_step import refusal_of, smaller_step
from maxtext_lite.batching import make_plan
from maxtext_lite.batching.ledger import PARTS
from maxtext_lite.batching.parameters import vocab_tiles
from maxtext_lite.config import load_config
from maxtext_lite.config.kernels import Accelerator
from tests.tables import arithmetic, read_table

ROWS = read_table("batching/memory.yml")
ONE_DEVICE = dict.fromkeys(("stage", "data", "fsdp", "expert", "context", "tensor"), 1)
V, D, N, K, H, F, L, T = 320, 128, 8, 4, 16, 384, 4, 256
MATRICES = L * (2 * D * N * H + 2 * D * K * H + 3 * D * F)
NAMES = {
    "V": V,
    "D": D,
    "N": N,
    "K": K,
    "H": H,
    "F": F,
    "L": L,
    "T": T,
    "TOKENS": 16 * T,
    "TABLES": 2 * V * D,
    "MATRICES": MATRICES,
    "NORMS": 9 * D,
    "ALL": 2 * V * D + MATRICES + 9 * D,
}


def estimate(
    keys=(),
    mesh=(),
    slots=16,
    accumulation=1,
    pieces=1,
    replicas=None,
    device="",
    limit=None,
):
    accelerator = (
        Accelerator(*device.split())
        if " " in device or device in ("cpu", "tpu")
        else None
    )
    mesh = ONE_DEVICE | dict(mesh)
    return estimate_memory(
        load_config(None, keys),
        mesh,
        slots,
        accumulation,
        pieces,
        limit,
        replicas,
        accelerator or Accelerator.planned("gpu"),
    )


def held(memory, *names):
    return sum(line.bytes for line in memory.lines if line.name in names)


def found_in(row):
    """(what was found, by name, and what was expected as arithmetic) of a row."""
    asked = {
        name: row[name]
        for name in row
        if name not in ("lines", "memory", "than", "within")
    }
    memory, lines, parts = (
        estimate(**asked),
        row.get("lines", {}),
        row.get("memory", {}),
    )
    found = {name: held(memory, *name.split(" + ")) for name in lines}
    for name in parts:
        found[name] = memory.most(name) if name in PARTS else getattr(memory, name)
    return found, lines | parts


@pytest.mark.fast
@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: f"{row['keys']} {row.get('mesh', '')}"
)
def test_bytes_are_as_worked_out_by_hand(row):
    found, expressions = found_in(row)
    before = found_in(row | row["than"])[0] if "than" in row else {}
    for name, text in expressions.items():
        expected = arithmetic(text, NAMES)
        if "within" in row:
            expected = pytest.approx(expected, rel=row["within"])
        assert found[name] - before.get(name, 0) == expected, name


def test_logits_are_split_into_the_fewest_tiles_of_half_a_gib():
    """llama3-8b's 128,256 float32 logits of a token are 513,024 bytes: 1,046 tokens in 512 MiB."""
    for rows, tokens, tiles in (
        (1, 1024, 1),
        (3, 8192, 32),
        (1, 1047, 3),
        (2, 3, 1),
    ):
        assert vocab_tiles(-1, rows=rows, tokens=tokens, vocab_size=128_256) == tiles
    assert vocab_tiles(5, rows=10**6, tokens=4096, vocab_size=128_256) == 5


def test_context_shards_keep_their_tokens_and_the_scores_of_a_tile():
    """8,192 tokens, 16 rows: the scores of one tile, four times, and with shards the arrays of the others."""
    keys = ["max_target_length=8192", "remat_policy=full"]
    one, ring = (
        estimate(keys),
        estimate([*keys, "context_parallel_strategy=ring"], {"context": 4}),
    )
    gathered, split = estimate(keys, {"context": 4}), estimate(keys, {"fsdp": 4})
    assert (
        ring.most("params") == split.most("params") < one.most("params") / 3.9
    )  # parameters lie over context as over fsdp
    tile, keys_and_values = 4 * 4 * 16 * N * 512**2, 2 * K * H
    per_tensor_axes, of_ring, of_gathered = (
        held(memory, "attention of a layer") for memory in (one, ring, gathered)
    )
    assert (
        per_tensor_axes - tile
    ) // 4 == of_ring - tile - 16 * 2 * 2048 * keys_and_values * (4 + 4)
    assert of_gathered - of_ring == 16 * (8192 - 2 * 2048) * keys_and_values * (4 + 4)
    for name in (
        "kept of layers",
        "stream of a layer",
        "heads of a layer",
        "mlp of a layer",
    ):
        assert held(one, name) == 4 * held(ring, name) > 0, name


def test_the_total_is_what_is_held_at_the_fullest_moment():
    """One layer of many tokens peaks in its backward pass, a large vocabulary at the loss."""
    keys = ["vocab_size=32000", "remat_policy=full"]
    layers, loss = estimate(limit=95), estimate(keys)
    lasting = layers.most("params") + layers.most("optimizer_state")
    assert layers.total == lasting + layers.most("gradients") + layers.most(
        "weights"
    ) + layers.most("activations")
    kept = held(loss, "kept of layers")
    assert loss.total == loss.most("params") + loss.most(
        "optimizer_state"
    ) + 4 * MATRICES + kept + loss.most("logits")
    assert estimate(keys, device="tpu").at_peak("gradients") == 0, (
        "no stack is filled with zeros before layers go back"
    )
    assert (layers.peak, loss.peak, layers.limit) == (
        "attention",
        "loss",
        95_000_000_000,
    )
    there = estimate(
        ["optimizer_memory_host_offload=true"]
    )  # not held with activations
    others = layers.total - layers.most("optimizer_state")
    assert there.total == max(
        others,
        layers.most("params")
        + layers.most("gradients")
        + layers.most("optimizer_state"),
    )


# ---- Smaller steps -------------------------------------------------------------------------------------------------


def reductions(*words):
    """All changes of a config on eight devices, one after another, and the plans after them."""

    def plan_of(config):
        return make_plan(config, num_devices=8)

    sizes = (
        "base_emb_dim=256",
        "max_target_length=512",
        "vocab_size=50304",
        "base_num_decoder_layers=4",
    )
    config = load_config(None, [*sizes, *words])
    found, plans = [], [plan_of(config)]
    while keys := smaller_step(config, plans[-1], plan_of):
        config = config.model_copy(update=keys)
        found.append({name: str(value) for name, value in keys.items() if value != ""})
        plans.append(plan_of(config))
    return found, plans


def test_rows_of_the_largest_stage_are_halved_and_a_kept_batch_stays_kept():
    def plan_of(config):
        return make_plan(config, num_devices=4)

    kept = {"batch_schedule": ((0, 64), (99, 6)), "gradient_accumulation_steps": -1}
    config = load_config(
        None,
        [
            "per_device_batch_size=8",
            "ici_data_parallelism=-1",
            "ici_fsdp_parallelism=1",
        ],
    )
    config = config.model_copy(update=kept).with_origins(
        dict.fromkeys(kept, "on_resume_batch")
    )
    said = refusal_of("no room.", 0.6, config, plan_of(config), plan_of)
    assert said.endswith(
        "works: batch_schedule=[[0, 64], [99, 6]] gradient_accumulation_steps=-1 per_device_batch_size=4."
    )


def test_rows_are_halved_then_layers_recomputed_then_logits_split():
    found, plans = reductions(
        "per_device_batch_size=4", "gradient_accumulation_steps=3"
    )
    assert found[:2] == [
        {"per_device_batch_size": "2", "gradient_accumulation_steps": "6"},
        {"per_device_batch_size": "1", "gradient_accumulation_steps": "12"},
    ]
    assert [keys["remat_policy"] for keys in found[2:6]] == [
        "save_dot_products",
        "minimal",
        "save_qkv_proj",
        "full",
    ]
    tiles = [int(keys["num_vocab_tiling"]) for keys in found[6:]]
    assert tiles == sorted(tiles) != []
    assert all(512 % pieces == 0 for pieces in tiles)
    assert {plan.global_batch_to_train for plan in plans} == {96}
    sizes = [
        plan.memory.most("activations") + plan.memory.most("logits") for plan in plans
    ]
    assert sizes == sorted(sizes, reverse=True)


def test_rows_that_the_shards_cannot_share_are_not_halved():
    """Half a row for each of 8 fsdp shards would leave half of them idle and not help the others."""
    assert reductions("per_device_batch_size=1")[0][0] == {
        "remat_policy": "save_dot_products"
    }
    found, _ = reductions(
        "per_device_batch_size=1", "ici_tensor_parallelism=4", "ici_fsdp_parallelism=2"
    )
    assert [keys.get("per_device_batch_size") for keys in found[:3]] == [
        "1/2",
        "1/4",
        None,
    ]
    found, plans = reductions(
        "per_device_batch_size=1",
        "remat_policy=custom",
        "remat_save=query_proj,mlpwi_0",
    )
    assert found[0]["remat_policy"] in ("save_qkv_proj", "full")
    assert plans[1].memory.most("activations") < plans[0].memory.most("activations")


def test_every_stage_of_a_ramp_keeps_its_batch():
    found, plans = reductions(
        "enable_rampup_batch_size=true",
        "rampup_mode=gradient_accumulation_steps",
        "per_device_batch_size=8",
        "steps=100",
        "gradient_accumulation_steps=4",
        "per_device_batch_size_start=2",
        "per_device_batch_size_increment=2",
        "global_rampup_samples=960",
    )
    assert (
        found[0]["per_device_batch_size"],
        found[0]["gradient_accumulation_steps"],
    ) == (
        "4",
        "8",
    )
    batches = [
        [(stage.first_step, stage.global_batch_to_train) for stage in plan.stages]
        for plan in plans
    ]
    assert len(batches[0]) > 1
    assert all(each == batches[0] for each in batches)
