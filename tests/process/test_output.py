"""Whatever becomes of stdout, a command ends with one line or none, and training goes on."""

import subprocess
import sys

import pytest

from tests.source_tree import REPOSITORY

PLAN = f"{sys.executable} -m maxtext_lite.plan"
TRAIN = (
    f"{sys.executable} -c 'import sys, time\n"
    "from maxtext_lite.cli import run_command\n"
    "from maxtext_lite.process.output import go_on_without_stdout\n"
    "def main(argv):\n"
    "    go_on_without_stdout()\n"
    "    for step in range(3):\n"
    '        print("step", step, flush=True)\n'
    "        time.sleep(0.1)\n"
    '    print("done", file=sys.stderr)\n'
    "    return 0\n"
    "sys.exit(run_command(main))'"
)


def shell(command, environment=""):
    done = subprocess.run(
        ["bash", "-c", f"export PYTHONUNBUFFERED={environment}; {command}; exit ${{PIPESTATUS[0]}}"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["", "--help"])
def test_a_full_stdout_is_one_error_line(words, unbuffered):
    assert shell(f"{PLAN} {words} >/dev/full", unbuffered) == (
        2,
        "",
        "error: stdout cannot be written: No space left on device.\n",
    )


def test_a_closed_stdout_is_as_dev_null():
    assert shell(f"{PLAN} >&-") == (0, "", "")


def test_closed_streams_are_not_taken_by_what_is_opened_next():
    assert shell(f"{PLAN} steps=0 <&- >&- 2>&-") == (2, "", "")


def test_a_reader_that_reads_nothing_is_no_error():
    assert shell(f"{PLAN} --json | true") == (1, "", "")


def test_errors_that_cannot_be_written_leave_the_exit_code():
    assert shell(f"{PLAN} steps=0 2>/dev/full")[0] == 2


FULL, GONE = "No space left on device", "Broken pipe"


@pytest.mark.parametrize(("to", "reason"), [(">/dev/full", FULL), ("| true", GONE), ("| head -1", GONE)])
def test_training_says_once_that_stdout_is_lost_and_goes_on(to, reason):
    code, _, err = shell(f"{TRAIN} {to}")
    assert code == 0
    assert err == f"warning: stdout cannot be written any more ({reason}); training goes on without it\ndone\n"


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
    done = subprocess.run([sys.executable, "-c", LOGS], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stderr == "ERROR: absl: a disk has gone\nWARNING: jax: no GPU\n"
