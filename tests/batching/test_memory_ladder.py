"""The rungs of a ladder, on machines that need not exist; the batches of every step stay the same."""

import pytest

from maxtext_lite.batching import make_plan
from maxtext_lite.batching.memory_ladder import LADDER_KEYS, next_rung
from maxtext_lite.config import load_config

BASE = ["base_emb_dim=256", "max_target_length=512", "vocab_size=50304", "base_num_decoder_layers=4"]


def rungs(words, num_devices=8):
    """All rungs of a config, and the plans after them."""

    def plan_of(config):
        return make_plan(config, num_devices=num_devices)

    config = load_config(None, [*BASE, *words])
    found, plans = [], [plan_of(config)]
    while (rung := next_rung(config, plans[-1], plan_of)) is not None:
        assert rung.keys() <= set(LADDER_KEYS)
        config = config.model_copy(update=rung)
        found.append({name: str(value) for name, value in rung.items() if value != ""})
        plans.append(plan_of(config))
    return found, plans


def test_rows_are_halved_then_layers_recomputed_then_logits_split():
    found, plans = rungs(["per_device_batch_size=4", "gradient_accumulation_steps=3"])
    assert found[:2] == [
        {"per_device_batch_size": "2", "gradient_accumulation_steps": "6"},
        {"per_device_batch_size": "1", "gradient_accumulation_steps": "12"},
    ]
    assert [rung["remat_policy"] for rung in found[2:6]] == ["save_dot_products", "minimal", "save_qkv_proj", "full"]
    tiles = [int(rung["num_vocab_tiling"]) for rung in found[6:]]
    assert tiles
    assert tiles == sorted(tiles)
    assert all(512 % pieces == 0 for pieces in tiles)
    assert {plan.global_batch_to_train for plan in plans} == {96}
    held = [plan.memory.activations + plan.memory.logits for plan in plans]
    assert held == sorted(held, reverse=True)


def test_rows_that_the_shards_cannot_share_are_not_halved():
    """Half a row for each of 8 fsdp shards would leave half of them idle and not help the others."""
    found, _ = rungs(["per_device_batch_size=1"])
    assert found[0] == {"remat_policy": "save_dot_products"}
    found, _ = rungs(["per_device_batch_size=1", "ici_tensor_parallelism=4", "ici_fsdp_parallelism=2"])
    assert [rung.get("per_device_batch_size") for rung in found[:3]] == ["1/2", "1/4", None]


@pytest.mark.parametrize("mode", ["per_device_batch_size", "gradient_accumulation_steps"])
def test_every_stage_of_a_ramp_keeps_its_batch(mode):
    words = [
        "enable_rampup_batch_size=true", f"rampup_mode={mode}", "per_device_batch_size=8", "steps=100",
        "gradient_accumulation_steps=4", "per_device_batch_size_start=2", "per_device_batch_size_increment=2",
        "global_rampup_samples=960",
    ]  # fmt: skip
    found, plans = rungs(words)
    assert found[0]["per_device_batch_size"] == "4"
    assert found[0]["gradient_accumulation_steps"] == "8"
    batches = [[(stage.first_step, stage.global_batch_to_train) for stage in plan.stages] for plan in plans]
    assert len(batches[0]) > 1
    assert all(each == batches[0] for each in batches)


def test_a_custom_policy_is_followed_by_one_that_keeps_less():
    words = ["per_device_batch_size=1", "remat_policy=custom", "remat_save=query_proj,mlpwi_0"]
    found, plans = rungs(words)
    assert found[0]["remat_policy"] in ("save_qkv_proj", "full")
    assert plans[1].memory.activations < plans[0].memory.activations
