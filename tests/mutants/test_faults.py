"""The yardstick of the suite: each fault can be planted, and the map says which tests reach a function."""

import json
import shutil

import pytest

from tests.mutants.__main__ import chosen_tests, read_map
from tests.mutants.faults import read_faults
from tests.mutants.reached import instrument
from tests.source_tree import REPOSITORY

FAULTS = read_faults()


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(REPOSITORY / "maxtext_lite", root / "maxtext_lite")
    return root


@pytest.mark.fast
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault, copy):
    assert fault.target(copy)
    before = fault.plant(copy)
    path = copy / fault.file
    assert path.read_text() != before
    path.write_text(before)


def test_there_are_at_least_sixty_faults_with_names_of_their_own():
    names = {fault.name for fault in FAULTS}
    assert len(names) == len(FAULTS) >= 60


def test_the_most_specific_tests_are_chosen_and_the_cheapest_run_first(tmp_path):
    def ended(name, seconds, outcome="passed"):
        return {"ended": name, "when": "call", "seconds": seconds, "outcome": outcome}

    records = [
        {"test": "a.py::test_one[1]", "fixtures": []},
        {"reached": "x.py:f", "by": "a.py::test_one[1]"},
        ended("a.py::test_one[1]", 3),
        {"test": "b.py::test_trained", "fixtures": ["fixture b.py::run"]},
        {"reached": "x.py:f", "by": "fixture b.py::run"},
        {"reached": "x.py:g", "by": "fixture b.py::run"},
        ended("b.py::test_trained", 1),
        {"test": "c.py::test_failed", "fixtures": []},
        {"reached": "x.py:f", "by": "c.py::test_failed"},
        ended("c.py::test_failed", 0.1, "failed"),
        {"test": "c.py::test_other", "fixtures": []},
        {"reached": "x.py:g", "by": "c.py::test_other"},
        ended("c.py::test_other", 0.1),
    ]
    log = tmp_path / "reached.jsonl"
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    reach = read_map(log)
    assert [case.name for case in chosen_tests(reach, "x.py:f")] == [
        "b.py::test_trained",
        "a.py::test_one[1]",
    ]
    assert [case.num_functions for case in chosen_tests(reach, "x.py:f")] == [2, 1]


def test_an_instrumented_function_says_that_it_was_called(tmp_path, monkeypatch):
    source = "class A:\n    def f(self):\n        '''Says.'''\n        return 1\n"
    package = tmp_path / "maxtext_lite"
    package.mkdir()
    (package / "a.py").write_text(source)
    instrument(tmp_path)
    lines = (package / "a.py").read_text().splitlines()
    assert lines[3].endswith('.note("maxtext_lite/a.py:A.f")')
    assert lines[4] == "        return 1"
