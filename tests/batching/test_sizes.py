from fractions import Fraction

import pytest

from maxtext_lite.batching.planning import load_plan
from maxtext_lite.batching.sizes import Loading, Sizes, derive_sizes, loading_hosts
from maxtext_lite.batching.topology import Topology
from maxtext_lite.config import UserError, load_config
from maxtext_lite.config.violation import Violation

BASE = load_config()


def sizes_of(num_devices, num_hosts=1, **values):
    return derive_sizes(BASE.model_copy(update=values), Topology(num_devices, num_hosts))


def messages_of(num_devices, num_hosts=1, **values):
    problems = sizes_of(num_devices, num_hosts, **values)
    assert isinstance(problems, list)
    return [problem.message for problem in problems]


def test_a_pipeline_without_stated_microbatches_has_one_per_stage():
    sizes = sizes_of(8, ici_pipeline_parallelism=4)
    assert isinstance(sizes, Sizes)
    assert (sizes.num_pipeline_stages, sizes.num_pipeline_microbatches, sizes.num_pipeline_repeats) == (4, 4, 1)
    sizes = sizes_of(8, ici_pipeline_parallelism=2, num_pipeline_microbatches=6)
    assert isinstance(sizes, Sizes)
    assert (sizes.num_pipeline_microbatches, sizes.num_pipeline_repeats) == (6, 2)


def test_evaluation_has_its_own_batch():
    sizes = sizes_of(8, eval_per_device_batch_size=Fraction(1, 2))
    assert isinstance(sizes, Sizes)
    assert sizes.eval_batch_examples == 4
    assert sizes_of(8).eval_batch_examples == 128


NO_EFFECT = "has no effect with 1 pipeline stage (ici_pipeline_parallelism x dcn_pipeline_parallelism)."


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ici_pipeline_parallelism": 2, "num_pipeline_microbatches": 3},
         "num_pipeline_microbatches=3 is not a multiple of the 2 pipeline stages."),
        ({"num_pipeline_microbatches": 4}, f"num_pipeline_microbatches=4 {NO_EFFECT}"),
        ({"num_layers_per_pipeline_stage": 2}, f"num_layers_per_pipeline_stage=2 {NO_EFFECT}"),
        ({"num_pipeline_repeats": 2}, f"num_pipeline_repeats=2 {NO_EFFECT}"),
        ({"ici_pipeline_parallelism": 8}, "base_num_decoder_layers=4 is not a multiple of 8 pipeline stages x "
                                          "num_layers_per_pipeline_stage=1."),
        ({"ici_pipeline_parallelism": 2, "num_layers_per_pipeline_stage": 3},
         "base_num_decoder_layers=4 is not a multiple of 2 pipeline stages x num_layers_per_pipeline_stage=3."),
        ({"ici_pipeline_parallelism": 2, "num_pipeline_repeats": 3},
         "num_pipeline_repeats=3 x 2 pipeline stages x num_layers_per_pipeline_stage=1 = 6 layers, but "
         "base_num_decoder_layers=4."),
        ({"pipeline_schedule": "1f1b"}, f"pipeline_schedule=1f1b {NO_EFFECT}"),
        ({"ici_pipeline_parallelism": 2, "pipeline_schedule": "1f1b"},
         "pipeline_schedule=1f1b passes the stages once, but 4 layers on 2 stages with num_layers_per_pipeline_stage=1 "
         "go round 2 times."),
        ({"ici_pipeline_parallelism": 4, "pipeline_schedule": "1f1b", "num_vocab_tiling": 2, "max_target_length": 100},
         "max_target_length=100 is not a multiple of 4 pipeline stages x num_vocab_tiling=2, between which "
         "pipeline_schedule=1f1b splits the tokens of a microbatch for the loss."),
        ({"ici_tensor_parallelism": 8}, "ici_tensor_parallelism=8 does not divide base_num_kv_heads=4."),
        ({"ici_tensor_parallelism": 4, "dcn_tensor_parallelism": 2},
         "ici_tensor_parallelism=4 x dcn_tensor_parallelism=2 = 8 does not divide base_num_kv_heads=4."),
        ({"ici_context_parallelism": 8, "max_target_length": 100},
         "ici_context_parallelism=8 x 2 chunks = 16 does not divide max_target_length=100."),
        ({"ici_context_parallelism": 4, "dcn_context_parallelism": 2, "max_target_length": 24},
         "ici_context_parallelism=4 x dcn_context_parallelism=2 x 2 chunks = 16 does not divide max_target_length=24."),
        ({"ici_context_parallelism": 8, "num_vocab_tiling": 64},
         "num_vocab_tiling=64 does not divide the 32 tokens of each of 8 context shards."),
        ({"ici_context_parallelism": 8, "attention": "splash"},
         "attention=splash needs max_target_length=256 to be a multiple of 2048, 128 for each of 2 chunks on 8 context "
         "shards."),
        ({"ici_context_parallelism": 8, "attention": "cudnn_flash", "dtype": "bfloat16"},
         "attention=cudnn_flash does not work on 8 context shards, whose tokens are laid out in chunks."),
        ({"ici_expert_parallelism": 4, "num_experts": 6}, "ici_expert_parallelism=4 does not divide num_experts=6."),
        ({"ici_expert_parallelism": 2}, "ici_expert_parallelism=2 does not divide num_experts=1."),
        ({"ici_tensor_parallelism": 2, "num_experts": 4, "base_moe_mlp_dim": 7, "base_mlp_dim": 9},
         "ici_tensor_parallelism=2 does not divide base_moe_mlp_dim=7."),
        ({"ici_tensor_parallelism": 2, "num_experts": 4, "base_mlp_dim": 9},
         "ici_tensor_parallelism=2 does not divide base_mlp_dim=9."),
        ({"base_emb_dim": 100}, "ici_fsdp_parallelism=-1, the remaining 8, does not divide base_emb_dim=100."),
        ({"eval_per_device_batch_size": Fraction("0.3")},
         "eval_per_device_batch_size=0.3 x 8 devices = 2.4 examples, not a whole number."),
    ],
)  # fmt: skip
def test_what_the_model_or_the_pipeline_does_not_allow_is_refused(values, message):
    assert messages_of(8, **values) == [message]


