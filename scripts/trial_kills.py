#!/usr/bin/env python3
"""Kills a run at random moments, starts it again until it ends, and compares it with an undisturbed run.

  python scripts/trial_kills.py --kills 50
  python scripts/trial_kills.py --kills 8 --minutes 20

Kills are meant for the start (from the first import to the first step), a step, a save and an evaluation in turn. With
--minutes the run goes on for that long, is then told to stop, and is compared over the steps of a shorter run; kills
come in its first 60 %, and the memory, threads and open files of each start of two minutes and more are looked at.
Exit code 1 where a step is missing, doubled or another than it was, where goodput.json does not add up to the time that
passed here, or where memory, threads or files grow.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from trial_hangs import MODEL, REPOSITORY, Run, compared

sys.path.insert(0, str(REPOSITORY))
from maxtext_lite.operations.goodput_records import goodput_text, spent, starts_of

EVALUATES = 5  # steps between evaluations
RUN = [
    *MODEL, f"eval_interval={EVALUATES}", "eval_steps=8", "max_num_checkpoints_to_keep=2",
    "learning_rate_schedule=constant", "log_period=100",
]  # fmt: skip
KINDS = ("step", "save", "evaluation", "start")
LONG, WARM_UP = 120, 30  # seconds
ENDING = 2.0  # seconds that a process may take to end after its last words
# How each is measured in the first half of a start and in its last quarter, and by how much it may grow. Threads and
# files come and go with every save, and the first save makes pools of threads that stay, so what was once held counts.
MOST_GROWTH = {"MB": (statistics.median, statistics.median, 4.0), "threads": (max, min, 1.0), "files": (max, min, 1.0)}

Samples = list[tuple[float, dict[str, float]]]
"""What a process held, and how many seconds after its start, from its first step on (a busy machine delays it)."""


def held(process: int) -> dict[str, float]:
    """The memory, threads and open files of a process now."""
    about = Path(f"/proc/{process}")
    resident, mapped = map(
        int, (about / "statm").read_text().split()[1:3]
    )  # the number of mapped file pages says nothing
    threads, files = (len(list((about / name).iterdir())) for name in ("task", "fd"))
    return {"MB": (resident - mapped) * os.sysconf("SC_PAGE_SIZE") / 1e6, "threads": threads, "files": files}


def is_in(run: Run, kind: str) -> bool:
    """Whether a run is in this phase or about to enter it, as far as its directory shows."""
    if kind == "save":
        return any((run.directory / "checkpoints").glob("unfinished-*"))
    last = run.last_line
    return bool(last) and (kind == "step" or ("loss" in last and last["step"] % EVALUATES == 0))


class Trial:
    """A run that is killed again and again.

    Attributes:
      codes, samples: of each start.
      wall: seconds from its first start to its end.
    """

    def __init__(self, run: Run, asked: argparse.Namespace, steps: int, startup: float):
        self.run, self.asked, self.startup = run, asked, startup
        seconds, kills = asked.minutes * 60, asked.kills
        self.marks = sorted(random.uniform(0, 0.6 * seconds or 0.95 * steps) for _ in range(kills))
        self.kinds = random.sample([KINDS[number % len(KINDS)] for number in range(kills)], kills)
        self.codes: list[list[int]] = []
        self.samples: list[Samples] = []
        began = time.monotonic()
        self.until = began + (seconds or 1e9)
        for kind, mark in [*zip(self.kinds, self.marks, strict=True), ("", 0.0)]:
            self._start(kind, began + mark if seconds else mark)
            said = f"after step {run.last_line.get('step', 0)}, {time.monotonic() - run.began:.1f} s from its start"
            print(f"{kind or 'the end'}: {self.codes[-1]} {said}", flush=True)
            if not kind or not any(code == -signal.SIGKILL for code in self.codes[-1]):
                break
        self.wall = time.monotonic() - began

    def _start(self, kind: str, mark: float) -> None:
        """One start, until it is killed, told to stop or ends."""
        run, samples, before, begins = self.run, Samples(), self.run.last_line, 0.0
        run.start(self.asked.processes)
        at = random.uniform(0, self.startup)
        while run.runs:
            passed = time.monotonic() - run.began
            if begins and (not samples or passed - samples[-1][0] >= 1):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    samples.append((passed, held(run.processes[0].pid)))
            if time.monotonic() > self.until:
                for process in run.processes:
                    process.send_signal(signal.SIGTERM)
                break
            last = run.last_line
            if last != before and not begins:
                begins = self.startup = passed
            # Where this one's step was passed by an earlier start, it is as good as any.
            reached = time.monotonic() if self.asked.minutes else last.get("step", 0) * bool(begins)
            if passed > at or begins if kind == "start" else kind and reached > mark and is_in(run, kind):
                time.sleep(random.choice((0, 0.03)) * random.random())
                random.choice(run.processes).kill()
                break
            time.sleep(0.003)
        self.codes.append(run.end())
        self.samples.append(samples)


def lasted(samples: Samples) -> float:
    """Seconds from the first to the last."""
    return samples[-1][0] - samples[0][0] if samples else 0.0


def growth(samples: Samples) -> dict[str, tuple[float, float, float]]:
    """For each quantity: its first half, its last quarter, and the slope per minute, without the warm-up."""
    late = [(at / 60, each) for at, each in samples if at > samples[0][0] + WARM_UP]
    found = {}
    for name, (of_first, of_last, _) in MOST_GROWTH.items():
        first = of_first(each[name] for _, each in late[: len(late) // 2])
        second = of_last(each[name] for _, each in late[-len(late) // 4 :])
        slope = statistics.linear_regression([at for at, _ in late], [each[name] for _, each in late]).slope
        found[name] = first, second, slope
    return found


def problems_of(trial: Trial, whole: Run) -> list[str]:
    """What is not as it should be; prints all findings."""
    found, run, wall = [], trial.run, trial.wall
    steps, evaluated = ([line["step"] for line in run.lines if name in line] for name in ("loss", "eval_loss"))
    for what, numbers, every in (("steps", steps, 1), ("evaluations", evaluated, EVALUATES)):
        numbers = [number for number in numbers if number % every == 0]  # one may stand at the end
        if numbers != list(range(every, steps[-1] + 1, every)):
            odd = [number for number, times in collections.Counter(numbers).items() if times > 1]
            found.append(f"the {what} are not all there, once and in order: {len(numbers)}, doubled {odd[:9]}")
    same, text = compared(whole, run)
    print(text)
    if not same:
        found.append("it is not the run that nobody disturbed")
    starts = starts_of(json.loads((run.directory / "goodput.json").read_text()))
    added = sum(spent(starts).values())
    print(f"{goodput_text(starts)}\n{added:.1f} s in goodput.json, {wall:.1f} s here: {added / wall - 1:+.2%}")
    if abs(added - wall) > max(0.01 * wall, ENDING):
        found.append("goodput.json does not add up")
    for number, samples in enumerate(trial.samples, 1):
        for name, (first, second, slope) in growth(samples).items() if lasted(samples) >= LONG else ():
            said = f"{first:.1f} {name}, then {second:.1f}; {slope:+.2f} a minute"
            print(f"start {number}, {lasted(samples):.0f} s of steps: {said}")
            if second > first + MOST_GROWTH[name][2]:
                found.append(f"{name} grew in start {number}")
    kills = sum(-signal.SIGKILL in codes for codes in trial.codes)
    if kills < trial.asked.kills or set(trial.codes[-1]) != {75 if trial.asked.minutes else 0}:
        found.append(f"{kills} kills, and the end with {trial.codes[-1]}:\n{run.log}")
    if any(set(codes) - {-signal.SIGKILL, 76} for codes in trial.codes[:-1]):
        found.append(f"exit codes {trial.codes}")
    print(f"{kills} kills in {wall / 60:.1f} minutes")
    return found


def main() -> int:
    """Runs the trial; returns 1 if it found something."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the runs are kept; default: they are removed")
    asked = parser.parse_args()
    random.seed(asked.seed)
    with contextlib.ExitStack() as open_things:
        folder = asked.folder or Path(open_things.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        steps, words = 40 * max(asked.kills, 5), [*RUN, "warmup_steps=1", f"checkpoint_period={asked.save_every}"]
        whole = Run(folder, "whole", [*words, f"steps={steps}"])
        whole.start(asked.processes)
        while whole.runs and not whole.last_line:
            time.sleep(0.1)
        startup = time.monotonic() - whole.began
        assert set(whole.end()) == {0}, whole.log
        seconds = time.monotonic() - whole.began
        print(f"{steps} steps that nobody disturbed: {seconds:.0f} s, {startup:.0f} s to the first", flush=True)
        run = Run(folder, "killed", [*words, f"steps={10**9 if asked.minutes else steps}"])
        trial = Trial(run, asked, steps, startup)
        (folder / "held.json").write_text(json.dumps(trial.samples))
        found = problems_of(trial, whole)
        print("\n".join(f"WRONG {each}" for each in found) or "all as it should be")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
