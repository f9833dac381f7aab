"""Which weights may have adapters, by hand. The tables of weights: tests/batching/test_parameters.py."""

import pytest

from maxtext_lite.config import adapted_weights, load_config
from maxtext_lite.config.weights import adaptable_weights, model_shape

LATENT = "mla={q_lora_rank: %d, kv_lora_rank: 4, qk_nope_head_dim: 12, qk_rope_head_dim: 4, v_head_dim: 8}"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "query key value out gate up down"),
        (["gated_mlp=false"], "query key value out up down"),
        (
            ["attention_output_gate=sigmoid"],
            "query key value out output_gate gate up down",
        ),
        (["num_experts=4"], "query key value out gate up down"),  # but routers
        (
            ["base_num_kv_heads=8", LATENT % 0],
            "query kv_down key_up value_up out gate up down",
        ),
        (
            ["base_num_kv_heads=8", LATENT % 6],
            "query_down query_up kv_down key_up value_up out gate up down",
        ),
        (
            ["lora_targets=down, value,query,value"],
            "query value down",
        ),  # in the model's order
    ],
)
def test_adapters_are_for_the_weights_that_tokens_are_multiplied_by(words, expected):
    config = load_config(None, [*words, "lora_rank=2"])
    assert adapted_weights(config) == tuple(expected.split())
    assert set(adapted_weights(config)) <= set(adaptable_weights(config))
    assert adapted_weights(load_config()) == ()


def test_the_counts_of_experts_are_sorted_by_stack_as_the_parameters_are():
    """Layers 1 and 3, with a window, are in the first stack, and layers 0 and 2 in the second; 0 has no experts."""
    heads = "global_attention={global_head_dim: 16, global_num_kv_heads: 2}"
    kinds = [
        "layer_pattern=global,local",
        "sliding_window_size=8",
        "mlp_pattern=dense,moe,moe,moe",
    ]
    shape = model_shape(load_config(None, [heads, *kinds, "num_experts=4"]))
    assert sorted(shape.stacks) == [
        "layers/attention_moe",
        "layers/global_attention_dense",
        "layers/global_attention_moe",
    ]
    assert shape.expert_order == [0, 2, 1]
