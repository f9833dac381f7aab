#!/usr/bin/env python3
"""Trials of batch schedules: random stages, up and down, planned and run on random machines, resumed on others.

  python scripts/trial_schedules.py --plans 200 --runs 12 --moves 20

Every plan: batches, positions and learning rates are those of a replay in exact and float64 arithmetic, step by step,
also after a resume at each machine. Every run: the same, and the losses are those of an unbroken run. Every move: a run
whose batches follow from its devices keeps them elsewhere, in its plan and (every fifth) when it resumes there.
Exit code 1 where something is not as it should be.
"""

import argparse
import dataclasses
import json
import math
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

from maxtext_lite.batching import BatchPlan, keep_batches, make_plan, resumed
from maxtext_lite.config import Config, UserError, load_config
from maxtext_lite.data.order import example_ids, examples_hash

sys.path.insert(0, str(Path(__file__).resolve().parent))
from trial_hangs import MODEL, started

TOKENS = 16  # of an example, as in MODEL
PEAK = 0.004
LOSS_TOLERANCE = 1e-5
RATE_TOLERANCE = 1e-6  # of float32


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where a part of the run takes place, and how it splits the batches."""

    hosts: int
    devices: int
    per_device: Fraction
    mode: str
    factor: int

    @property
    def words(self) -> list[str]:
        """Its keys."""
        return [
            f"per_device_batch_size={self.per_device}",
            f"rampup_mode={self.mode}",
            f"expansion_factor_real_data={self.factor}",
        ]


@dataclasses.dataclass(frozen=True)
class Trial:
    """A schedule, the machines of its parts and the steps after which each but the first begins.

    Attributes:
      stages: [threshold, examples]; thresholds in `unit`.
      shape: learning_rate_schedule.
      counts: schedule_unit.
      of: learning_rate_scaling_of.
    """

    stages: tuple[tuple[int, int], ...]
    unit: str
    steps: int
    warmup: int
    shape: str
    counts: str
    rule: str
    of: str
    base: int
    machines: tuple[Machine, ...]
    begins: tuple[int, ...]
    is_mixture: bool

    @property
    def words(self) -> list[str]:
        """Its keys, but for those of a machine."""
        scaling = [f"learning_rate_scaling={self.rule}", f"base_global_batch_size={self.base}"]
        if self.rule != "none":
            scaling.append(f"learning_rate_scaling_of={self.of}")
        return [
            *MODEL[:-1],
            f"batch_schedule={[list(stage) for stage in self.stages]}",
            f"batch_schedule_unit={self.unit}",
            f"steps={self.steps}",
            f"warmup_steps={self.warmup}",
            f"learning_rate={PEAK}",
            f"learning_rate_schedule={self.shape}",
            f"schedule_unit={self.counts}",
            "gradient_accumulation_steps=-1",
            "ici_data_parallelism=-1",
            "ici_fsdp_parallelism=1",
            "packing=false",
            *scaling,
        ]

    def batches(self) -> list[int]:
        """The batch of each step, one after the other."""
        found: list[int] = []
        for _ in range(self.steps):
            seen = sum(found) * (TOKENS if self.unit == "tokens" else 1)
            found.append([examples for threshold, examples in self.stages if threshold <= seen][-1])
        return found

    def rates(self) -> list[float]:
        """The learning rate of each step by the formulas of docs/batch_size.md, in float64."""
        batches = self.batches()
        target = self.stages[-1][1]
        last = self.steps if self.counts == "steps" else sum(batches) / target
        found: list[float] = []
        for step, batch in enumerate(batches, 1):
            at = step if self.counts == "steps" else sum(batches[:step]) / target
            progress = min(max((at - self.warmup) / max(last - self.warmup, 1), 0), 1)
            if self.shape == "cosine":
                part = 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2
            elif self.shape == "linear":
                part = 1 - 0.9 * progress
            else:
                part = 1
            rising = min(at / self.warmup, 1) if self.warmup else 1
            ratio = (batch if self.of == "stage" else target) / self.base
            scale = {"none": 1, "linear": ratio, "sqrt": math.sqrt(ratio)}[self.rule]
            found.append(PEAK * part * rising * scale)
        return found


def draw(rng: random.Random, *, runs: bool) -> Trial:
    """A random trial; `runs`: small enough to be run."""
    unit = rng.choice([1, 2, 3, 4, 6, 8])  # divides all batches, as some machines need
    unit_of_thresholds = rng.choice(["examples", "tokens"])
    most_stages = 4 if runs else 7
    thresholds = sorted(rng.sample(range(1, 90 if runs else 500), rng.randint(1, most_stages - 1)))
    if unit_of_thresholds == "tokens":
        thresholds = [threshold * TOKENS - rng.randint(0, TOKENS - 1) for threshold in thresholds]
    batches = [unit * rng.randint(1, 4 if runs else 12) for _ in range(len(thresholds) + 1)]
    steps = rng.randint(5, 9 if runs else 60)
    rule = rng.choice(["none", "linear", "sqrt"])
    machines = [_machine(rng, unit, runs=runs) for _ in range(3)]
    return Trial(
        tuple(zip([0, *thresholds], batches, strict=True)),
        unit_of_thresholds,
        steps,
        rng.choice([0, 1, 3]),
        rng.choice(["cosine", "linear", "constant"]),
        rng.choice(["steps", "examples"]),
        rule,
        "target" if rule == "none" else rng.choice(["target", "stage"]),
        rng.choice([1, 4, 64]),
        tuple(machines),
        tuple(sorted(rng.sample(range(1, steps), 2))),
        rng.random() < 0.3,
    )


def _machine(rng: random.Random, unit: int, *, runs: bool) -> Machine:
    """A machine on which every multiple of `unit` is legal."""
    hosts = rng.choice([1, 1, 2] if runs else [1, 2, 4])
    devices = hosts * rng.choice([1, 2, 3])
    mode = rng.choice(["per_device_batch_size", "gradient_accumulation_steps"])
    per_device = Fraction(unit, devices)
    if mode == "per_device_batch_size":  # the most that a device may have
        per_device = rng.choice([Fraction(1), Fraction(3, 2), Fraction(2), Fraction(5)])
    return Machine(hosts, devices, per_device, mode, rng.choice([1, hosts]))


def parts(trial: Trial) -> Iterator[tuple[Machine, int, int]]:
    """The machine of each part, and its first and last step."""
    ends = [*trial.begins, trial.steps]
    for machine, before, end in zip(trial.machines, [0, *trial.begins], ends, strict=True):
        yield machine, before + 1, end


def check_plans(trial: Trial) -> list[str]:
    """What is wrong with the plans of the trial's parts."""
    batches = trial.batches()
    wrong: list[str] = []
    for machine, first, last in parts(trial):
        config = load_config(None, [*trial.words, *machine.words])
        plan = make_plan(config, num_devices=machine.devices, num_hosts=machine.hosts)
        before = sum(batches[: first - 1])
        for start in (plan, resumed(config, plan, step=first - 1, examples_seen=before)):
            for step in range(first, last + 1):
                wrong += _check_step(start, machine, sum(batches[: step - 1]), batches[step - 1])
        for stage in resumed(config, plan, step=first - 1, examples_seen=before).length.stages_ahead:
            planned = batches[stage.first_step - 1 :][: stage.num_steps]
            if any(batch != stage.global_batch_to_train for batch in planned):
                wrong.append(f"stage from step {stage.first_step}: {stage.global_batch_to_train}, not {planned}")
        wrong += _check_rates(trial, config, plan, first, last)
    return wrong


