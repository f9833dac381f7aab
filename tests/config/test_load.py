import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maxtext_lite.config import ConfigError, UserError, load_config, packaged_directory, packaged_file, write_resolved
from maxtext_lite.config.schema import RLRunConfig
from tests.mutations import VALUES
from tests.refusals import changes

REPOSITORY = Path(__file__).resolve().parents[2]


def problems_of(*arguments):
    with pytest.raises(UserError) as refused:
        load_config(*arguments)
    return refused.value.problems


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_base_yml_is_the_default_and_holds_every_default():
    config = load_config()
    written = yaml.safe_load(packaged_file("configs", "base.yml").read_text())
    assert set(written) == set(config.origins)
    assert set(config.origins.values()) == {"base.yml"}
    assert config.steps == written["steps"]
    assert config == load_config("configs/base.yml") == load_config("base.yml")


def test_the_command_line_wins_over_the_file_and_the_file_over_its_base(here):
    Path("deep.yml").write_text("steps: 10\nseed: 1\nlog_period: 1\n")
    Path("my.yml").write_text("base: deep.yml\nseed: 2\nlog_period: 2\n")
    config = load_config("my.yml", ["log_period=3"])
    assert (config.steps, config.seed, config.log_period) == (10, 2, 3)
    assert [config.origins[key] for key in ("checkpoint_period", "steps", "seed", "log_period")] == [
        "base.yml", "deep.yml", "my.yml", "command line"]  # fmt: skip


def test_of_duplicate_overrides_the_last_wins_and_duplicate_keys_of_a_file_are_refused(here):
    assert load_config(None, ["steps=30", "steps=25"]).steps == 25
    Path("my.yml").write_text("steps: 30\nsteps: 25\n")
    assert problems_of("my.yml") == ("key 'steps' occurs twice in my.yml. Keep one of them.",)


def test_a_model_file_lies_between_base_yml_and_what_the_user_states(here):
    Path("my.yml").write_text("base_num_decoder_layers: 2\n")
    config = load_config("my.yml", ["model_name=llama3-8b", "head_dim=64"])
    assert (config.base_emb_dim, config.base_num_decoder_layers, config.head_dim) == (4096, 2, 64)
    assert config.origins["base_emb_dim"] == "models/llama3-8b.yml"
    assert config.origins["base_num_decoder_layers"] == "my.yml"
    assert config.origins["model_name"] == "command line"


def test_the_dimensions_of_one_model_do_not_pass_for_anothers(here):
    Path("my.yml").write_text("model_name: smollm2-135m\nbase_num_decoder_layers: 2\n")
    problems = problems_of("my.yml", ["model_name=llama3-8b"])
    assert len(problems) == 1
    assert problems[0].startswith("base_num_decoder_layers=2 in my.yml belongs to model_name=smollm2-135m there, ")
    assert load_config("my.yml", ["model_name=llama3-8b", "base_num_decoder_layers=2"]).base_num_decoder_layers == 2


def test_a_model_of_the_working_directory_is_found(here):
    Path("configs/models").mkdir(parents=True)
    Path("configs/models/mine.yml").write_text("base_emb_dim: 64\n")
    config = load_config(None, ["model_name=mine"])
    assert config.base_emb_dim == 64
    assert config.origins["base_emb_dim"] == "configs/models/mine.yml"


def test_a_config_with_every_key_needs_no_file_of_its_model(here, monkeypatch):
    Path("configs/models").mkdir(parents=True)
    Path("configs/models/mine.yml").write_text("base_emb_dim: 64\n")
    config = load_config(None, ["model_name=mine"])
    write_resolved(config, here / "config.yml")
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    assert load_config(here / "config.yml") == config
    assert load_config(here / "config.yml", ["model_name=mine", "steps=5"]).base_emb_dim == 64
    assert "model_name=other has no file" in problems_of(here / "config.yml", ["model_name=other"])[0]


def test_an_unknown_model_is_refused_with_those_there_are():
    (problem,) = problems_of(None, ["model_name=llama3_8b"])
    assert problem.startswith("model_name=llama3_8b has no file in configs/models/. Its family has: llama2-")
    assert problem.endswith("Did you mean 'llama3-8b'?")
    (problem,) = problems_of(None, ["model_name=0.25"])
    assert "There are models of: apertus, command, deepseek, " in problem
    assert problem.endswith("; model_name=default takes the dimensions from the config.")
    assert "has no file" in problems_of(None, ["model_name=../base"])[0]


