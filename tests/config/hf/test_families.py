"""What config.json says is what families.yml has in keys, both ways; a missing field is what transformers has."""

import copy
import itertools
import json
import re

import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.config.keys import ModelConfig, RopeScaling
from maxtext_lite.hf.config_json import (
    config_json,
    family_of,
    model_keys,
    quantization_of,
    stored_dtype,
    text_fields,
)
from maxtext_lite.hf.families import FAMILIES
from maxtext_lite.hf.fields import DEFAULTS, same_architecture
from tests.tables import read_table

TABLE = read_table("config/hf/families.yml")
PUBLISHED = {
    row["fields"]["model_type"]: row["fields"] for row in reversed(TABLE["published"])
}
LLAMA = PUBLISHED["llama"]


def fields_of(row):
    """A whole config.json: the usual sizes, what the family needs, and the row's own fields."""
    kind = row["model"]
    needed = TABLE["needed"].get(kind, {}) if isinstance(kind, str) else {}
    return {"model_type": kind, **TABLE["sizes"], **needed, **row["fields"]}


def config_of(keys):
    return load_config(
        None, [f"{key}={json.dumps(value)}" for key, value in keys.items()]
    )


def written(keys, original, max_position_embeddings=64, dtype="bfloat16"):
    return config_json(
        config_of(keys),
        original=original,
        max_position_embeddings=max_position_embeddings,
        dtype=dtype,
    )


def named(row):
    return pytest.param(row, id=f"{row['model']} {list(row['fields'])}")


@pytest.mark.fast
@pytest.mark.parametrize("row", [named(row) for row in TABLE["read"]])
def test_fields_are_read_as_keys_and_written_again(row):
    keys = model_keys(fields_of(row), "config.json")
    assert {key: keys[key] for key in row["keys"]} == row["keys"]
    again = model_keys(written(keys, {"model_type": row["model"]}), "config.json")
    assert same_architecture(again, keys) == []


@pytest.mark.parametrize(
    "row", TABLE["published"], ids=lambda row: row["fields"]["model_type"]
)
def test_published_models_are_read_and_written(row):
    fields, expected = row["fields"], row.get("keys", {})
    keys = model_keys(fields, "config.json")
    assert {key: keys[key] for key in expected} == expected
    if "name" in row:
        config = load_config(None, [f"model_name={row['name']}"])
        assert (
            same_architecture(keys, {key: getattr(config, key) for key in keys}) == []
        )
    if "text_config" not in fields:
        carried = written(keys, fields)
        assert carried == {**carried, **fields, "torch_dtype": "bfloat16"}
        assert carried["dtype"] == "bfloat16"
        again = model_keys(
            written(keys, {"model_type": fields["model_type"]}), "config.json"
        )
        assert same_architecture(again, keys) == []


@pytest.mark.parametrize("row", [named(row) for row in TABLE["refused"]])
def test_what_cannot_be_expressed_is_refused_by_the_name_of_its_field(row):
    with pytest.raises(UserError) as refusal:
        model_keys(fields_of(row), "there/config.json")
    starts = [
        problem.startswith(f"there/config.json: {row['named']}")
        for problem in refusal.value.problems
    ]
    assert any(starts), refusal.value.problems


@pytest.mark.parametrize("kind", ["llama", "phi3", "gemma3_text", "phimoe"])
def test_rotary_positions_of_the_wrong_kind_are_refused(kind):
    for field, wrong in itertools.product(
        ("rope_parameters", "rope_scaling"), TABLE["wrong_rotations"]
    ):
        with pytest.raises(
            UserError, match=r"rope_|rotary_|original_max_position|llama_4|short_mscale"
        ):
            model_keys(
                fields_of({"model": kind, "fields": {field: wrong}}), "config.json"
            )


_WRONG = (
    "x",
    "",
    "\x1b[31m\n",
    float("nan"),
    float("inf"),
    -1,
    0,
    1,
    2.5,
    10**18,
    10**400,
    True,
    False,
    [],
    [None],
    [[["a"]]],
    {},
    {"a": 1},
    {"rope_type": [1]},
    {"full_attention": 3},
    {"type": "yarn", "factor": -3},
    {
        "type": "longrope",
        "short_factor": [0],
        "long_factor": "x",
        "original_max_position_embeddings": 0,
    },
    ["full_attention"] * 3,
)


