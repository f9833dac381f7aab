"""A checkpoint gets its name last; all hosts check the same files."""

import errno
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from maxtext_lite.config import UserError
from maxtext_lite.training import saving
from maxtext_lite.training.commit import remove
from maxtext_lite.training.failures import Failures
from maxtext_lite.training.manifest import write_part
from maxtext_lite.training.saving import Saver, check, read_arrays, save_alone


@pytest.fixture(scope="module")
def items():
    return {"params": ocp.args.StandardSave({"w": jnp.arange(8.0)}), "about": ocp.args.JsonSave({"format": 3})}


def test_a_kill_before_the_checksums_stand_leaves_no_checkpoint(items, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def kill(*_):
        raise Killed

    monkeypatch.setattr(saving, "write_part", kill)
    monkeypatch.setattr(saving.threading, "excepthook", lambda _: None)
    saver = Saver(Failures())
    saver.start(tmp_path / "3", items, on_commit=lambda _: None)
    saver._thread.join()
    assert [path.name for path in tmp_path.iterdir()] == ["unfinished-3"]
    monkeypatch.setattr(saving, "write_part", write_part)
    said = []
    saver.start(tmp_path / "3", items, on_commit=said.append)
    saver.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["3"]
    assert "hashed at" in said[0]
    saver.close()
    assert check(tmp_path / "3").problem is None


def test_a_run_that_lost_its_directory_names_no_checkpoint_there(items, tmp_path):
    saver = Saver(Failures(), holds=lambda: False)
    saver.start(tmp_path / "3", items, on_commit=pytest.fail)
    saver.close()
    assert [path.name for path in tmp_path.iterdir()] == ["unfinished-3"]


def test_replicas_share_the_writing_of_large_arrays_alone(tmp_path):
    """By the chunks on disk, one per slice that a replica writes."""
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    replicated = jax.NamedSharding(mesh, jax.P())
    arrays = {"small": np.ones((2, 2**17), np.float32), "large": np.ones((2, 2**18), np.float32)}
    save_alone(tmp_path / "3", {"params": ocp.args.StandardSave(jax.device_put(arrays, replicated))})
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.metadata(tmp_path / "3" / "params").item_metadata
    assert found["small"].storage.chunk_shape == (2, 2**17)
    assert found["large"].storage.chunk_shape == (1, 2**18)


def test_a_full_disk_is_raised_by_whoever_waits(items, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(saving, "write_part", full)
    with pytest.raises(UserError, match=r"unfinished-3 cannot be written: No space left on device. What is safe:"):
        save_alone(tmp_path / "3", items)


def test_files_that_vanish_are_the_users_to_find(items, tmp_path, monkeypatch):
    save_alone(tmp_path / "3", items)
    for path in (tmp_path / "3" / "params").rglob("d/*"):
        path.unlink()
    abstract = {"params": {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=jnp.zeros(8).sharding)}}
    with pytest.raises(UserError, match=r"3 cannot be read \(ValueError: NOT_FOUND: "):
        read_arrays(tmp_path / "3", abstract)
    text = 'NOT_FOUND: Error reading Byte range [18987, 26817) of local file "/runs/unfinished-4/d/56e1"'

    def vanished(*_):
        raise ValueError(text)  # of Orbax, where it gathers what the processes wrote

    monkeypatch.setattr(saving, "write_part", vanished)
    with pytest.raises(UserError, match=r"^/runs/unfinished-4/d/56e1 cannot be written: No such file or directory\. W"):
        save_alone(tmp_path / "4", items)


def test_a_bug_is_not_told_as_a_full_disk(items, tmp_path, monkeypatch):
    def buggy(*_):
        raise TypeError("a bug")

    monkeypatch.setattr(saving, "write_part", buggy)
    with pytest.raises(TypeError, match="a bug"):
        save_alone(tmp_path / "3", items)


def test_hosts_that_see_other_files_are_not_taken_for_damage(items, tmp_path, monkeypatch):
    save_alone(tmp_path / "3", items)
    monkeypatch.setattr(saving, "exchange", lambda mine: [mine, [None, "its checksums are missing", None]])
    with pytest.raises(UserError, match=r"host 1 does not see the same files in .*/3 as host 0"):
        check(tmp_path / "3")


def test_damage_that_only_another_host_found_counts(items, tmp_path, monkeypatch):
    save_alone(tmp_path / "3", items)
    other = None, "about/metadata is missing", 0
    monkeypatch.setattr(saving, "exchange", lambda mine: [mine, other if isinstance(mine, tuple) else mine])
    assert check(tmp_path / "3").problem == "about/metadata is missing"


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EACCES, errno.ESTALE, errno.ETIMEDOUT])
@pytest.mark.parametrize("reader", ["iterdir", "read_text", "open"], ids=["listed", "checksums", "hashed"])
def test_what_cannot_be_read_for_now_is_not_taken_for_damage(items, tmp_path, monkeypatch, reader, number):
    save_alone(tmp_path / "3", items)
    found = getattr(Path, reader)

    def fail(path, *words, **keys):
        if reader == "open" and path.name.startswith("sha256."):  # read_text opens, too
            return found(path, *words, **keys)
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, reader, fail)
    with pytest.raises(UserError, match=rf"/3\S* cannot be read: {os.strerror(number)}\. Nothing is set aside"):
        check(tmp_path / "3")


def test_what_a_disk_cannot_read_is_damage(items, tmp_path, monkeypatch):
    save_alone(tmp_path / "3", items)

    def fail(path, *_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(Path, "read_text", fail)
    assert check(tmp_path / "3").problem == "sha256.0-of-1 cannot be read: Input/output error"


@pytest.mark.parametrize("found", [["a cannot be read: Too many open files.", None, None],
                                   ("a cannot be read: Too many open files.", None, 0)],
                         ids=["listed", "hashed"])  # fmt: skip
def test_a_passing_error_of_another_host_ends_the_start_on_all(items, tmp_path, monkeypatch, found):
    save_alone(tmp_path / "3", items)
    monkeypatch.setattr(saving, "exchange", lambda mine: [mine, found if type(mine) is type(found) else mine])
    with pytest.raises(UserError, match=r"^a cannot be read: Too many open files\.$"):
        check(tmp_path / "3")


def test_without_checksums_a_new_checkpoint_is_damaged_and_an_old_one_is_not(items, tmp_path):
    save_alone(tmp_path / "3", items)
    (tmp_path / "3" / "sha256.0-of-1").unlink()
    assert check(tmp_path / "3").problem == "its checksums are missing"
    (tmp_path / "3" / "about" / "metadata").write_text('{"format": 2}')
    assert check(tmp_path / "3").problem is None
    remove(tmp_path / "3")
    assert not list(tmp_path.iterdir())
