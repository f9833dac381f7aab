"""A directory brings the architecture, its dtype and tokenizer, by the files that count; contradictions are named."""

import contextlib
import json

import pytest
from hypothesis import HealthCheck, given, settings

from maxtext_lite.config import UserError, load_config
from maxtext_lite.config.hf.directory import (
    CARRIED,
    INDEX,
    WHOLE,
    directory_origin,
    has_hf_weights,
    hf_directory,
    tokenizer_keys,
    weight_files,
    weight_map,
)
from maxtext_lite.training.run_files import run_directory
from tests.config.hf.test_config import GPT2, LLAMA3_8B
from tests.mutations import changed

LLAMA = LLAMA3_8B | {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2}


@pytest.fixture
def directory(tmp_path):
    """A Hugging Face directory, whose weights are not looked at."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def load(directory, *overrides, path=None):
    return load_config(path, [f"load_parameters_path={directory}", *overrides])


def test_the_architecture_dtype_and_tokenizer_come_with_the_directory(directory):
    config = load(directory)
    assert (config.base_emb_dim, config.base_num_decoder_layers, config.vocab_size) == (64, 2, 300)
    assert (config.dtype, config.weight_dtype) == ("bfloat16", "float32")
    assert (config.tokenizer_type, config.tokenizer_path) == ("huggingface", str(directory / "tokenizer.json"))
    assert config.origins["base_emb_dim"] == str(directory / "config.json")
    assert directory_origin(str(directory)) == str(directory / "config.json")
    assert directory_origin("") is None


def test_what_the_user_states_wins_where_it_does_not_contradict(directory, tmp_path):
    config = load(directory, "dtype=float32", "tokenizer_type=byte", "initializer_range=0.5", "base_emb_dim=64")
    assert (config.dtype, config.tokenizer_type, config.tokenizer_path) == ("float32", "byte", "")
    assert (config.initializer_range, config.base_emb_dim) == (0.5, 64)
    file = tmp_path / "mine.yml"
    file.write_text("dtype: float32\nqk_norm: none\nlayer_pattern: global,global\n")
    assert load(directory, path=file).dtype == "float32"


def test_a_directory_that_is_not_there_is_refused_unless_the_keys_say_what_the_model_is(tmp_path, monkeypatch):
    """As those of a run do, whose directory may have moved since."""
    absent = tmp_path / "absent"
    with pytest.raises(UserError, match=r"load_parameters_path=.*absent: there is no such directory in .*, and no key"):
        load(absent)
    assert load(absent, "model_name=llama3-8b").base_emb_dim == 4096
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "absent").mkdir()
    assert load("~/absent").base_emb_dim == load_config().base_emb_dim


def test_a_home_directory_is_found(directory, monkeypatch):
    monkeypatch.setenv("HOME", str(directory.parent))
    assert load(f"~/{directory.name}").base_emb_dim == 64
    config = load_config(None, ["base_output_directory=~/runs", "run_name=a"])
    assert run_directory(config) == directory.parent / "runs" / "a"


def test_every_key_that_contradicts_is_named(directory, tmp_path):
    file = tmp_path / "mine.yml"
    file.write_text("base_num_decoder_layers: 3\n")
    with pytest.raises(UserError) as refusal:
        load(directory, "base_emb_dim=128", "qk_norm=head", path=file)
    origin = directory / "config.json"
    assert refusal.value.problems == tuple(
        f"{key} ({where}) contradicts {origin}, which has {there}. Remove it; load_parameters_path decides the "
        "architecture."
        for key, where, there in (
            ("qk_norm=head", "command line", "none"),
            ("base_emb_dim=128", "command line", "64"),
            ("base_num_decoder_layers=3", str(file), "2"),
        )
    )


def test_a_model_name_contradicts_as_a_key_does(directory):
    with pytest.raises(UserError, match=r"base_emb_dim=576 \(models/smollm2-135m\.yml\) contradicts"):
        load(directory, "model_name=smollm2-135m")


def test_a_resolved_config_loads_without_its_directory(directory, tmp_path):
    from maxtext_lite.config import write_resolved

    write_resolved(load(directory), tmp_path / "run.yml")
    assert load_config(tmp_path / "run.yml") == load(directory)
    (directory / "config.json").unlink()
    assert load_config(tmp_path / "run.yml").base_emb_dim == 64


def test_examples_are_no_longer_than_learned_positions(directory):
    (directory / "config.json").write_text(json.dumps(GPT2 | {"n_positions": 100}))
    assert load(directory).max_target_length == 100
    (directory / "config.json").write_text(json.dumps(GPT2))
    assert load(directory).max_target_length == 256


def test_the_tokenizer_of_a_run_from_scratch_is_that_which_it_stored(tmp_path):
    (tmp_path / "run" / "hf").mkdir(parents=True)
    assert load(tmp_path / "run").tokenizer_type == "byte"
    stored = tmp_path / "run" / "hf" / "tokenizer.model"
    stored.write_text("")
    config = load(tmp_path / "run", "base_emb_dim=64")
    assert (config.tokenizer_type, config.tokenizer_path) == ("sentencepiece", str(stored))
    assert config.origins["tokenizer_path"] == str(tmp_path / "run" / "hf")
    assert load(tmp_path / "run", "tokenizer_type=byte").tokenizer_path == ""


def test_a_tokenizer_in_another_form_is_not_replaced_in_silence(directory):
    (directory / "tokenizer.json").unlink()
    (directory / "vocab.json").write_text("{}")
    with pytest.raises(UserError, match=r"has a vocab\.json, but no tokenizer\.json"):
        load(directory)
    assert load(directory, "tokenizer_type=byte").tokenizer_type == "byte"


def test_problems_of_the_directory_are_problems_of_the_config(directory):
    (directory / "config.json").write_text(json.dumps(LLAMA | {"hidden_act": "tanh"}))
    with pytest.raises(UserError, match="hidden_act=tanh is none of"):
        load(directory)
    (directory / "config.json").write_text(json.dumps(LLAMA))
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin is pickled"):
        load(directory)


def test_rules_between_fields_name_them_and_their_file(directory):
    (directory / "config.json").write_text(json.dumps(LLAMA | {"num_key_value_heads": 3, "head_dim": 7}))
    with pytest.raises(UserError) as refusal:
        load(directory, "steps=0")
    origin = directory / "config.json"
    assert refusal.value.problems == (
        "steps=0 must be at least 1, or -1. Nearest that works: 1.",
        f"{origin}: num_key_value_heads=3 does not divide num_attention_heads=32. Nearest that work: 2 or 4.",
        f"{origin}: head_dim=7 must be even for rotary positions. Nearest that work: 6 or 8.",
    )


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changed(LLAMA))
def test_any_config_json_is_one_or_refused(directory, stated):
    (directory / "config.json").write_bytes(json.dumps(stated).encode("utf-8", "surrogatepass"))
    with contextlib.suppress(UserError):
        load(directory)


# ---- The files -----------------------------------------------------------------------------------------------------


def test_an_adapter_is_not_taken_for_a_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"adapter_model\.safetensors belongs to an adapter in PEFT's layout"):
        has_hf_weights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"adapter_config\.json: peft_type=null is not read: it must be LORA"):
        has_hf_weights(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_what_is_no_file_is_not_overlooked(name, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match=rf"{name} is a link to .*gone, which is not there"):
        has_hf_weights(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=rf"{name} is a directory, not a file"):
        has_hf_weights(tmp_path)


def test_directories_and_their_files(tmp_path):
    assert hf_directory(tmp_path) is None
    assert has_hf_weights(tmp_path) is False
    (tmp_path / "config.json").write_text("{}")
    assert hf_directory(tmp_path) == tmp_path
    with pytest.raises(UserError, match=r"has a config\.json, but no \.safetensors file"):
        has_hf_weights(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"pytorch_model\.bin is pickled"):
        has_hf_weights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert has_hf_weights(tmp_path) is True
    assert tokenizer_keys(tmp_path) == {}
    (tmp_path / "tokenizer.model").write_bytes(b"")
    assert tokenizer_keys(tmp_path)["tokenizer_type"] == "sentencepiece"
    (tmp_path / "tokenizer.json").write_bytes(b"")
    path = str(tmp_path / "tokenizer.json")
    assert tokenizer_keys(tmp_path) == {"tokenizer_type": "huggingface", "tokenizer_path": path}
    (tmp_path / "run" / "hf").mkdir(parents=True)
    (tmp_path / "run" / "hf" / "config.json").write_text("{}")
    assert hf_directory(tmp_path / "run") == tmp_path / "run" / "hf"
    assert has_hf_weights(tmp_path / "run") is False
    assert CARRIED[0] == "config.json"


def names(directory):
    return [file.name for file in weight_files(directory)]


def test_an_index_or_one_file_goes_before_all(tmp_path):
    assert names(tmp_path) == []
    for name in ("b.safetensors", "a.safetensors"):
        (tmp_path / name).write_bytes(b"")
    assert names(tmp_path) == ["a.safetensors", "b.safetensors"]
    (tmp_path / WHOLE).write_bytes(b"")
    assert names(tmp_path) == [WHOLE]
    assert weight_map(tmp_path) == {}
    (tmp_path / WHOLE).unlink()
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "b.safetensors", "y": "b.safetensors"}}))
    assert names(tmp_path) == ["b.safetensors"]
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(UserError, match=r"lacks b\.safetensors, which model\.safetensors\.index\.json names"):
        weight_files(tmp_path)


def test_of_an_index_and_one_file_config_json_names_the_one_that_counts(tmp_path):
    """transformers reads the file, and others the index: without a name neither is taken silently."""
    for name in (WHOLE, "b.safetensors"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "b.safetensors"}}))
    with pytest.raises(UserError, match=r"has model\.safetensors, which transformers reads, and model"):
        weight_files(tmp_path)
    for stated, found in ((WHOLE, WHOLE), (INDEX, "b.safetensors")):
        (tmp_path / "config.json").write_text(json.dumps({"transformers_weights": stated}))
        assert names(tmp_path) == [found]
    (tmp_path / "config.json").write_text(json.dumps({"transformers_weights": "b.safetensors"}))
    with pytest.raises(UserError, match=r"config\.json: transformers_weights=b\.safetensors is not read: it must be"):
        weight_files(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": WHOLE}}))
    assert names(tmp_path) == [WHOLE]


@pytest.mark.parametrize(
    "text", ['{"weight_map": []}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": ".."}}', "[]", "[" * 200_000, ""]
)
def test_an_index_that_names_no_files_is_refused(text, tmp_path):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(UserError, match=r"model\.safetensors\.index\.json (is not|names)"):
        weight_files(tmp_path)
