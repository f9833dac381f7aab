"""What a value may be and what it then is: numbers, texts, paths, lists and mappings, in files as on a command line."""

import importlib.util
import math
from fractions import Fraction

import pytest

from maxtext_lite.config import (
    KEYS,
    RopeScaling,
    SourceList,
    UserError,
    load_config,
    single_path,
)
from maxtext_lite.config.keys import listed, name_of_path, require_trackers
from maxtext_lite.config.yaml import parse_mapping, parse_value


def value_of(word, file=None):
    return getattr(load_config(file, [word]), word.partition("=")[0])


@pytest.mark.fast
@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("per_device_batch_size=1/3", Fraction(1, 3)),
        ("per_device_batch_size=0.29", Fraction(29, 100)),
        ("per_device_batch_size=1e-3", Fraction(1, 1000)),
        ("packing=true", True),
        ("packing=concat", True),
        ("packing=none", False),
        ("packing=best_fit", "best_fit"),
        ("run_name=007", "007"),
        ("run_name=#5", "#5"),
        ("remat_policy=none", "none"),
        ("tokenizer_path=''", ""),
        # Of a text nothing is dropped, and a local path may hold colons.
        *(
            (f"dataset_path={text}", text)
            for text in (
                "!!str 5",
                "x: y",
                "[ab]*.txt",
                "007",
            )
        ),
        *(
            (f"base_output_directory={path}", path)
            for path in (
                "./gs:/bucket",
                "gs:bucket",
                "runs/2026-01-01T10:00",
                "gs://bucket/runs",
            )
        ),
        ("mla={}", None),
        ("rope_scaling={}", None),
        (
            "rope_scaling={rope_type: llama3, factor: 8, low_freq_factor: 1, high_freq_factor: 4, "
            "original_max_position_embeddings: 64}",
            RopeScaling("llama3", 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0),
        ),
    ],
)
def test_a_value_is_what_the_user_wrote(word, value):
    found = value_of(word)
    assert found == value
    assert isinstance(found, bool) == isinstance(value, bool)


def test_auto_leaves_the_accumulation_open_too_unless_somebody_states_it(tmp_path):
    def keys(*words, file=None):
        config = load_config(file, words)
        return config.per_device_batch_size, config.gradient_accumulation_steps

    auto = "per_device_batch_size=auto"
    assert keys(auto) == keys(
        "per_device_batch_size=-1", "gradient_accumulation_steps=-1"
    )
    assert keys(auto, "gradient_accumulation_steps=2") == (-1, 2)
    path = tmp_path / "auto.yml"
    path.write_text("per_device_batch_size: auto\n")
    assert keys(file=path) == (-1, -1)
    assert keys("per_device_batch_size=4", file=path) == (4, 1)


PATHS = [
    "base_output_directory",
    "load_parameters_path",
    "dataset_path",
    "eval_dataset_path",
    "tokenizer_path",
]


@pytest.mark.parametrize("key", [*PATHS, "chat_template"])
def test_a_url_that_is_not_read_or_written_is_refused_by_its_key(key):
    assert [key for key in KEYS if key.endswith(("_path", "_directory"))] == PATHS
    for url in (
        "gs:/bucket",
        "hdfs://h:9/x",
        "abfs://c@a/x",
        "hf://u/m",
        "HTTPS://x/y",
        "a+b.c-d:/",
    ):
        with pytest.raises(
            UserError, match=f"^{key}={url.replace('+', '.')} "
        ) as refused:
            load_config(None, [f"{key}={url}"])
        assert len(refused.value.problems) == 1
    with pytest.raises(UserError, match=r"Nearest that works: /a/b\."):
        load_config(None, ["base_output_directory=file:" + "///a/b"])


