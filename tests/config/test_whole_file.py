"""Files that appear only when complete; a directory has the checkpoints that its names say."""

import pytest

from maxtext_lite.config import UserError, whole_file
from maxtext_lite.config.whole_file import replacing, steps_in, write_whole


@pytest.mark.parametrize(("content", "written"), [("ü", b"\xc3\xbc"), (b"\0", b"\0")])
def test_a_text_or_bytes_take_the_place_of_what_was_there(tmp_path, content, written):
    write_whole(tmp_path / "a", b"before")
    write_whole(tmp_path / "a", content)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": written}


def test_the_permissions_of_what_was_there_are_kept(tmp_path):
    path = tmp_path / "a"
    for mode in (0o600, 0o664):
        path.write_text("before")
        path.chmod(mode)
        write_whole(path, "after")
        assert (path.read_text(), path.stat().st_mode & 0o777) == ("after", mode)


def test_an_incomplete_write_leaves_no_file(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    write_whole(tmp_path / "a", b"before")
    monkeypatch.setattr(whole_file.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "a", b"content")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"before"}


def test_an_error_names_the_file_that_was_to_be_written(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        write_whole(tmp_path / "no" / "a", "")
    assert error.value.filename == str(tmp_path / "no" / "a")


def test_a_block_that_fails_leaves_what_was_there(tmp_path):
    def fail():
        with replacing(tmp_path / "a") as partial:
            partial.write_text("half")
            raise ZeroDivisionError

    (tmp_path / "a").write_text("before")
    with pytest.raises(ZeroDivisionError):
        fail()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "before"}


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
