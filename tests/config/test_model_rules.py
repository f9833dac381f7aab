"""Rules of the architecture: what is refused, and that the suggestions work."""

import pytest

from maxtext_lite.config import ConfigError, UserError, adapted_weights, load_config
from maxtext_lite.config.model_rules import adaptable_weights


@pytest.mark.parametrize(("overrides", "works"), [
    # A search number by number would take hours.
    (["base_num_query_heads=1000000007", "base_num_kv_heads=500000000"], "1 or 1000000007"),
    (["base_num_query_heads=2147483646", "base_num_kv_heads=2147483645"], "1073741823 or 2147483646"),
    (["num_experts=2147483646", "n_routing_groups=65537"], "65534 or 65538"),
])  # fmt: skip
def test_divisors_of_large_numbers_are_found_at_once(overrides, works):
    with pytest.raises(UserError) as refused:
        load_config(None, overrides)
    assert refused.value.problems[0].endswith(f" Nearest that work: {works}.")


def test_routing_groups_have_equal_shares_and_enough_experts():
    keys = ["num_experts=12", "num_experts_per_tok=5"]
    for groups, near in ((5, "4 or 6"), (12, "6")):
        with pytest.raises(UserError, match=rf"num_experts=12 into equal .* works?: {near}\."):
            load_config(None, [*keys, f"n_routing_groups={groups}", "topk_routing_group=4"])
    with pytest.raises(UserError) as refused:
        load_config(None, [*keys, "n_routing_groups=4", "topk_routing_group=1"])
    assert refused.value.problems == (
        "topk_routing_group=1 x 3 experts of a group are fewer than num_experts_per_tok=5. Nearest that works: 2.",
    )
    load_config(None, [*keys, "n_routing_groups=4", "topk_routing_group=2"])


LATENT = "mla={q_lora_rank: 0, kv_lora_rank: 16, qk_nope_head_dim: 12, qk_rope_head_dim: 4, v_head_dim: 8}"


@pytest.mark.parametrize(("overrides", "message"), [
    (["gated_mlp=false", "mlp_activation=clamped_silu"],
     "gated_mlp=false with mlp_activation=clamped_silu: it clamps the gate too. Nearest that works: true."),
    (["gated_mlp=false", "num_experts=4"],
     "gated_mlp=false with num_experts > 1: experts have gates. Nearest that works: true."),
    ([LATENT, "base_num_kv_heads=8", "head_dim=20"],
     "head_dim=20 is not the 16 of mla's qk_nope_head_dim + qk_rope_head_dim. Nearest that works: 16."),
    ([LATENT], "base_num_kv_heads=4 with " + LATENT + ": latent attention has its own. Nearest that works: 8."),
    ([LATENT, "base_num_kv_heads=8", "layer_pattern=nope"],
     "layer_pattern=nope has layers without rotation beside mla. Nearest that works: global."),
    (["rope_max_timescale=1", "rope_scaling={rope_type: yarn, factor: 2, original_max_position_embeddings: 8}"],
     "rope_max_timescale=1 with rope_type=yarn: all wavelengths are the same. Nearest that works: 10000."),
    (["trainable_position_size=256", "rope_scaling={rope_type: ntk, factor: 2}"],
     "trainable_position_size=256 contradicts rope_scaling={rope_type: ntk, factor: 2}, which is about rotation. "
     "Nearest that works: 0."),
    (["num_experts=4", "mlp_pattern=moe,dens"],
     "mlp_pattern=moe,dens names 'dens', which is none of moe, dense. Nearest that works: moe,moe."),
    (["num_experts=4", "mlp_pattern=dense,dense,dense,dense,moe"],
     "mlp_pattern=dense,dense,dense,dense,moe leaves none of base_num_decoder_layers=4 for experts. "
     "Nearest that works: moe."),
    (["num_experts=4", "mlp_pattern=moe,moe,moe,moe,dense"],
     "mlp_pattern=moe,moe,moe,moe,dense has no dense layer among base_num_decoder_layers=4. Nearest that works: moe."),
    (["num_experts=4", "mlp_pattern=dense,moe", "first_num_dense_layers=1"],
     "first_num_dense_layers=1 beside mlp_pattern=dense,moe, which counts all layers. Nearest that work: "
     "first_num_dense_layers=0 or mlp_pattern=dense,moe,dense,moe first_num_dense_layers=0."),
    (["mlp_pattern=dense,moe"], "mlp_pattern=dense,moe has no effect with num_experts=1, a model without experts. "
     "Nearest that works: moe."),
    (["num_experts=4", "base_shared_mlp_dim=8"],
     "base_shared_mlp_dim=8 has no effect with shared_experts=0. Nearest that work: base_shared_mlp_dim=-1 or "
     "shared_experts=1."),
    (["num_experts=4", "shared_expert_gate=true"],
     "shared_expert_gate=true has no effect with shared_experts=0. Nearest that work: shared_expert_gate=false or "
     "shared_experts=1."),
    (["num_experts=4", "shared_experts=1", "base_shared_mlp_dim=0"],
     "base_shared_mlp_dim=0 must be at least 1, or -1. Nearest that works: 1."),
    (["num_experts=4", "routed_score_func=sparsemixer"],
     "norm_topk_prob=true has no effect with routed_score_func=sparsemixer, which takes a separate softmax for each "
     "choice. Nearest that works: false."),
    (["layer_pattern=chunked"],
     "chunk_attn_window_size=0 with layer_pattern=chunked: chunked layers see no token. Nearest that works: 256."),
    (["chunk_attn_window_size=8"],
     "chunk_attn_window_size=8 has no effect with layer_pattern=global. Nearest that work: "
     "chunk_attn_window_size=0 or layer_pattern=chunked."),
    (["num_experts=4", "first_num_dense_layers=4"],
     "first_num_dense_layers=4 leaves none of base_num_decoder_layers=4 for experts. Nearest that works: 3."),
])  # fmt: skip
def test_parts_of_a_model_that_do_not_go_together_are_refused(overrides, message):
    with pytest.raises(UserError) as refused:
        load_config(None, overrides)
    assert refused.value.problems == (message,)


