"""Rewards: the shipped functions and the process of the others, by hand; functions that fail in every way, after which
the next call works."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import yaml
from numpy.testing import assert_array_equal

from maxtext_lite.config import UserError, load_config
from maxtext_lite.post_training.prompts import Prompt
from maxtext_lite.post_training.reward_functions import number_in, shipped
from maxtext_lite.post_training.reward_worker import Functions
from maxtext_lite.post_training.rewards import (
    Completion,
    RewardError,
    Rewards,
    Scores,
    _Worker,
)
from tests.source_tree import REPOSITORY


def test_the_number_that_a_text_ends_up_with():
    numbers = Path(__file__).with_name("numbers.yml").read_text(encoding="utf-8")
    for text, number in yaml.safe_load(numbers).items():
        assert number_in(text) == (None if number is None else Fraction(number)), text
    # Python does not read it as an integer.
    ones = "1" * 5000
    for text in (f"7 {ones}", f"{ones}\\frac12", f"1e{ones}", f"{ones}/3"):
        assert number_in(text) is None


@pytest.mark.parametrize(
    ("name", "answer", "completion", "reward"),
    [
        ("numeric_answer", "0.3", "the answer is 0.3", 1),
        ("numeric_answer", "0.3", "0.30000000000000004", 0),
        ("numeric_answer", "no number", "1000", None),
        ("numeric_answer", None, "1", None),
        ("exact_answer", " 42 ", " 42\n", 1),
        ("exact_answer", "42", "42.", 0),
        ("exact_answer", [1], "1", None),
        ("format", "", "<think>a\nb</think>5", 1),
        ("format", "", "<think>a</think>5 ", 0),
    ],
)
def test_the_shipped_functions_judge_by_number_by_text_and_by_format(
    name, answer, completion, reward
):
    judge = shipped(name, pattern="<think>.*</think>[0-9]+")
    answers = () if name == "format" else ([answer],)
    assert judge([completion], *answers) == [reward]


MODULE = '''
import asyncio, os, re, subprocess, sys, time

class Judge:
    def __call__(self, completions, **others): return [float(len(each)) for each in completions]

judge = Judge()
not_one = 5

def everything(**given): return [len(given)] * len(given["completions"])
def missing(completions, nothing): return [0] * len(completions)
def mixed(completions): return [True, None]
def wrong(completions): return ["5", [], 2 + 1j, float("nan"), judge][: len(completions)]
def optional(completions, nothing=0, *more, level=1): return [nothing + level[0]] * len(completions)
def near(completion, **others): return [0] * len(completion)
def behind(completions, /): return [0] * len(completions)
def ids(prompt_ids, completion_ids): return [len(p) + 10 * len(c) for p, c in zip(prompt_ids, completion_ids)]
def huge(completions): return (10**400, float("-inf"))
def text(completions): return "ab"
def short(completions): return [1.0]
async def awaited(completions): return [float(len(each)) for each in completions]
class Judges:
    async def __call__(self, completions): return [float(len(each)) for each in completions]
    async def method(self, completions): return await self(completions)
judges, loops = Judges(), set()
async def connected(completions):
    """As one that keeps a connection, which belongs to the event loop in which it was opened."""
    loops.add(asyncio.get_running_loop())
    return [float(len(loops))] * len(completions)
async def streams(completions): yield 1.0
def yields(completions): yield 1.0
def raises(completions): raise ValueError("no\\nway")
def takes_all(completions): return [len(completions.pop(0)) for _ in range(len(completions))]
def prints(completions):
    print('{"rewards": [7]}'), os.write(1, b"written\\n"), subprocess.run(["echo", "echoed"])
    return [float(len(sys.stdin.read()))] * len(completions)
def sleeps(completions): time.sleep(600)
def starts(completions): return [float(subprocess.Popen(["sleep", "600"]).pid)] * len(completions)
def asked(prompts, level): return [len(p) + (0.5 if l is None else l) for p, l in zip(prompts, level)]
def fails(completions):
    """Does what the first completion says; the others have rewards."""
    what = completions[0]
    rewards = [1.0] * len(completions)
    if what == "hang": time.sleep(600)
    if what == "backtrack": re.match("(a+)+$", "a" * 60 + "b")  # holds the interpreter
    if what == "nan": rewards[0] = float("nan")
    if what == "none": rewards[:2] = [None, None]
    if what == "crash": os._exit(5)
    if what == "huge": rewards[:3] = [1e200, -2e12, 1e12]
    return rewards
def numbers(completions):
    """The completions as numbers: one that is none takes down the call, `hang` also the process."""
    if "hang" in completions: time.sleep(600)
    return [float(each) for each in completions]
'''


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A module of reward functions, m, and others that cannot be imported."""
    directory = tmp_path_factory.mktemp("rewards")
    (directory / "m.py").write_text(MODULE)
    (directory / "broken.py").write_text("import no_such_package")
    (directory / "leaves.py").write_text("import sys; sys.exit('gone')")
    return directory


