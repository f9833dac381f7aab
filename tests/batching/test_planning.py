"""From configs to plans: worked values, epochs, replicas, warnings and refusals."""

import pytest

from maxtext_lite.batching import BatchPlan, load_plan, make_plan, resumed
from maxtext_lite.batching.ledger import bytes_text
from maxtext_lite.config import UserError, load_config

DILOCO = ("enable_diloco=true", "ici_data_parallelism=2", "steps=240")


def plan_of(*overrides, num_devices=8, **machine):
    return make_plan(load_config(None, overrides), num_devices=num_devices, **machine)


@pytest.mark.parametrize(
    ("per_device", "expansion", "num_devices", "accumulation", "load", "train", "micro"),
    # (p, x, n, A) of the study of MaxText; its own numbers differ where p < 1 or x < 1, and rows are lost there.
    [
        ("8", "-1", 8, 2, 128, 128, 64), ("12", "-1", 8, 1, 96, 96, 96), ("0.5", "-1", 8, 1, 4, 4, 4),
        ("0.5", "-1", 8, 4, 16, 16, 4), ("0.29", "-1", 100, 1, 29, 29, 29), ("2", "2", 8, 1, 32, 16, 16),
        ("2", "2", 8, 4, 128, 64, 16), ("0.5", "2", 8, 1, 8, 4, 4), ("2", "0.5", 8, 1, 8, 16, 16),
        ("1", "0.5", 8, 1, 4, 8, 8),
    ],
)  # fmt: skip
def test_worked_values(per_device, expansion, num_devices, accumulation, load, train, micro):
    plan = plan_of(f"per_device_batch_size={per_device}", f"expansion_factor_real_data={expansion}",
                   f"gradient_accumulation_steps={accumulation}", "ici_fsdp_parallelism=1", "ici_data_parallelism=-1",
                   num_devices=num_devices, num_hosts=num_devices)  # fmt: skip
    assert (plan.global_batch_to_load, plan.global_batch_to_train, plan.micro_batch_to_train) == (load, train, micro)
    # No loaded row is discarded: the loads of a step contain its examples, once.
    read = plan.examples_per_loading_host * len(plan.loading_hosts) * plan.loads_per_step
    assert read == train


def test_pipeline_microbatches_need_not_divide_the_rows():
    plan = plan_of("ici_pipeline_parallelism=2", "per_device_batch_size=0.75", "num_pipeline_microbatches=4")
    assert (plan.micro_batch_to_train, plan.pipeline_microbatch_size, plan.micro_batch_slots) == (6, 2, 16)
    assert plan.warnings[0].startswith("num_pipeline_microbatches=4 does not divide the micro-batch of 6 examples")


def test_epochs_follow_from_the_data():
    plan = plan_of("steps=400", num_examples=256)
    assert (plan.steps_per_epoch, plan.epochs) == (2, 200)
    assert plan_of().epochs is None
    with pytest.raises(UserError, match="no training example"):
        plan_of(num_examples=0)


def test_probable_mistakes_are_warned_of():
    ramp = ["enable_rampup_batch_size=true", "global_rampup_samples=500000"]
    assert plan_of(*ramp).warnings[0].startswith("the ramp takes ")
    assert plan_of("steps=5").warnings == ("warmup_steps=20 is more than steps=5: the run ends in the warm-up.",)
    assert plan_of(device_memory_gb=0.001).warnings[0].endswith("or set remat_policy=full.")
    assert plan_of(device_memory_gb=95).warnings == ()
    uneven = plan_of("ici_tensor_parallelism=4", "max_target_length=250")
    assert uneven.warnings[0].startswith("max_target_length=250 is not a multiple of 1 context x 4 tensor shards: ")
    assert uneven.memory.activations > plan_of("ici_tensor_parallelism=4", "max_target_length=248").memory.activations


