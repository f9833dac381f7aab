"""Hints name what the user may have meant, and nothing else."""

import pytest

from maxtext_lite.config import KEYS, RL_KEYS, ConfigError, load_config
from maxtext_lite.config.hints import _ELSEWHERE, key_hint, missing_file, words_meant


def test_every_name_from_elsewhere_leads_to_a_key_and_is_none():
    assert set(_ELSEWHERE.values()) <= {*KEYS, *RL_KEYS}
    assert not set(_ELSEWHERE) & set(KEYS)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("lr", "learning_rate"),
        ("LR", "learning_rate"),
        ("learning-rate", "learning_rate"),
        ("max_steps", "steps"),
        ("per_device_batchsize", "per_device_batch_size"),
        ("zzz", None),
    ],
)
def test_an_unknown_key_is_held_against_known_ones_and_other_frameworks(name, key):
    assert key_hint(name, KEYS) == (f" Did you mean '{key}'?" if key else "")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--steps=5"], ("steps=5", 1)),
        (["-steps=5"], ("steps=5", 1)),
        (["--steps", "5"], ("steps=5", 2)),
        (["--steps", "--json"], ("steps=VALUE", 1)),
        (["steps:5"], ("steps=5", 1)),
        (["steps:", "5", "seed=1"], ("steps=5", 2)),
        (["steps", "5"], ("steps=5", 2)),
        (["steps", "=", "5"], ("steps=5", 3)),
        (["steps", "=5"], ("steps=5", 2)),
        (["steps", "seed=1"], ("steps=VALUE", 1)),
        (["--lr", "1e-3"], ("learning_rate=1e-3", 2)),
        (["my.yml"], None),
        (["5"], None),
        (["--zzz=1"], None),
    ],
)
def test_a_key_that_is_written_otherwise_is_shown_as_key_value(words, meant):
    assert words_meant(words, KEYS) == meant


@pytest.mark.parametrize("overrides", [["steps:5"], ["steps", "5"], ["steps", "=", "5"]])
def test_a_word_without_a_sign_is_one_error_with_what_is_meant(overrides):
    with pytest.raises(ConfigError) as error:
        load_config(None, overrides)
    assert error.value.problems == (
        f"'{overrides[0]}' (command line) is not of the form key=value. Did you mean 'steps=5'?",
    )


@pytest.mark.parametrize(
    ("there", "named", "meant"),
    [
        ("tiny.yml", "tiny.yaml", "tiny.yml"),
        ("tiny.yaml", "tiny.yml", "tiny.yaml"),
        ("small.yml", "smal.yml", "small.yml"),
    ],
)
def test_a_file_that_is_not_there_is_held_against_those_beside_it(there, named, meant, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / there).touch()
    assert missing_file(named, "", []) == f"no config file '{named}'. Did you mean '{meant}'?"
    assert missing_file(f"{tmp_path}/{named}", "", []).endswith(f"Did you mean '{tmp_path}/{meant}'?")


def test_without_one_near_nothing_is_guessed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nowheres.yml").mkdir()
    assert missing_file("nowhere.yml", "a.yml", ["base.yml"]) == "no config file 'nowhere.yml' (base of a.yml)."


def test_a_config_at_a_url_is_refused_by_its_scheme():
    with pytest.raises(ConfigError, match=r"the config file 'gs://a/b.yml' is a URL \(gs:\)"):
        load_config("gs://a/b.yml")


def test_a_directory_or_broken_link_is_not_a_misspelt_name(tmp_path):
    (tmp_path / "some.yml").mkdir()
    (tmp_path / "link.yml").symlink_to("gone.yml")
    assert missing_file("some.yml", "", [], tmp_path) == "the config file 'some.yml' is a directory."
    said = "the config file 'link.yml' (base of a.yml) is a link to a file that does not exist."
    assert missing_file("link.yml", "a.yml", [], tmp_path) == said
