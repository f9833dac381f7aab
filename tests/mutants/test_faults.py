"""The yardstick of the suite: each fault can be planted, and the test that must see it exists."""

import shutil

import pytest

from tests.mutants.faults import read_faults
from tests.source_tree import REPOSITORY

FAULTS = read_faults()


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(REPOSITORY / "maxtext_lite", root / "maxtext_lite")
    return root


@pytest.mark.fast
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted_and_has_a_test(fault, copy):
    before = fault.plant(copy)
    path = copy / fault.file
    assert path.read_text() != before
    path.write_text(before)
    file, _, test = fault.seen_by.partition("::")
    assert f"\ndef {test.partition('[')[0]}(" in (REPOSITORY / file).read_text()


def test_there_are_at_least_sixty_faults_with_names_of_their_own():
    names = {fault.name for fault in FAULTS}
    assert len(names) == len(FAULTS) >= 60
