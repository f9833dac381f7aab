"""One prepare at a time, or its shares, writes an output; a dead one locks nobody out."""

import os
import subprocess
import sys

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.data.preparing.journal import Journal
from maxtext_lite.data.preparing.keys import PrepareConfig
from maxtext_lite.data.preparing.shards import Entry
from maxtext_lite.data.preparing.tasks import find_inputs, split_into_tasks
from maxtext_lite.data.tokenizer import ByteTokenizer


@pytest.fixture
def open_journal(tmp_path):
    (tmp_path / "a.txt").write_text("a text")
    config = PrepareConfig(input=[str(tmp_path / "a.txt")], output=str(tmp_path / "out"))
    files = find_inputs(config.input)
    return lambda: Journal(config, files, split_into_tasks(files, task_bytes=10, field="text"), ByteTokenizer())


def test_a_second_prepare_is_refused_and_shares_are_not(open_journal):
    with open_journal().hold(shared=False):
        for shared in (False, True):
            with (
                pytest.raises(UserError, match="is in use: another prepare writes there"),
                open_journal().hold(shared=shared),
            ):
                pass
    with open_journal().hold(shared=True), open_journal().hold(shared=True):
        with pytest.raises(UserError, match="is in use"), open_journal().hold(shared=False):
            pass


def test_the_lock_ends_with_its_process(open_journal, tmp_path):
    with open_journal().hold(shared=False):
        pass
    lock = tmp_path / "out" / "journal" / "lock"
    program = (
        "import fcntl, os, signal\n"
        f"opened = open({str(lock)!r}, 'ab')\n"
        "fcntl.flock(opened, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\n"
        "signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="is in use"), open_journal().hold(shared=False):
            pass
        holder.kill()
        holder.wait()
    with open_journal().hold(shared=False):
        pass


def test_a_task_is_done_when_its_entry_and_all_that_it_made_are_there(open_journal, tmp_path):
    journal = open_journal()
    with journal.hold(shared=False):
        assert journal.done() == {}
        assert journal.finish() is None
        empty = Entry(0, None, 1, 0, ())
        journal.record(empty)
        assert journal.done() == {0: empty}
        with pytest.raises(UserError, match="has no text: every document is empty"):
            journal.finish()


def test_a_plan_of_another_format_is_named(open_journal, tmp_path):
    open_journal()
    plan = tmp_path / "out" / "prepare.json"
    plan.write_text(plan.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(UserError, match=r"was begun differently: format=2, not 1\."):
        open_journal()


def test_shares_with_one_process_id_do_not_meet(open_journal, tmp_path, monkeypatch):
    """As in containers, each with its own."""
    linked = os.link

    def link(*arguments):
        monkeypatch.undo()
        open_journal()
        linked(*arguments)

    monkeypatch.setattr(os, "link", link)
    assert open_journal().done() == {}


def test_a_share_that_begins_while_another_does_takes_its_plan(open_journal, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    listed = type(tmp_path).iterdir

    def iterdir(self):
        monkeypatch.undo()
        open_journal()
        return listed(self)

    monkeypatch.setattr(type(tmp_path), "iterdir", iterdir)
    assert open_journal().done() == {}