def _check_step(plan: BatchPlan, machine: Machine, seen: int, batch: int) -> list[str]:
    stage = plan.stage_at(seen)
    micro = stage.per_device_batch_size * machine.devices
    most = machine.per_device * machine.devices
    fitting = max(size for size in range(1, batch + 1) if batch % size == 0 and size <= most)
    expected = (batch, fitting, batch // fitting)
    found = (plan.length.step_examples(seen), micro, stage.gradient_accumulation_steps)
    return [] if found == expected else [f"after {seen} examples: {found}, not {expected}"]


def _check_rates(trial: Trial, config: Config, plan: BatchPlan, first: int, last: int) -> list[str]:
    """The schedule of a start after step `first - 1`, at each of its steps."""
    import numpy as np

    from maxtext_lite.batching import scaled_optimizer
    from maxtext_lite.training.optimizer import Progress, schedule_of_run

    batches = trial.batches()
    wrong: list[str] = []
    start = {"step": first - 1, "examples_seen": sum(batches[: first - 1])}
    schedule = schedule_of_run(scaled_optimizer(config, plan), plan, None, seed=0, **start)  # pyright: ignore
    for step in range(first, last + 1):
        seen = np.array([0, sum(batches[:step])], np.uint32)
        found = float(schedule(step, Progress(seen, seen), step))
        expected = trial.rates()[step - 1]
        if not math.isclose(found, expected, rel_tol=RATE_TOLERANCE):
            wrong.append(f"step {step}: learning rate {found}, not {expected}")
    return wrong


Run = Callable[[Path, str, list[str], Machine], None]
"""(folder of the run directories, name of the run, its keys, where it takes place) -> trains to its end."""


def run_processes(folder: Path, name: str, words: list[str], machine: Machine) -> None:
    """The run as a process for each host."""
    _train(folder, [*words, *machine.words, f"run_name={name}"], machine.devices, machine.hosts)


def _train(folder: Path, words: list[str], devices: int, hosts: int = 1) -> None:
    arguments = ["-m", "maxtext_lite.train", *words]
    processes = started(folder, lambda _: arguments, count=hosts, devices=devices // hosts)
    codes = [process.wait() for process in processes]
    if any(codes):
        raise RuntimeError(f"{' '.join(arguments)}\n{(folder / 'log0').read_text()}")


def check_run(trial: Trial, folder: Path, run: Run = run_processes) -> list[str]:
    """What is wrong with the metrics of a whole run on the first machine, and of its parts on theirs."""
    words = [*trial.words, "checkpoint_period=1", "max_num_checkpoints_to_keep=100", "eval_interval=-1"]
    words += ["dataset_type=synthetic", "matmul_precision=highest", f"base_output_directory={folder}"]
    if trial.is_mixture:
        sources = [f"{{path: {_texts(folder, name)}, weight: {weight}}}" for name, weight in (("a", 0.7), ("b", 0.3))]
        words += ["dataset_type=text", f"dataset_path=[{', '.join(sources)}]"]
    before = "whole"
    run(folder, "whole", words, trial.machines[0])
    for number, (machine, first, _) in enumerate(parts(trial)):
        name = f"part{number}"
        shutil.copytree(folder / before, folder / name)
        for later in (folder / name / "checkpoints").iterdir():
            if later.name.isdigit() and int(later.name) >= first:
                shutil.rmtree(later)
        if number:
            run(folder, name, words, machine)
        before = name
    return _check_metrics(trial, _metrics(folder / "whole"), _metrics(folder / before))


def _texts(folder: Path, name: str) -> Path:
    """Documents of 1 to 9 words."""
    rng = random.Random(name)
    path = folder / f"{name}.jsonl"
    documents = [" ".join(rng.choices(["to", "be", "or", "not"], k=rng.randint(1, 9))) for _ in range(120)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def _metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _check_metrics(trial: Trial, whole: list[dict[str, float]], found: list[dict[str, float]]) -> list[str]:
    wrong: list[str] = []
    seen = 0
    sizes: tuple[int, ...] = ()
    for batch, rate, one, other in zip(trial.batches(), trial.rates(), whole, found, strict=True):
        ids = example_ids(seen, batch, num_examples=_num_examples(whole), seed=0)
        hashes = {one["examples_hash"], other["examples_hash"]} | (
            {examples_hash(ids)} if not trial.is_mixture else set()
        )
        seen += batch
        sizes = (batch, seen)
        for line in (one, other):
            if (line["global_batch_to_train"], line["examples_seen"]) != sizes:
                wrong.append(f"step {line['step']}: {line['global_batch_to_train']} examples, not {sizes}")
            if not math.isclose(line["learning_rate"], rate, rel_tol=RATE_TOLERANCE):
                wrong.append(f"step {line['step']}: learning rate {line['learning_rate']}, not {rate}")
        if len(hashes) > 1 or not math.isclose(one["loss"], other["loss"], rel_tol=LOSS_TOLERANCE):
            wrong.append(f"step {one['step']}: {one['loss']} of {hashes}, {other['loss']}")
    return wrong


def _num_examples(lines: list[dict[str, float]]) -> int:
    return round(lines[0]["examples_seen"] / lines[0]["epoch"])


@dataclasses.dataclass(frozen=True)
class Move:
    """A run whose batches follow from its devices, and the devices on which it resumes."""

    words: tuple[str, ...]
    before: int
    after: int

    @property
    def per_device(self) -> Fraction:
        """The most examples of a device."""
        return load_config(None, self.words).per_device_batch_size


def draw_move(rng: random.Random) -> Move:
    """A plain batch, a ramp in either mode, or a schedule by accumulation."""
    before, after = rng.sample([1, 2, 3, 4, 6, 8], 2)
    per_device = rng.choice([1, 2, 3, 4]) if rng.random() < 0.7 else Fraction(rng.choice([1, 3]), before)
    accumulation = rng.choice([1, 2, 4])
    kind = rng.choice(["plain", "ramp", "ramp by accumulation", "schedule"])
    words = [f"per_device_batch_size={per_device}", f"gradient_accumulation_steps={accumulation}"]
    if kind.startswith("ramp"):
        unit = Fraction(per_device) / accumulation
        mode = "gradient_accumulation_steps"
        if kind == "ramp":
            unit = Fraction(1, before)
            mode = "per_device_batch_size"
        if unit == per_device:
            return draw_move(rng)
        words += ["enable_rampup_batch_size=true", f"rampup_mode={mode}", f"global_rampup_samples={rng.randint(1, 90)}"]
        words += [f"per_device_batch_size_start={unit}", f"per_device_batch_size_increment={per_device - unit}"]
    elif kind == "schedule":
        micro = int(per_device * before)
        stages = [[0, micro * rng.randint(1, 4)], [rng.randint(1, 60), micro * rng.randint(1, 4)]]
        words = [words[0], f"batch_schedule={stages}", "rampup_mode=gradient_accumulation_steps"]
    words += [*MODEL[:-1], "ici_data_parallelism=-1", "ici_fsdp_parallelism=1", "warmup_steps=1", "packing=false"]
    return Move(tuple(words), before, after)


def check_move(move: Move) -> list[str]:
    """What is wrong with the plan of a run that has moved."""
    config = load_config(None, move.words)
    old = make_plan(config, num_devices=move.before)
    batches = [(stage.threshold, stage.global_batch_to_train) for stage in old.stages]
    most = move.per_device * move.after
    try:
        kept = keep_batches(config, batches, move.after)
    except UserError as error:
        return [] if most < 1 else [str(error)]
    new = make_plan(kept, num_devices=move.after)
    wrong: list[str] = []
    seen = 0
    for _ in range(30):
        if new.length.step_examples(seen) != old.length.step_examples(seen):
            wrong.append(f"after {seen} examples: {new.length.step_examples(seen)}")
        seen += old.length.step_examples(seen)
    for stage in new.stages:
        micro = stage.per_device_batch_size * move.after
        is_whole = micro.denominator == 1 and micro * stage.gradient_accumulation_steps == stage.global_batch_to_train
        if micro > most or not is_whole:
            wrong.append(f"{stage.global_batch_to_train} = {micro} x {stage.gradient_accumulation_steps} of {most}")
    return wrong


def check_resume(move: Move, folder: Path) -> list[str]:
    """What is wrong with a run that resumes after the move: it must take the steps of one that has stayed."""
    words = [*move.words, "dataset_type=synthetic", "matmul_precision=highest", f"base_output_directory={folder}"]
    words += ["eval_interval=-1", "checkpoint_period=4", "max_num_checkpoints_to_keep=9", "steps=6"]
    _train(folder, [*words, "run_name=stayed"], move.before)
    shutil.copytree(folder / "stayed", folder / "moved")
    shutil.rmtree(folder / "moved" / "checkpoints" / "6")
    _train(folder, [*words, "run_name=moved"], move.after)
    wrong: list[str] = []
    for one, other in zip(_metrics(folder / "stayed"), _metrics(folder / "moved"), strict=True):
        same = ("examples_hash", "global_batch_to_train", "examples_seen")
        if [one[key] for key in same] != [other[key] for key in same]:
            wrong.append(f"step {one['step']}: {[other[key] for key in same]}")
        if not math.isclose(one["loss"], other["loss"], rel_tol=LOSS_TOLERANCE):
            wrong.append(f"step {one['step']}: loss {other['loss']}, not {one['loss']}")
    about = json.loads((folder / "moved" / "plan.json").read_text())
    if about["resumed"]["before"]["num_devices"] != move.before or about["num_devices"] != move.after:
        wrong.append(f"plan.json has {about['resumed']} on {about['num_devices']} devices")
    return wrong


def main() -> int:
    """Draws and checks; returns 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=200)
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--moves", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    wrong = 0
    for number in range(asked.plans):
        trial = draw(random.Random(f"{asked.seed} plan {number}"), runs=False)
        if problems := check_plans(trial):
            wrong += 1
            print(f"WRONG plan {number}: {trial}", *problems[:3], sep="\n  ", flush=True)
    print(f"{asked.plans} schedules planned on 3 machines each: {wrong} wrong", flush=True)
    for number in range(asked.runs):
        trial = draw(random.Random(f"{asked.seed} run {number}"), runs=True)
        with tempfile.TemporaryDirectory() as folder:
            problems = check_run(trial, Path(folder))
        wrong += bool(problems)
        machines = ", then ".join(f"{each.hosts} x {each.devices // each.hosts}" for each in trial.machines)
        print(
            f"{'WRONG' if problems else 'right'} run {number}: {list(trial.stages)} on {machines}, after steps "
            f"{trial.begins}",
            *problems[:3],
            sep="\n  ",
            flush=True,
        )
    kept = 0
    for number in range(asked.moves):
        move = draw_move(random.Random(f"{asked.seed} move {number}"))
        problems = check_move(move)
        is_run = number % 5 == 0 and move.per_device * move.after >= 1
        if is_run and not problems:
            with tempfile.TemporaryDirectory() as folder:
                problems = check_resume(move, Path(folder))
        wrong += bool(problems)
        kept += move.per_device * move.after >= 1
        state = "WRONG" if problems else "right"
        words = " ".join(move.words[:3])
        print(
            f"{state} move {number}: {words} from {move.before} to {move.after}{' (run)' * is_run}",
            *problems,
            sep="\n  ",
        )
    print(f"{asked.moves} moves: {kept} kept the batches, the others are refused", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
