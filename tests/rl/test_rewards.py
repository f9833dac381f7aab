"""Rewards of whole batches: sums by hand, and functions that fail in every way, after which the next call works."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.data.prompts import Prompt
from maxtext_lite.rl.rewards import RewardError, Rewards, _Worker
from tests.source_tree import REPOSITORY

MODULE = '''
import os, re, sys, time

def length(completions): return [float(len(each)) for each in completions]
def asked(prompts, level): return [len(p) + (0.5 if l is None else l) for p, l in zip(prompts, level)]
def process(completions): return [os.getpid()] * len(completions)
def chatty(completions):
    print('{"rewards": [7, 7, 7, 7]}', flush=True)
    return length(completions)
def fails(completions):
    """Does what the first completion says; the others have rewards."""
    what = completions[0]
    rewards = [1.0] * len(completions)
    if what == "raise": raise RuntimeError("no")
    if what == "hang": time.sleep(600)
    if what == "backtrack": re.match("(a+)+$", "a" * 60 + "b")  # holds the interpreter
    if what == "nan": rewards[0] = float("nan")
    if what == "inf": rewards[0] = float("inf")
    if what == "none": rewards[:2] = [None, None]
    if what == "short": rewards.pop()
    if what == "text": return "good"
    if what == "exit": sys.exit("done")
    if what == "crash": os._exit(5)
    if what == "signal": os.kill(os.getpid(), 11)
    if what == "silence": os.closerange(3, 100)
    if what == "huge": rewards[:3] = [1e200, -2e12, 1e12]
    return rewards
def numbers(completions):
    """The completions as numbers: one that is none takes down the call, the words below also the process."""
    if "hang" in completions: time.sleep(600)
    if "crash" in completions: os._exit(5)
    return [float(each) for each in completions]
'''


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("rewards")
    (directory / "mine.py").write_text(MODULE)
    return directory


@pytest.fixture(autouse=True)
def working_directory(directory, monkeypatch):
    monkeypatch.chdir(directory)


def rewards(*overrides):
    return Rewards(load_config(REPOSITORY / "configs" / "post_train" / "rl.yml", overrides))


def prompts(*fields):
    return [Prompt(number, "p" * (number + 1), (1,), each) for number, each in enumerate(fields)]


ANSWERS = prompts({"answer": "5"}, {"answer": "7", "level": 2}, {}, {"answer": "1/2"})


def test_the_sum_is_weighted():
    with rewards("reward_functions=numeric_answer, mine:length,mine:asked,format", "reward_weights=2,-0.5,1,0",
                 "reward_format=[0-9]*") as judge:  # fmt: skip
        scores = judge.of([*ANSWERS[:2], ANSWERS[3]], ["is 5", "is 8!", "0.5"])
        assert {name: found.tolist() for name, found in scores.by_name.items()} == {
            "numeric_answer": [1, 0, 1],
            "mine:length": [4, 5, 3],
            "mine:asked": [1.5, 4, 4.5],  # keys that a line lacks are None there
            "format": [0, 0, 0],
        }
        assert scores.total.tolist() == [2 - 2 + 1.5, -2.5 + 4, 2 - 1.5 + 4.5]
        assert scores.total.dtype == np.float64
        assert (scores.errors, scores.messages) == (0, [])
        nothing = judge.of([], [])
        assert nothing.total.shape == nothing.by_name["format"].shape == (0,)
        with pytest.raises(ValueError, match="1 prompts for 2 completions"):
            judge.of(ANSWERS[:1], ["a", "b"])
    with pytest.raises(ValueError, match="closed"):
        judge.of(ANSWERS[:1], ["a"])


NONE_OF = ": no reward for 4 of 4 pairs."
FAILURES = {
    "raise": (4, "raised RuntimeError: no (mine.py:14)" + NONE_OF),
    "hang": (4, "did not return within reward_timeout_seconds=1" + NONE_OF),
    "backtrack": (4, "did not return within reward_timeout_seconds=1" + NONE_OF),
    "silence": (4, "ended its process (signal 9)" + NONE_OF),
    "nan": (1, "returned nan: no reward for 1 of 4 pairs."),
    "inf": (1, "returned inf: no reward for 1 of 4 pairs."),
    "none": (2, "returned None: no reward for 2 of 4 pairs."),
    "huge": (2, "returned a number beyond 1e+12, the largest in size: no reward for 2 of 4 pairs."),
    "short": (4, "returned 3 numbers for 4 pairs" + NONE_OF),
    "text": (4, "returned a str ('good'), not a list of numbers" + NONE_OF),
    "exit": (4, "raised SystemExit: done (mine.py:22)" + NONE_OF),
    "crash": (4, "ended its process (exit code 5)" + NONE_OF),
    "signal": (4, "ended its process (signal 11)" + NONE_OF),
}


ENDLESS = ("hang", "backtrack")


@pytest.fixture(scope="module")
def judges(directory):
    """One that continues after a failure and one that stops, each with a short and a long time-out."""
    before = os.getcwd()  # noqa: PTH109
    os.chdir(directory)
    keys = ("reward_functions=mine:fails,mine:length", "reward_weights=1,10")
    every = {
        (policy, seconds): rewards(*keys, f"reward_error={policy}", f"reward_timeout_seconds={seconds}")
        for policy in ("zero", "stop")
        for seconds in (1, 30)
    }
    os.chdir(before)
    yield every
    for judge in every.values():
        judge.close()


@pytest.mark.parametrize("what", FAILURES)
def test_what_fails_counts_nothing_and_the_run_goes_on(what, judges):
    count, sentence = FAILURES[what]
    judge = judges["zero", 1 if what in ENDLESS else 30]
    scores = judge.of(ANSWERS, [what, "b", "c", "d"])
    rest = [1e12, 1] if what == "huge" else [1] * (4 - count)
    assert scores.by_name["mine:fails"].tolist() == [0] * count + rest
    assert scores.by_name["mine:length"].tolist() == [len(what), 1, 1, 1]
    assert scores.total.tolist() == (scores.by_name["mine:fails"] + 10 * scores.by_name["mine:length"]).tolist()
    assert scores.errors == count
    assert scores.messages == [f"Reward function mine:fails {sentence}"]
    after = judge.of(ANSWERS[:2], ["a", "b"])
    assert (after.total.tolist(), after.errors) == ([11, 11], 0)


@pytest.mark.parametrize("what", ["raise", "hang", "none", "crash", "exit"])
def test_or_the_run_stops_with_the_same_words(what, judges):
    judge = judges["stop", 1 if what in ENDLESS else 30]
    with pytest.raises(RewardError) as stopped:
        judge.of(ANSWERS, [what, "b", "c", "d"])
    assert stopped.value.problems == (
        f"Reward function mine:fails {FAILURES[what][1]} Mend it, or set reward_error=zero.",
    )
    assert judge.of(ANSWERS[:2], ["a", "b"]).total.tolist() == [11, 11]


def test_each_way_of_failing_is_said_once():
    with rewards("reward_functions=exact_answer,mine:fails") as judge:
        scores = judge.of([*ANSWERS, *ANSWERS], ["nan", "6", "7", "1/2"] * 2)
        assert scores.total.tolist() == [0, 1, 1, 2, 1, 1, 1, 2]
        assert scores.errors == 3
        assert scores.messages == [
            "Reward function exact_answer returned None: no reward for 2 of 8 pairs.",
            "Reward function mine:fails returned nan: no reward for 1 of 8 pairs.",
        ]


@pytest.mark.parametrize(("word", "seconds", "sentence"), [
    ("x", 30, "raised ValueError: could not convert string to float: 'x' (mine.py:32)"),
    ("crash", 30, "ended its process (exit code 5)"),
    ("hang", 3, "did not return within its share of reward_timeout_seconds=3"),
])  # fmt: skip
def test_a_failure_costs_the_responses_to_one_prompt_however_many_a_call_has(word, seconds, sentence):
    """Which pairs count 0 decides the update, and micro_batch_size must not."""
    asked, texts = [prompt for prompt in ANSWERS for _ in range(2)], ["1", "2", "3", word, "5", "6", "7", "8"]
    keys = ("reward_functions=mine:numbers", f"reward_timeout_seconds={seconds}")
    with rewards(*keys) as judge:
        for pairs in (2, 4, 8):
            calls = [slice(first, first + pairs) for first in range(0, 8, pairs)]
            scores = [judge.of(asked[call], texts[call], 2) for call in calls]
            assert np.concatenate([each.total for each in scores]).tolist() == [1, 2, 0, 0, 5, 6, 7, 8]
            assert sum(each.errors for each in scores) == 2
        assert scores[0].messages == [f"Reward function mine:numbers {sentence}: no reward for 2 of 8 pairs."]
        alone = judge.of(asked, texts, 1)
        assert (alone.total.tolist(), alone.errors) == ([1, 2, 3, 0, 5, 6, 7, 8], 1)


def test_a_function_that_hangs_everywhere_takes_twice_its_time_not_more_for_more_responses():
    with rewards("reward_functions=mine:numbers", "reward_timeout_seconds=1") as judge:
        waited: list[float] = []
        asked = _Worker.asked

        def timed(worker, request, limit):
            if "completions" in request:
                waited.append(limit)
            return asked(worker, request, limit)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_Worker, "asked", timed)
            scores = judge.of([*ANSWERS, *ANSWERS], ["hang"] * 8, 2)
    assert (scores.total.tolist(), scores.errors) == ([0] * 8, 8)
    assert len(waited) == 5
    assert sum(waited) <= 2.001


def test_an_answer_that_was_not_waited_for_is_not_that_to_the_next_question():
    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    with rewards("reward_functions=mine:fails") as judge:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            judge.of(ANSWERS, ["hang", "b", "c", "d"])
        signal.signal(signal.SIGALRM, before)
        assert judge.of(ANSWERS[:2], ["a", "b"]).total.tolist() == [1, 1]


def test_what_is_printed_is_no_answer(capfd):
    with rewards("reward_functions=mine:chatty") as judge:
        assert judge.of(ANSWERS, ["a", "b", "c", "dd"]).total.tolist() == [1, 1, 1, 2]
    assert capfd.readouterr().err == '{"rewards": [7, 7, 7, 7]}\n'


def test_texts_larger_than_a_pipe_and_of_any_character_arrive():
    with rewards("reward_functions=mine:length") as judge:
        texts = ["x" * 3_000_000, "é東\u2028\n\ud800", "", "\0"]
        assert judge.of(ANSWERS, texts).total.tolist() == [3_000_000, 5, 0, 1]


def test_one_process_has_all_calls_and_is_gone_afterwards():
    judge = rewards("reward_functions=mine:process")
    first, second = (judge.of(ANSWERS, [""] * 4).total[0] for _ in range(2))
    assert first == second != os.getpid()
    judge.close()
    judge.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(first), 0)


@pytest.mark.parametrize(("functions", "message"), [
    ("mine:lenght,exact_answer", "reward_functions=mine:lenght: mine has no 'lenght'. Did you mean 'length'?"),
    ("no_such:f", "reward_functions=no_such:f: there is no module 'no_such', in "),
    ("crashes:f", "reward_functions=crashes:f: importing them ended its process (exit code 7)."),
])  # fmt: skip
def test_what_cannot_be_imported_is_refused_before_a_run(functions, message, directory):
    (directory / "crashes.py").write_text("import os; os._exit(7)")
    with pytest.raises(UserError) as refused:
        rewards(f"reward_functions={functions}")
    (problem,) = refused.value.problems
    assert problem.startswith(message)


def test_what_can_be_imported_no_more_is_a_failure_too(directory):
    module = directory / "passing.py"
    module.write_text("import os\ndef f(completions): os._exit(1)")
    with rewards("reward_functions=passing:f") as judge:
        assert judge.of(ANSWERS[:1], ["a"]).errors == 1
        module.unlink()
        (message,) = judge.of(ANSWERS[:1], ["a"]).messages
        assert message.startswith("Reward function passing:f could not be started again: reward_functions=passing:f: ")
        module.write_text("def f(completions): return [3.0]")
        assert judge.of(ANSWERS[:1], ["a"]).total.tolist() == [3]


def test_neither_process_imports_jax_for_it(directory):
    program = (
        "import sys\nfrom maxtext_lite.config import load_config\nfrom maxtext_lite.data.prompts import Prompt\n"
        "from maxtext_lite.rl.rewards import Rewards\n"
        "config = load_config('post_train/rl.yml', ['reward_functions=modules:f'])\n"
        "with Rewards(config) as judge:\n"
        "    print(judge.of([Prompt(0, '', (), {})], ['']).total, 'jax' in sys.modules)\n"
    )
    (directory / "modules.py").write_text("import sys\ndef f(completions): return ['jax' in sys.modules]")
    started = time.monotonic()
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=directory,
                            env=os.environ | {"PYTHONPATH": str(REPOSITORY)})  # fmt: skip
    assert result.stdout == "[0.] False\n", result.stderr
    assert time.monotonic() - started < 60
