"""The terms of the decoder in families' words, by hand and in both directions."""

import math

import pytest

from maxtext_lite.config import load_config
from maxtext_lite.config.hf.fields import Fields
from maxtext_lite.config.hf.terms import Inverse, OldGelu, OutBias, PositionScaling, Switch
from tests.config.hf.test_parts import problems, read


@pytest.mark.parametrize("multiplier", [0.015625, 0.0078125, 0.1, 1 / math.sqrt(192), 0.3])
def test_a_multiplier_of_scores_is_what_they_are_divided_by_the_root_of(multiplier):
    part = Inverse("attention_multiplier", "query_pre_attn_scalar", power=-2)
    scalar = read(part, attention_multiplier=multiplier)["query_pre_attn_scalar"]
    assert math.isclose(1 / math.sqrt(scalar), multiplier, rel_tol=1e-12)
    written = part.write(load_config(None, [f"query_pre_attn_scalar={scalar!r}"]))
    assert read(part, **written)["query_pre_attn_scalar"] == scalar
    assert part.write(load_config(None, ["head_dim=16"])) == {"attention_multiplier": 0.25}


def test_what_logits_are_divided_by_is_their_inverse_multiplier():
    part = Inverse("logits_scaling", "logits_multiplier")
    assert read(part, logits_scaling=8) == {"logits_multiplier": 0.125}
    assert read(part) == {"logits_multiplier": 1.0}
    third = read(part, logits_scaling=3.0)["logits_multiplier"]
    assert part.write(load_config(None, [f"logits_multiplier={third!r}"])) == {"logits_scaling": 3.0}
    for wrong in (0, -1, True, "8"):
        assert "is not a number above 0" in problems(part, logits_scaling=wrong)[0]


def test_a_switch_has_two_values_and_others_follow_it():
    part = Switch("use_bias", "attention_bias", "all", "none", default=True, mlp_bias=(True, False))
    assert read(part) == {"attention_bias": "all", "mlp_bias": True}
    assert read(part, use_bias=False) == {"attention_bias": "none", "mlp_bias": False}
    assert part.write(load_config(None, ["attention_bias=all"])) == {"use_bias": True}
    assert problems(part, use_bias=1)


def test_biases_of_the_output_need_those_of_the_inputs():
    part = OutBias()
    for inner, out, bias in ((True, False, "qkv"), (True, True, "all"), (False, False, "none")):
        fields = {"attention_bias": inner, "attention_out_bias": out}
        assert read(part, **fields) == {"attention_bias": bias}
        assert part.write(load_config(None, [f"attention_bias={bias}"])) == fields
    assert "attention_out_bias=true cannot" in problems(part, attention_bias=False, attention_out_bias=True)[0]


def test_gelu_of_the_first_gemma_is_its_approximation():
    assert read(OldGelu(), hidden_act="gelu") == {"mlp_activation": "gelu_tanh"}
    assert read(OldGelu(), hidden_act="gelu", hidden_activation="gelu_pytorch_tanh") == {"mlp_activation": "gelu_tanh"}
    assert "hidden_act=silu cannot" in problems(OldGelu(), hidden_act="silu")[0]


def test_queries_grow_with_every_original_length():
    stated = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384}
    part = PositionScaling(1e6, scaling=stated)
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8, "rope_theta": 1e4}
    keys = read(part, rope_parameters={**scaling, "llama_4_scaling_beta": 0.2, "max_position_embeddings": 16})
    assert keys["position_temperature"] == {"scale": 0.2, "floor_scale": 8}
    assert read(part)["position_temperature"] == {"scale": 0.1, "floor_scale": 16384}
    assert read(part, rope_scaling={**scaling, "llama_4_scaling_beta": 0.0})["position_temperature"] == {}
    for wrong in (10**400, math.inf):
        beta = {"llama_4_scaling_beta": wrong}
        assert "must be a number beside" in problems(part, rope_parameters={**scaling, **beta})[0]
    assert "llama_4_scaling_beta=null must be" in problems(part, rope_parameters=scaling)[0]
    scaling = "rope_scaling={rope_type: yarn, factor: 2, original_max_position_embeddings: 8}"
    config = load_config(None, ["position_temperature={scale: 0.2, floor_scale: 8}", "rope_max_timescale=1e4", scaling])
    assert part.read(Fields(part.write(config)))["position_temperature"] == keys["position_temperature"]
