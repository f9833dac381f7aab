"""The families name themselves."""

from maxtext_lite.config.hf.config import family_of
from maxtext_lite.config.hf.families import FAMILIES


def test_families_name_themselves():
    assert all(family_of({"model_type": kind}, "x") == kind for kind in FAMILIES)