def test_an_evaluation_that_cannot_fit_is_warned_of():
    """64 times the rows of a micro-batch: the stream twice, and gate and up, beside the state; or a tile's logits."""
    keys = ("eval_per_device_batch_size=64", "per_device_batch_size=1", "base_mlp_dim=4096", "remat_policy=full",
            "num_vocab_tiling=-1", "ici_fsdp_parallelism=8")  # fmt: skip
    config, held = load_config(None, keys), plan_of(*keys).memory.held
    tokens = 64 * config.max_target_length
    needed = held + tokens * 4 * (2 * config.base_emb_dim + 2 * 4096)
    start = f"at least {bytes_text(needed)} per device are needed in an evaluation, more than the "
    (warning,) = plan_of(*keys, device_memory_gb=(needed - 1) / 1e9).warnings
    assert warning.startswith(start)
    assert warning.endswith("lower eval_per_device_batch_size.")
    assert plan_of(*keys, device_memory_gb=needed / 1e9).warnings == ()
    for never in ("eval_interval=-1", "eval_per_device_batch_size=1"):
        assert plan_of(*keys, never, device_memory_gb=(needed - 1) / 1e9).warnings == ()
    least = held + config.max_target_length * 4 * (2 * config.base_emb_dim + 2 * 4096)  # of one row on each device
    assert "evaluation" in plan_of(*keys, device_memory_gb=least / 1e9).warnings[0]
    assert not any("evaluation" in each for each in plan_of(*keys, device_memory_gb=(least - 1) / 1e9).warnings)
    large = (*keys, "vocab_size=65536", "base_mlp_dim=64", "num_vocab_tiling=1")
    logits = plan_of(*large).memory.held + tokens * 4 * 65536
    assert plan_of(*large, device_memory_gb=logits / 1e9).warnings == ()
    (warning,) = plan_of(*large, device_memory_gb=(logits - 1) / 1e9).warnings
    assert warning.startswith(f"at least {bytes_text(logits)} per device")


def test_a_plan_without_masters_says_what_is_lost_and_what_is_saved():
    keys = ("weight_dtype=bfloat16", "master_weights=false", "steps=100")
    plan, whole = plan_of(*keys), plan_of(*keys[:1], *keys[2:])
    saved = whole.memory.total - plan.memory.total
    assert saved == whole.memory.optimizer_state - plan.memory.optimizer_state == 2 * plan.memory.params
    assert whole.warnings == plan_of(keys[1], keys[2]).warnings == plan_of(*keys, "lora_rank=2").warnings == ()
    (warning,) = plan.warnings
    assert warning.startswith("master_weights=false with weight_dtype=bfloat16: an update smaller than 2^-9 of its ")
    assert warning.endswith(f"this saves 4 bytes per parameter, {bytes_text(saved)} per device.")


@pytest.mark.parametrize(("stated", "replicas", "shards", "slots"), [(-1, 2, 8, 8), (2, 2, 8, 8), (6, 6, 24, 24)])
def test_replicas_are_a_multiple_of_the_data_axis_and_have_equal_slots(stated, replicas, shards, slots):
    plan = plan_of(*DILOCO, f"diloco_num_replicas={stated}", "per_device_batch_size=1")
    assert (plan.diloco_num_replicas, plan.diloco_sync_period) == (replicas, 30)
    assert (plan.batch_shards, plan.layout_shards, plan.micro_batch_slots) == (8, shards, slots)
    assert plan.slots_for(25) == (48 if replicas == 6 else 32)
    assert plan.to_json()["diloco_num_replicas"] == replicas


def test_replicas_that_the_data_axis_cannot_hold_are_refused():
    with pytest.raises(UserError) as refused:
        plan_of(*DILOCO, "diloco_num_replicas=3")
    assert refused.value.problems == (
        "diloco_num_replicas=3 is not a multiple of the data axis, 2: each part has equally many. "
        "Nearest that work: 2 or 4.",)  # fmt: skip


def test_without_local_updates_their_keys_have_no_effect():
    plan = plan_of("diloco_num_replicas=3")
    assert (plan.diloco_num_replicas, plan.diloco_sync_period, plan.layout_shards) == (None, None, 8)
    assert plan.memory == plan_of().memory