@pytest.mark.parametrize("kind", ["gemma3_text", "deepseek_v3", "gpt2"])
def test_a_value_of_any_kind_in_any_field_is_read_or_named_by_its_field(kind):
    """Never an exception, and never the name of a key that is not a field."""
    fields = PUBLISHED[kind]
    keys = set(ModelConfig.model_fields) - set(fields) - {"rope_scaling"}
    refused = 0
    for field, wrong in itertools.product(
        [*fields, "rope_scaling", "rope_parameters", "torch_dtype"], _WRONG
    ):
        try:
            model_keys(fields | {field: wrong}, "F")
        except UserError as error:
            refused += 1
            for problem in error.problems:
                assert problem.startswith("F: ")
                assert problem.isprintable()
                assert not set(re.findall(r"\w+", problem.partition("=")[0])) & (
                    keys - {field}
                ), problem
    assert refused > 100


def of_transformers(kind, fields):
    """All fields as transformers reads these, its defaults among them."""
    made = pytest.importorskip(
        "transformers.models.auto.configuration_auto"
    ).CONFIG_MAPPING[kind]
    return made.from_dict(copy.deepcopy(fields)).to_dict()


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_field_that_is_not_there_or_null_is_what_transformers_takes_it_for(kind):
    assert family_of({"model_type": kind}, "x") == kind
    not_allowed = (
        TypeError,
        pytest.importorskip("huggingface_hub.errors").StrictDataclassError,
    )
    needed = (
        TABLE["needed"].get(kind, {})
        if kind in ("deepseek_v2", "dots1", "hunyuan_v1_moe")
        else {}
    )
    whole = of_transformers(kind, needed)
    compared = 0
    for field in set(whole) - {"model_type", "architectures", "transformers_version"}:
        for fields in (
            {key: value for key, value in whole.items() if key != field},
            whole | {field: None},
        ):
            try:
                ours = model_keys(fields, "config.json")
            except UserError:  # what must be there is not guessed
                continue
            try:
                theirs = of_transformers(kind, fields)
            except not_allowed:  # null is not allowed
                continue
            assert same_architecture(model_keys(theirs, "config.json"), ours) == [], (
                field
            )
            compared += 1
    assert compared > 20


# ---- Writing -------------------------------------------------------------------------------------------------------


def test_a_model_of_ones_own_is_written_as_the_first_family_that_expresses_it():
    def kind(*words):
        config = load_config(None, words)
        return config_json(
            config,
            max_position_embeddings=256,
            dtype="float32",
            original={},
            end_of_text_id=256,
        )

    assert (kind()["model_type"], kind()["eos_token_id"]) == ("llama", 256)
    assert (
        kind("layer_pattern=local", "sliding_window_size=8")["model_type"] == "mistral"
    )
    assert kind("qk_norm=head")["model_type"] == "qwen3"
    assert kind("num_experts=4")["model_type"] == "mixtral"
    with pytest.raises(
        UserError
    ) as refusal:  # mixtral's config.json would be refused for its one expert alone
        kind("inverse_layer_scaling=true", "clip_qkv=8")
    for key, problem in zip(
        ("clip_qkv=8", "inverse_layer_scaling=true"),
        sorted(refusal.value.problems),
        strict=True,
    ):
        assert problem.startswith("model_type=llama ")
        assert key in problem


def test_training_on_longer_rows_raises_the_number_of_positions_unless_a_scaling_follows_from_it():
    yarn = {
        "rope_scaling": {
            "type": "yarn",
            "factor": 4,
            "original_max_position_embeddings": 2048,
        }
    }
    for scaling, expected in (({}, 9000), (yarn, 8192)):
        original = LLAMA | scaling
        keys = model_keys(original, "config.json")
        assert written(keys, original, 9000)["max_position_embeddings"] == expected
        assert written(keys, original, 64)["max_position_embeddings"] == 8192


@pytest.mark.parametrize("stated", [None, "4096", [], 2.5, -1])
def test_a_number_of_positions_that_is_none_is_not_read_and_not_written(stated):
    original = LLAMA | {"max_position_embeddings": stated}
    keys = model_keys(original, "config.json")
    assert written(keys, original, 9000)["max_position_embeddings"] == 9000


def test_two_original_lengths_of_a_scaling_become_the_one_that_counts_and_names_of_files_go():
    """What is added for older versions would contradict an entry that nobody reads."""
    scaling = TABLE["published"][1]["fields"]["rope_scaling"] | {"rope_theta": 5e5}
    original = {
        name: value for name, value in LLAMA.items() if not name.startswith("rope")
    }
    original |= {"rope_parameters": scaling, "original_max_position_embeddings": 4096}
    keys = model_keys(original, "config.json")
    fields = written(keys, original | {"transformers_weights": "model.safetensors"})
    assert model_keys(fields, "config.json") == keys
    assert keys["rope_scaling"]["original_max_position_embeddings"] == 4096
    assert "transformers_weights" not in fields


