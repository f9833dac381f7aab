import json

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maxtext_lite.config import KEYS, UserError, describe, load_config, write_resolved
from maxtext_lite.config.errors import setting_text
from maxtext_lite.config.field_types import exact
from maxtext_lite.config.load import read_config
from tests.source_tree import REPOSITORY


def test_config_yml_says_where_each_value_came_from(tmp_path):
    config = load_config(None, ["steps=30", "model_name=smollm2-135m"])
    write_resolved(config, tmp_path / "config.yml")
    lines = dict(
        line.split(":", 1)
        for line in (tmp_path / "config.yml").read_text().splitlines()
        if line and not line.startswith("#")
    )
    assert tuple(lines) == KEYS
    assert lines["steps"].split() == ["30", "#", "command", "line"]
    assert lines["base_emb_dim"].split() == ["576", "#", "models/smollm2-135m.yml"]
    assert lines["seed"].split() == ["0", "#", "base.yml"]


def test_what_cannot_be_written_leaves_config_yml_as_it_was(tmp_path, monkeypatch):
    """So that a start on a full disk does not make a whole run unusable."""
    write_resolved(load_config(), tmp_path / "config.yml")
    before = (tmp_path / "config.yml").read_text()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_resolved(load_config(None, ["steps=30"]), tmp_path / "config.yml")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"config.yml": before}


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(
    lambda text: text.isprintable() and text.strip()
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    # What `exact` accepts: a ratio of two numbers of at most 18 digits, or the decimal of a float.
    per_device=st.fractions(min_value="1/1000", max_value=1000, max_denominator=10**15)
    | st.floats(1e-12, 1e12).map(exact),
    rate=st.just(0.0) | st.floats(1e-30, 1e30),
    name=texts.filter(lambda text: "/" not in text and text not in (".", "..")),
    path=texts,
    seed=st.integers(0, 2**63 - 1),
    packing=st.sampled_from([True, False, "best_fit"]),
)
def test_config_yml_loads_to_an_equal_config(tmp_path, per_device, rate, name, path, seed, packing):
    config = load_config().model_copy(update={
        "per_device_batch_size": per_device, "learning_rate": rate, "run_name": name, "dataset_path": path,
        "seed": seed, "packing": packing,
    })  # fmt: skip
    write_resolved(config, tmp_path / "config.yml")
    again = load_config(tmp_path / "config.yml")
    assert again == config
    assert set(again.origins.values()) == {str(tmp_path / "config.yml")}
    # Other YAML readers can read it too.
    assert set(yaml.safe_load((tmp_path / "config.yml").read_text(encoding="utf-8"))) == set(KEYS)


LONGROPE = {
    "rope_type": "longrope", "factor": 4, "original_max_position_embeddings": 64,
    "short_factor": [1.0123456789 + i / 7 for i in range(16)], "long_factor": [2.5 + i / 3 for i in range(16)],
}  # fmt: skip
MODELS = sorted((REPOSITORY / "configs/models").glob("*.yml"))


@pytest.mark.parametrize("words", [
    *([f"model_name={path.stem}"] for path in MODELS if ": {" in path.read_text()),
    ["head_dim=32", f"rope_scaling={json.dumps(LONGROPE)}"],
])  # fmt: skip
def test_keys_with_entries_are_written_in_full(tmp_path, words):
    """Also those that a message would shorten."""
    config = load_config(None, words)
    write_resolved(config, tmp_path / "config.yml")
    assert load_config(tmp_path / "config.yml") == config
    said = [f"{key}={setting_text(getattr(config, key))}" for key in ("rope_scaling", "position_temperature", "mla")]
    assert load_config(None, [*words, *said]) == config


def test_a_config_of_many_sources_is_read_back(tmp_path):
    sources = [{"path": f"/data/{'directory/' * 60}{number}.txt", "weight": 1} for number in range(120)]
    config = load_config(None, [f"dataset_path={json.dumps(sources)}"])
    write_resolved(config, tmp_path / "config.yml")
    assert (tmp_path / "config.yml").stat().st_size > 65_536
    assert load_config(tmp_path / "config.yml") == config


def test_the_table_shows_what_matters_and_what_differs():
    table = describe(load_config(None, ["adam_b1=0.8", "steps=400"]))
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines()}
    assert rows["adam_b1"] == ["0.8", "command", "line"]
    assert rows["steps"] == ["400", "command", "line"]
    assert rows["per_device_batch_size"] == ["16", "base.yml"]
    assert "adam_b2" not in rows


def test_the_table_of_reinforcement_learning_says_what_a_step_samples_and_not_what_follows_from_it():
    table = describe(load_config("configs/post_train/rl.yml", ["num_generations=16"]))
    rows = {line.split()[0]: line.split()[1] for line in table.splitlines()}
    assert rows["num_generations"] == "16"
    assert {"batch_size", "micro_batch_size", "reward_functions"} <= rows.keys()
    assert not {"per_device_batch_size", "gradient_accumulation_steps"} & rows.keys()


def test_a_password_in_an_address_does_not_reach_the_run_directory_or_the_log(tmp_path):
    url = "rollout_url=http://me:planted@host:8000"
    config = load_config("configs/post_train/rl.yml", ["rollout_engine=vllm", url])
    write_resolved(config, tmp_path / "config.yml")
    for text in ((tmp_path / "config.yml").read_text(), describe(config)):
        assert "http://***@host:8000" in text
        assert "planted" not in text


@pytest.mark.parametrize("name", ["...", "---", "null", "~", "1e5", "0x1", "'", '"', "- a", "a: b", "[", "@", "%"])
def test_a_text_that_is_something_else_in_yaml_is_read_back_as_it_is(tmp_path, name):
    config = load_config().model_copy(update={"run_name": name})
    write_resolved(config, tmp_path / "config.yml")
    assert read_config(tmp_path / "config.yml").config.run_name == name


@pytest.mark.parametrize(
    "number", ["10000000001/4096", "100000000000000001/1000000", "1/3", "999999999999999999/7000000"]
)
def test_a_number_of_more_digits_than_a_float_has_is_read_back_exactly(tmp_path, number):
    sources = f"dataset_path=[{{path: a.txt, weight: {number}}}, {{path: b.txt, weight: 1}}]"
    config = read_config(None, [f"per_device_batch_size={number}", f"capacity_factor={number}", sources]).config
    write_resolved(config, tmp_path / "config.yml")
    assert read_config(tmp_path / "config.yml").config == config
    assert config.per_device_batch_size == config.capacity_factor == exact(number)


@pytest.mark.parametrize("words", [
    ["prompt_template=http://a.b/?sig={prompt}"],
    [r"reward_format=.*https?://[^:]*:[^@]*@.*"],
    ["dataset_path=a/?://y?token=abc"],
    ["dataset_path=[{path: 'a/?://y?token=abc', weight: 1}]"],
])  # fmt: skip
def test_a_text_that_looks_like_an_address_is_read_back_as_it_is(tmp_path, words):
    config = read_config("configs/post_train/rl.yml", words).config
    write_resolved(config, tmp_path / "config.yml")
    assert read_config(tmp_path / "config.yml").config == config


@pytest.mark.parametrize("setting", [
    "base_output_directory=gs://me:planted@bucket/x", "dataset_path=s3://me:planted@bucket/x",
    "load_parameters_path=gs://me:planted@bucket/x",
])  # fmt: skip
def test_a_path_with_a_password_is_refused_without_it(setting):
    with pytest.raises(UserError, match=r"://\*\*\*@bucket/x has a name or password") as refused:
        load_config(None, ["dataset_type=array_record", setting])
    assert "planted" not in str(refused.value)
