"""A directory brings its architecture, dtype, tokenizer and adapter, by the files that count."""

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from maxtext_lite.config import UserError, load_config, write_resolved
from maxtext_lite.hf.adapter import adapter_of, missing_base
from maxtext_lite.hf.directory import has_hf_weights, hf_directory, tokenizer_keys
from maxtext_lite.hf.model_directory import config_of_run, directory_config, hf_config
from maxtext_lite.hf.safetensors import INDEX, WHOLE, weight_files, weight_map
from maxtext_lite.training.run_files import run_directory
from tests.config.hf.test_families import LLAMA, TABLE

SMALL = LLAMA | {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2}


def written(path, files):
    """A directory with files: texts, or JSON."""
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(
            content if isinstance(content, str) else json.dumps(content)
        )
    return path


@pytest.fixture
def directory(tmp_path):
    """A Hugging Face directory, whose weights are not looked at."""
    return written(
        tmp_path / "hf", {"config.json": SMALL, WHOLE: "", "tokenizer.json": "{}"}
    )


def load(directory, *overrides, path=None):
    return load_config(path, [f"load_parameters_path={directory}", *overrides])


def refused(named, call, *arguments):
    with pytest.raises(UserError) as refusal:
        call(*arguments)
    assert any(named in problem for problem in refusal.value.problems), (
        refusal.value.problems
    )
    return refusal.value.problems


@pytest.mark.fast
def test_the_architecture_dtype_and_tokenizer_come_with_the_directory(directory):
    config = load(directory)
    assert (config.base_emb_dim, config.vocab_size) == (64, 300)
    assert (config.dtype, config.weight_dtype) == ("bfloat16", "float32")
    assert config.tokenizer_type == "huggingface"
    assert config.tokenizer_path == str(directory / "tokenizer.json")
    origin = str(directory / "config.json")
    assert config.origins["base_emb_dim"] == origin


def test_what_the_user_states_wins_where_it_does_not_contradict(directory, tmp_path):
    words = ["dtype=float32", "tokenizer_type=byte", "initializer_range=0.5"]
    config = load(directory, *words, "base_emb_dim=64")
    assert (config.dtype, config.initializer_range) == ("float32", 0.5)
    assert (config.tokenizer_type, config.tokenizer_path) == ("byte", "")
    (tmp_path / "right.yml").write_text("layer_pattern: global,global\n")
    assert load(directory, path=tmp_path / "right.yml").layer_pattern == "global,global"
    (tmp_path / "mine.yml").write_text("base_num_decoder_layers: 3\n")
    words = [f"load_parameters_path={directory}", "qk_norm=head"]
    problems = refused("", load_config, tmp_path / "mine.yml", words)
    for stated, problem in zip(
        ("qk_norm=head", "base_num_decoder_layers=3"), problems, strict=True
    ):
        assert problem.startswith(f"{stated} ")
        assert str(directory / "config.json") in problem
    refused("base_emb_dim=576", load, directory, "model_name=smollm2-135m")


def test_a_directory_that_is_not_there_is_refused_unless_the_keys_say_what_the_model_is(
    directory, monkeypatch
):
    """As those of a run do, whose directory may have moved since."""
    absent = directory.parent / "absent"
    refused(f"load_parameters_path={absent}", load, absent)
    assert load(absent, "model_name=llama3-8b").base_emb_dim == 4096
    config = load(directory)
    write_resolved(config, directory.parent / "run.yml")
    assert load_config(directory.parent / "run.yml") == config
    (directory / "config.json").unlink()
    assert load_config(directory.parent / "run.yml").base_emb_dim == 64
    monkeypatch.setenv("HOME", str(directory.parent))
    written(directory, {"config.json": SMALL})
    assert load("~/hf").base_emb_dim == 64
    config = load_config(None, ["base_output_directory=~/runs", "run_name=a"])
    assert run_directory(config) == directory.parent / "runs" / "a"


