"""Every shipped model shrinks to one of the same kind that trains in seconds and can be split in many ways."""

import os

import pytest

from maxtext_lite.analysis.equiv import WHOLE, settings, shrunk, splits
from maxtext_lite.analysis.repeat import EXAMPLES
from maxtext_lite.batching import count_parameters, make_plan
from maxtext_lite.config import UserError, load_config
from maxtext_lite.config.load import packaged_directory

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


@pytest.mark.fast
@pytest.mark.parametrize(
    "words",
    [
        "ici_pipeline_parallelism=2 pipeline_schedule=1f1b num_layers_per_pipeline_stage=2 per_device_batch_size=2",
        "learning_rate_scaling=sqrt base_global_batch_size=64 scale_adam_with_batch=true",
        "max_target_length=384 num_vocab_tiling=3",
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
