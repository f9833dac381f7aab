"""A command ends at once with 130, is asked to stop later on, then ends with its own code; imports change nothing."""

import os
import signal
import subprocess
import sys

import pytest

from maxtext_lite.process import signals
from maxtext_lite.process.signals import NUMBERS, CommandSignals, command_signals, runs_a_command
from tests.source_tree import REPOSITORY

BOTH = pytest.mark.parametrize("number", NUMBERS)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("python -m maxtext_lite.train steps=3", True),
        ("python -m maxtext_lite plan", True),
        ("python -mmaxtext_lite.train", True),
        ("python -X dev -W error -Im maxtext_lite.report runs/a", True),
        ("python -Xdev -Werror::UserWarning -m maxtext_lite.plan", True),
        ("python /usr/bin/maxtext-lite train", True),
        ("python -m maxtext_lite.rl.reward_worker", False),  # which leaves signals to its parent
        ("python -m maxtext_lite_plus.train", False),
        ("python -m pytest -m maxtext_lite.train", False),
        ("python -c code -m maxtext_lite.train", False),
        ("python script.py -m maxtext_lite.train", False),
        ("python -X maxtext_lite script.py", False),
        ("python -m", False),
        ("python", False),
    ],
)
def test_the_interpreters_own_words_say_whether_it_runs_a_command(words, expected):
    assert runs_a_command(words.split()) is expected


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
def test_with_nothing_to_save_a_signal_ends_the_process_with_130(of_a_command, number):
    assert exit_code(of_a_command, number) == 130


@BOTH
def test_with_something_to_save_the_first_is_a_request_and_the_second_ends_with_130(of_a_command, number):
    asked = []
    of_a_command.ask(asked.append)
    of_a_command.came(number)
    assert asked == [number]
    assert exit_code(of_a_command, number) == 130
    assert asked == [number]


def test_each_signal_is_a_request_of_its_own(of_a_command):
    asked = []
    of_a_command.ask(asked.append)
    of_a_command.came(signal.SIGTERM)
    of_a_command.came(signal.SIGINT)
    assert asked == [signal.SIGTERM, signal.SIGINT]


@BOTH
def test_while_another_run_begins_a_signal_ends_the_process_again(of_a_command, number):
    asked = []
    of_a_command.ask(asked.append)
    of_a_command.begin_again()
    assert exit_code(of_a_command, number) == 130
    assert not asked


def test_a_request_that_a_failing_run_has_not_obeyed_ends_the_process_before_the_next(of_a_command):
    of_a_command.ask(lambda number: None)
    of_a_command.came(signal.SIGTERM)
    with pytest.raises(Ended, match="130"):
        of_a_command.begin_again()


@pytest.mark.parametrize("code", [0, 2, 75])
def test_when_all_is_done_a_signal_changes_no_exit_code(of_a_command, code):
    of_a_command.ask(lambda number: None)
    of_a_command.finish(code)
    assert exit_code(of_a_command, signal.SIGINT) == code


def test_what_restores_the_terminal_is_written_before_the_end(of_a_command, capfd):
    of_a_command.say_at_the_end(b"\x1b[?25h")
    exit_code(of_a_command, signal.SIGINT)
    assert capfd.readouterr().out == "\x1b[?25h"


def test_a_mere_import_leaves_signals_alone():
    assert not command_signals.installed
    command_signals.handle()
    program = (
        "import signal; before = [signal.getsignal(n) for n in (2, 15)]; import maxtext_lite; "
        "print(before == [signal.getsignal(n) for n in (2, 15)], signal.set_wakeup_fd(-1))"
    )
    assert subprocess.check_output([sys.executable, "-c", program], cwd=REPOSITORY, text=True) == "True -1\n"


IN_C = """
import ctypes, os, signal, sys
from maxtext_lite.process.signals import command_signals
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


@BOTH
def test_the_end_is_prompt_in_a_long_call_into_c_and_a_forks_signals_are_its_own(number):
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", IN_C],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == f"{signal.SIGINT:d}\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=30)  # the call takes 60 seconds
    assert (process.returncode, out, err) == (130, "", "")


def test_a_signal_while_a_command_imports_ends_it_quietly(tmp_path):
    (tmp_path / "pydantic.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    with subprocess.Popen(
        [sys.executable, "-m", "maxtext_lite.plan"],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")
