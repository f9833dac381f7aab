"""One run has a directory: others are refused, the dead are followed, and whatever the order one holds it."""

import dataclasses
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.training import lease as lease_module
from maxtext_lite.training.failures import Failures
from maxtext_lite.training.lease import Holder, Lease, hold

FAST = 0.05  # seconds between renewals


@pytest.fixture
def new(tmp_path):
    """A function to a new lease of one directory; all are released at the end."""
    made = []

    def make(failures=None, renewal_seconds=60.0):
        failures = Failures() if failures is None else failures
        made.append(Lease(tmp_path / "run", failures, renewal_seconds=renewal_seconds))
        return made[-1]

    yield make
    for each in made:
        each.release()


def leave(tmp_path, *, number=1, age=0.0, **changed):
    """A lease that somebody else left, `age` seconds after its last renewal."""
    path = tmp_path / "run" / "lease" / f"{number}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    holder = dataclasses.replace(Holder.this_process(), **changed)
    path.write_text(lease_module.json.dumps(dataclasses.asdict(holder)))
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def test_the_second_is_refused_with_who_holds_it_until_it_is_released(new, tmp_path):
    first = new()
    assert first.attempt() is None
    with pytest.raises(UserError, match=rf"run is in use: process {os.getpid()} on host \S+, since 20\d\d-.*run_name"):
        new().attempt()
    first.release()
    assert not (tmp_path / "run" / "lease").exists()
    assert new().attempt() is None


def ended_process():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("changed", [
    lambda: {"process_id": ended_process()},
    lambda: {"started": "12345"},  # its number belongs to another process now
], ids=["ended", "number in use again"])  # fmt: skip
def test_on_one_machine_a_dead_holder_is_known_at_once(changed, new, tmp_path):
    leave(tmp_path, **changed())
    assert new().attempt() is None
    assert [path.name for path in (tmp_path / "run" / "lease").iterdir()] == ["2.json"]


