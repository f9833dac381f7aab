"""What docs/parallelism.md says about context parallelism."""

import re

from maxtext_lite.parallel import context_order
from tests.source_tree import REPOSITORY

PAGE = (REPOSITORY / "docs" / "parallelism.md").read_text(encoding="utf-8")
SECTION = re.search(r"^## Context parallelism\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)[1]


def test_the_chunks_of_four_shards():
    rows = re.findall(r"^\| (\d) \| (\d+) - (\d+) \| (\d+) - (\d+) \| (\d+) \|$", SECTION, re.MULTILINE)
    by_shard = context_order(4096, 4).reshape(4, 2, 512)
    for shard, *chunk_ends, pairs in (map(int, row) for row in rows):
        assert chunk_ends == by_shard[shard][:, [0, -1]].ravel().tolist()
        assert pairs == round((by_shard[shard] + 1).sum() / 1000)
    assert len(rows) == 4
