"""The memory of reinforcement learning by hand."""

import pytest

from maxtext_lite.batching import load_plan

FILE = "configs/post_train/rl.yml"


PARAMETERS = 8_030_261_248  # of Llama 3 8B: 2 tables of 128,256 x 4,096, and norms of 32 layers and the last one
TABLES, NORMS = 2 * 128_256 * 4_096, (2 * 32 + 1) * 4_096
SLOT = (
    2 * 2_048 * 32 * 8 * (128 + 128)
)  # bytes of a sequence's keys and values: 32 layers, 8 kv heads of 128
WORDS = (
    "model_name=llama3-8b",
    "dtype=bfloat16",
    "remat_policy=full",
    "tokenizer_type=huggingface",
    "tokenizer_path=x",
    "max_target_length=2048",
    "max_prefill_predict_length=512",
    "batch_size=32",
    "num_generations=8",
    "micro_batch_size=8",
)
APART = ("trainer_devices_fraction=0.5", "sampler_devices_fraction=0.5")
SERVER = ("rollout_engine=sglang", "rollout_url=http://x/v1")


def plan_of(*overrides, gigabytes=80.0):
    return load_plan(
        FILE, [*WORDS, *overrides], num_devices=8, device_memory_gb=gigabytes
    )[1]


def lines(*overrides):
    found = plan_of(*overrides).memory.lines
    return {
        line.name: (line.bytes, len(line.moments))
        for line in found
        if line.part == "rollout"
    }


def warnings(*overrides, gigabytes=80.0):
    return [
        text
        for text in plan_of(*overrides, gigabytes=gigabytes).warnings
        if "are needed" in text
    ]


def test_on_the_same_devices_the_samplers_parameters_stay_and_its_cache_is_there_while_it_samples():
    assert lines() == {
        "sampler's parameters": (2 * PARAMETERS, 5),
        "keys and values": (SLOT, 1),
    }
    shared = lines("rollout_fsdp_parallelism=8", "rollout_slots=64")
    assert shared == {
        "sampler's parameters": (2 * PARAMETERS // 8, 5),
        "keys and values": (8 * SLOT, 1),
    }
    assert lines(*APART) == lines(*SERVER) == {}
    of_step = plan_of(*SERVER).memory
    assert plan_of().memory.total == of_step.total + 2 * PARAMETERS
    assert plan_of().memory.held == of_step.held


def test_the_peak_may_be_the_rollout():
    memory = plan_of("rollout_slots=2048").memory
    throughout = sum(
        line.bytes for line in plan_of(*SERVER).memory.lines if len(line.moments) == 5
    )
    assert (memory.peak, memory.total) == (
        "rollout",
        throughout + 2 * PARAMETERS + 256 * SLOT,
    )
    assert sum(memory.to_json()["at_peak"].values()) == memory.total


@pytest.mark.parametrize("fsdp", [1, 8])
@pytest.mark.parametrize("adapters", [(), ("lora_rank=8",)])
def test_the_reference_is_a_copy_of_the_matrices_in_dtype_and_of_all_else_as_it_is_stored(
    fsdp, adapters
):
    """`Reference` copies the frozen parameters of LoRA too; norms are not split."""
    mesh = (f"ici_fsdp_parallelism={fsdp}", f"ici_data_parallelism={8 // fsdp}")
    expected = (
        2 * (PARAMETERS - TABLES - NORMS) // fsdp + 4 * TABLES // fsdp + 4 * NORMS
    )
    assert lines("grpo_beta=0.1", *SERVER, *mesh, *adapters) == {
        "KL reference": (expected, 5)
    }
    assert lines("grpo_beta=0", *SERVER, *mesh, *adapters) == {}


def test_devices_are_compared_with_their_memory_while_they_train_and_while_they_sample():
    """By sampling, 100.8 GB where it takes turns with training, and 153.5 GB on devices that only sample."""
    assert warnings() == warnings(*APART) == []
    for overrides, gigabytes in (((), "100.8"), (APART, "153.5")):
        (text,) = warnings("rollout_slots=2048", *overrides)
        assert f" {gigabytes} GB " in text
        assert "rollout_slots" in text
    (text,) = warnings(*SERVER, gigabytes=5.0)
    assert "micro_batch_size" in text
    assert "rollout" not in text
