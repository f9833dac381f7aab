"""The protocol of the process: its input, its output, and nothing else."""

import copy
import json
import os
import signal
import subprocess
import sys
import time
from fractions import Fraction

import numpy as np
import pytest

from maxtext_lite.rl.reward_worker import Functions
from tests.source_tree import REPOSITORY

MODULE = """
import os, subprocess, sys, time
import numpy as np

class Judge:
    def __call__(self, completions, **others):
        return [float(len(each)) for each in completions]

judge = Judge()
not_one = 5

def named(prompts, answer): return [len(p) + (0 if a is None else len(a)) for p, a in zip(prompts, answer)]
def everything(**given): return [len(given)] * len(given["completions"])
def defaulted(completions, missing=3): return [missing] * len(completions)
def missing(completions, nothing): return [0] * len(completions)
def kinds(completions): return np.array([1, 0], np.float16)
def mixed(completions): return [True, None]
def huge(completions): return (10**400, float("-inf"))
def text(completions): return "ab"
def mapping(completions): return {0: 1.0, 1: 2.0}
def stream(completions): return (1.0 for _ in completions)
def texts(completions): return [1.0, "b"]
def short(completions): return [1.0]
def raises(completions): raise ValueError("no\\nway")
def exits(completions): sys.exit(3)
def prints(completions):
    print("printed"), os.write(1, b"written\\n"), subprocess.run(["echo", "echoed"])
    return [float(len(sys.stdin.read()))] * len(completions)
def sleeps(completions): time.sleep(600)
def ends_what_it_starts(completions):
    process = subprocess.Popen(["sleep", "600"])
    process.terminate()
    return [-process.wait()] * len(completions)
def starts(completions):
    return [float(subprocess.Popen(["sleep", "600"]).pid)] * len(completions)
def takes_all(completions): return [len(completions.pop(0)) for _ in range(len(completions))]
def leaves_one(completions):
    del completions[1:]
    return [2.0]
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of reward functions, m, and others that cannot be imported."""
    (tmp_path / "m.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("import no_such_package")
    (tmp_path / "leaves.py").write_text("import sys; sys.exit('gone')")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("m", "broken", "leaves"):
        sys.modules.pop(name, None)


GIVEN = (["P", "PP"], ["a", "bb"], {"answer": ["x", None], "other": [1, 2]})


@pytest.mark.parametrize(("name", "reply"), [
    ("m:judge", {"rewards": [1, 2]}),
    ("m:judge.__call__", {"rewards": [1, 2]}),
    ("m:named", {"rewards": [2, 2]}),
    ("m:everything", {"rewards": [4, 4]}),
    ("m:defaulted", {"rewards": [3, 3]}),
    ("m:kinds", {"rewards": [1, 0]}),
    ("m:mixed", {"rewards": [1, None]}),
    ("m:huge", {"rewards": [float("inf"), float("-inf")]}),
    ("m:missing", {"error": "raised TypeError: missing() missing 1 required positional argument: 'nothing'"}),
    ("m:text", {"error": "returned a str ('ab'), not a list of numbers"}),
    ("m:mapping", {"error": "returned a dict ({0: 1.0, 1: 2.0}), not a list of numbers"}),
    ("m:texts", {"error": "returned a list with a str ('b') in it, not a number"}),
    ("m:short", {"error": "returned 1 number for 2 pairs"}),
    ("m:takes_all", {"rewards": [1, 2]}),
    ("m:leaves_one", {"error": "returned 1 number for 2 pairs"}),
    ("m:raises", {"error": "raised ValueError: no way (m.py:24)"}),
    ("m:exits", {"error": "raised SystemExit: 3 (m.py:25)"}),
    ("exact_answer", {"rewards": [0, None]}),
])  # fmt: skip
def test_what_a_function_says(name, reply, module):
    functions = Functions([name], "")
    assert functions.problems == []
    assert functions.rewards(name, *copy.deepcopy(GIVEN)) == reply


def test_what_is_no_list_is_refused(module):
    functions = Functions(["m:stream"], "")
    assert functions.rewards("m:stream", *GIVEN)["error"].startswith("returned a generator (<generator object")


@pytest.mark.parametrize("returned", [[1.0, 1j], np.array([1.0, 2.0 + 1j]), np.array([1, 0], np.complex64)])
def test_complex_numbers_are_no_rewards(returned, module, monkeypatch):
    functions = Functions(["m:judge"], "")
    monkeypatch.setattr(sys.modules["m"].Judge, "__call__", lambda self, **given: returned)
    assert "complex" in functions.rewards("m:judge", *GIVEN)["error"]


@pytest.mark.parametrize("returned", [[Fraction(1, 2), np.float32(1)], (0.5, True)])
def test_numbers_of_any_kind_are_numbers(returned, module, monkeypatch):
    functions = Functions(["m:judge"], "")
    monkeypatch.setattr(sys.modules["m"].Judge, "__call__", lambda self, **given: returned)
    assert functions.rewards("m:judge", *GIVEN) == {"rewards": [0.5, 1.0]}


def test_what_cannot_be_called_is_said_of_all_at_once(module, monkeypatch):
    monkeypatch.chdir(module)
    functions = Functions(["m:jugde", "no_such:f", "broken:f", "leaves:f", "m:not_one", "m:judge"], "")
    assert functions.problems == [
        "reward_functions=m:jugde: m has no 'jugde'. Did you mean 'judge'?",
        f"reward_functions=no_such:f: there is no module 'no_such', in {str(module)!r} or installed.",
        "reward_functions=broken:f: importing broken raised ModuleNotFoundError: No module named 'no_such_package' "
        "(broken.py:1).",
        "reward_functions=leaves:f: importing leaves raised SystemExit: gone (leaves.py:1).",
        "reward_functions=m:not_one: 'not_one' of m is not a function.",
    ]


def test_a_package_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    (problem,) = Functions(["math_verify", "exact_answer"], "").problems
    assert problem == (
        "reward_functions=math_verify needs the package math-verify, which is not installed. "
        "Install maxtext-lite[math]."
    )


class Process:
    """The worker, driven by hand."""

    def __init__(self, directory):
        pipe = subprocess.PIPE
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "maxtext_lite.rl.reward_worker"],
            stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True, cwd=directory,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        )  # fmt: skip

    def tell(self, **request):
        self.popen.stdin.write(json.dumps(request) + "\n")
        self.popen.stdin.flush()

    def asked(self, **request):
        self.tell(**request)
        return json.loads(self.popen.stdout.readline())

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGKILL)
        for pipe in (self.popen.stdin, self.popen.stdout, self.popen.stderr):
            pipe.close()
        self.popen.wait()