# ---- When two models are the same ----------------------------------------------------------------------------------


def test_a_directory_decides_every_key_of_the_model_but_its_name_and_what_training_sets():
    left = set(ModelConfig.model_fields) - set(model_keys(LLAMA, "x"))
    adapters = {key for key in left if key.startswith("lora_")}
    trained = {"capacity_factor", "load_balance_over", "mtp_num_layers"}
    assert left - adapters == {"model_name"} | trained


KEYS = {
    **DEFAULTS,
    "base_num_decoder_layers": 4,
    "head_dim": 16,
    "base_mlp_dim": 24,
    "initializer_range": 0.02,
}
YARN = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "same",
    [
        {"layer_pattern": "global, global"},
        {"query_pre_attn_scalar": 16},
        {"base_moe_mlp_dim": 24},
        {"initializer_range": 0.5},
        {"norm_topk_prob": False},
        {"mla": None},
        {"rope_scaling": {**YARN, "beta_fast": 32, "truncate": True}},
    ],
)
def test_keys_that_say_the_same_are_the_same(same):
    scaled = KEYS | ({"rope_scaling": YARN} if "rope_scaling" in same else {})
    assert same_architecture(scaled, KEYS | same) == []


def test_keys_that_say_something_else_are_named():
    for key, value in {
        "layer_pattern": "global,local",
        "query_pre_attn_scalar": 15,
        "num_experts": 2,
        "qk_norm": "head",
        "rope_scaling": RopeScaling("linear", 2.0),
    }.items():
        assert key in same_architecture(KEYS, KEYS | {key: value})


# ---- The weights' format -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "quantization", TABLE["quantized"], ids=lambda each: each.get("quant_method", "")
)
def test_quantized_formats_are_read_leave_the_architecture_alone_and_are_not_written(
    quantization,
):
    fields = LLAMA | {"quantization_config": quantization}
    keys = model_keys(fields, "config.json")
    assert keys == model_keys(LLAMA, "config.json")
    assert quantization_of(fields)["quant_method"] == quantization.get(
        "quant_method", "bitsandbytes"
    )
    assert "quantization_config" not in written(keys, fields)


def test_the_number_format_of_the_weights():
    quantized = {"quantization_config": TABLE["quantized"][0]}
    for fields, expected in (
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"quantization_config": {}}, "float32"),
        (quantized, "bfloat16"),
        (quantized | {"torch_dtype": "float16"}, "float16"),
    ):
        assert stored_dtype(fields) == expected


# ---- Models of images and text, and models that are not built ------------------------------------------------------


def test_the_text_part_has_the_fields_of_the_whole_that_are_not_about_images():
    whole = {
        "model_type": "gemma3",
        "vision_config": {"hidden_size": 9},
        "mm_tokens_per_image": 256,
        "dtype": "bfloat16",
    }
    inner = {"hidden_size": 2560, "sliding_window": None, "vocab_size": None}
    text = text_fields(whole | {"text_config": inner})
    expected = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_attention_heads": 8,
        "dtype": "bfloat16",
        "sliding_window": None,
    }
    assert {key: text[key] for key in expected} == expected
    assert "vision_config" not in text
    assert text_fields({"model_type": "llama"}) == {"model_type": "llama"}
    for outer, within, is_tied in (
        ({}, {}, True),
        ({}, {"tie_word_embeddings": False}, False),
        ({"tie_word_embeddings": False}, {"tie_word_embeddings": True}, False),
        ({"tie_word_embeddings": True}, {}, True),
    ):
        text = text_fields(whole | outer | {"text_config": inner | within})
        assert text["tie_word_embeddings"] is is_tied


def test_what_transformers_does_not_look_for_outside_of_the_text_part_is_refused():
    text = {
        "model_type": "mistral",
        "hidden_size": 32,
        "num_attention_heads": 4,
        "sliding_window": None,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
    }
    whole = {
        "model_type": "mistral3",
        "text_config": text,
        "sliding_window": 9,
        "max_position_embeddings": 64,
    }
    with pytest.raises(UserError) as refusal:
        model_keys(whole, "x")
    inner, outer = refusal.value.problems
    assert inner.startswith("x: rope_scaling=")
    assert outer.startswith("x: mistral3.sliding_window=")
    for wrong in (None, {}, [], {"model_type": "llama"}):
        with pytest.raises(UserError, match="text_config"):
            text_fields({"model_type": "mistral3", "text_config": wrong})
