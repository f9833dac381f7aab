"""Prompts, pairs and chunks by hand; what train_rl's words mean in a plan; every legal split, and what is refused."""

from fractions import Fraction

import pytest

from maxtext_lite.batching import load_plan, make_plan
from maxtext_lite.batching.rl import rl_batch
from maxtext_lite.batching.topology import Topology
from maxtext_lite.config import Config, RLRunConfig, UserError, load_config, write_resolved
from tests.refusals import changes

FILE = "configs/post_train/rl.yml"


def config(*overrides):
    return load_config(FILE, overrides)


def test_the_quantities_of_the_seeds():
    """6 prompts with 4 responses each, in chunks of 8: three chunks of two prompts, on 4 of 8 devices."""
    apart = ("trainer_devices_fraction=0.5", "sampler_devices_fraction=0.5")
    asked = config("batch_size=6", "num_generations=4", "micro_batch_size=8", "num_iterations=2", "steps=10", *apart)
    rl = rl_batch(asked, Topology(8))
    assert (rl.prompts_per_batch, rl.pairs_per_batch, rl.pairs_per_micro_batch, rl.micro_batches) == (6, 24, 8, 3)
    assert (rl.updates_per_batch, rl.batches) == (2, 5)
    assert (rl.trainer_devices, rl.sampler_devices, rl.overlap_fraction) == (4, 4, Fraction(2, 3))
    plan = make_plan(asked, num_devices=8, num_examples=60)
    assert (plan.num_devices, plan.global_batch_to_train, plan.gradient_accumulation_steps) == (4, 24, 3)
    assert (plan.micro_batch_to_train, plan.per_device_batch_size) == (8, 2)
    assert (plan.epochs, plan.steps_per_epoch) == (Fraction(1, 2), 20)  # 5 batches of 6 of 60 prompts, two steps each
    said = plan.to_json()["rl"]
    assert isinstance(said, dict)
    assert said["pairs_per_batch"] == 24
    assert said["micro_batches"] == 3
    assert said["updates_per_batch"] == 2


def test_without_a_split_there_is_one_chunk_and_no_overlap():
    rl = rl_batch(config(), Topology(8))
    assert (rl.pairs_per_micro_batch, rl.micro_batches, rl.overlap_fraction) == (32 * 8, 1, 0)
    assert rl.takes_turns
    assert rl_batch(config("micro_batch_size=8"), Topology(8)).overlap_fraction == 0  # in turns, nothing runs at once


@pytest.mark.parametrize(("prompts", "group"), [(1, 2), (6, 4), (7, 3), (12, 2)])
def test_a_chunk_is_whole_groups_that_divide_the_batch_and_others_are_refused_with_the_nearest(prompts, group):
    legal = {group * count for count in range(1, prompts + 1) if prompts % count == 0}
    for pairs in range(1, prompts * group + 2):
        words = [f"batch_size={prompts}", f"num_generations={group}", f"micro_batch_size={pairs}"]
        if pairs in legal:
            rl = rl_batch(config(*words), Topology(2))
            assert rl.pairs_per_micro_batch * rl.micro_batches == rl.pairs_per_batch == prompts * group
            continue
        with pytest.raises(UserError) as refusal:
            config(*words)
        (problem,) = refusal.value.problems
        near = [str(size) for size in sorted(legal) if size < pairs][-1:]
        near += [str(size) for size in sorted(legal) if size > pairs][:1]
        assert problem.endswith(f": {' or '.join(near)}.")


