"""A config is base.yml, the user's file over its base, a model's file, and the command line, each over the last."""

import contextlib
import json
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maxtext_lite.analysis.ranking import is_open
from maxtext_lite.config import (
    KEYS,
    UserError,
    load_config,
    packaged_file,
    write_resolved,
)
from maxtext_lite.config.hints import hub_hint, keys_elsewhere
from maxtext_lite.config.keys import keys_of
from maxtext_lite.post_training.keys import RLRunConfig

RL_KEYS = [key for key in keys_of(RLRunConfig) if key not in KEYS]


def problems_of(*arguments):
    with pytest.raises(UserError) as refused:
        load_config(*arguments)
    return refused.value.problems


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_base_yml_is_the_default_and_holds_every_default(monkeypatch):
    for name in ("STEPS", "steps", "M_STEPS", "MAXTEXT_LITE_STEPS"):
        monkeypatch.setenv(name, "7")  # the environment is not consulted
    config = load_config()
    written = yaml.safe_load(packaged_file("configs", "base.yml").read_text())
    assert set(written) == set(config.origins) == set(KEYS)
    assert set(config.origins.values()) == {"base.yml"}
    assert config.steps == written["steps"] == 250
    assert config == load_config("configs/base.yml") == load_config("base.yml")
    rl = yaml.safe_load(packaged_file("configs", "post_train/rl.yml").read_text())
    assert [key for key in rl if key not in (*KEYS, "base")] == RL_KEYS


@pytest.mark.fast
def test_the_command_line_wins_over_the_file_and_the_file_over_its_base(here):
    Path("deep.yml").write_text("steps: 10\nseed: 1\nlog_period: 1\n")
    Path("my.yml").write_text("base: deep.yml\nseed: 2\nlog_period: 2\n")
    config = load_config("my.yml", ["log_period=4", "log_period=3"])
    assert (config.steps, config.seed, config.log_period) == (10, 2, 3)
    assert [
        config.origins[key]
        for key in ("checkpoint_period", "steps", "seed", "log_period")
    ] == [
        "base.yml",
        "deep.yml",
        "my.yml",
        "command line",
    ]


def test_a_model_file_lies_between_base_yml_and_what_the_user_states(here):
    Path("my.yml").write_text("base_num_decoder_layers: 2\n")
    config = load_config("my.yml", ["model_name=llama3-8b", "head_dim=64"])
    assert (config.base_emb_dim, config.base_num_decoder_layers, config.head_dim) == (
        4096,
        2,
        64,
    )
    assert config.origins["base_emb_dim"] == "models/llama3-8b.yml"
    assert config.origins["base_num_decoder_layers"] == "my.yml"


def test_a_model_of_the_working_directory_is_found_and_a_resolved_config_does_not_need_it(
    here, monkeypatch
):
    Path("configs/models").mkdir(parents=True)
    Path("configs/models/mine.yml").write_text("base_emb_dim: 64\n")
    config = load_config(None, ["model_name=mine"])
    assert config.origins["base_emb_dim"] == "configs/models/mine.yml"
    write_resolved(config, here / "config.yml")
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    assert load_config(here / "config.yml") == config
    assert (
        load_config(here / "config.yml", ["model_name=mine", "steps=5"]).base_emb_dim
        == 64
    )
    assert (
        "model_name=other" in problems_of(here / "config.yml", ["model_name=other"])[0]
    )


def test_files_of_the_working_directory_replace_no_shipped_defaults_and_are_not_taken_for_them(
    here,
):
    for name, text in {
        "base.yml": "seed: 3\n",
        "configs/base.yml": "seed: 4\n",
        "configs/models/llama3-8b.yml": "base_emb_dim: 64\n",
        "models/own.yml": "ici_fsdp_parallelism: 2\n",
    }.items():
        Path(name).parent.mkdir(exist_ok=True, parents=True)
        Path(name).write_text(text)
    config = load_config(None, ["model_name=llama3-8b"])
    assert (config.seed, config.base_emb_dim) == (0, 4096)
    assert all(is_open(config, key) for key in ("seed", "base_emb_dim"))
    own = load_config("models/own.yml")
    assert is_open(own, "seed")
    assert not is_open(own, "ici_fsdp_parallelism")
    assert not is_open(load_config("base.yml"), "seed")


def test_a_base_is_looked_for_beside_the_file_then_at_home_and_among_the_shipped_ones(
    here, monkeypatch
):
    monkeypatch.setenv("HOME", str(here / "home"))
    for name, text in {
        "sub/base.yml": "seed: 5\n",
        "sub/my.yml": "base: base.yml\n",
        "my.yml": "base: configs/base.yml\nsteps: 30\n",
        "home/mine.yml": "steps: 7\n",
        "of_home.yml": "base: ~/mine.yml\n",
        "base.yml": "base: base.yml\nseed: 3\n",
    }.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    assert load_config("sub/my.yml").origins["seed"] == "sub/base.yml"
    assert load_config("my.yml").origins["seed"] == "base.yml"
    assert load_config("of_home.yml").steps == load_config("~/mine.yml").steps == 7
    assert load_config("base.yml").seed == 3  # over the shipped one


