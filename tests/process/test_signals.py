"""A command ends at once with 130, is asked to stop later on, then ends with its own code; imports change nothing."""

import contextlib
import os
import signal
import subprocess
import sys
import threading

import pytest

from maxtext_lite import console as signals
from maxtext_lite.console import (
    NUMBERS,
    CommandSignals,
    command_signals,
    runs_a_command,
)
from tests.source_tree import REPOSITORY

BOTH = pytest.mark.parametrize("number", NUMBERS)


COMMANDS = """python -m maxtext_lite.train steps=3
python -m maxtext_lite plan
python -mmaxtext_lite.train
python -X dev -W error -Im maxtext_lite.report runs/a
python /usr/bin/maxtext-lite train"""
OTHERS = """python -m maxtext_lite.post_training.reward_worker
python -m maxtext_lite_plus.train
python -m pytest -m maxtext_lite.train
python -c code -m maxtext_lite.train
python script.py -m maxtext_lite.train
python -X maxtext_lite script.py
python -m"""


def test_the_interpreters_own_words_say_whether_it_runs_a_command():
    assert all(runs_a_command(words.split()) for words in COMMANDS.splitlines())
    assert not any(
        runs_a_command(words.split()) for words in OTHERS.splitlines()
    )  # which leave signals to others


@pytest.fixture(autouse=True)
def interruptible():
    """A background shell may have left SIGINT ignored, in this process and in those that it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Ended(Exception):
    pass


@pytest.fixture
def of_a_command(monkeypatch):
    """Signals of a command whose end raises `Ended` with the exit code."""

    def end(code):
        raise Ended(code)

    monkeypatch.setattr(signals.os, "_exit", end)
    return CommandSignals()


def exit_code(of_a_command, number):
    with pytest.raises(Ended) as ended:
        of_a_command.came(number)
    return ended.value.args[0]


@BOTH
def test_with_something_to_save_the_first_is_a_request_and_the_second_ends_with_130(
    of_a_command, number
):
    asked = []
    of_a_command.ask(asked.append)
    of_a_command.came(number)
    other = ({*NUMBERS} - {number}).pop()
    of_a_command.came(other)  # a request of its own
    assert asked == [number, other]
    assert exit_code(of_a_command, number) == 130
    assert asked == [number, other]


@pytest.mark.fast
@BOTH
def test_while_another_run_begins_a_signal_ends_the_process_again(of_a_command, number):
    of_a_command.ask(lambda number: pytest.fail("asked"))
    of_a_command.reset()
    assert exit_code(of_a_command, number) == 130


@pytest.mark.parametrize("code", [0, 2, 75])
def test_when_all_is_done_a_signal_changes_no_exit_code(of_a_command, code):
    of_a_command.ask(lambda number: None)
    of_a_command.finish(code)
    assert exit_code(of_a_command, signal.SIGINT) == code


def test_a_mere_import_leaves_signals_alone():
    assert not command_signals.installed
    command_signals.handle()
    program = (
        "import signal; before = [signal.getsignal(n) for n in (2, 15)]; import maxtext_lite; "
        "print(before == [signal.getsignal(n) for n in (2, 15)], signal.set_wakeup_fd(-1))"
    )
    said = subprocess.check_output(
        [sys.executable, "-c", program], cwd=REPOSITORY, text=True, timeout=60
    )
    assert said == "True -1\n"


IN_C = """
import ctypes, os, signal, sys
from maxtext_lite.console import command_signals
command_signals.install()
child = os.fork()
if not child:  # ends as any process does, without a word to its parent
    os.kill(os.getpid(), signal.SIGINT)
ended_by = os.WTERMSIG(os.waitpid(child, 0)[1])
command_signals.handle()
print(ended_by, flush=True)
while True:
    ctypes.CDLL(None).sleep(60)
"""


@contextlib.contextmanager
def popen(words, **environment):
    pipe = subprocess.PIPE
    keys = {"cwd": REPOSITORY, "stdout": pipe, "stderr": pipe, "text": True}
    with subprocess.Popen(
        [sys.executable, *words], env=os.environ | environment, **keys
    ) as process:
        killer = threading.Timer(60, process.kill)
        killer.start()
        try:
            yield process
        finally:
            killer.cancel()
            process.kill()


@BOTH
def test_the_end_is_prompt_in_a_long_call_into_c_and_a_forks_signals_are_its_own(
    number,
):
    with popen(["-W", "ignore", "-c", IN_C]) as process:
        assert process.stdout.readline() == f"{signal.SIGINT:d}\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=30)  # the call takes 60 seconds
    assert (process.returncode, out, err) == (130, "", "")


def test_a_signal_while_a_command_imports_ends_it_quietly(tmp_path):
    (tmp_path / "pydantic.py").write_text(
        "import time\nprint('importing', flush=True)\ntime.sleep(60)\n"
    )
    with popen(["-m", "maxtext_lite.plan"], PYTHONPATH=str(tmp_path)) as process:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")
