"""Prompts, pairs, chunks, rollouts and memory by hand; what train_rl's words mean in a plan; what is refused."""

import json
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


def mesh(devices, *overrides):
    return rl_batch(load_config(FILE, overrides), Topology(devices)).rollout.mesh


def test_generating_devices_have_their_own_mesh():
    assert mesh(8) == {"data": 8, "fsdp": 1, "tensor": 1}
    assert mesh(8, "rollout_tensor_parallelism=2") == {"data": 4, "fsdp": 1, "tensor": 2}
    both = ("rollout_tensor_parallelism=2", "rollout_fsdp_parallelism=2")
    assert mesh(8, *both) == {"data": 2, "fsdp": 2, "tensor": 2}
    apart = ("trainer_devices_fraction=0.5", "sampler_devices_fraction=0.5")
    assert mesh(8, *both, *apart) == {"data": 1, "fsdp": 2, "tensor": 2}


def test_slots_are_a_micro_batch_rounded_up_to_whole_shards():
    def slots(devices, *overrides):
        return rl_batch(
            load_config(FILE, ["batch_size=3", "num_generations=4", *overrides]), Topology(devices)
        ).rollout.slots

    assert slots(1) == 12
    assert slots(8) == 16
    assert slots(8, "rollout_tensor_parallelism=2") == 12
    assert slots(8, "micro_batch_size=4") == 8
    assert slots(8, "rollout_slots=24") == 24