def test_the_length_that_is_stated_last_counts(here):
    Path("steps.yml").write_text("steps: 30\n")
    Path("epochs.yml").write_text("base: steps.yml\nnum_epochs: 2\nlast_batch: train\n")
    for words, length in (
        (["steps.yml", "num_epochs=3"], (250, 3)),
        (["epochs.yml"], (250, 2)),
        (["epochs.yml", "steps=7"], (7, 0)),
    ):
        config = load_config(words[0], words[1:])
        assert (config.steps, config.num_epochs) == length
    assert problems_of("epochs.yml", ["steps=7", "num_epochs=1"])


def test_what_may_be_an_id_of_the_hub_is_to_be_downloaded(here):
    for path in (
        "Qwen/Qwen2.5-0.5B",
        "HuggingFaceTB/SmolLM2-135M",
        "openai/gpt-oss-20b",
    ):
        for words in ([], ["lora_rank=16"]):
            (problem,) = problems_of(None, [f"load_parameters_path={path}", *words])
            assert f"hf download {path}" in problem
    Path("runs/other").mkdir(parents=True)
    Path("runs/other/config.yml").touch()
    for path in ("runs/mine", "data/lines.jsonl", "nowhere", "a/b/c"):
        assert not hub_hint(path)


def test_a_file_of_a_shipped_name_is_the_users_own(here):
    Path("post_train").mkdir()
    own = Path("post_train/rl.yml")
    own.write_text("base: base.yml\nsteps: 7\n")
    assert not isinstance(load_config("post_train/rl.yml"), RLRunConfig)
    assert load_config("post_train/rl.yml").steps == 7
    own.write_text(
        "base: post_train/rl.yml\nsteps: 7\n"
    )  # the shipped file: there is none beside it
    assert isinstance(load_config("post_train/rl.yml"), RLRunConfig)


# ---- What is no config ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"stps: 30\nxyzzy: 1\n", ["'stps'", "'xyzzy'"]),
        (b"steps: " + b"[" * 9000, ["my.yml"]),
        (b"\xff\xfe", ["my.yml"]),
        (b"\x00\x01\x02" * 9, ["my.yml"]),
        (b"#" * (2**22 + 1), ["my.yml has 4,194,305"]),
        (
            b"".join(b"key%d: 1\n" % number for number in range(30)),
            ["'key"] * 20 + ["10 more"],
        ),
    ],
)
def test_what_is_no_config_is_refused_by_its_file_or_key(here, content, named):
    """As are the files of refusals.yml."""
    Path("my.yml").write_bytes(content)
    problems = problems_of("my.yml")
    assert len(problems) == len(named), problems
    assert all(
        word in problem for word, problem in zip(named, problems, strict=True)
    ), problems


def test_all_problems_are_reported_at_once_and_each_with_the_value_that_suits_the_others(
    here,
):
    Path("my.yml").write_text("stps: 30\nseed: 1.5\nseed: 2.5\nbase_num_kv_heads: 3\n")
    words = [
        "steps=many",
        "optimizer=adam",
        "nonsense",
        "base_num_query_heads=true",
        "scale_adam_with_batch=true",
    ]
    named = [
        "'seed'",
        "'nonsense'",
        "'stps'",
        "steps=many",
        "base_num_query_heads=true",
        "base_num_kv_heads=3",
        "seed=2.5",
        "optimizer=adam",
        "scale_adam_with_batch=true",
    ]
    problems = problems_of("my.yml", words)
    assert len(problems) == len(named)
    assert all(any(name in problem for problem in problems) for name in named), problems


# ---- What may have been meant --------------------------------------------------------------------------------------


def test_every_name_from_elsewhere_leads_to_a_key_and_is_none():
    assert set(keys_elsewhere().values()) <= {*KEYS, *RL_KEYS}
    assert not set(keys_elsewhere()) & set(KEYS)


PIECES = (
    "steps",
    "run_name",
    ": ",
    "- ",
    "\n",
    "  ",
    "[",
    "]",
    "{",
    "}",
    "&a ",
    "*a ",
    "<<: ",
    "!!python/object:os.system ",
    "!!binary ",
    "!!set ",
    "? ",
    "| ",
    "'",
    '"',
    "#",
    "---\n",
    "1",
    "1e999",
    "0x1F",
    "2024-01-01",
    "~",
    "\t",
    "@",
    "\0",
)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=14).map("".join)
    | st.dictionaries(
        st.sampled_from(sorted(RLRunConfig.model_fields)), ANYTHING, max_size=3
    ).map(json.dumps)
    | st.binary(max_size=30)
)
def test_any_document_is_a_config_or_refused(tmp_path, document):
    file = tmp_path / "any.yml"
    file.write_bytes(
        document
        if isinstance(document, bytes)
        else document.encode("utf-8", "surrogatepass")
    )
    with contextlib.suppress(UserError):
        load_config(file)
