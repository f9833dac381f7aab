"""A checkpoint counts once it is whole and has its name; every file of it has a checksum; all hosts check the same."""

import errno
import hashlib
import os
import shutil
import threading
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from maxtext_lite.config import UserError
from maxtext_lite.config.whole_file import steps_in
from maxtext_lite.training import saving
from maxtext_lite.training.saving import (
    Saver,
    check,
    find_damage,
    read_checksums,
    save_alone,
    store_of,
    write_checksums,
)


class Killed(BaseException):
    pass


def kill(*_):
    raise Killed


def failing(error):
    """A function that raises the error, whatever it is called with."""

    def fail(*_, **__):
        raise error

    return fail


def os_error(number):
    return OSError(number, os.strerror(number))


# ---- The name ----------------------------------------------------------------------------------


@pytest.fixture(params=["disk", "bucket"])
def parent(request, tmp_path):
    """A directory of checkpoints."""
    if request.param == "disk":
        (tmp_path / "checkpoints").mkdir()
        return tmp_path / "checkpoints"
    return request.getfixturevalue("bucket") / "checkpoints"


def write(parent, step, text="whole", *, commits=True):
    store = store_of(parent)
    store.prepare(parent / str(step))
    where = store.unfinished_path(parent / str(step)) / "params"
    where.mkdir(parents=True, exist_ok=True)
    (where / "w").write_text(text)
    assert step not in steps_in(parent)
    if commits:
        store.commit(parent / str(step))


def names_in(parent):
    return sorted(path.name for path in parent.iterdir())


def test_a_checkpoint_counts_from_its_commit_to_its_removal_and_what_a_kill_leaves_does_not(
    parent, monkeypatch
):
    store = store_of(parent)
    for step in (10, 8, 9):
        write(parent, step)
    assert steps_in(parent) == [8, 9, 10]
    store.remove(parent / "10")
    assert names_in(parent) == ["8", "9"]
    write(parent, 10, "half", commits=False)
    with monkeypatch.context() as patch:
        patch.setattr(saving, "remove_objects", kill)
        patch.setattr(shutil, "rmtree", kill)
        with pytest.raises(Killed):
            store.remove(parent / "8")
    assert steps_in(parent) == [9]
    store.remove_leftovers(parent)
    assert names_in(parent) == ["9"]
    write(parent, 10, "again")
    assert (parent / "10" / "params" / "w").read_text() == "again"


def test_one_set_aside_is_kept_until_its_step_is_saved_again(parent):
    write(parent, 7, "damaged")
    store = store_of(parent)
    assert store.quarantine(parent / "7").name == "damaged-7"
    store.remove_leftovers(parent)
    assert steps_in(parent) == []
    kept = parent / ("7" if "gs:" in str(parent) else "damaged-7")
    assert (kept / "params" / "w").read_text() == "damaged"
    write(parent, 7)
    assert steps_in(parent) == [7]
    assert (parent / "7" / "params" / "w").read_text() == "whole"


# ---- The checksums -----------------------------------------------------------------------------

FILES = {
    "about/metadata": b"{}",
    "params/d/ab12": b"x" * 5000,
    "params/ocdbt.process_0/d/cd": b"first",
    "params/ocdbt.process_1/d/ef": b"second",
    "params/array_metadatas/process_1": b"shapes",
    "params/ocdbt.process_7/d/aa": b"of an eighth process",
    "commit_success.txt": b"",
}


@pytest.fixture
def directory(tmp_path):
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path


@pytest.mark.fast
def test_the_shares_of_two_processes_hold_each_file_once(directory):
    for process in (0, 1):
        write_checksums(directory, process, 2)
    assert (directory / "sha256.1-of-2").read_text().count("process_1") == 2
    assert read_checksums(directory) == {
        name: hashlib.sha256(text).hexdigest() for name, text in FILES.items()
    }


@pytest.mark.fast
def test_the_checksums_of_one_process_do_not_stand_for_anothers(directory):
    for process in (0, 1):
        write_checksums(directory, process, 2)
    first, second = (directory / f"sha256.{process}-of-2" for process in (0, 1))
    second.write_bytes(first.read_bytes())
    assert check(directory).startswith("sha256.1-of-2 ")


CHANGES = [
    lambda path: path.write_bytes(path.read_bytes() + b"x"),
    lambda path: path.write_bytes(b"\xff\xfe"),
    lambda path: path.unlink(),
    lambda path: (path.unlink(), path.mkdir()),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_file_is_named(change, directory):
    write_checksums(directory, 0, 1)
    digests = read_checksums(directory)
    assert check(directory) is None
    change(directory / "params" / "d" / "ab12")
    assert find_damage(directory, digests).startswith("params/d/ab12 ")
    assert check(directory).startswith("params/d/ab12 ")
    assert check(directory, ["about"]) is None


# ---- A save, and the check of one --------------------------------------------------------------


@pytest.fixture(scope="module")
def items():
    params = ocp.args.StandardSave({"w": jax.device_put(np.arange(8.0))})
    return {"params": params, "about": ocp.args.JsonSave({"format": 4})}


@pytest.fixture
def saved_3(items, tmp_path):
    save_alone(tmp_path / "3", items)
    return tmp_path / "3"


def test_a_kill_before_the_checksums_stand_leaves_no_checkpoint(
    items, tmp_path, monkeypatch
):
    monkeypatch.setattr(saving.threading, "excepthook", lambda _: None)
    saver = Saver()
    with monkeypatch.context() as patch:
        patch.setattr(saving, "write_checksums", kill)
        saver.start(tmp_path / "3", items, on_commit=pytest.fail)
        saver._thread.join()
    assert names_in(tmp_path) == ["unfinished-3"]
    counts = threading.Event()
    saver.start(tmp_path / "3", items, on_commit=counts.set)
    saver.close()
    assert names_in(tmp_path) == ["3"]
    assert counts.is_set()
    assert check(tmp_path / "3") is None


def test_what_cannot_be_read_for_now_is_not_taken_for_damage(saved_3, monkeypatch):
    monkeypatch.setattr(Path, "read_bytes", failing(os_error(errno.ESTALE)))
    with pytest.raises(UserError, match=os.strerror(errno.ESTALE)):
        check(saved_3)
