"""Whatever becomes of stdout, a command ends with one line or none, and training goes on."""

import subprocess
import sys

import pytest

from tests.source_tree import REPOSITORY

PLAN = f"{sys.executable} -m maxtext_lite.plan"
TRAIN = (
    f"{sys.executable} -c 'import sys, time\n"
    "from maxtext_lite.cli import run_command\n"
    "from maxtext_lite.console import go_on_without_stdout\n"
    "def main(argv):\n"
    "    go_on_without_stdout()\n"
    "    for step in range(3):\n"
    '        print("step", step, flush=True)\n'
    "        time.sleep(0.1)\n"
    '    print("done", file=sys.stderr)\n'
    "    return 0\n"
    "sys.exit(run_command(main))'"
)


def shell(command, unbuffered=""):
    words = [
        "bash",
        "-c",
        f"export PYTHONUNBUFFERED={unbuffered}; {command}; exit ${{PIPESTATUS[0]}}",
    ]
    done = subprocess.run(
        words, cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("command", "unbuffered", "code"),
    [
        (">/dev/full", "1", 2),
        (">&-", "", 0),  # as /dev/null
        ("steps=0 <&- >&- 2>&-", "", 2),  # what is opened next takes none of them
        ("--json | true", "", 1),  # a reader that reads nothing is no error
    ],
)
def test_a_command_ends_with_one_line_or_none(command, unbuffered, code):
    ended, out, err = shell(f"{PLAN} {command}", unbuffered)
    lines = err.splitlines()
    assert (ended, out) == (code, "")
    assert len(lines) == (code == 2 and "2>" not in command)
    assert all(line.startswith("error: stdout ") for line in lines)


def test_training_says_once_that_stdout_is_lost_and_goes_on():
    code, _, err = shell(f"{TRAIN} | true")
    assert code == 0
    warning, done = err.splitlines()
    assert warning.startswith("warning: stdout")
    assert done == "done"


LOGS = """
import logging, sys
from absl import logging as absl_logging
from maxtext_lite.cli import run_command
def main(argv):
    absl_logging.info("of absl")
    absl_logging.warning("cleaning up")
    absl_logging.error("a disk has gone")
    logging.getLogger("jax").warning("no GPU")
    logging.getLogger("jax").info("a device")
    return 0
sys.exit(run_command(main))
"""


def test_absls_warnings_are_not_the_users_and_those_of_others_are():
    keys = {"cwd": REPOSITORY, "capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run([sys.executable, "-c", LOGS], **keys)
    assert done.stderr == "ERROR: absl: a disk has gone\nWARNING: jax: no GPU\n"
