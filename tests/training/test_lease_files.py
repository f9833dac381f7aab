"""The files of leases do the same on a file system and in a bucket."""

import resource
import threading
import time

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.training.failures import Failures
from maxtext_lite.training.lease import Lease
from maxtext_lite.training.lease_files import lease_files


@pytest.fixture(params=["disk", "bucket"])
def directory(request, tmp_path):
    return tmp_path / "lease" if request.param == "disk" else request.getfixturevalue("bucket") / "lease"


def test_a_lease_is_made_once_renewed_while_it_is_there_and_removed(directory):
    files = lease_files(directory)
    assert files.found() == []
    files.make("1.json", b"one")
    with pytest.raises(FileExistsError):
        files.make("1.json", b"two")
    (made,) = files.found()
    assert (made.name, made.text, files.read("1.json")) == ("1.json", b"one", b"one")
    assert abs(files.now_ns() - made.renewed_ns) < 60e9
    time.sleep(0.01)
    files.renew("1.json")
    (renewed,) = files.found()
    assert renewed.renewed_ns > made.renewed_ns
    assert renewed != made
    files.remove("1.json")
    files.remove("1.json")
    for missing in (files.renew, files.read):
        with pytest.raises(FileNotFoundError):
            missing("1.json")
    assert files.found() == []
    files.close()


def test_in_a_bucket_one_of_many_holds_the_directory_and_a_takeover_is_noticed(bucket):
    """One process at a time, as among `test_lease`'s: all of them look before any of them writes."""
    leases = [Lease(bucket / "run", Failures(), renewal_seconds=60) for _ in range(4)]
    barrier, got, refused = threading.Barrier(4), [], []

    def contend(lease):
        barrier.wait()
        try:
            while lease.attempt() is not None:
                time.sleep(0.001)
            got.append(lease)
        except UserError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=contend, args=(lease,)) for lease in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (holder,) = got
    assert ["is in use: process" in each for each in refused] == [True] * 3
    assert holder.check()
    files = lease_files(bucket / "run" / "lease")
    (mine,) = files.found()
    files.make("99.json", mine.text.replace(b'"host": "', b'"host": "far'))
    files.remove(mine.name)
    assert not holder.check()
    with pytest.raises(UserError, match=r"lease of gs://bucket/.*/run was taken over by process \d+ on host far"):
        holder._failures.raise_together()
    holder.release()
    assert [each.name for each in files.found()] == ["99.json"]


def test_a_request_whose_answer_was_lost_is_not_another_s_lease(directory, monkeypatch):
    """A store's client asks again, and is told that there is one."""
    lease = Lease(directory, Failures(), renewal_seconds=60)
    make = lease._files.make

    def make_twice(name, text):
        make(name, text)
        make(name, text)

    monkeypatch.setattr(lease._files, "make", make_twice)
    assert lease.attempt() is None
    assert lease.check()
    lease.release()
    assert lease._files.found() == []


def test_a_lease_that_cannot_be_written_leaves_nothing(tmp_path):
    """As on a full disk: no file may have a byte."""
    files = lease_files(tmp_path / "run" / "lease")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            files.make("1.json", b"one")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [*(tmp_path / "run").iterdir()] == []
    files.make("1.json", b"one")
    with pytest.raises(FileExistsError):
        files.make("1.json", b"two")
    assert files.read("1.json") == b"one"