def test_problems_of_all_parts_come_at_once():
    messages = messages_of(
        8,
        3,
        per_device_batch_size=Fraction("0.3"),
        ici_tensor_parallelism=3,
        expansion_factor_real_data=Fraction(2),
        num_pipeline_microbatches=5,
    )
    starts = (
        "num_hosts=3",
        "ici_tensor_parallelism=3 does not divide the 8",
        "per_device_batch_size=0.3",
        "expansion_factor_real_data=2",
        "ici_tensor_parallelism=3 does not divide base_num_query_heads=8, ",
        "num_pipeline_microbatches=5",
    )
    assert len(messages) == len(starts)
    assert all(message.startswith(start) for message, start in zip(messages, starts, strict=True))


@pytest.mark.parametrize("more", [
    ["layer_pattern=local,global", "sliding_window_size=4"], ["num_layers_per_pipeline_stage=7"],
    ["num_layers_per_pipeline_stage=2", "num_pipeline_repeats=3"], ["pipeline_schedule=1f1b", "max_target_length=240"],
])  # fmt: skip
def test_a_model_without_pipeline_layers_is_refused_only_for_that(more):
    keys = ["ici_pipeline_parallelism=6", "num_experts=4", "first_num_dense_layers=1000"]
    with pytest.raises(UserError) as refused:
        load_plan(None, [*keys, *more], num_devices=6)
    (problem,) = refused.value.problems
    assert problem.startswith("first_num_dense_layers=1000 leaves none of base_num_decoder_layers=4 for experts.")


def loading_of(factor, num_hosts):
    return loading_hosts(BASE.model_copy(update={"expansion_factor_real_data": Fraction(factor)}), num_hosts)


@pytest.mark.parametrize("factor", [-1, 1])
def test_all_hosts_read_their_own_share(factor):
    loading = loading_of(factor, 4)
    assert loading == Loading(Fraction(1), (0, 1, 2, 3), 1)
    assert loading.global_batch_to_load(64) == 64
    assert loading.examples_per_loading_host(64) == 16


def test_above_one_fewer_hosts_read_more_and_each_example_once():
    loading = loading_of(2, 8)
    assert loading.loading_hosts == (0, 1, 2, 3)
    assert loading.global_batch_to_load(64) == 128
    assert loading.examples_per_loading_host(64) * len(loading.loading_hosts) == 64


# D4: MaxText multiplies the batch by the factor and trains on a part of it.
@pytest.mark.parametrize(("factor", "loads"), [("0.5", 2), ("0.25", 4), ("1/3", 3)])
def test_below_one_several_loads_feed_one_step(factor, loads):
    loading = loading_of(factor, 2)
    assert isinstance(loading, Loading)
    assert (loading.loading_hosts, loading.loads_per_step) == ((0, 1), loads)
    assert loading.global_batch_to_load(48) == 48 // loads
    assert loading.examples_per_loading_host(48) * 2 * loads == 48


# D5: the number of hosts is an integer, whatever the factor was written as.
@pytest.mark.parametrize("factor", ["2", "1.5", "3", "6"])
def test_hosts_are_counted_in_integers(factor):
    loading = loading_of(factor, 6)
    assert isinstance(loading, Loading)
    assert all(type(host) is int for host in loading.loading_hosts)
    assert len(loading.loading_hosts) * Fraction(factor) == 6


# D6: 8 hosts / 3 passes MaxText's check, and placeholders are trained on.
@pytest.mark.parametrize(
    ("factor", "num_hosts", "message"),
    [
        ("3", 8, "expansion_factor_real_data=3: 8 hosts / 3 = 2.667 loading hosts, not a whole number."),
        ("2", 1, "expansion_factor_real_data=2: 1 hosts / 2 = 0.5 loading hosts, not a whole number."),
        (
            "2.6667",
            8,
            "expansion_factor_real_data=2.6667: 8 hosts / 2.6667 = 2.99996 loading hosts, not a whole number.",
        ),
        ("0.3333", 8, "expansion_factor_real_data=0.3333 is 1/x = 3.0003 loads per step, not a whole number."),
        ("0.3", 8, "expansion_factor_real_data=0.3 is 1/x = 3.333 loads per step, not a whole number."),
        ("2/3", 8, "expansion_factor_real_data=2/3 is 1/x = 1.5 loads per step, not a whole number."),
    ],
)
def test_a_factor_without_a_whole_number_of_hosts_or_loads_is_refused(factor, num_hosts, message):
    problem = loading_of(factor, num_hosts)
    assert isinstance(problem, Violation)
    assert problem.message == message


def test_a_rounded_factor_is_suggested_as_a_fraction():
    assert loading_of("2.6667", 8).nearest == (Fraction(8, 3),)
    assert isinstance(loading_of("8/3", 8), Loading)
    below, above = loading_of("3", 8).nearest[0]()
    assert (next(iter(below)), next(iter(above))) == (
        {"expansion_factor_real_data": Fraction(2)},
        {"expansion_factor_real_data": Fraction(4)},
    )


def test_a_load_of_a_batch_that_does_not_divide_has_an_empty_slot():
    assert loading_of("0.5", 1).global_batch_to_load(3) == 2
    assert loading_of("1.5", 3).global_batch_to_load(3) == 5
