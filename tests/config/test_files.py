"""Files that are not configs, and which of two files with the same name is used."""

import re
from pathlib import Path

import pytest

from maxtext_lite.config import RLRunConfig, UserError, load_config
from maxtext_lite.config.files import find_config, first_of, is_file, packaged_file


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problems_of(*arguments):
    with pytest.raises(UserError) as refused:
        load_config(*arguments)
    return refused.value.problems


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b", "\ud800", "x/" * 3000, "."])
def test_a_name_that_no_file_can_have_is_that_of_no_file(here, name):
    assert not is_file(Path(name))
    (problem,) = problems_of(name)
    assert re.match("(no|the) config file '", problem)
    assert len(problem) < 300
    assert problem.isprintable()
    (problem,) = problems_of(None, [f"model_name={name}"])
    assert problem.startswith("model_name=")


@pytest.mark.parametrize(("content", "why"), [
    (b"\x00\x01\x02" * 9, "is not YAML (unacceptable character #x0000: special characters are not allowed)."),
    (b"\xff\xfe", "is not UTF-8 text."),
    (b"5\n", "is not a list of `key: value` lines."),
    (b"steps: " + b"[" * 9000, "is nested too deeply."),
    (b"steps: " + b"[" * 30 + b"]" * 30, "is nested too deeply."),
    (b"steps: !!int x", "has the tag !!int before a value that is not one (line 1)."),
    (b"a: &a [1]\n" + b"".join(b"b%d: &%c [%s]\n" % (i, 98 + i, b", ".join([b"*%c" % (97 + i)] * 9)) for i in range(9)),
     "repeats more than 1,000 values by aliases (line 1)."),
])  # fmt: skip
def test_what_is_no_config_is_refused_in_one_line(here, content, why):
    Path("my.yml").write_bytes(content)
    assert problems_of("my.yml") == (f"my.yml {why}",)


def test_a_file_larger_than_any_config_is_not_read(here):
    with Path("my.yml").open("wb") as file:
        file.truncate(2**22 + 1)
    assert problems_of("my.yml") == ("my.yml has 4,194,305 bytes; a config has at most 4,194,304.",)


def test_an_empty_file_is_a_config_but_not_that_of_a_run_and_so_are_a_few_aliases(here):
    Path("my.yml").write_text("")
    assert load_config("my.yml") == load_config()
    Path("config.yml").write_text("# of a run\n")
    assert problems_of("config.yml") == (
        "config.yml has no keys, as if it had been cut short; that of a run has all. The run's own command writes it "
        "again.",
    )
    Path("my.yml").write_text("seed: &a 7\ndata_shuffle_seed: *a\n")
    assert load_config("my.yml").data_shuffle_seed == 7


def test_a_file_or_its_base_may_be_below_the_home_directory(here, monkeypatch):
    monkeypatch.setenv("HOME", str(here / "home"))
    (here / "home").mkdir()
    (here / "home" / "mine.yml").write_text("steps: 7\n")
    Path("my.yml").write_text("base: ~/mine.yml\n")
    assert load_config("my.yml").steps == load_config("~/mine.yml").steps == 7
    assert load_config("my.yml").origins["steps"] == f"{here}/home/mine.yml"


def test_a_file_of_a_shipped_name_is_the_users_own(here):
    Path("post_train").mkdir()
    own = Path("post_train/rl.yml")
    own.write_text("steps: 7\n")
    assert not isinstance(load_config("post_train/rl.yml"), RLRunConfig)
    assert load_config("post_train/rl.yml").steps == 7
    own.write_text("base: base.yml\nsteps: 7\n")
    assert load_config("post_train/rl.yml").steps == 7
    own.write_text("base: post_train/rl.yml\nsteps: 7\n")  # the shipped file: there is none beside it
    assert isinstance(load_config("post_train/rl.yml"), RLRunConfig)
    Path("base.yml").write_text("base: base.yml\nseed: 3\n")
    assert (load_config("base.yml").seed, load_config("base.yml").origins["steps"]) == (3, "base.yml")


def test_a_file_beside_the_one_that_names_it_comes_first_but_itself(here):
    Path("base.yml").write_text("")
    assert find_config("base.yml") == Path("base.yml")
    assert find_config("base.yml", Path("my.yml")) == Path("base.yml")
    assert find_config("base.yml", Path("base.yml")) == packaged_file("configs", "base.yml")


def test_many_problems_of_one_file_are_counted(here):
    Path("my.yml").write_text("".join(f"key{number}: 1\n" for number in range(30)))
    problems = problems_of("my.yml")
    assert len(problems) == 21
    assert problems[-1] == "my.yml has 10 more of these."
    assert first_of(["a", "b"], "x") == ["a", "b"]
