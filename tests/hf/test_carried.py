"""Files that go with a model, and the tokens after which its texts end."""

import json

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.hf import carry_files, stop_ids_of


def test_files_about_a_model_go_with_it_and_weights_do_not(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out" / "hf"
    source.mkdir()
    for name in ("config.json", "tokenizer.json", "merges.txt", "model.safetensors", "modeling.py"):
        (source / name).write_text(name)
    assert carry_files(source, out, but=["merges.txt"]) == ["config.json", "tokenizer.json"]
    assert {file.name: file.read_text() for file in out.iterdir()} == {
        name: name for name in ("config.json", "tokenizer.json")
    }


@pytest.mark.parametrize(("generation", "config", "expected"), [
    (None, {"eos_token_id": 2}, [2]), ({"eos_token_id": [7, 5]}, {"eos_token_id": 5}, [7, 5]), ({}, {}, []),
    ({"eos_token_id": None}, {"eos_token_id": None}, []),
])  # fmt: skip
def test_stop_tokens_are_those_of_both_files(generation, config, expected, tmp_path):
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert stop_ids_of(tmp_path) == expected


@pytest.mark.parametrize("value", ["x", -1, 2.5, True, [[2]], [None], {"a": 1}, float("nan")])
def test_what_is_no_token_is_named_with_its_file(value, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(UserError, match=r"generation_config\.json: eos_token_id=.* is not a token's number"):
        stop_ids_of(tmp_path)


def test_a_link_to_nothing_is_not_passed_over(tmp_path):
    (tmp_path / "tokenizer.json").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match=r"tokenizer\.json is a link to"):
        carry_files(tmp_path, tmp_path / "out")
    (tmp_path / "generation_config.json").mkdir()
    with pytest.raises(UserError, match=r"generation_config\.json is a directory"):
        stop_ids_of(tmp_path)