@pytest.fixture(autouse=True)
def working_directory(directory, monkeypatch):
    monkeypatch.chdir(directory)
    monkeypatch.syspath_prepend(directory)
    yield
    for name in ("m", "broken", "leaves"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("name", "rewards"),
    [
        ("m:judge.__call__", [1, 2]),
        ("m:everything", [4, 4]),
        ("m:mixed", [1, None]),
        ("m:wrong", ["returned a str, not a number", "returned a list, not a number"]),
        ("m:optional", [1, 1]),
        ("m:huge", ["returned inf", "returned -inf"]),
        ("m:takes_all", [1, 2]),
        ("m:awaited", [1, 2]),
        ("m:judges", [1, 2]),
        ("m:judges.method", [1, 2]),
        ("exact_answer", [0, None]),
        ("m:text", None),
        ("m:short", None),
        ("m:raises", None),
    ],
)
def test_what_a_function_says(name, rewards):
    given = {"prompts": ["P", "PP"], "completions": ["a", "bb"]}
    given |= {"answer": ["x", None], "level": [1, 2]}
    functions = Functions([name], "", list(given))
    assert functions.problems == []
    reply = functions.rewards(name, given)
    if rewards is None:
        assert reply.keys() == {"error", "traceback"}
        assert reply["error"].isprintable()
        assert ("raise ValueError" in reply["traceback"]) == (name == "m:raises")
    else:
        assert reply == {"rewards": rewards}


def test_all_calls_of_async_functions_have_one_event_loop():
    functions = Functions(["m:connected"], "", ["completions"])
    for _ in range(2):
        reply = functions.rewards("m:connected", {"completions": ["a"]})
        assert reply == {"rewards": [1.0]}


def test_what_cannot_be_called_is_said_of_all_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    wrong = ["m:jugde", "no_such:f", "broken:f", "leaves:f", "m:not_one", "m:Judge"]
    wrong += ["m:streams", "m:yields", "__main__:of_a_cell"]
    names = [*wrong, "m:judge", "math_verify"]
    *found, package = Functions(names, "", ["completions"]).problems
    assert [problem.split(": ")[0] for problem in found] == [
        f"reward_functions={name}" for name in wrong
    ]
    assert "'judge'" in found[0]
    assert "rewards:of_a_cell" in found[-1]
    assert "[math]" in package


def test_a_function_that_needs_what_nobody_gives_is_refused():
    for name, words in {
        "m:missing": ["'nothing'", "completions, answer"],
        "m:near": ["'completion'", "Did you mean 'completions'"],
        "m:behind": ["'completions'", "by position"],
        "m:ids": ["'prompt_ids'"],
    }.items():
        (problem,) = Functions([name], "", ["completions", "answer"]).problems
        assert all(word in problem for word in words), problem
    assert not Functions(["m:missing"], "", ["completions", "nothing"]).problems


