"""Every family by its class of transformers: what fields mean that are missing, null, or of the wrong kind."""

import copy
from typing import Any

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.config.hf.config import family_of, model_keys
from maxtext_lite.config.hf.families import FAMILIES
from maxtext_lite.config.hf.fields import JsonObject, same_architecture

configuration = pytest.importorskip("transformers.models.auto.configuration_auto")
StrictDataclassError = pytest.importorskip("huggingface_hub.errors").StrictDataclassError

_NEEDED = {
    "deepseek_v2": {"num_experts_per_tok": 6}, "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "hunyuan_v1_moe": {"num_experts": 4},  # one expert, its default, is no model of ours
}  # fmt: skip
_WRONG = (
    "x", 5, 1.5, True, [1], {"rope_type": []}, {"full_attention": 5}, {"type": ["a"]}, {"rope_theta": "x"},
    {"rope_type": "longrope", "short_factor": [0], "long_factor": [1], "original_max_position_embeddings": 0},
    {"rope_type": "longrope", "short_factor": 5, "long_factor": "x", "original_max_position_embeddings": "4"},
    {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 1.5, "llama_4_scaling_beta": [1]},
    {"rope_type": "dynamic", "factor": 1, "alpha": []},
)  # fmt: skip


def of_transformers(kind: str, fields: JsonObject) -> JsonObject:
    """All fields as transformers reads these, its defaults among them."""
    made: Any = configuration.CONFIG_MAPPING[kind]
    return made.from_dict(copy.deepcopy(fields)).to_dict()


def test_families_name_themselves():
    assert all(family_of({"model_type": kind}, "x") == kind for kind in FAMILIES)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_field_that_is_not_there_or_null_is_what_transformers_takes_it_for(kind):
    whole = of_transformers(kind, _NEEDED.get(kind, {}))
    compared = 0
    for field in set(whole) - {"model_type", "architectures", "transformers_version"}:
        for fields in ({key: value for key, value in whole.items() if key != field}, whole | {field: None}):
            try:
                ours = model_keys(fields, "config.json")
            except UserError:  # what must be there is not guessed
                continue
            try:
                theirs = of_transformers(kind, fields)
            except (TypeError, StrictDataclassError):  # null is not allowed
                continue
            assert same_architecture(model_keys(theirs, "config.json"), ours) == [], field
            compared += 1
    assert compared > 20


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "gpt2"])
def test_rotary_positions_of_the_wrong_kind_are_refused(kind):
    plain = of_transformers(kind, _NEEDED.get(kind, {}))
    del plain["rope_parameters"]
    for field in ("rope_parameters", "rope_scaling"):
        for wrong in _WRONG:
            with pytest.raises(UserError, match=r"rope_|rotary_|original_max_position|llama_4|short_mscale"):
                model_keys(plain | {field: wrong}, "config.json")


@pytest.mark.parametrize(("kind", "fields", "message"), [
    ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 8.0}}, "says type, which transformers does not read"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50 cannot be expressed: it must be null"),
    ("apertus", {"rope_theta": 500.0}, "rope_theta=500 contradicts rope_parameters, in which it is 12000000."),
    ("qwen3", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8},
               "max_position_embeddings": None}, "lacks max_position_embeddings beside it."),
    ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling=linear is not of this family"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 32, "sliding_window": 5}, "sliding_attention needs a sliding_"),
    ("solar_open", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 has no effect in this family"),
    ("cohere2", {"sliding_window": None, "layer_types": ["full_attention"] * 40}, "sliding_window=null is a model"),
])  # fmt: skip
def test_what_transformers_passes_over_is_refused(kind, fields, message):
    plain = of_transformers(kind, {})
    for field in ("rope_parameters", *fields):
        plain.pop(field, None)
    with pytest.raises(UserError, match=message):
        model_keys(plain | fields, "config.json")


@pytest.mark.parametrize("kind", ["gpt_oss", "apertus"])
def test_an_empty_object_is_no_rotation_by_default(kind):
    """Where the family's own default scales it."""
    plain = of_transformers(kind, {})
    del plain["rope_parameters"]
    scaled, empty = (model_keys(plain | fields, "x") for fields in ({}, {"rope_parameters": {}}))
    assert scaled["rope_scaling"] != empty["rope_scaling"] == {}
    theirs = model_keys(of_transformers(kind, plain | {"rope_parameters": {}}), "x")
    assert same_architecture(theirs, empty) == []


def test_a_base_that_no_scaling_names_is_transformers_usual_one():
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.1}
    fields = of_transformers("ministral3", {"rope_parameters": scaling})
    named = model_keys(fields, "x")
    del fields["rope_parameters"]["rope_theta"]
    assert named["rope_max_timescale"] == model_keys(fields, "x")["rope_max_timescale"] == 10_000.0