ASKED = {"prompts": ["p"], "completions": ["c"], "fields": {}}


def test_nothing_but_answers_goes_out_and_signals_end_nothing(module):
    with Process(module) as worker:
        names = ["m:prints", "m:judge", "m:ends_what_it_starts"]
        assert worker.asked(names=names, pattern="") == {"problems": []}
        for number in (signal.SIGINT, signal.SIGTERM):
            worker.popen.send_signal(number)
        assert worker.asked(name="m:prints", **ASKED) == {"rewards": [0.0]}
        assert worker.asked(name="m:ends_what_it_starts", **ASKED) == {"rewards": [float(signal.SIGTERM)]}
        assert worker.asked(name="m:judge", **ASKED) == {"rewards": [1.0]}
        output, errors = worker.popen.communicate()  # closes its input
        assert output == ""
        assert errors.splitlines() == ["printed", "written", "echoed"]
        assert worker.popen.returncode == 0


def test_it_ends_with_its_input_even_amid_a_call_and_takes_along_what_was_started(module):
    with Process(module) as worker:
        assert worker.asked(names=["m:sleeps", "m:starts"], pattern="") == {"problems": []}
        (started,) = worker.asked(name="m:starts", **ASKED)["rewards"]
        worker.tell(name="m:sleeps", **ASKED)
        worker.popen.stdin.close()
        assert worker.popen.wait(60) == -signal.SIGKILL
        deadline = time.monotonic() + 60
        while _is_running(int(started)):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def _is_running(process):
    """Whether a process is alive, not only a zombie."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True).stdout
    return state.strip() != "" and not state.startswith("Z")