# ---- LoRA: which weights may have adapters -------------------------------------------------------------------------


LATENT_WIDTHS = "mla={q_lora_rank: %d, kv_lora_rank: 4, qk_nope_head_dim: 12, qk_rope_head_dim: 4, v_head_dim: 8}"
LATENT_HEADS = ("base_num_kv_heads=8", "head_dim=16")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([], "query key value out gate up down"),
        (["gated_mlp=false"], "query key value out up down"),
        (["num_experts=4"], "query key value out gate up down"),
        ([*LATENT_HEADS, LATENT_WIDTHS % 0], "query kv_down key_up value_up out gate up down"),
        ([*LATENT_HEADS, LATENT_WIDTHS % 6], "query_down query_up kv_down key_up value_up out gate up down"),
    ],
)
def test_all_are_the_weights_that_tokens_are_multiplied_by_but_routers(keys, expected):
    assert adaptable_weights(load_config(None, keys)) == tuple(expected.split())
    assert adapted_weights(load_config(None, [*keys, "lora_rank=2"])) == tuple(expected.split())


def test_named_ones_come_in_the_models_order_and_none_without_a_rank():
    named = load_config(None, ["lora_rank=2", "lora_targets=down, value,query,value"])
    assert adapted_weights(named) == ("query", "value", "down")
    assert adapted_weights(load_config()) == ()


REFUSED = [
    (["lora_rank=2", "lora_targets=query,valu"],
     "lora_targets=query,valu names 'valu'; this model has query, key, value, out, gate, up, down, or all. "
     "Nearest that works: query,value."),
    (["lora_rank=2", "lora_targets=query,gate,down", "gated_mlp=false"],
     "lora_targets=query,gate,down names 'gate'; this model has query, key, value, out, up, down, or all. "
     "Nearest that works: query,down."),
    (["lora_rank=2", "lora_targets=key", *LATENT_HEADS, LATENT_WIDTHS % 0],
     "lora_targets=key names 'key'; this model has query, kv_down, key_up, value_up, out, gate, up, down, or all. "
     "Nearest that works: key_up."),
    (["lora_rank=2", "lora_targets=router", "num_experts=4"],
     "lora_targets=router names 'router'; this model has query, key, value, out, gate, up, down, or all. "
     "Nearest that works: all."),
    (["lora_alpha=32"],
     "lora_alpha=32 has no effect with lora_rank=0, which trains all weights. "
     "Nearest that work: lora_alpha=16 or lora_rank=8."),
    (["lora_targets=query"],
     "lora_targets=query has no effect with lora_rank=0, which trains all weights. "
     "Nearest that work: lora_targets=all or lora_rank=8."),
    (["lora_rank=-1"], "lora_rank=-1 must be at least 0. Nearest that works: 0."),
    (["lora_rank=2", "lora_alpha=0"], "lora_alpha=0 must be"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "message"), REFUSED)
def test_what_contradicts_is_refused_with_what_works(keys, message):
    with pytest.raises(ConfigError) as refused:
        load_config(None, keys)
    (problem,) = refused.value.problems
    assert problem.startswith(message)
    if message.endswith("."):
        assert problem == message
    if "lora_targets" in message and "rank=0" not in message:
        mended = problem.rpartition("works: ")[2].removesuffix(".")
        load_config(None, [*keys, f"lora_targets={mended}"])