def test_idle_replicas_and_an_unsynchronised_end_are_warned_of():
    # 5 examples fill the first 5 of 8 slots, 2 to a replica: 2 2 1 0.
    plan = plan_of("enable_diloco=true", "ici_data_parallelism=4", "diloco_sync_period=7", "per_device_batch_size=5/8")
    assert plan.warnings == (
        "a micro-batch of 5 examples in 8 slots leaves 1 of 4 DiLoCo replicas without one: raise "
        "per_device_batch_size or lower diloco_num_replicas.",
        "steps=250 is not a multiple of diloco_sync_period=7: the last 5 steps are not in the synchronised parameters.",
    )
    assert plan_of(*DILOCO).warnings == ()
    # Derived steps count too: 10 epochs of 256 examples in batches of 128 are 20.
    assert plan_of(*DILOCO[:2], "num_epochs=10", num_examples=256).warnings[-1].startswith("steps=20 is not a mult")


def test_a_warm_up_longer_than_derived_steps_is_warned_of():
    plan = plan_of("num_epochs=2", "warmup_steps=9", num_examples=256)
    assert plan.warnings == ("warmup_steps=9 is more than steps=4: the run ends in the warm-up.",)


def test_a_resume_is_warned_by_the_length_of_its_run():
    """Half of 64 examples in 8 steps of 4, the rest in 4 steps of 8: it ends at step 12; a new run would at step 8."""
    keys = ["num_epochs=1", "global_batch_size=8", "per_device_batch_size=-1", "warmup_steps=10"]
    config = load_config(None, keys)
    new = make_plan(config, num_devices=1, num_examples=64)
    plan = resumed(config, new, step=8, examples_seen=32)
    assert (plan.steps, plan.total_examples, plan.epochs) == (12, 64, 1)
    assert "warmup_steps=10 is more than steps=8" in new.warnings[-1]
    assert not plan.warnings
    assert resumed(config, plan, step=9, examples_seen=40) == resumed(config, new, step=9, examples_seen=40)
    longer = config.model_copy(update={"warmup_steps": 13})
    assert resumed(longer, make_plan(longer, num_devices=1, num_examples=64), step=8, examples_seen=32).warnings == (
        "warmup_steps=13 is more than steps=12: the run ends in the warm-up.",
    )


def test_a_resume_within_its_ramp_is_warned_by_the_steps_that_it_has():
    """From 2 to 4: 24 examples take 12 steps of 2; 20 steps of 1 before it leave 2 of them."""
    keys = ["steps=21", "warmup_steps=0", "enable_rampup_batch_size=true", "per_device_batch_size_start=2",
            "per_device_batch_size=4", "per_device_batch_size_increment=2", "global_rampup_samples=24"]  # fmt: skip
    config = load_config(None, keys)
    new = make_plan(config, num_devices=1)
    assert not new.warnings
    plan = resumed(config, new, step=20, examples_seen=20)
    assert plan.warnings == (
        "the ramp takes 22 steps, more than steps=21: the target per_device_batch_size=4 is not reached.",
    )
    assert plan.to_json()["resumed"] == {
        "step": 20,
        "examples_seen": 20,
        "stages_ahead": [
            {"first_step": 21, "num_steps": 2, "per_device_batch_size": 2, "gradient_accumulation_steps": 1,
             "global_batch_to_train": 2, "samples": 4},
            {"first_step": 23, "num_steps": None, "per_device_batch_size": 4, "gradient_accumulation_steps": 1,
             "global_batch_to_train": 4, "samples": None},
        ],
    }  # fmt: skip
    assert "resumed" not in new.to_json()


def test_the_passes_of_a_resumed_rl_run_are_those_of_its_prompts():
    """Two batches of 4 prompts, then two of 8: 24 prompts, which is 3 passes over 8; a new run would make 4."""
    keys = ["steps=4", "batch_size=8", "num_generations=2"]
    config = load_config("post_train/rl.yml", keys)
    new = make_plan(config, num_devices=1, num_examples=8)
    plan = resumed(config, new, step=2, examples_seen=2 * 4 * 2)
    assert (new.epochs, plan.epochs, plan.steps) == (4, 3, 4)