@pytest.mark.parametrize(
    "key", ["base_output_directory=gs", "dataset_path=s3", "load_parameters_path=gs"]
)
def test_a_path_with_a_password_is_refused_without_it(key):
    with pytest.raises(UserError, match=key.partition("=")[0]) as refused:
        load_config(None, ["dataset_type=array_record", f"{key}://me:planted@bucket/x"])
    assert "planted" not in str(refused.value)


# ---- YAML, as version 1.2 has it -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        (".5", 0.5),
        ("+3", 3),
        ("010", 10),
        ("0o17", 15),
        ("0x1F", 31),
        ("on", "on"),
        ("no", "no"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("", None),
        ("none", "none"),
        ('"5"', "5"),
        ("'true'", "true"),
        ("!!seq [!!map {a: 1}]", [{"a": 1}]),
        ("-.inf", -math.inf),
        ("a # comment", "a"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text, value):
    parsed = parse_value(text).value
    assert parsed == value
    assert type(parsed) is type(value)


def test_entries_come_in_order_with_duplicates_and_a_scalar_with_its_text():
    entries = parse_mapping("b: 1\na: 007\nb: '2'\n")
    assert [(key, value.text) for key, value in entries] == [
        ("b", "1"),
        ("a", "007"),
        ("b", "2"),
    ]
    assert parse_mapping("# nothing\n") == []


@pytest.mark.parametrize(
    "text",
    [
        "[1",
        "&a [*a]",
        "*a",
        "!!python/name:os 1",
        "!foo {a: 1}",
        "[!foo [a]]",
        "{a: 1, b: 2, a: 3}",
        "- a: 1\n  'a': 1\n",
        "\0",
        "a: b: c",
        "--- 1\n--- 2\n",
        "[" * 2000,
    ],
)
def test_what_is_not_yaml_or_has_tags_or_a_key_twice_is_refused(text):
    with pytest.raises(ValueError, match=r"YAML|nested"):
        parse_value(text)
    for mapping in ("- a\n", "text"):
        with pytest.raises(ValueError, match="list"):
            parse_mapping(mapping)


# ---- Lists and mappings --------------------------------------------------------------------------------------------


def test_a_list_of_sources_has_exact_weights_and_names_by_default():
    words = (
        "dataset_path=[{path: data/web.jsonl.gz, weight: 0.7}, {path: 'a: b/c', weight: 1/3, max_epochs: 2, "
        'name: "d é"}, {path: "007", weight: 0x2}]'
    )
    entries = value_of(words).entries
    assert [
        (each.path, each.weight, each.max_epochs, each.name) for each in entries
    ] == [
        ("data/web.jsonl.gz", Fraction(7, 10), -1, "web"),
        ("a: b/c", Fraction(1, 3), 2, "d é"),
        ("007", 2, -1, "007"),
    ]
    assert isinstance(value_of("dataset_path=[{path: a, weight: 1}]"), SourceList)
    assert single_path(value_of("dataset_path=[ab]*.txt")) == "[ab]*.txt"
    names = {"data/web/": "web", "data/.hidden/": ".hidden", "a.b/c": "c", "/": "/"}
    names |= {"data/ /": "data/ /", " .txt": " .txt"}  # not blank
    assert {path: name_of_path(path) for path in names} == names
    for path in names:
        sources = value_of(f"dataset_path=[{{path: '{path}', weight: 1}}]")
        assert value_of(f"dataset_path={sources}") == sources


def test_trackers_may_be_a_list_or_a_text_and_need_their_extras(monkeypatch):
    words = ["tensorboard", "[tensorboard, wandb]", "wandb, mlflow", "[]", ""]
    assert [list(listed(value_of(f"log_to={word}"))) for word in words] == [
        ["tensorboard"],
        ["tensorboard", "wandb"],
        ["wandb", "mlflow"],
        [],
        [],
    ]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    require_trackers("tensorboard")
    with pytest.raises(UserError, match=r"(?s)\[wandb\].*\[mlflow\]"):
        require_trackers("tensorboard,wandb,mlflow")
