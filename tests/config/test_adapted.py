"""Which weights adapters may stand beside, and what is refused."""

import pytest

from maxtext_lite.config import ConfigError, adapted_weights, load_config
from maxtext_lite.config.adapted import adaptable_weights

MLA = "mla={q_lora_rank: %d, kv_lora_rank: 4, qk_nope_head_dim: 12, qk_rope_head_dim: 4, v_head_dim: 8}"
LATENT = ("base_num_kv_heads=8", "head_dim=16")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([], "query key value out gate up down"),
        (["gated_mlp=false"], "query key value out up down"),
        (["num_experts=4"], "query key value out gate up down"),
        ([*LATENT, MLA % 0], "query kv_down key_up value_up out gate up down"),
        ([*LATENT, MLA % 6], "query_down query_up kv_down key_up value_up out gate up down"),
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
    (["lora_rank=2", "lora_targets=key", *LATENT, MLA % 0],
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
