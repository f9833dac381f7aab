"""`equiv` catches bugs that make a run depend on how its batch is split.

Each with the environment variable EVERY_PLANTED_BUG, which takes minutes; tests/training/test_equivalence.py plants
two of them always.
"""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from maxtext_lite import equiv
from maxtext_lite.config import load_config
from maxtext_lite.training import equivalence
from maxtext_lite.training.shrunk import splits
from tests.planted_bugs import BUGS, CONFIG, EVERYWHERE, FOUR, train_all

EVERY = pytest.mark.skipif(not os.environ.get("EVERY_PLANTED_BUG"), reason="minutes; EVERY_PLANTED_BUG is not set")


@pytest.fixture
def planted(monkeypatch, capsys):
    """A function (names of bugs, that of the whole batch's run) -> exit code of `equiv`, and whether each agrees."""

    def run(names, whole=""):
        found = {split.name: split for split in splits(load_config(None, CONFIG))}
        ways = [dataclasses.replace(found[(BUGS | EVERYWHERE).get(name, ("", FOUR))[1]], name=name) for name in names]

        original = equivalence.verdicts

        def verdicts(path, overrides, directory):
            Path(directory, "planted.txt").write_text("\n".join([whole, *names]))
            return original(path, overrides, directory)

        monkeypatch.setattr(equivalence, "_train_all", train_all)
        monkeypatch.setattr(equivalence, "splits", lambda config: ways)
        with monkeypatch.context() as context:
            context.setattr(equivalence, "verdicts", verdicts)
            code = equiv.main(["--json", *CONFIG])
        told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert not any(each["refused"] or "not run" in each["difference"] for each in told), told
        return code, {each["split"]: each["agrees"] for each in told}

    return run


@EVERY
def test_planted_bugs_are_caught(planted):
    code, agrees = planted([*BUGS, "nothing planted"])
    assert code == 1
    assert agrees == {**dict.fromkeys(BUGS, False), "nothing planted": True}


@EVERY
@pytest.mark.parametrize(("name", "code"), [("one key", 1), ("key of row", 0)])
def test_one_key_for_all_micro_batches_is_caught_and_a_key_for_each_row_is_not(name, code, planted):
    assert planted([name], name) == (code, {name: not code})


def test_each_bug_has_a_split_that_shows_it():
    names = {split.name for split in splits(load_config(None, CONFIG))}
    assert {split for _, split in (BUGS | EVERYWHERE).values()} <= names
