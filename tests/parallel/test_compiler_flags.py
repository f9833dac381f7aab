"""A run adds its compiler's flags to those that the environment names, and changes none of these."""

import os

import pytest

from maxtext_lite.parallel.compiler_flags import FLAGS, VARIABLES, Flag, set_compiler_flags

ONE, TWO = Flag("xla_one", "1", "for a test"), Flag("xla_one_more", "true", "for a test")


@pytest.mark.parametrize(("given", "found"), [
    (None, "--xla_one=1 --xla_one_more=true"),
    ("--xla_other=2", "--xla_other=2 --xla_one=1 --xla_one_more=true"),
    ("--xla_one=5  --xla_other=2", "--xla_one=5 --xla_other=2 --xla_one_more=true"),
    ("--xla_one_more --xla_one=5", "--xla_one_more --xla_one=5"),
])  # fmt: skip
@pytest.mark.parametrize("compiler", VARIABLES)
def test_flags_are_added_to_those_that_are_given_but_change_none(compiler, given, found, monkeypatch):
    for variable in VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
    if given is not None:
        monkeypatch.setenv(VARIABLES[compiler], given)
    set_compiler_flags(compiler, (ONE, TWO))
    assert os.environ[VARIABLES[compiler]] == found
    (other,) = set(VARIABLES.values()) - {VARIABLES[compiler]}
    assert other not in os.environ


def test_every_flag_is_named_once_without_dashes_and_says_why():
    for flags in FLAGS.values():
        names = [flag.name for flag in flags]
        assert len(set(names)) == len(names)
        assert all(flag.name.startswith("xla_") and "=" not in flag.name and flag.value and flag.why for flag in flags)
