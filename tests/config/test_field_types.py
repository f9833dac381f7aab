from fractions import Fraction

import pytest

from maxtext_lite.config import KEYS, ConfigError, UserError, load_config
from maxtext_lite.config.bucket import bucket_scheme
from maxtext_lite.config.errors import WrongType
from maxtext_lite.config.field_types import exact

REFUSED = {
    "steps=0": "steps=0 must be at least 1, or -1. Nearest that works: 1.",
    "steps=true": "steps=true is true or false, not a number. Nearest that works: 250.",
    "steps=3.5": "steps=3.5 is not an integer. Nearest that work: 3 or 4.",
    "steps=0.5": "steps=0.5 is not an integer. Nearest that works: 1.",
    "steps=1e2": "steps=100 is not written as an integer, but with a point or an exponent. Nearest that works: 100.",
    "steps=many": "steps=many is text, not a number. Nearest that works: 250.",
    "steps='5'": "steps=5 is text, not a number. Nearest that works: 250.",
    "steps=": "steps=null is empty, not a number. Nearest that works: 250.",
    "steps=.nan": "steps=nan is not a finite number. Nearest that works: 250.",
    "steps=[5]": "steps=[5] is a list or a mapping, not a number. Nearest that works: 250.",
    "steps=9223372036854775808":
        "steps=9223372036854775808 must be at most 2147483647. Nearest that works: 2147483647.",
    "first_num_dense_layers=2147483647":  # whose numbers alone would fill the memory
        "first_num_dense_layers=2147483647 must be at most 10000. Nearest that works: 0.",
    "eval_interval=0": "eval_interval=0 must be at least 1, or -1. Nearest that works: 1.",
    "hang_timeout_seconds=3": "hang_timeout_seconds=3 must be at least 5, or 0. Nearest that works: 5.",
    "packing=1": "packing=1 is not concat (true), none (false) or best_fit. Nearest that work: true or false.",
    "packing=fit": "packing=fit is not concat (true), none (false) or best_fit. Nearest that work: true or false.",
    "async_checkpointing=1": "async_checkpointing=1 is not true or false. Nearest that work: true or false.",
    "async_checkpointing=yes": "async_checkpointing=yes is not true or false. Nearest that work: true or false.",
    "learning_rate=-1": "learning_rate=-1 must be at least 0. Nearest that works: 0.",
    "learning_rate=.inf": "learning_rate=inf is not a finite number. Nearest that works: 0.003.",
    "learning_rate=1e999": "learning_rate=inf is not a finite number. Nearest that works: 0.003.",
    "adam_b1=1": "adam_b1=1 must be at least 0 and below 1. Nearest that works: 0.9.",
    "eval_fraction=1.5": "eval_fraction=1.5 must be at least 0 and at most 1. Nearest that works: 0.02.",
    "dpo_beta=-2e30": "dpo_beta=-2e+30 must be above 0. Nearest that works: 0.1.",
    "partial_rotary_factor=-2e30":
        "partial_rotary_factor=-2e+30 must be above 0 and at most 1. Nearest that works: 1.",
    "rope_max_timescale=0": "rope_max_timescale=0 must be above 0. Nearest that works: 10000.",
    "per_device_batch_size=0": "per_device_batch_size=0 must be above 0, or -1 (derived). Nearest that works: 1.",
    "per_device_batch_size=-0.5": "per_device_batch_size=-0.5 must be above 0, or -1 (derived). Nearest that works: 1.",
    "per_device_batch_size='0.5'": "per_device_batch_size=0.5 is text, not a number. Nearest that works: 16.",
    "per_device_batch_size=1/0": "per_device_batch_size=1/0 is divided by 0. Nearest that works: 16.",
    "per_device_batch_size=1/1234567890123456789": (
        "per_device_batch_size=1/1234567890123456789 has more than 18 digits in its numerator or denominator. "
        "Nearest that works: 16."
    ),
    "per_device_batch_size_increment=-1": "per_device_batch_size_increment=-1 must be above 0. Nearest that works: 1.",
    "expansion_factor_real_data=0":
        "expansion_factor_real_data=0 must be above 0, or -1 (which means 1). Nearest that works: 1.",
    "optimizer=adam": "optimizer=adam is not one of adamw, sgd, adafactor, muon, lion. Nearest that works: adamw.",
    "remat_policy=Full": "remat_policy=Full is not one of none, save_dot_products, minimal, save_qkv_proj, "
    "minimal_offloaded, qkv_proj_offloaded, full, custom. "
                         "Nearest that works: full.",
    "run_name=": "run_name= must not be empty. Nearest that works: default.",
    "dataset_path=null": "dataset_path=null is not text. Nearest that works: shakespeare.jsonl.gz.",
}  # fmt: skip