@pytest.mark.parametrize(("words", "message"), [
    (["num_generations=1"], "num_generations=1 must be at least 2. Nearest that works: 2."),
    (["per_device_batch_size=2"], "per_device_batch_size=2 (command line) has no effect in RL"),
    (["num_iterations=7"], "steps=120 ends in the middle of the num_iterations=7 steps on a batch. "
                        "Nearest that work: 119 or 126."),
    (["max_prefill_predict_length=256"], "leaves no token of max_target_length=24 for a response."),
    (["trainer_devices_fraction=0.3"],
     "Nearest that works: trainer_devices_fraction=0.25 sampler_devices_fraction=0.75."),
    (["trainer_devices_fraction=0.5"], "Nearest that works: sampler_devices_fraction=0.5."),
    (["trainer_devices_fraction=0.3", "sampler_devices_fraction=0.5"],
     "trainer_devices_fraction=0.3 x 8 devices = 2.4 devices, not a whole number. Nearest that work: 0.25 or 0.5."),
])  # fmt: skip
def test_contradictions_are_refused(words, message):
    with pytest.raises(UserError) as refusal:
        load_plan(FILE, words, num_devices=8)
    assert message in str(refusal.value)


def test_devices_without_work_are_a_warning():
    words = ("trainer_devices_fraction=0.5", "sampler_devices_fraction=0.25")
    said = "trainer_devices_fraction=0.5 and sampler_devices_fraction=0.25: 2 of 8 devices neither train nor sample."
    assert said in make_plan(config(*words), num_devices=8).warnings
    assert not make_plan(config(words[0], "sampler_devices_fraction=0.5"), num_devices=8).warnings


def test_training_that_drops_tokens_of_experts_is_a_warning():
    def warned(*words):
        plan = make_plan(config("num_experts=4", *words), num_devices=8)
        return [text for text in plan.warnings if "only training drops tokens" in text]

    (said,) = warned("capacity_factor=1.5")
    assert said.startswith("capacity_factor=1.5: only")
    assert not warned("capacity_factor=1.5", "rollout_correction=truncated")
    assert not warned()


def test_a_batch_with_more_prompts_than_there_are_is_a_warning():
    said = "batch_size=32 is more than the 31 prompts: a batch has some of them several times, each with groups of its "
    (warning,) = make_plan(config(), num_devices=8, num_examples=31).warnings
    assert warning.startswith(said)
    assert not make_plan(config(), num_devices=8, num_examples=32).warnings


def test_separate_trainer_and_sampler_devices_need_one_host():
    words = ("trainer_devices_fraction=0.5", "sampler_devices_fraction=0.5")
    with pytest.raises(UserError) as refusal:
        make_plan(config(*words), num_devices=8, num_hosts=2)
    assert refusal.value.problems == (
        "trainer_devices_fraction=0.5 and sampler_devices_fraction=0.5 need all devices on one host, not 2. Nearest "
        "that work: trainer_devices_fraction=1 sampler_devices_fraction=1 or num_hosts=1.",)  # fmt: skip
    assert make_plan(config(*words), num_devices=8).num_hosts == 1
    assert make_plan(config(), num_devices=8, num_hosts=2).num_hosts == 2


@pytest.mark.parametrize("devices", [0, -3, 10**12])
def test_fractions_of_a_device_are_refused(devices):
    with pytest.raises(UserError, match=rf"num_devices={devices} must be at (least 1|most 1000000)\. Nearest.*: 1\.$"):
        load_plan(FILE, num_devices=devices)


def test_rl_keys_are_those_of_its_file(tmp_path):
    asked = config("batch_size=6", "micro_batch_size=8")
    assert isinstance(asked, RLRunConfig)
    assert not isinstance(load_config(), RLRunConfig)
    assert asked.origins["num_generations"] == "post_train/rl.yml"
    write_resolved(asked, tmp_path / "config.yml")
    assert load_config(tmp_path / "config.yml") == asked
    with pytest.raises(UserError, match=r"unknown key 'batch_size' .*It is a key of configs/post_train/rl.yml"):
        load_config(None, ["batch_size=6"])
    assert set(Config.model_fields) < set(RLRunConfig.model_fields)


def test_without_a_machine_a_split_is_named_that_most_machines_have():
    with pytest.raises(UserError) as refusal:
        load_config(FILE, ["trainer_devices_fraction=0.3"])
    (problem,) = refusal.value.problems
    quarters, same = changes(problem)
    assert same == {"sampler_devices_fraction": "0.7"}
    for num_devices in (4, 8, 256):
        load_plan(FILE, [f"{key}={value}" for key, value in quarters.items()], num_devices=num_devices)
