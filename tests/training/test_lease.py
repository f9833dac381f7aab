"""One run has a directory: others are refused, the dead are followed, and whatever the order one holds it."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.operations.lock import Holder, Lease

FAST = 0.05  # seconds between renewals


@pytest.fixture
def new(tmp_path):
    """A function to a new lease of one directory; all are released at the end."""
    made = []

    def make(renewal_seconds=60.0):
        made.append(Lease(tmp_path / "run", renewal_seconds=renewal_seconds))
        return made[-1]

    yield make
    for each in made:
        each.release()


def leave(tmp_path, *, number=1, age=0.0, **changed):
    """A lease that somebody else left, `age` seconds after its last renewal."""
    path = tmp_path / "run" / "lease" / f"{number}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    holder = Holder("here", os.getpid(), "", str(tmp_path / "no lock"))
    path.write_text(
        json.dumps(dataclasses.asdict(dataclasses.replace(holder, **changed)))
    )
    os.utime(path, (time.time() - age, time.time() - age))
    return path


@pytest.mark.fast
def test_the_second_is_refused_with_who_holds_it_until_it_is_released(new, tmp_path):
    first = new()
    assert first.attempt() is None
    with pytest.raises(
        UserError, match=rf"run is in use: process {os.getpid()} on host"
    ):
        new().attempt()
    first.release()
    assert not (tmp_path / "run" / "lease").exists()
    assert new().attempt() is None


def dead_lock(tmp_path):
    """The file of a holder that has died."""
    path = tmp_path / "dead.lock"
    path.touch()
    return str(path)


def test_on_one_machine_a_dead_holder_is_known_at_once(new, tmp_path):
    lock = dead_lock(tmp_path)
    source = f"import fcntl; file = open({lock!r}); fcntl.flock(file, fcntl.LOCK_EX); print(); input()"
    process = subprocess.Popen(
        [sys.executable, "-uc", source],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    process.stdout.readline()
    leave(tmp_path, process_id=process.pid, lock_file=lock)
    with pytest.raises(UserError, match=f"process {process.pid} "):
        new().attempt()
    process.kill()
    process.communicate(timeout=60)
    assert new().attempt() is None


def test_elsewhere_missed_renewals_show_it_and_a_fresh_lease_is_waited_for(
    new, tmp_path
):
    path = leave(tmp_path, host="far", age=30)
    waiting = new()
    assert "on host far" in waiting.attempt()
    os.utime(path)
    with pytest.raises(UserError, match="on host far"):
        waiting.attempt()
    waiting = new(renewal_seconds=FAST)
    while waiting.attempt() is not None:
        time.sleep(FAST)


def test_a_holder_renews_and_learns_that_it_was_taken_over(new, tmp_path):
    first = new(renewal_seconds=FAST)
    first.attempt()
    path = tmp_path / "run" / "lease" / "1.json"
    os.utime(path, (0, 0))
    deadline = time.monotonic() + 60
    while not path.stat().st_mtime and time.monotonic() < deadline:
        time.sleep(FAST)
    assert path.stat().st_mtime > 0
    leave(tmp_path, number=2, process_id=1, host="far")
    path.unlink()
    with pytest.raises(UserError, match="taken over by process 1 on host far"):
        first.check()
    first._thread.join(60)
    assert "taken over" in str(first.error)
    first.release()
    assert (tmp_path / "run" / "lease" / "2.json").exists()


@pytest.fixture(params=["disk", "bucket"])
def run(request, tmp_path):
    return (
        tmp_path / "run"
        if request.param == "disk"
        else request.getfixturevalue("bucket") / "run"
    )


def test_of_many_at_once_one_holds_it(run, tmp_path):
    for dead in (False, True):
        if dead:
            leave(
                tmp_path, lock_file=dead_lock(tmp_path)
            )  # which is where those of the disk look
        contenders = [Lease(run, renewal_seconds=60) for _ in range(5)]
        got, start = [], threading.Barrier(5)

        def contend(contender, got=got, start=start):
            start.wait()
            try:
                while contender.attempt() is not None:
                    time.sleep(0.001)
                got.append(contender)
            except UserError:
                got.append("refused")

        threads = [
            threading.Thread(target=contend, args=(each,)) for each in contenders
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got.count("refused") == 4
        (holder,) = [each for each in got if each != "refused"]
        holder.check()
        for each in contenders:
            each.release()