def test_an_unknown_key_is_refused_with_its_place_and_the_nearest_key(here):
    assert problems_of(None, ["per_device_batchsize=3"]) == (
        "unknown key 'per_device_batchsize' (command line). Did you mean 'per_device_batch_size'?",
    )
    Path("my.yml").write_text("stps: 30\nxyzzy: 1\n")
    assert problems_of("my.yml") == (
        "unknown key 'stps' (my.yml). Did you mean 'steps'?",
        "unknown key 'xyzzy' (my.yml).",
    )


def test_keys_of_reinforcement_learning_take_one_line_which_says_what_to_write(here):
    Path("my.yml").write_text("base: base.yml\nbatch_size: 8\nstps: 3\nnum_generations: 4\nmicro_batch_size: 8\n")
    assert problems_of("my.yml", ["num_iterations=2"]) == (
        "unknown keys 'batch_size', 'num_generations' and 1 more (my.yml). They are keys of "
        "configs/post_train/rl.yml: give that file, or one whose base it is.",
        "unknown key 'stps' (my.yml). Did you mean 'steps'?",
        "unknown key 'num_iterations' (command line). It is a key of configs/post_train/rl.yml: give that file, or one "
        "whose base it is.",
    )
    Path("my.yml").write_text("base: post_train/rl.yml\nbatch_size: 8\nnum_generations: 4\nmicro_batch_size: 8\n")
    assert load_config("my.yml", ["num_iterations=2"]).num_generations == 4


def test_all_problems_are_reported_at_once(here):
    Path("my.yml").write_text("stps: 30\nseed: 1.5\nseed: 2.5\nbase_num_kv_heads: 3\n")
    assert problems_of("my.yml", ["steps=many", "optimizer=adam", "nonsense", "vocab_size=3"]) == (
        "key 'seed' occurs twice in my.yml. Keep one of them.",
        "'nonsense' (command line) is not of the form key=value.",
        "unknown key 'stps' (my.yml). Did you mean 'steps'?",
        "steps=many is text, not a number. Nearest that works: 250.",
        "seed=2.5 is not an integer. Nearest that work: 2 or 3.",
        "optimizer=adam is not one of adamw, sgd, adafactor, muon, lion. Nearest that works: adamw.",
        "base_num_kv_heads=3 does not divide base_num_query_heads=8. Nearest that work: 2 or 4.",
        "vocab_size=3 is less than the 257 tokens of tokenizer_type=byte. Nearest that works: 257.",
    )


def test_the_first_suggestions_of_all_lines_make_a_config():
    with pytest.raises(ConfigError) as refused:
        load_config(None, ["steps=0", "optimizer=adam", "base_num_kv_heads=3"])
    suggested = [f"{key}={value}" for problem in refused.value.problems for key, value in changes(problem)[0].items()]
    config = load_config(None, suggested)
    assert (config.steps, config.optimizer, config.base_num_kv_heads) == (1, "adamw", 2)


def test_a_missing_base_is_held_against_the_files_beside_the_one_that_names_it(here):
    Path("sub").mkdir()
    for name in ("othr.yml", "sub/othre.yml"):
        Path(name).touch()
    Path("sub/my.yml").write_text("base: other.yml\n")
    (problem,) = problems_of("sub/my.yml")
    assert problem == "no config file 'other.yml' (base of sub/my.yml). Did you mean 'othre.yml'?"


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"my.yml": "base: my.yml\n"}, "leads back to my.yml"),
        ({"my.yml": "base: a.yml\n", "a.yml": "base: my.yml\n"}, "leads back to my.yml"),
        ({"my.yml": "base: nowhere.yml\n"}, "no config file 'nowhere.yml' (base of my.yml)."),
        ({"my.yml": "base: 3\n"}, "base: 3 in my.yml is not the name of a file."),
        ({"my.yml": "- a\n"}, "my.yml is not a list of `key: value` lines."),
        ({"my.yml": "steps: [\n"}, "my.yml is not YAML ("),
        ({"my.yml": "steps: &a [*a]\n"}, "my.yml contains itself (line 1)."),
        ({}, "no config file 'my.yml'."),
    ],
)
def test_files_that_do_not_serve_are_refused(here, files, why):
    for name, text in files.items():
        Path(name).write_text(text)
    (problem,) = problems_of("my.yml")
    assert why in problem


def test_a_file_that_is_not_text_is_refused(here):
    Path("my.yml").write_bytes(b"\xff\xfe")
    assert problems_of("my.yml") == ("my.yml is not UTF-8 text.",)
    assert "the config file '.' is a directory" in problems_of(".")[0]


def test_a_base_is_looked_for_beside_the_file_and_then_among_the_shipped_ones(here):
    Path("sub").mkdir()
    Path("sub/base.yml").write_text("seed: 5\n")
    Path("sub/my.yml").write_text("base: base.yml\n")
    Path("my.yml").write_text("base: configs/base.yml\nsteps: 30\n")
    assert load_config("sub/my.yml").seed == 5
    assert load_config("sub/my.yml").origins["seed"] == "sub/base.yml"
    assert load_config("my.yml").origins["seed"] == "base.yml"


