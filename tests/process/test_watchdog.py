"""A watched process: what it tells the others, when it ends, and what it leaves; with a clock that the test moves."""

import os
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from maxtext_lite.operations import watchdog as module
from maxtext_lite.operations.watchdog import Verdict, Watchdog
from tests.source_tree import REPOSITORY


class Clock:
    seconds = 0.0
    cpu = 0.0


class Memory:
    """A store for several watchdogs in one process."""

    def __init__(self, process, num_processes, values):
        self.process, self.num_processes, self.values = process, num_processes, values
        self.is_gone = False

    def put(self, key, value):
        if self.is_gone:
            raise ConnectionError
        self.values[key] = value

    def all(self):
        return dict(self.values)


def without_start(kind):
    return type(kind.__name__, (kind,), {"start": lambda self: None})


class Run:
    """So many watched processes, without threads: `passes` is what theirs do."""

    def __init__(self, num_processes, least, monkeypatch, directory):
        # The watchdog's own: threads that other tests have left go on with the real ones.
        threads = {
            kind.__name__: without_start(kind)
            for kind in (threading.Thread, threading.Timer)
        }
        monkeypatch.setattr(
            module, "threading", SimpleNamespace(**vars(threading) | threads)
        )
        monkeypatch.setattr(
            module,
            "time",
            SimpleNamespace(sleep=lambda seconds: self.passes(seconds or 0.05)),
        )
        self.clocks = [Clock() for _ in range(num_processes)]
        self.dogs, self.stopped, self.codes, values = [], set(), {}, {}
        self.stores = [
            Memory(process, num_processes, values) for process in range(num_processes)
        ]
        for process, clock in enumerate(self.clocks):
            dog = Watchdog(
                lambda c=clock: c.seconds,
                lambda c=clock: c.cpu,
                lambda code, p=process: self.ends(p, code),
            )
            dog.start(least, directory)
            if num_processes > 1:
                dog.join(self.stores[process])
            self.dogs.append(dog)

    def ends(self, process, code):
        self.codes.setdefault(process, code)
        raise SystemExit(code)

    def passes(self, seconds):
        """Time, during which those that are not stopped tell each other where they are."""
        for _ in range(max(1, round(seconds))):
            for clock in self.clocks:
                clock.seconds += min(seconds, 1.0)
            for dog, store in self.going():
                dog.tick()
                if store.num_processes > 1 and not store.is_gone:
                    dog.exchange(store)

    def going(self):
        return [
            each
            for i, each in enumerate(zip(self.dogs, self.stores, strict=True))
            if i not in self.stopped
        ]

    def found(self):
        return [dog.look() for dog, _ in self.going()]

    def texts(self):
        """What they say, each wording once, without seconds."""
        said = [
            re.sub(r"\d+ s\b", "S s", verdict.text)
            for verdict in self.found()
            if verdict
        ]
        return list(dict.fromkeys(said))


@pytest.fixture
def run(monkeypatch, tmp_path):
    return lambda num_processes=3, least=300: Run(
        num_processes, least, monkeypatch, tmp_path
    )


@pytest.mark.fast
def test_the_one_whose_main_thread_hangs_is_named_by_all(run):
    three = run()
    for step in (1, 2):
        for dog in three.dogs:
            dog.enter("reading", step)
            if not (step == 2 and dog is three.dogs[1]):
                dog.enter("step", step)
        three.passes(3)
    three.passes(295)
    assert three.found() == [None] * 3
    three.passes(10)
    (text,) = three.texts()
    assert text.startswith("no progress: process 1 on ")
    assert "in reading of step 2" in text


def assert_limit(one, limit, phase):
    """The process is left alone until shortly before its limit, and named shortly after it."""
    one.passes(limit - 2)
    assert one.found() == [None]
    one.passes(4)
    (verdict,) = one.found()
    assert verdict.code == 76
    assert f"in {phase}" in verdict.text


@pytest.mark.parametrize(("earlier", "limit"), [(0, 40), (1, 10)])
def test_the_first_evaluation_has_four_times_the_limit_also_after_its_first_batch_and_later_ones_have_not(
    run, earlier, limit
):
    """What an evaluation compiles it compiles after it has read a batch."""
    one = run(num_processes=1, least=10)
    for step in range(earlier + 1):
        for phase in ("step", "evaluation"):
            one.dogs[0].enter(phase, step)
        one.dogs[0].advance()
    assert_limit(one, limit, "evaluation")


def test_after_a_failed_collective_the_lost_are_found_within_the_grace_or_the_error_goes_on(
    run,
):
    three = run()
    three.passes(2)
    three.stopped.add(1)
    three.dogs[2].failed(ValueError("closed by peer"))
    assert three.dogs[0].look() is None
    assert "process 1" in three.dogs[2].look().text
    two = run(2)
    two.passes(2)
    two.dogs[1].failed(ValueError("a bug"))
    assert two.found() == [None, None]


def test_a_phase_may_take_four_times_its_longest_so_far(run):
    one = run(num_processes=1, least=10)
    one.dogs[0].enter("reading", 1)
    one.passes(30)
    one.dogs[0].enter("step", 1)
    one.dogs[0].enter("reading", 2)
    assert_limit(one, 120, "reading")


def test_compiling_may_take_any_time_as_long_as_it_computes(run):
    one = run(1)
    one.dogs[0].enter("compile", 1)
    for _ in range(5000):
        one.clocks[0].cpu += 0.2
        one.passes(1)
    assert one.found() == [None]
    one.passes(1190)
    assert one.found() == [None]
    one.passes(20)
    assert "compile of step 1" in one.found()[0].text


def test_an_end_writes_stacks_and_the_error_and_process_0_waits_until_the_others_know(
    run, tmp_path, capfd
):
    two = run(2)
    two.passes(1)
    for process in (1, 0):
        with pytest.raises(SystemExit):
            two.dogs[process].end(Verdict("process 1 hangs", 76))
    assert two.codes == {1: 76, 0: 76}
    assert two.clocks[0].seconds < 9  # they knew before the grace was over
    for process in (0, 1):
        text = (tmp_path / f"stacks-{process}.txt").read_text()
        assert text.startswith("error: process 1 hangs. Exit code 76.")
        assert "test_watchdog.py" in text
    assert capfd.readouterr().err.count("error: process 1 hangs") == 2


def test_a_process_alone_whose_main_thread_hangs_in_c_ends_with_76():
    program = (
        "import os, maxtext_lite.operations.watchdog as module\n"
        "module.BEAT_SECONDS = 0.1\n"
        "module.watchdog.start(0.05)\n"
        "module.watchdog.enter('reading', 3)\n"
        "os.read(os.pipe()[0], 1)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 76
    assert ended.stderr.startswith("error: no progress: process 0")
    assert 'File "<string>", line 5 in <module>' in ended.stderr