def test_memory_by_hand():
    """Llama 3 8B in bfloat16, 8 devices of which two share a copy of the parameters: 32 layers, 8 kv heads of 128."""
    words = ["model_name=llama3-8b", "dtype=bfloat16", "rollout_tensor_parallelism=2", "max_target_length=1024",
             "batch_size=16", "num_generations=8", "tokenizer_type=huggingface", "tokenizer_path=x"]  # fmt: skip
    rollout = rl_batch(load_config(FILE, words), Topology(8)).rollout
    assert rollout.slots == 128
    assert rollout.params == 8_030_261_248 // 2 * 2
    assert rollout.cache == (128 // 4) * 1024 * 32 * 8 * (128 + 128) // 2 * 2
    assert str(rollout).startswith("128 slots on data 4 x tensor 2; ")
    server = ["rollout_engine=http", "rollout_url=http://here:8000/v1"]
    assert rl_batch(load_config(FILE, [*words[:2], *words[3:], *server]), Topology(8)).rollout is None


@pytest.mark.parametrize(("devices", "overrides", "messages"), [
    (8, ["rollout_slots=9"],
     ["rollout_slots=9 is not a multiple of the 8 parts into which the generating devices split them. Nearest that "
      "work: 8 or 16."]),
    (8, ["rollout_slots=3"],
     ["rollout_slots=3 is not a multiple of the 8 parts into which the generating devices split them. Nearest that "
      "works: 8."]),
    (8, ["rollout_tensor_parallelism=3"],
     ["rollout_tensor_parallelism=3 does not divide both the model's heads, mlp and vocabulary and the 8 generating "
      "devices. Nearest that work: 2 or 4."]),
    (8, ["rollout_tensor_parallelism=8"],  # 4 kv heads
     ["rollout_tensor_parallelism=8 does not divide both the model's heads, mlp and vocabulary and the 8 generating "
      "devices. Nearest that works: 4."]),
    (6, ["rollout_fsdp_parallelism=3", "ici_fsdp_parallelism=2", "ici_data_parallelism=-1"],  # base_emb_dim=128
     ["rollout_fsdp_parallelism=3 does not divide both the model's embedding and the 6 generating devices. Nearest "
      "that works: 2."]),
    (8, ["rollout_fsdp_parallelism=16", "rollout_tensor_parallelism=4"],
     ["rollout_fsdp_parallelism=16 does not divide both the model's embedding and the 8 generating devices. Nearest "
      "that works: 2."]),
    (8, ["rollout_tensor_parallelism=4", "rollout_fsdp_parallelism=4"],
     ["rollout_tensor_parallelism=4 x rollout_fsdp_parallelism=4 does not divide the 8 generating devices. Nearest "
      "that works: rollout_tensor_parallelism=2."]),
    (8, ["rollout_tensor_parallelism=3", "rollout_fsdp_parallelism=5"],
     ["rollout_tensor_parallelism=3 does not divide both the model's heads, mlp and vocabulary and the 8 generating "
      "devices. Nearest that works: 2.",
      "rollout_fsdp_parallelism=5 does not divide both the model's embedding and the 8 generating devices. Nearest "
      "that works: 4."]),
])  # fmt: skip
def test_a_mesh_that_does_not_divide_model_or_devices_is_refused(devices, overrides, messages):
    with pytest.raises(UserError) as refusal:
        load_plan(FILE, overrides, num_devices=devices)
    assert list(refusal.value.problems) == messages
    mended = []
    for message in messages:
        works = message.partition("Nearest that work")[2].partition(": ")[2].removesuffix(".").split(" or ")[0]
        mended.append(works if "=" in works else f"{message.partition('=')[0]}={works}")
    load_plan(FILE, [*overrides, *mended], num_devices=devices)


def test_a_server_has_its_own_devices():
    wide = "base_num_kv_heads=1"
    with pytest.raises(UserError, match="rollout_tensor_parallelism=2 does not divide"):
        load_plan(FILE, ["rollout_tensor_parallelism=2", wide], num_devices=4)
    _, plan = load_plan(FILE, ["rollout_engine=http", "rollout_url=http://x/v1", wide], num_devices=4)
    assert plan.rl.rollout is None


PARAMETERS = 8_030_261_248  # of Llama 3 8B: 2 tables of 128,256 x 4,096, and norms of 32 layers and the last one
TABLES, NORMS = 2 * 128_256 * 4_096, (2 * 32 + 1) * 4_096
SLOT = 2 * 2_048 * 32 * 8 * (128 + 128)  # bytes of a sequence's keys and values: 32 layers, 8 kv heads of 128
WORDS = (
    "model_name=llama3-8b", "dtype=bfloat16", "remat_policy=full", "tokenizer_type=huggingface", "tokenizer_path=x",
    "max_target_length=2048", "max_prefill_predict_length=512", "batch_size=32", "num_generations=8",
    "micro_batch_size=8",
)  # fmt: skip
APART = ("trainer_devices_fraction=0.5", "sampler_devices_fraction=0.5")
SERVER = ("rollout_engine=http", "rollout_url=http://x/v1")


def plan_of(*overrides, gigabytes=80.0):
    return load_plan(FILE, [*WORDS, *overrides], num_devices=8, device_memory_gb=gigabytes)[1]


def lines(*overrides):
    found = plan_of(*overrides).memory.lines
    return {line.name: (line.bytes, len(line.moments)) for line in found if line.part == "rollout"}


def warning(*overrides, gigabytes=80.0):
    return [text for text in plan_of(*overrides, gigabytes=gigabytes).warnings if "are needed" in text]


def test_on_the_same_devices_the_samplers_parameters_stay_and_its_cache_is_there_while_it_samples():
    assert lines() == {"sampler's parameters": (2 * PARAMETERS, 5), "keys and values": (SLOT, 1)}
    shared = lines("rollout_fsdp_parallelism=8", "rollout_slots=64")
    assert shared == {"sampler's parameters": (2 * PARAMETERS // 8, 5), "keys and values": (8 * SLOT, 1)}
    assert lines(*APART) == lines(*SERVER) == {}
    of_step = plan_of(*SERVER).memory
    assert plan_of().memory.total == of_step.total + 2 * PARAMETERS
    assert plan_of().memory.held == of_step.held


def test_the_peak_may_be_the_rollout():
    memory = plan_of("rollout_slots=2048").memory
    throughout = sum(line.bytes for line in plan_of(*SERVER).memory.lines if len(line.moments) == 5)
    assert (memory.peak, memory.total) == ("rollout", throughout + 2 * PARAMETERS + 256 * SLOT)
    found = json.loads(json.dumps(memory.to_json()))
    assert found["rollout"] == found["at_peak"]["rollout"] == 2 * PARAMETERS + 256 * SLOT
    assert sum(found["at_peak"].values()) == found["total"]
    assert "rollout" not in plan_of(*SERVER).memory.to_json()


@pytest.mark.parametrize("fsdp", [1, 8])
@pytest.mark.parametrize("adapters", [(), ("lora_rank=8",)])
def test_the_reference_is_a_copy_of_the_matrices_in_dtype_and_of_all_else_as_it_is_stored(fsdp, adapters):
    """`Reference` copies the frozen parameters of LoRA too; norms are not split."""
    mesh = (f"ici_fsdp_parallelism={fsdp}", f"ici_data_parallelism={8 // fsdp}")
    expected = 2 * (PARAMETERS - TABLES - NORMS) // fsdp + 4 * TABLES // fsdp + 4 * NORMS
    assert lines("grpo_beta=0.1", *SERVER, *mesh, *adapters) == {"KL reference": (expected, 5)}
    assert lines("grpo_beta=0", *SERVER, *mesh, *adapters) == {}


def test_warnings_name_keys_of_rl():
    assert warning() == []
    (text,) = warning("rollout_slots=2048")
    assert text.startswith("about 100.8 GB per device")
    for overrides in (["rollout_slots=2048"], ["micro_batch_size=-1", "remat_policy=none"]):
        (text,) = warning(*overrides)
        assert text.endswith(
            " GB per device are needed, more than the 80.0 GB it has: lower micro_batch_size or rollout_slots, raise "
            "rollout_fsdp_parallelism, or set remat_policy=full."
        )
    (text,) = warning(*SERVER, gigabytes=5.0)
    assert text.endswith("more than the 5.0 GB it has: lower micro_batch_size, or set remat_policy=full.")


def test_devices_that_sample_only_are_compared_with_the_limit_too():
    assert warning(*APART) == []
    assert warning(*APART, "rollout_slots=2048") == [
        "about 153.5 GB per device that samples are needed, more than the 80.0 GB it has: lower micro_batch_size or "
        "rollout_slots, or raise rollout_fsdp_parallelism."
    ]