def test_problems_of_the_directory_are_problems_of_the_config(directory):
    written(directory, {"config.json": SMALL | {"hidden_act": "tanh"}})
    refused("hidden_act=tanh", load, directory)
    wrong = SMALL | {"num_key_value_heads": 3, "head_dim": 7}
    written(directory, {"config.json": wrong})
    problems = refused("steps=0", load, directory, "steps=0")
    for named, problem in zip(
        ("steps=0", "num_key_value_heads=3", "head_dim=7"), problems, strict=True
    ):
        assert named in problem
    written(directory, {"config.json": SMALL, "vocab.json": "{}"})
    (directory / "tokenizer.json").unlink()
    refused(
        "vocab.json", load, directory
    )  # a tokenizer in another form is not replaced in silence
    assert load(directory, "tokenizer_type=byte").tokenizer_type == "byte"
    (directory / WHOLE).rename(directory / "pytorch_model.bin")
    refused("pytorch_model.bin", load, directory, "tokenizer_type=byte")


# ---- The files -----------------------------------------------------------------------------------------------------


def test_directories_and_their_files(tmp_path):
    assert hf_directory(tmp_path) is None
    assert has_hf_weights(tmp_path) is False
    refused("config.json", hf_config, tmp_path)
    refused("config.yml", directory_config, tmp_path, "")
    written(tmp_path, {"config.json": "{}"})
    assert hf_directory(tmp_path) == tmp_path
    refused(".safetensors", has_hf_weights, tmp_path)
    written(tmp_path, {WHOLE: ""})
    assert has_hf_weights(tmp_path) is True
    assert tokenizer_keys(tmp_path) == {}
    for file, kind in (
        ("tokenizer.model", "sentencepiece"),
        ("tokenizer.json", "huggingface"),
    ):
        written(tmp_path, {file: ""})
        path = str(tmp_path / file)
        expected = {"tokenizer_type": kind, "tokenizer_path": path}
        assert tokenizer_keys(tmp_path) == expected
    written(tmp_path, {"run/hf/config.json": "{}"})
    assert hf_directory(tmp_path / "run") == tmp_path / "run" / "hf"
    assert has_hf_weights(tmp_path / "run") is False
    written(tmp_path, {"adapter_config.json": "{}", "adapter_model.safetensors": ""})
    refused("peft_type=null", has_hf_weights, tmp_path)


