"""A checkpoint counts by its name, on a file system and in a bucket; the remains of a kill do not count."""

from pathlib import Path

import pytest

from maxtext_lite.config.whole_file import steps_in
from maxtext_lite.training import commit
from maxtext_lite.training.commit import make_room, remove, remove_leftovers, set_aside, while_unfinished


@pytest.fixture(params=["disk", "bucket"])
def parent(request, tmp_path):
    """A directory of checkpoints."""
    if request.param == "disk":
        (tmp_path / "checkpoints").mkdir()
        return tmp_path / "checkpoints"
    return request.getfixturevalue("bucket") / "checkpoints"


class Killed(BaseException):
    pass


def kill(*_: object):
    raise Killed


def write(parent: Path, step: int, text: str = "whole"):
    make_room(parent / str(step))
    where = while_unfinished(parent / str(step)) / "params"
    where.mkdir(parents=True, exist_ok=True)
    (where / "w").write_text(text)


def test_a_checkpoint_counts_from_its_commit_to_its_removal(parent):
    assert steps_in(parent) == []
    for step in (10, 9):
        write(parent, step)
        assert step not in steps_in(parent)
        commit.commit(parent / str(step))
    assert steps_in(parent) == [9, 10]
    assert (parent / "9" / "params" / "w").read_text() == "whole"
    remove(parent / "9")
    assert steps_in(parent) == [10]
    assert {path.name for path in parent.iterdir()} == {"10"}


def test_what_a_kill_leaves_is_not_counted_and_goes_at_the_next_start(parent, monkeypatch):
    for step in (8, 9):
        write(parent, step)
        commit.commit(parent / str(step))
    write(parent, 10, "half")  # killed while it is written
    name = "remove_objects" if "gs:" in str(parent) else "shutil"
    with monkeypatch.context() as patch:
        patch.setattr(commit, name, kill if name == "remove_objects" else type("", (), {"rmtree": kill}))
        with pytest.raises(Killed):
            remove(parent / "8")
    assert steps_in(parent) == [9]
    remove_leftovers(parent)
    assert {path.name for path in parent.iterdir()} == {"9"}
    write(parent, 10, "again")
    commit.commit(parent / "10")
    assert steps_in(parent) == [9, 10]
    assert (parent / "10" / "params" / "w").read_text() == "again"


def test_one_set_aside_is_kept_until_its_step_is_saved_again(parent):
    write(parent, 7, "damaged")
    commit.commit(parent / "7")
    assert set_aside(parent / "7").name == "damaged-7"
    remove_leftovers(parent)
    assert steps_in(parent) == []
    kept = parent / ("7" if "gs:" in str(parent) else "damaged-7")
    assert (kept / "params" / "w").read_text() == "damaged"
    write(parent, 7)
    commit.commit(parent / "7")
    assert steps_in(parent) == [7]
    assert (parent / "7" / "params" / "w").read_text() == "whole"
