"""A directory's config is that of its run, or what its config.json and tokenizer say."""

import json
from pathlib import Path

import pytest

from maxtext_lite.config import UserError, load_config, write_resolved
from maxtext_lite.config.hf.directory import files_of_model
from maxtext_lite.config.hf.model_directory import config_of_run, directory_config, hf_config

LLAMA = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def hf_directory(path, **fields):
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({**LLAMA, **fields}))
    (path / "model.safetensors").write_bytes(b"")
    return path


def test_a_hugging_face_directory_has_its_architecture_and_the_format_of_its_weights(tmp_path):
    config = hf_config(hf_directory(tmp_path / "one", torch_dtype="bfloat16"), ["dtype=float32"])
    assert (config.base_emb_dim, config.weight_dtype, config.dtype) == (32, "bfloat16", "float32")
    assert (config.dataset_type, config.tokenizer_type) == ("synthetic", "byte"), "it has no tokenizer"
    assert hf_config(hf_directory(tmp_path / "two", torch_dtype="float16")).weight_dtype == "float32"


@pytest.mark.parametrize("name", ["hf #1", "'hf'", "null", "[hf]", "a: b"])
def test_the_name_of_a_directory_is_taken_as_it_is(tmp_path, monkeypatch, name):
    hf_directory(tmp_path / "hf", hidden_size=64)
    hf_directory(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    config = hf_config(Path(name))
    assert (config.load_parameters_path, config.base_emb_dim) == (name, 32)


def test_a_run_directory_has_its_own_config_and_where_it_was_moved_its_tokenizer(tmp_path):
    gone = tmp_path / "gone" / "tokenizer.json"
    run = tmp_path / "run"
    hf_directory(run / "hf")
    keys = ["vocab_size=96", "tokenizer_type=huggingface", f"tokenizer_path={gone}", "base_emb_dim=64"]
    write_resolved(load_config(None, keys), run / "config.yml")
    assert directory_config(run, "").tokenizer_path == str(gone)
    (run / "hf" / "tokenizer.json").write_text("{}")
    config = directory_config(run, "float16")
    assert (config.tokenizer_path, config.dtype) == (str(run / "hf" / "tokenizer.json"), "float16")
    gone.parent.mkdir()
    gone.write_text("{}")
    assert directory_config(run, "").tokenizer_path == str(gone)


def test_a_tokenizer_below_the_home_directory_is_the_runs_own(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    run = tmp_path / "run"
    hf_directory(run / "hf")
    (run / "hf" / "tokenizer.json").write_text("{}")
    keys = ["vocab_size=96", "tokenizer_type=huggingface", "tokenizer_path=~/tokenizer.json"]
    write_resolved(load_config(None, keys), run / "config.yml")
    assert directory_config(run, "").tokenizer_path == "~/tokenizer.json"


def run_directory(run, working_directory, *keys):
    """A run directory with a tokenizer and a template, as a run in a working directory leaves it."""
    (run / "hf").mkdir(parents=True)
    for name in ("tokenizer.json", "chat_template.jinja"):
        (run / "hf" / name).write_text("{}")
    write_resolved(load_config(None, keys), run / "config.yml")
    (run / "environment.json").write_text(json.dumps({"working_directory": str(working_directory)}))
    return run


def test_a_run_has_the_tokenizer_and_the_template_that_it_stored_whatever_has_their_names_here(tmp_path, monkeypatch):
    keys = ["dataset_type=sft", "dataset_path=x.jsonl", "tokenizer_type=huggingface", "tokenizer_path=tokenizer.json",
            "chat_template=t.jinja"]  # fmt: skip
    run = run_directory(tmp_path / "run", tmp_path / "gone", *keys)
    monkeypatch.chdir(tmp_path)
    for name in ("tokenizer.json", "t.jinja"):
        (tmp_path / name).write_text("another")
    stored = (str(run / "hf" / "tokenizer.json"), str(run / "hf" / "chat_template.jinja"))
    config = directory_config(run, "")
    assert (config.tokenizer_path, config.chat_template) == stored
    config = config_of_run(run, ["chat_template=t.jinja", "dtype=float16"])
    assert (config.tokenizer_path, config.chat_template, config.dtype) == (stored[0], "t.jinja", "float16")
    (run / "environment.json").unlink()  # as imported: only what is gone comes from there
    assert directory_config(run, "").chat_template == "t.jinja"


@pytest.mark.parametrize(("stated", "here", "expected"), [
    ("texts/*.txt", None, "{glob}/texts/*.txt"),
    ("texts/*.txt", "texts/c.txt", "texts/*.txt"),
    ("texts", None, "{there}/texts"),
    ("[{path: texts/a.txt, weight: 1}, {path: 'texts/b*', weight: 2}]", None,
     '[{"path": "{there}/texts/a.txt", "weight": 1, "max_epochs": -1, "name": "a"}, '
     '{"path": "{glob}/texts/b*", "weight": 2, "max_epochs": -1, "name": "b*"}]'),
    ("{there}/gone/*.txt", None, "{there}/gone/*.txt"),
    ("gone/*.txt", None, "gone/*.txt"),
    ("shakespeare.jsonl.gz", None, "shakespeare.jsonl.gz"),
])  # fmt: skip
def test_data_that_are_not_here_are_those_of_the_runs_working_directory(stated, here, expected, tmp_path, monkeypatch):
    there = tmp_path / "of [the] run"
    (there / "texts").mkdir(parents=True)
    for name in ("a.txt", "b.txt"):
        (there / "texts" / name).write_text("x")
    run = run_directory(tmp_path / "run", there, f"dataset_path={stated.replace('{there}', str(there))}")
    monkeypatch.chdir(run)
    if here:
        (run / here).parent.mkdir()
        (run / here).write_text("x")
    expected = expected.replace("{there}", str(there)).replace("{glob}", f"{tmp_path}/of [[]the] run")
    assert str(config_of_run(run).dataset_path) == expected
    assert config_of_run(run, ["dataset_path=other.txt"]).dataset_path == "other.txt"


def test_a_run_that_was_moved_has_the_files_of_its_model_where_it_is_now(tmp_path, monkeypatch):
    """A resumed run, whose config.yml no longer names the model that it began with."""
    words = ["run_name=before", "base_output_directory=runs", "dataset_type=synthetic"]
    run = run_directory(tmp_path / "moved", tmp_path, *words)
    (run / "checkpoints/3").mkdir(parents=True)
    (run / "hf/config.json").write_text("{}")
    monkeypatch.chdir(run)
    assert files_of_model(config_of_run(Path())) == run / "hf"
    assert files_of_model(config_of_run(run, words)) is None, "a stated run directory is another one"


def test_a_directory_that_is_neither_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"is not a run directory: it has no config\.yml\. Nor is it a Hugging Face"):
        directory_config(tmp_path, "")
    with pytest.raises(UserError, match=r"is not a Hugging Face directory: it has no config\.json"):
        hf_config(tmp_path)