def test_a_schedule_in_examples_counts_steps_of_the_target():
    # 10 steps of 32, then 10 of 128: 1600 examples, which are 12.5 batches of 128.
    ramp = ["enable_rampup_batch_size=true", "per_device_batch_size_increment=12", "global_rampup_samples=320",
            "steps=20", "warmup_steps=15"]  # fmt: skip
    assert plan_of(*ramp).warnings == ()
    for unit in ("examples", "tokens"):
        assert plan_of(*ramp, f"schedule_unit={unit}").warnings == (
            "warmup_steps=15 is more than steps=20, which are 12.5 at the target of 128 examples: the run ends in the "
            "warm-up.",)  # fmt: skip


def test_the_memory_of_a_ramp_is_that_of_its_target():
    keys = ["per_device_batch_size=4", "gradient_accumulation_steps=4"]
    for mode in ("per_device_batch_size", "gradient_accumulation_steps"):
        ramp = ["enable_rampup_batch_size=true", f"rampup_mode={mode}", "per_device_batch_size_start=1",
                "per_device_batch_size_increment=1"]  # fmt: skip
        assert plan_of(*keys, *ramp).memory == plan_of(*keys).memory


def test_examples_are_counted_only_for_a_config_that_can_be_planned():
    def count(config):
        assert config.num_epochs == 2
        return 1000

    assert load_plan(None, ["num_epochs=2"], num_devices=8, num_examples=count)[1].steps == 15
    for overrides in (["num_epochs=2", "per_device_batch_size=0.3"], ["num_epochs=2", "stps=3"]):
        with pytest.raises(UserError, match=r"not a whole number|unknown key"):
            load_plan(None, overrides, num_devices=8, num_examples=lambda config: pytest.fail("was counted"))
    assert load_plan(None, num_devices=8, num_examples=lambda config: pytest.fail("was counted"))[1].epochs is None


def test_problems_of_config_and_plan_come_at_once():
    with pytest.raises(UserError) as refused:
        load_plan(
            None,
            ["stps=3", "steps=0", "per_device_batch_size=0.3", "gradient_accumulation_steps=0"],
            num_devices=8,
            num_hosts=3,
        )
    assert refused.value.problems == (
        "unknown key 'stps' (command line). Did you mean 'steps'?",
        "steps=0 must be at least 1, or -1. Nearest that works: 1.",
        "gradient_accumulation_steps=0 must be at least 1, or -1. Nearest that works: 1.",
        "num_hosts=3 does not divide num_devices=8: every host has equally many devices. Nearest that work: 2 or 4.",
        "per_device_batch_size=0.3 x 8 devices = 2.4 examples, not a whole number. Nearest that work: 0.25 or 0.375.",
    )


def test_a_value_of_the_wrong_kind_is_replaced_by_one_that_the_plan_allows():
    with pytest.raises(UserError) as refused:
        load_plan(
            None, ["per_device_batch_size=0", "gradient_accumulation_steps=-1", "global_batch_size=12"], num_devices=8
        )
    (problem,) = (problem for problem in refused.value.problems if problem.startswith("per_device_batch_size=0 "))
    assert problem == "per_device_batch_size=0 must be above 0, or -1 (derived). Nearest that works: 1."
    assert "global_batch_size=12 / (per_device_batch_size=1 x 8 devices" in refused.value.problems[1]


def test_load_plan_is_load_config_and_make_plan():
    config, plan = load_plan(None, ["steps=30"], num_devices=8)
    assert config == load_config(None, ["steps=30"])
    assert isinstance(plan, BatchPlan)
    assert plan == make_plan(config, num_devices=8)
    with pytest.raises(UserError, match="no config file"):
        load_plan("nowhere.yml", num_devices=8)


@pytest.mark.parametrize(("policy", "warned"), [("save_dot_products", True), ("minimal", False), ("none", False)])
def test_a_kernel_that_cannot_keep_a_saved_tensor_is_warned_of(policy, warned):
    words = ["attention=cudnn_flash", "packing=none", "dtype=bfloat16", "head_dim=64", f"remat_policy={policy}"]
    plan = make_plan(load_config(None, words), num_devices=1, platform="gpu")
    assert any("attention=cudnn_flash keeps no context" in warning for warning in plan.warnings) == warned