def test_auto_leaves_the_accumulation_open_too_unless_somebody_states_it(here):
    def keys(*words, file=None):
        config = load_config(file, words)
        return config.per_device_batch_size, config.gradient_accumulation_steps

    auto = "per_device_batch_size=auto"
    assert keys(auto) == keys("per_device_batch_size=-1", "gradient_accumulation_steps=-1")
    assert keys(auto, "gradient_accumulation_steps=2") == (-1, 2)
    path = here / "auto.yml"
    path.write_text("per_device_batch_size: auto\n")
    assert keys(file=path) == (-1, -1)
    assert keys("per_device_batch_size=4", file=path) == (4, 1)
    with pytest.raises(ConfigError, match="per_device_batch_size=automatic is text, not a number"):
        keys("per_device_batch_size=automatic")


def test_text_keys_take_text_as_written():
    config = load_config(None, ["run_name=007", "dataset_path=*.txt", "eval_dataset_path=[ab]*.txt", "tokenizer_path="])
    assert (config.run_name, config.dataset_path, config.eval_dataset_path) == ("007", "*.txt", "[ab]*.txt")
    assert config.tokenizer_path == ""
    assert load_config(None, ["run_name='a b'"]).run_name == "a b"
    assert load_config(None, ["remat_policy=none"]).remat_policy == "none"
    assert load_config(None, ["run_name=a=b"]).run_name == "a=b"
    assert load_config(None, ["run_name=#5"]).run_name == "#5"
    assert load_config(None, ["tokenizer_path=''"]).tokenizer_path == ""
    assert "run_name=null is not text" in problems_of(None, ["run_name=null"])[0]


@pytest.mark.parametrize("text", ["r1 #2", "'r1' #2", "!!str 5", "&a x", "x: y"])
def test_of_a_text_nothing_is_dropped(text):
    assert load_config(None, [f"dataset_path={text}"]).dataset_path == text


def test_base_is_no_key_of_the_command_line():
    assert problems_of(None, ["base=x.yml"])[0].startswith("base is a line of a config file")


def test_environment_variables_are_not_consulted(monkeypatch):
    for name in ("STEPS", "steps", "M_STEPS", "MAXTEXT_STEPS", "MAXTEXT_LITE_STEPS"):
        monkeypatch.setenv(name, "7")
    assert load_config().steps == 250


def test_only_files_inside_the_shipped_directory_are_shipped_files():
    assert packaged_file("configs", "configs/base.yml") == packaged_directory("configs") / "base.yml"
    assert packaged_file("configs", "../pyproject.toml") is None
    assert packaged_file("configs", "nothing.yml") is None
    assert packaged_file("assets", "shakespeare.jsonl.gz").is_file()


@pytest.mark.parametrize("layout", ["checkout", "wheel"])
def test_shipped_configs_are_found_from_any_directory(tmp_path, layout):
    root = tmp_path / "site"
    shutil.copytree(REPOSITORY / "maxtext_lite", root / "maxtext_lite", ignore=shutil.ignore_patterns("__pycache__"))
    inside = root / "maxtext_lite" if layout == "wheel" else root
    shutil.copytree(REPOSITORY / "configs", inside / "configs")
    program = (
        "import maxtext_lite; print(maxtext_lite.load_config('configs/models/llama3-8b.yml').base_emb_dim,"
        "maxtext_lite.load_config(None, ['model_name=smollm2-135m']).base_emb_dim, maxtext_lite.__file__)"
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=elsewhere,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["4096", "576", str(root / "maxtext_lite" / "__init__.py")]


PIECES = (
    "steps", "run_name", ": ", "- ", "\n", "  ", "[", "]", "{", "}", "&a ", "*a ", "<<: ", "!!python/object:os.system ",
    "!!binary ", "!!set ", "? ", "| ", "'", '"', "#", "---\n", "1", "1e999", "0x1F", "2024-01-01", "~", "\t", "@", "\0",
)  # fmt: skip


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=14).map("".join)
    | st.dictionaries(st.sampled_from(sorted(RLRunConfig.model_fields)), VALUES, max_size=3).map(json.dumps)
    | st.binary(max_size=30)
)
def test_any_document_is_a_config_or_refused(tmp_path, document):
    file = tmp_path / "any.yml"
    file.write_bytes(document if isinstance(document, bytes) else document.encode("utf-8", "surrogatepass"))
    with contextlib.suppress(UserError):
        load_config(file)