@pytest.mark.parametrize("name", ["config.json", WHOLE, INDEX])
def test_what_is_no_file_is_not_overlooked(name, tmp_path):
    written(tmp_path, {"config.json": "{}", WHOLE: ""})
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to(tmp_path / "gone")
    refused(name, has_hf_weights, tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    refused(name, has_hf_weights, tmp_path)


def test_an_index_or_one_file_goes_before_all_and_of_both_config_json_names_the_one_that_counts(
    tmp_path,
):
    """transformers reads the file, and others the index: without a name neither is taken silently."""

    def names():
        return [file.name for file in weight_files(tmp_path)]

    assert names() == []
    written(tmp_path, {"b.safetensors": "", "a.safetensors": ""})
    assert names() == ["a.safetensors", "b.safetensors"]
    written(tmp_path, {WHOLE: ""})
    assert (names(), weight_map(tmp_path)) == ([WHOLE], {})
    written(
        tmp_path, {INDEX: {"weight_map": {"x": "b.safetensors", "y": "b.safetensors"}}}
    )
    refused(WHOLE, weight_files, tmp_path)
    for stated, found in ((WHOLE, WHOLE), (INDEX, "b.safetensors")):
        written(tmp_path, {"config.json": {"transformers_weights": stated}})
        assert names() == [found]
    written(tmp_path, {"config.json": {"transformers_weights": "b.safetensors"}})
    refused("transformers_weights=b.safetensors", weight_files, tmp_path)
    for name in ("config.json", WHOLE, "b.safetensors"):
        (tmp_path / name).unlink()
    refused("b.safetensors", weight_files, tmp_path)


# ---- An adapter decides the LoRA keys, and its base the rest -------------------------------------------------------

FIELDS = TABLE["adapter"]


def adapter(path, modules=("self_attn.q_proj", "self_attn.v_proj"), **fields):
    written(path, {"its-base/config.json": LLAMA, f"its-base/{WHOLE}": ""})
    written(path, {"adapter/adapter_config.json": FIELDS | fields})
    names = [
        f"base_model.model.model.layers.0.{module}.lora_{which}.weight"
        for module in modules
        for which in "AB"
    ]
    stored = {name: np.zeros((1, 1), np.float32) for name in names}
    safetensors.numpy.save_file(stored, path / "adapter" / "adapter_model.safetensors")
    return path / "adapter"


@pytest.mark.parametrize(
    ("fields", "rank", "alpha"),
    [
        ({}, 4, 6),
        ({"use_rslora": True}, 4, 12),  # alpha / sqrt(r) = 3 = 12 / 4
        ({"target_modules": r".*self_attn\.[qv]_proj"}, 4, 6),
        ({"target_modules": ["self_attn.q_proj", "v_proj", "nothing"]}, 4, 6),
        (
            {"rank_pattern": {"q_proj": 8}},
            8,
            12,
        ),  # the others' alpha / r = 1.5 = 12 / 8
        ({"rank_pattern": {r"layers\.[01]\..*": 2}}, 2, 3),
        ({"exclude_modules": ["k_proj"], "layers_to_transform": [0]}, 4, 6),
    ],
)
def test_an_adapter_decides_the_lora_keys_and_its_base_the_rest(
    fields, rank, alpha, tmp_path
):
    path = adapter(tmp_path, **fields)
    assert adapter_of(path).keys == {
        "lora_rank": rank,
        "lora_alpha": alpha,
        "lora_targets": "query,value",
    }
    assert adapter_of(tmp_path / "its-base") is None
    assert has_hf_weights(path)
    assert hf_directory(path).resolve() == tmp_path / "its-base"
    config = load(path, "tokenizer_type=byte", "lora_targets=value, query")
    assert (config.lora_rank, config.base_emb_dim) == (rank, 4096)


def test_a_run_says_what_its_model_is_where_the_base_of_its_adapter_is_gone(tmp_path):
    path, run = adapter(tmp_path), tmp_path / "run"
    run.mkdir()
    write_resolved(load(path, "tokenizer_type=byte"), run / "config.yml")
    assert missing_base(path) is None
    (tmp_path / "its-base").rename(tmp_path / "gone")
    assert missing_base(path) == "../its-base"
    assert hf_directory(path) is None
    found = config_of_run(run)
    assert (found.lora_targets, found.base_emb_dim) == ("query,value", 4096)
    for more in ([], ["base_emb_dim=4096"]):
        words = ["tokenizer_type=byte", *more]
        named = "base_model_name_or_path=../its-base"
        assert len(refused(named, load, path, *words)) == 1
    refused("base_model_name_or_path", has_hf_weights, path)


@pytest.mark.parametrize(
    "stated", ["lora_rank=8", "lora_rank=0", "lora_targets=all", "lora_alpha=3"]
)
def test_a_stated_lora_key_may_not_contradict_it(stated, tmp_path):
    path = adapter(tmp_path)
    problems = refused(
        f"{stated} (command line)", load, path, "tokenizer_type=byte", stated
    )
    assert any(str(path / "adapter_config.json") in problem for problem in problems)


@pytest.mark.parametrize(
    "fields", [*TABLE["adapters_refused"], {"lora_alpha": 10**400}], ids=str
)
def test_what_lora_keys_cannot_express_is_refused_by_its_field(fields, tmp_path):
    path = adapter(tmp_path, **fields)
    (field,) = fields
    refused(f"{path / 'adapter_config.json'}: {field}", adapter_of, path)


@pytest.mark.parametrize(
    ("prefix", "module", "way_out"),
    [
        ("_orig_mod.base_model.model.", "self_attn.q_proj.lora_A", "_orig_mod"),
        ("base_model.model._orig_mod.", "self_attn.q_proj.lora_A", "_orig_mod"),
        ("base_model.model.", "embed_tokens.lora_embedding_A", "merge_and_unload"),
        ("base_model.model.", "lm_head.lora_A", "merge_and_unload"),
        ("base_model.model.", "lm_head", "merge_and_unload"),
    ],
)
def test_an_adapter_with_other_tensors_names_the_way_out(
    prefix, module, way_out, tmp_path
):
    path = adapter(tmp_path)
    stored = {f"{prefix}model.{module}.weight": np.zeros((1, 1), np.float32)}
    safetensors.numpy.save_file(stored, path / "adapter_model.safetensors")
    with pytest.raises(UserError, match=f"Nearest that works: .*{way_out}"):
        adapter_of(path)


# ---- A directory's config is that of its run, or what its config.json and tokenizer say ----------------------------


@pytest.mark.parametrize("name", ["'hf'", "[hf]", "a: b"])
def test_the_name_of_a_directory_is_taken_as_it_is(tmp_path, monkeypatch, name):
    written(
        tmp_path, {"hf/config.json": SMALL | {"hidden_size": 128}, f"hf/{WHOLE}": ""}
    )
    written(tmp_path / name, {"config.json": SMALL, WHOLE: ""})
    monkeypatch.chdir(tmp_path)
    config = hf_config(Path(name))
    assert (config.load_parameters_path, config.base_emb_dim) == (name, 64)


def run_of(run, working_directory, *keys):
    """A run directory with a tokenizer and a template, as a run in a working directory leaves it."""
    files = {"hf/tokenizer.json": "{}", "hf/chat_template.jinja": "{}"}
    written(
        run,
        {**files, "environment.json": {"working_directory": str(working_directory)}},
    )
    write_resolved(load_config(None, keys), run / "config.yml")
    return run


def test_a_run_has_the_tokenizer_and_the_template_that_it_stored_whatever_has_their_names_here(
    tmp_path, monkeypatch
):
    keys = [
        "dataset_type=sft",
        "dataset_path=x.jsonl",
        "tokenizer_type=huggingface",
        "tokenizer_path=tokenizer.json",
        "chat_template=t.jinja",
    ]
    run = run_of(tmp_path / "run", tmp_path / "gone", *keys)
    monkeypatch.chdir(
        written(tmp_path, {"tokenizer.json": "another", "t.jinja": "another"})
    )
    stored = str(run / "hf" / "tokenizer.json")
    config = directory_config(run, "")
    assert config.tokenizer_path == stored
    assert config.chat_template == str(run / "hf" / "chat_template.jinja")
    config = config_of_run(run, ["chat_template=t.jinja", "dtype=float16"])
    assert (config.tokenizer_path, config.chat_template) == (stored, "t.jinja")
    # As imported: only what is gone comes from there.
    (run / "environment.json").unlink()
    assert directory_config(run, "").chat_template == "t.jinja"


def test_what_starts_from_a_run_begins_texts_as_that_run_did(directory, tmp_path):
    keys = ["tokenizer_type=huggingface", "tokenizer_path=tokenizer.json"]
    for words, begins in (([], "auto"), (["add_bos=false"], False)):
        run = run_of(tmp_path / f"run-{begins}", tmp_path, *keys, *words)
        assert load(run).add_bos == begins
        assert load(run, "add_bos=auto").add_bos == "auto"
        assert load(run, "tokenizer_type=byte").add_bos == "auto"
        (run / "hf" / "config.json").write_bytes(
            (directory / "config.json").read_bytes()
        )
        assert load(run).add_bos == begins, "also where the run began with a model"


@pytest.mark.parametrize(
    ("stated", "here", "expected"),
    [
        ("texts/*.txt", None, "{glob}/texts/*.txt"),
        ("texts/*.txt", "texts/c.txt", "texts/*.txt"),
        (
            "[{path: texts/a.txt, weight: 1}, {path: 'texts/b*', weight: 2}]",
            None,
            '[{"path": "{there}/texts/a.txt", "weight": 1, "max_epochs": -1, "name": "a"}, '
            '{"path": "{glob}/texts/b*", "weight": 2, "max_epochs": -1, "name": "b*"}]',
        ),
        ("gone/*.txt", None, "gone/*.txt"),
        ("shakespeare.jsonl.gz", None, "shakespeare.jsonl.gz"),
    ],
)
def test_data_that_are_not_here_are_those_of_the_runs_working_directory(
    stated, here, expected, tmp_path, monkeypatch
):
    there = written(tmp_path / "of [the] run", {"texts/a.txt": "x", "texts/b.txt": "x"})
    run = run_of(tmp_path / "run", there, f"dataset_path={stated}")
    monkeypatch.chdir(written(run, {here: "x"} if here else {}))
    expected = expected.replace("{there}", str(there)).replace(
        "{glob}", f"{tmp_path}/of [[]the] run"
    )
    assert str(config_of_run(run).dataset_path) == expected
    assert config_of_run(run, ["dataset_path=other.txt"]).dataset_path == "other.txt"
