"""The text part of a model of images, and the reasons of what is not built."""

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.config.hf.config import model_keys
from maxtext_lite.config.hf.families import FAMILIES
from maxtext_lite.config.hf.text_tower import TOWERS, text_fields, text_tensor, unbuilt


def test_the_text_part_has_the_fields_of_the_whole_that_are_not_about_images():
    whole = {
        "model_type": "gemma3", "vision_config": {"hidden_size": 9}, "mm_tokens_per_image": 256, "dtype": "bfloat16",
        "text_config": {"hidden_size": 2560, "sliding_window": None, "vocab_size": None},
    }  # fmt: skip
    text = text_fields(whole)
    assert text["model_type"] == "gemma3_text"
    assert (text["hidden_size"], text["num_attention_heads"], text["dtype"]) == (2560, 8, "bfloat16")
    assert text["sliding_window"] is None
    assert "vision_config" not in text
    assert text_fields({"model_type": "llama"}) == {"model_type": "llama"}


@pytest.mark.parametrize(
    ("outer", "inner", "tied"),
    [
        ({}, {}, True),
        ({"tie_word_embeddings": False}, {"tie_word_embeddings": True}, False),
        ({}, {"tie_word_embeddings": False}, False),
        ({"tie_word_embeddings": True}, {}, True),
    ],
)
def test_the_whole_model_says_whether_its_table_is_tied(outer, inner, tied):
    text = text_fields({"model_type": "gemma3", "text_config": {"hidden_size": 8, **inner}, **outer})
    assert text["tie_word_embeddings"] is tied


def test_what_transformers_does_not_look_for_outside_of_the_text_part_is_refused():
    text = {
        "model_type": "mistral", "hidden_size": 32, "num_attention_heads": 4, "sliding_window": None,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
    }  # fmt: skip
    whole = {"model_type": "mistral3", "text_config": text, "sliding_window": 9, "max_position_embeddings": 64}
    with pytest.raises(UserError) as refusal:
        model_keys(whole, "x")
    assert refusal.value.problems == (
        "x: rope_scaling={rope_type: yarn, factor: 2} lacks original_max_position_embeddings.",
        "x: mistral3.sliding_window=9 is not a field of mistral that maxtext_lite knows, and could change the logits. "
        "If it does not, remove it.",
    )


@pytest.mark.parametrize("wrong", [None, {}, [], {"model_type": "llama"}])
def test_another_text_part_is_refused(wrong):
    with pytest.raises(UserError, match="text_config"):
        text_fields({"model_type": "mistral3", "text_config": wrong})


def test_tensors_of_text_have_their_names_and_those_of_images_none():
    for name in ("language_model.model.norm.weight", "model.language_model.norm.weight"):
        assert text_tensor(name) == "model.norm.weight"
    assert text_tensor("language_model.lm_head.weight") == text_tensor("lm_head.weight") == "lm_head.weight"
    for name in ("vision_tower.a", "model.vision_tower.a", "multi_modal_projector.b", "model.multi_modal_projector.b"):
        assert text_tensor(name) is None


def test_what_is_built_has_no_reason_not_to_be():
    assert not [kind for kind in (*FAMILIES, *TOWERS) if unbuilt(kind)]
    assert not unbuilt("lama")
    for kind, word in (("mamba2", "state"), ("jamba", "some of"), ("qwen2_vl", "images"), ("gemma3n", "shared caches"),
                       ("whisper", "sound"), ("roberta", "directions"), ("bloom", "ALiBi")):  # fmt: skip
        assert word in unbuilt(kind)