def rewards(*overrides, fields=("answer", "level")):
    file = REPOSITORY / "configs" / "post_train" / "rl.yml"
    return contextlib.closing(Rewards(load_config(file, overrides), fields))


def judged(judge, prompts, texts, *unit):
    """The scores of texts, whose tokens are as many as their characters."""
    completions = [Completion(text, f"<{text}>", range(len(text))) for text in texts]
    return judge.of(prompts, completions, *unit)


def prompts(*fields):
    return [
        Prompt(number, "p" * (number + 1), (1,), each)
        for number, each in enumerate(fields)
    ]


ASKED = {"arguments": {"prompts": ["p"], "completions": ["c"]}}
ANSWERS = prompts({"answer": "5"}, {"answer": "7", "level": 2}, {}, {"answer": "1/2"})


def test_nothing_but_answers_goes_out_and_signals_end_nothing(capfd):
    with rewards("reward_functions=m:prints,m:judge") as judge:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(judge._worker._process.pid, number)
        assert judged(judge, ANSWERS[:1], ["c"]).total.tolist() == [1]
        assert judged(judge, ANSWERS[:1], ["dd"]).total.tolist() == [2]
    out, errors = capfd.readouterr()
    assert out == ""
    assert errors.splitlines() == ['{"rewards": [7]}', "written", "echoed"] * 2
    assert judge._worker is None


@pytest.mark.parametrize("amid_a_call", [True, False])
def test_it_ends_with_its_input_even_amid_a_call_and_takes_along_what_was_started(
    amid_a_call,
):
    with rewards("reward_functions=m:starts,m:sleeps") as judge:
        worker = judge._worker
        (started,) = worker.ask({"name": "m:starts", **ASKED}, 60)["rewards"]
        if amid_a_call:  # as where this process has died
            worker._connection.send({"name": "m:sleeps", **ASKED})
        worker._connection.close()
        assert worker._process.wait(60) == -signal.SIGKILL
        deadline = time.monotonic() + 60
        while _is_running(int(started)):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def _is_running(process):
    """Whether a process is alive, not only a zombie."""
    state = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(process)],
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    return state.strip() != "" and not state.startswith("Z")


@pytest.mark.fast
def test_the_sum_is_weighted_and_texts_arrive_as_they_are():
    with rewards(
        "reward_functions=numeric_answer, m:judge,m:asked,format,m:ids",
        "reward_weights=2,-0.5,1,0,0",
        "reward_format=<is [0-9]*>",
    ) as judge:
        scores = judged(judge, [*ANSWERS[:2], ANSWERS[3]], ["is 5", "is 8!", "0.5"])
        assert {name: found.tolist() for name, found in scores.by_name.items()} == {
            "numeric_answer": [1, 0, 1],
            "m:judge": [4, 5, 3],
            "m:asked": [1.5, 4, 4.5],  # keys that a line lacks are None there
            "format": [1, 0, 0],  # which sees special tokens, whatever the others see
            "m:ids": [41, 51, 31],
        }
        assert scores.total.tolist() == [2 - 2 + 1.5, -2.5 + 4, 2 - 1.5 + 4.5]
        assert (scores.errors, scores.messages) == (0, [])
        assert judged(judge, [], []).total.shape == (0,)
        # More than a pipe holds.
        texts = ["x" * 300_000, "é東\u2028\n\ud800", "", "\0"]
        found = judged(judge, ANSWERS, texts).by_name["m:judge"]
        assert found.tolist() == [300_000, 5, 0, 1]


FAILURES = {"backtrack": 4, "nan": 1, "none": 0, "huge": 2, "crash": 4}


@pytest.fixture(scope="module")
def judges(directory):
    """Two that continue after a failure and one that stops."""
    keys = ("reward_functions=m:fails,m:judge", "reward_weights=1,10")
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.chdir(directory)
        yield {
            policy: stack.enter_context(
                rewards(
                    *keys, f"reward_error={policy}", f"reward_timeout_seconds={seconds}"
                )
            )
            for policy, seconds in (("unscored", 2), ("zero", 2), ("stop", 30))
        }


