"""Every key of configs/base.yml has its one comment."""

import re

from tests.source_tree import REPOSITORY


def test_every_key_of_base_yml_has_a_trailing_comment():
    lines = (REPOSITORY / "configs" / "base.yml").read_text("utf-8").splitlines()
    keys = [line for line in lines if re.match(r"\w+:", line)]
    assert not [line for line in keys if not re.search(r"\S\s+# \S.{5,}", line)]