@pytest.mark.parametrize("override", REFUSED)
def test_a_value_of_the_wrong_kind_is_refused_with_one_that_works(override):
    with pytest.raises(UserError) as refused:
        load_config(None, [override])
    problem = refused.value.problems[0]
    assert problem == REFUSED[override]
    key = override.split("=")[0]
    works = problem.rsplit(": ", 1)[1].removesuffix(".").split(" or ")[0]
    load_config(None, [f"{key}={works}"])


@pytest.mark.parametrize(
    ("value", "fraction"),
    [(0.29, Fraction(29, 100)), (1, Fraction(1)), ("1/3", Fraction(1, 3)), (1e-3, Fraction(1, 1000)), (16.0, 16)],
)
def test_batch_numbers_are_what_the_user_wrote(value, fraction):
    assert exact(value) == fraction


@pytest.mark.parametrize("value", [True, None, "x", "0.5", [1], float("nan"), float("inf")])
def test_what_is_no_number_is_no_batch_number(value):
    with pytest.raises(WrongType):
        exact(value)


PATH_KEYS = [
    "base_output_directory", "load_parameters_path", "dataset_path", "eval_dataset_path", "tokenizer_path",
    "chat_template",
]  # fmt: skip


def test_these_are_all_keys_that_are_paths():
    assert [key for key in KEYS if key.endswith(("_path", "_directory"))] == PATH_KEYS[:-1]


URLS = ["gs:/bucket", "s3://b", "hdfs://h:9/x", "abfs://c@a/x", "hf://u/m", "HTTPS://x/y", "a+b.c-d:/"]


@pytest.mark.parametrize("value", URLS[1:])
def test_a_run_directory_is_refused_where_orbax_cannot_write(value):
    with pytest.raises(ConfigError) as error:
        load_config(None, [f"base_output_directory={value}"])
    (problem,) = error.value.problems
    assert problem.startswith(
        f"base_output_directory={value} is where Orbax cannot write checkpoints; a local path and gs:"
    )


@pytest.mark.parametrize("value", ["gs://", "gs:///", "gs:/bucket"])
def test_a_bucket_needs_a_name(value):
    with pytest.raises(ConfigError, match=r"is a URL \(gs:\), and only local paths and gs:// are read and written"):
        load_config(None, [f"base_output_directory={value}"])


def test_run_directories_and_parameters_can_be_in_a_bucket():
    config = load_config(None, ["base_output_directory=gs://bucket/runs"])
    assert config.base_output_directory == "gs://bucket/runs"
    with pytest.raises(ConfigError, match=r"s3://b is a URL \(s3:\), and only local paths and gs:// are read"):
        load_config(None, ["load_parameters_path=s3://b"])


NOT_READ = [
    (key, url)
    for key in PATH_KEYS[2:]
    for url in ("gs://bucket/runs", *URLS)
    if not (key in ("dataset_path", "eval_dataset_path") and bucket_scheme(url))
]


@pytest.mark.parametrize(("key", "value"), NOT_READ)
def test_a_path_with_a_scheme_is_refused_by_its_name(key, value):
    with pytest.raises(ConfigError) as error:
        load_config(None, [f"{key}={value}"])
    (problem,) = error.value.problems
    scheme = value.partition(":")[0]
    assert problem.startswith(f"{key}={value} is a URL ({scheme}:), and only local paths")
    assert " are read and written. Nearest that works: " in problem


@pytest.mark.parametrize(("url", "path"), [("file:/" + "//a/b", "/a/b"), ("file:/a/b", "/a/b")])
def test_the_path_of_a_file_url_is_named(url, path):
    with pytest.raises(ConfigError, match=rf"Nearest that works: {path}\."):
        load_config(None, [f"base_output_directory={url}"])


@pytest.mark.parametrize("value", ["./gs:/bucket", "/a/b:/c", "gs:bucket", "a b:/c", "1:/x", "runs/2026-01-01T10:00"])
def test_a_local_path_may_hold_colons(value):
    assert load_config(None, [f"base_output_directory={value}"]).base_output_directory == value


@pytest.mark.parametrize(
    ("word", "value"), [("true", True), ("concat", True), ("false", False), ("none", False), ("best_fit", "best_fit")]
)
def test_packing_has_names_for_what_true_and_false_mean(word, value):
    assert load_config(None, [f"packing={word}"]).packing is value or value == "best_fit"
    assert load_config(None, [f"packing={word}"]) == load_config(None, [f"packing={str(value).lower()}"])