@pytest.mark.parametrize("what", FAILURES)
def test_what_fails_is_unscored_or_counts_nothing_or_stops_the_run(what, judges):
    """What is left out with None is neither: the other function's reward remains."""
    count, texts = FAILURES[what], [what, "b", "c", "d"]
    rest = [1e12, 1] if what == "huge" else [1] * (4 - count)
    if what == "none":
        rest[:2] = [np.nan, np.nan]
    for policy, of_failed in {"unscored": np.nan, "zero": 0}.items():
        if what == "backtrack" and policy == "zero":
            continue  # it takes seconds
        scores = judged(judges[policy], ANSWERS, texts)
        want = np.array([of_failed] * count + rest)
        assert_array_equal(scores.by_name["m:fails"], want)
        assert scores.by_name["m:judge"].tolist() == [len(what), 1, 1, 1]
        total = np.nan_to_num(want) + 10 * scores.by_name["m:judge"]
        if policy == "unscored":
            total[:count] = np.nan
        assert_array_equal(scores.total, total)
        assert scores.has_failed.tolist() == [True] * count + [False] * (4 - count)
        assert scores.errors == count
        assert len(scores.messages) == (count > 0)
        assert all("m:fails" in message for message in scores.messages)
    if count and what != "backtrack":
        with pytest.raises(RewardError, match=r"m:fails.*reward_error=unscored"):
            judged(judges["stop"], ANSWERS, texts)
    for each in judges.values():
        after = judged(each, ANSWERS[:2], ["a", "b"])
        assert (after.total.tolist(), after.errors) == ([11, 11], 0)


def test_a_failure_costs_the_responses_to_one_prompt_however_many_a_call_has():
    """Which pairs are unscored decides the update, and micro_batch_size must not."""
    asked = [prompt for prompt in ANSWERS for _ in range(2)]
    texts = ["1", "2", "3", "x", "5", "6", "7", "8"]
    with rewards("reward_functions=m:numbers") as judge:
        for pairs in (2, 8):
            calls = [slice(first, first + pairs) for first in range(0, 8, pairs)]
            scores = [judged(judge, asked[call], texts[call], 2) for call in calls]
            total = np.concatenate([each.total for each in scores])
            want = [1, 2, np.nan, np.nan, 5, 6, 7, 8]
            assert_array_equal(total, want)
            whole = Scores.joined(scores)
            assert "ValueError: could not convert" in whole.traceback
            assert "m.py" in whole.traceback.splitlines()[1]
            assert_array_equal(whole.has_failed, np.isnan(want))
            assert sum(each.errors for each in scores) == 2
        assert len(scores[0].messages) == 1


def test_a_function_that_hangs_everywhere_takes_twice_its_time_not_more_for_more_responses(
    monkeypatch,
):
    waited, started = [], []
    ask = _Worker.ask

    def timed(worker, request, limit):
        (waited if "arguments" in request else started).append(limit)
        return ask(worker, request, limit)

    monkeypatch.setattr(_Worker, "ask", timed)
    with rewards("reward_functions=m:numbers", "reward_timeout_seconds=1") as judge:
        scores = judged(judge, ANSWERS, ["hang"] * 4, 2)
    assert (scores.is_scored.any(), scores.errors) == (False, 4)
    assert len(waited) == 3
    assert sum(waited) <= 2.001
    first, restart, last = started  # restarts together have the time of one start
    assert first == restart > last


def test_what_cannot_be_imported_is_refused_before_a_run(directory):
    module = directory / "passing.py"
    module.write_text("import os; os._exit(7)")
    for wrong in ("m:jugde", "passing:f"):
        with pytest.raises(UserError, match=f"^reward_functions={wrong}"):
            rewards(f"reward_functions={wrong}")
