"""configs/base.yml and the schema have the same keys, each with its one comment."""

import re

from maxtext_lite.config import KEYS
from tests.source_tree import REPOSITORY

BASE_YML = (REPOSITORY / "configs" / "base.yml").read_text(encoding="utf-8")
LINES = [line for line in BASE_YML.splitlines() if re.match(r"\w+:", line)]


def test_base_yml_and_the_schema_have_the_same_keys():
    keys = [line.partition(":")[0] for line in LINES]
    assert sorted(keys) == sorted(KEYS)


def test_every_key_of_base_yml_has_a_trailing_comment():
    assert not [line for line in LINES if not re.search(r"\S\s+# \S.{5,}", line)]
