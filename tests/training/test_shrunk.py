"""Every shipped model shrinks to one of the same kind that trains in seconds and can be split in many ways."""

import json
import os

import pytest

from maxtext_lite.batching import count_parameters, make_plan
from maxtext_lite.config import UserError, load_config
from maxtext_lite.config.files import packaged_directory
from maxtext_lite.training.shrunk import EXAMPLES, WHOLE, settings, shrunk, splits

ALL = sorted(
    path.stem for path in (packaged_directory("configs") / "models").glob("*.yml")
)
MODELS = (
    ALL
    if os.environ.get("EVERY_MODEL")
    else [*ALL[::20], "deepseek-v3", "gpt-oss-20b", "llama4-scout"]
)
"""All where the environment variable EVERY_MODEL is set, which takes half a minute; some otherwise."""


def small(*words):
    """A config, and a function from a split to its shrunk config."""
    config = load_config(None, words)
    keys = shrunk(config)
    return config, lambda split: load_config(
        None, [*words, *settings(config, keys | split.keys(config))]
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_model_keeps_its_kind_and_splits(name):
    config, of = small(f"model_name={name}")
    whole = of(WHOLE)
    assert count_parameters(whole).total < 1_000_000

    def kind(config):
        keys = (
            "norm_placement",
            "qk_norm",
            "attn_logits_soft_cap",
            "routed_bias",
            "logits_via_embedding",
            "optimizer",
        )
        group = config.base_num_query_heads // config.base_num_kv_heads
        own = group, config.num_experts > 1, {*config.pattern}, bool(config.mla)
        return *own, *(getattr(config, key) for key in keys)

    assert kind(whole) == kind(config)
    planned = 0
    for split in [WHOLE, *splits(config)]:
        try:
            plan = make_plan(of(split), num_devices=split.devices, platform="cpu")
        except UserError:
            continue
        planned += 1
        assert (plan.global_batch_to_train, plan.gradient_accumulation_steps) == (
            EXAMPLES,
            split.accumulation,
        )
    assert planned >= 10  # of 11 or 12: with one key head there are no tensor shards


def test_the_users_own_axes_ramp_and_share_of_a_window_are_kept():
    config, of = small(
        "ici_tensor_parallelism=4",
        "dcn_data_parallelism=2",
        "enable_rampup_batch_size=true",
        "packing=false",
        "learning_rate_schedule=wsd",
    )
    *_, own = splits(config)
    plan = make_plan(of(own), num_devices=8, platform="cpu")
    assert {axis: size for axis, size in plan.mesh.items() if size > 1} == {
        "data": 2,
        "fsdp": 2,
        "tensor": 2,
    }
    assert [stage.global_batch_to_train for stage in plan.stages] == [
        EXAMPLES // 2,
        EXAMPLES,
    ]
    assert (of(own).packing, of(own).learning_rate_schedule) == (False, "wsd")
    _, of = small("model_name=gemma3-12b", "max_target_length=4096")
    assert (of(WHOLE).max_target_length, of(WHOLE).sliding_window_size) == (
        64,
        16,
    )  # 1,024 of 4,096


LONGROPE = {
    "rope_type": "longrope",
    "factor": 4,
    "original_max_position_embeddings": 4096,
    "short_factor": [1 + i for i in range(48)],
    "long_factor": [2 + i for i in range(48)],
}


@pytest.mark.fast
@pytest.mark.parametrize(
    "words",
    [
        "ici_pipeline_parallelism=2 pipeline_schedule=1f1b num_layers_per_pipeline_stage=2 per_device_batch_size=2",
        "ici_pipeline_parallelism=4 num_pipeline_repeats=1",
        "last_batch=train num_epochs=1 steps=-1",
        "learning_rate_scaling=sqrt base_global_batch_size=64 scale_adam_with_batch=true",
        "max_target_length=384 num_vocab_tiling=3",
        "model_name=phi3-mini rope_scaling="
        + json.dumps(LONGROPE, separators=(",", ":")),
        "dataset_type=sft long_examples=refuse max_target_length=4096 dataset_path=lines.jsonl",
    ],
)
def test_what_a_machine_of_many_devices_allows_shrinks_to_one(words):
    config, of = small(*words.split())
    whole = of(WHOLE)
    assert (
        make_plan(whole, num_devices=1, platform="cpu").global_batch_to_train
        == EXAMPLES
    )
    assert (whole.num_vocab_tiling > 1) == (config.num_vocab_tiling > 1)
    if config.rope_scaling:
        assert whole.rope_scaling.short_factor == (1, 13, 25, 37)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (
            None,
            ["enable_diloco=true", "ici_data_parallelism=-1", "ici_fsdp_parallelism=1"],
        ),
        ("configs/post_train/rl.yml", ["dataset_type=prompts"]),
    ],
)
def test_local_updates_and_batches_that_the_model_makes_itself_are_refused(file, words):
    with pytest.raises(UserError, match=words[0]):
        shrunk(load_config(file, words))
