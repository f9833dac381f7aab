"""A directory has the checkpoints that its names say; of other names and of marked ones there are none."""

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.config.checkpoint_steps import steps_in


def test_steps_are_the_directories_with_their_number_as_name(tmp_path):
    assert steps_in(tmp_path / "nothing") == []
    for name in ("10", "9", "007", "unfinished-11", "deleted-8", "damaged-9"):
        (tmp_path / name).mkdir()
    (tmp_path / "12").write_text("a file")
    assert steps_in(tmp_path) == [9, 10], "on a file system, what bears a mark has no other name"
    with pytest.raises(UserError, match="12 cannot be read: "):
        steps_in(tmp_path / "12")


def test_in_a_bucket_a_checkpoint_with_a_mark_beside_it_does_not_count(bucket):
    assert steps_in(bucket / "checkpoints") == []
    for step in (1, 2):
        (bucket / "checkpoints" / str(step) / "array").write_text("x")
    (bucket / "checkpoints" / "unfinished-2").write_text("-")
    assert steps_in(bucket / "checkpoints") == [1]