def test_a_process_that_nobody_has_waited_for_is_dead(new, tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = lease_module._started(process.pid)
    leave(tmp_path, process_id=process.pid, started=started)
    with pytest.raises(UserError, match=f"process {process.pid} "):
        new().attempt()
    process.kill()
    deadline = time.monotonic() + 60
    while lease_module._started(process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert new().attempt() is None
    process.communicate()


def test_ps_tells_starts_where_there_is_no_proc(monkeypatch, tmp_path):
    """As on macOS."""
    here = lease_module._started(os.getpid())
    nowhere = tmp_path / "nowhere"
    monkeypatch.setattr(lease_module, "Path", lambda path: nowhere if str(path).startswith("/proc") else path)
    assert lease_module._machine() == ""
    by_ps = lease_module._started(os.getpid())
    assert len(by_ps) > 10
    assert by_ps != here
    assert lease_module._started(ended_process()) == ""


@pytest.mark.parametrize("machine", ["another", ""])
def test_elsewhere_missed_renewals_show_it_by_the_clock_of_the_file_server(machine, new, tmp_path):
    leave(tmp_path, machine=machine, age=10 * 60.0)
    assert new().attempt() is None


def test_elsewhere_a_fresh_lease_is_waited_for_and_refused_once_it_is_renewed(new, tmp_path):
    path = leave(tmp_path, machine="another", host="far", age=30)
    other = new()
    assert "waiting for process" in other.attempt()
    assert "on host far" in other.attempt()
    os.utime(path)
    with pytest.raises(UserError, match="on host far"):
        other.attempt()


def test_one_that_is_released_while_it_is_looked_at_is_taken_next(new, tmp_path, monkeypatch):
    leave(tmp_path, machine="")

    def released(files):
        shutil.rmtree(tmp_path / "run" / "lease")
        monkeypatch.undo()
        return files.now_ns()

    monkeypatch.setattr(lease_module.lease_files(tmp_path / "run" / "lease").__class__, "now_ns", released)
    waiting = new()
    assert waiting.attempt() == ""
    assert waiting.attempt() is None


def test_a_clock_that_is_ahead_does_not_keep_the_dead_alive(new, tmp_path):
    leave(tmp_path, machine="another", age=-1000)
    other = new(renewal_seconds=FAST)
    assert other.attempt() is not None
    time.sleep(1.2 * FAST * lease_module.MISSED_RENEWALS)
    assert other.attempt() is None


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff", b'{"host": 1}', b"[" * 5000], ids=repr)
def test_a_lease_that_says_nothing_is_somebodys_until_it_is_old(text, new, tmp_path):
    path = leave(tmp_path)
    path.write_bytes(text)
    assert "has not said who it is" in new().attempt()
    os.utime(path, (0, 0))
    assert new().attempt() is None


def test_a_holder_renews_and_learns_that_it_was_taken_over(new, tmp_path):
    failures = Failures()
    first = new(failures, renewal_seconds=FAST)
    first.attempt()
    path = tmp_path / "run" / "lease" / "1.json"
    os.utime(path, (0, 0))
    deadline = time.monotonic() + 60
    while not path.stat().st_mtime and time.monotonic() < deadline:
        time.sleep(FAST)
    assert path.stat().st_mtime > 0
    leave(tmp_path, number=2, process_id=1, host="far")
    path.unlink()
    assert first.check() is False
    with pytest.raises(UserError, match=r"lease of .*run was taken over by process 1 on host far.*writes nothing more"):
        failures.raise_together()
    first.release()
    assert (tmp_path / "run" / "lease" / "2.json").exists()


@pytest.mark.parametrize("instead", ["", "a file"])
def test_a_holder_whose_directory_is_gone_stops(instead, new, tmp_path):
    failures = Failures()
    lease = new(failures)
    assert lease.attempt() is None
    shutil.rmtree(tmp_path / "run" / "lease")
    if instead:
        (tmp_path / "run" / "lease").write_text(instead)
    assert lease.check() is False
    with pytest.raises(UserError, match=r"lease of .*run is gone: .*its file was removed.*writes nothing more"):
        failures.raise_together()


@pytest.mark.parametrize("dead", [False, True])
def test_of_many_at_once_one_holds_it(dead, new, tmp_path):
    for _ in range(10):
        if dead:
            leave(tmp_path, started="12345")
        contenders, got, start = [new() for _ in range(6)], [], threading.Barrier(6)

        def contend(contender, got=got, start=start):
            start.wait()
            try:
                while contender.attempt() is not None:
                    time.sleep(0.001)
                got.append("holds")
            except UserError:
                got.append("refused")

        threads = [threading.Thread(target=contend, args=(each,)) for each in contenders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(got) == ["holds"] + ["refused"] * 5
        for each in contenders:
            each.release()


@pytest.mark.parametrize("let_go", [False, True])
def test_one_that_found_the_dead_long_ago_removes_nobodys_lease(let_go, new, tmp_path, monkeypatch):
    """Between its look and its own lease others come and go, and the numbers may begin anew."""
    leave(tmp_path, started="12345")
    slow, fast, last = new(), new(), new()
    write_bytes = lease_module.secrets.token_hex

    def meanwhile(number):
        monkeypatch.setattr(lease_module.secrets, "token_hex", write_bytes)
        assert fast.attempt() is None
        if let_go:
            fast.release()
            assert last.attempt() is None
        return write_bytes(number)

    monkeypatch.setattr(lease_module.secrets, "token_hex", meanwhile)  # called after the look
    assert slow.attempt() == ""
    assert (last if let_go else fast).check()
    with pytest.raises(UserError, match="is in use"):
        slow.attempt()


def test_all_hosts_end_on_the_first_hosts_refusal_and_wait_with_it(tmp_path, monkeypatch):
    held = hold(tmp_path / "run", Failures(), print)
    with pytest.raises(UserError, match="is in use"):
        hold(tmp_path / "run", Failures(), print)
    held.release()
    path = leave(tmp_path, machine="another", age=30)
    said = []
    timer = threading.Timer(0.2, path.unlink)  # let go of
    timer.start()
    monkeypatch.setattr(lease_module, "_POLL_SECONDS", 0.01)
    moves = []
    monkeypatch.setattr(lease_module.watchdog, "advance", lambda: moves.append(1))
    hold(tmp_path / "run", Failures(), said.append).release()
    assert len(said) == 1
    assert moves  # to wait is no hang
    assert "counts as dead after 90" in said[0]
    monkeypatch.setattr(lease_module.jax, "process_index", lambda: 1)
    assert hold(tmp_path / "elsewhere", Failures(), print) is None
    assert not (tmp_path / "elsewhere").exists()


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lease").write_text("a file")
    with pytest.raises(UserError, match="lease cannot be written: Not a directory"):
        hold(tmp_path / "run", Failures(), print)
