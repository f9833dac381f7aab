"""Branches of a run continue one of its checkpoints over the same examples with other batch sizes."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from maxtext_lite.analysis.short_runs import SHORT_RUNS
from maxtext_lite.batching import make_plan
from maxtext_lite.batching.schedule import scale_optimizer
from maxtext_lite.config import Config, UserError
from maxtext_lite.config.errors import divisors, number_text, setting_text, writing
from maxtext_lite.config.json_file import read_object
from maxtext_lite.config.records import Record, is_evaluation, read_records
from maxtext_lite.config.whole_file import steps_in, write_whole
from maxtext_lite.hf.model_directory import config_of_run

Rule = Literal["none", "linear", "sqrt"]

WORSE = 0.01
"""The relative excess over the best loss that makes a loss worse."""
_LAST_SHARE = Fraction(1, 4)


@dataclass(frozen=True)
class BranchSizes:
    """One branch's division of the examples into steps.

    Attributes:
      batch: examples per step, `factor` times the run's.
      accumulation: micro-batches per step, equal and as few as possible without one larger than the run's.
    """

    factor: Fraction
    batch: int
    accumulation: int
    steps: int


def branch_sizes(factors: Sequence[Fraction], *, batch: int, accumulation: int, steps: int) -> list[BranchSizes]:
    """The branch that each factor makes of `steps` batches of a run.

    Raises:
      UserError: factor 1 is missing, or a factor does not divide the examples into whole batches; names the nearest.
    """
    examples = batch * steps
    problems: list[str] = []
    sizes: list[BranchSizes] = []
    if 1 not in factors:
        problems.append("--factors has no 1, which the others are compared with. Nearest that works: 1 beside them.")
    for factor in sorted(set(factors)):
        wanted = factor * batch
        if wanted in divisors(examples):
            fewest = next(each for each in divisors(int(wanted)) if each >= factor * accumulation)
            sizes.append(BranchSizes(factor, int(wanted), fewest, int(steps / factor)))
            continue
        below = max((each for each in divisors(examples) if each < wanted), default=1)
        above = min((each for each in divisors(examples) if each > wanted), default=examples)
        named = " or ".join(f"{number_text(Fraction(each, batch))} ({each})" for each in dict.fromkeys((below, above)))
        problems.append(
            f"--factors={number_text(factor)}: --steps={steps} x {batch} examples = {examples} are not a whole number "
            f"of batches of {number_text(wanted)}. Nearest that work: {named}."
        )
    if problems:
        raise UserError(problems)
    return sizes


def compared_examples(sizes: Sequence[BranchSizes]) -> int:
    """The number of final examples whose training losses are averaged: a quarter, or the largest batch if larger."""
    largest = max(each.batch for each in sizes)
    return max(int(_LAST_SHARE * sizes[0].batch * sizes[0].steps), largest)


def critical_batch(losses: Mapping[int, float]) -> float | None:
    """The batch whose loss after equally many examples exceeds the best by `WORSE`; None: beyond the largest.

    Between measured batches it is interpolated over the logarithm of the batch.

    Args:
      losses: by batch in examples.
    Source: McCandlish et al. 2018, arXiv:1812.06162, section 2.2, for the idea of a batch beyond which more examples a
      step no longer pay; the threshold is ours.
    """
    before = min(losses, key=lambda batch: losses[batch])
    limit = (1 + WORSE) * losses[before]
    for batch in sorted(each for each in losses if each > before):
        if losses[batch] > limit:
            share = (limit - losses[before]) / (losses[batch] - losses[before])
            return before * (batch / before) ** share
        before = batch
    return None


@dataclass(frozen=True)
class Branch:
    """One branch, to be run by `train`.

    Attributes:
      config: continues the run's checkpoint at a constant learning rate, that of its step scaled by the rule.
    """

    sizes: BranchSizes
    config: Config
    directory: Path


@dataclass(frozen=True)
class BranchResult:
    """The result of a branch, after as many examples as the others.

    Attributes:
      tokens: target tokens of the branch alone.
      loss: mean training loss over the last `compared_examples`.
      left_out: steps among those of `loss` that have no finite loss, and are not in it.
      eval_loss: held-out loss after the last step; None where the run does not evaluate.
    """

    factor: float
    batch: int
    learning_rate: float
    steps: int
    tokens: int
    loss: float
    left_out: int
    eval_loss: float | None
    run_directory: str


class Branches:
    """The branches of a run from one of its checkpoints.

    Attributes:
      rule: how the learning rate follows the batch: the given one, else the run's, else sqrt (sgd: linear).
      batch: examples of the run's step at the checkpoint.
      examples_seen: of the run at the checkpoint.
      all: the branches, smallest batch first.
    Args:
      steps: of the branch with factor 1.
      output: directory of the branches; branches of the same kind in it are continued.
    Raises:
      UserError: the run has no such checkpoint, its learning rate there is 0 or not known, a factor does not give whole
        batches, a batch cannot be planned for these devices, or the output contains branches of another kind.
    """

    def __init__(self, run: Path, step: int, factors: Sequence[Fraction], steps: int, rule: Rule | None, output: Path):
        self._run = run
        self._step = step
        self._output = output
        there = steps_in(run / "checkpoints")
        if step not in there:
            raise UserError(f"--step={step} is no checkpoint of RUN_DIR={run}. {_nearest(step, there)}")
        config = config_of_run(run)
        if config.run_kind == "rl" or config.enable_diloco:
            raise UserError(f"RUN_DIR={run}: branch covers neither reinforcement learning nor enable_diloco.")
        lines = list(read_records(run / "metrics.jsonl", []))
        self._lines = [line for line in lines if line["step"] <= step]
        taken = {line["step"]: line for line in lines if not is_evaluation(line)}
        if step not in taken:
            raise UserError(f"RUN_DIR={run} has no step {step} in its metrics.jsonl.")
        self._at: Record = taken[step]
        rate = self._at["learning_rate"]
        if not rate:
            trains = [each for each in there if each in taken and taken[each]["learning_rate"]]
            said = (
                "is its own optimizer's, which is not known" if rate is None else "is 0, at which no branch would train"
            )
            raise UserError(f"--step={step}: the learning rate of RUN_DIR={run} {said}. {_nearest(step, trains)}")
        self.batch = int(self._at["global_batch_to_train"])
        self.examples_seen = int(self._at["examples_seen"])
        self.rule: Rule = rule or config.learning_rate_scaling
        if rule is None and self.rule == "none":
            self.rule = "linear" if config.optimizer == "sgd" else "sqrt"
        accumulation = int(self._at["gradient_accumulation_steps"])
        devices = round(self.batch / (accumulation * self._at["per_device_batch_size"]))
        self._per_device = Fraction(self.batch, accumulation * devices)
        sizes = branch_sizes(factors, batch=self.batch, accumulation=accumulation, steps=steps)
        self._compared = compared_examples(sizes)
        self._examples = steps * self.batch
        self.all = [self._branch(config, each) for each in sizes]

    def _branch(self, config: Config, sizes: BranchSizes) -> Branch:
        name = f"batch-{sizes.batch}"
        # The batch that the run's optimizer is scaled for: in a ramp-up that at its end.
        target_batch = int(read_object(self._run / "plan.json")["global_batch_to_train"])
        keys: dict[str, Any] = {
            **scale_optimizer(config, target_batch).scaled,
            **SHORT_RUNS["branch"],
            "learning_rate": self._at["learning_rate"],
            "learning_rate_scaling": self.rule,
            "scale_adam_with_batch": config.scale_adam_with_batch and self.rule == "sqrt",
            "base_global_batch_size": self.batch,
            "global_batch_size": sizes.batch,
            "gradient_accumulation_steps": sizes.accumulation,
            "eval_per_device_batch_size": config.eval_per_device_batch_size or self._per_device,
            "steps": self._step + sizes.steps,
            "base_output_directory": str(self._output),
            "run_name": name,
        }
        words = [f"{key}={setting_text(value)}" for key, value in keys.items()]
        return Branch(sizes, config_of_run(self._run, words), self._output / name)

    def prepare(self, machine: dict[str, Any]) -> None:
        """Plans all branches and makes missing run directories, each with a copy of the checkpoint.

        Args:
          machine: keyword arguments of `make_plan`.
        """
        for branch in self.all:
            make_plan(branch.config, **machine)
        about = {"run": str(self._run.resolve()), "step": self._step, "rule": self.rule, "examples": self._examples}
        path = self._output / "branch.json"
        with writing(self._output):
            self._output.mkdir(parents=True, exist_ok=True)
            there = read_object(path) if path.exists() else about
            if there != about:
                raise UserError(f"--output={self._output} holds branches of {there}, not of {about}: name another.")
            write_whole(path, json.dumps(about))
            for branch in self.all:
                if not branch.directory.exists():
                    self._copy(branch.directory)

    def _copy(self, directory: Path) -> None:
        """Copies the run up to the step into a run directory, which gets its name once it is complete."""
        unfinished = directory.with_name(f".{directory.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(self._run / "checkpoints" / str(self._step), unfinished / "checkpoints" / str(self._step))
        for name in ("frozen", "hf"):  # of LoRA, and what the run resumes with of a model from elsewhere
            if (self._run / name).exists():
                shutil.copytree(self._run / name, unfinished / name)
        for name in ("excluded_rows.jsonl", "reference.npz"):  # of loss spikes, and of DPO
            if (self._run / name).exists():
                shutil.copy(self._run / name, unfinished)
        (unfinished / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in self._lines))
        unfinished.rename(directory)

    def result(self, branch: Branch) -> BranchResult:
        """The result of a finished branch.

        Raises:
          UserError: none of the compared steps has a finite loss.
        """
        lines = [x for x in read_records(branch.directory / "metrics.jsonl", []) if x["step"] > self._step]
        trained = [line for line in lines if not is_evaluation(line)]
        after = self._at["examples_seen"] + self._examples - self._compared
        compared = [line for line in trained if line["examples_seen"] - line["examples"] >= after]
        last = [line for line in compared if line["loss"] is not None]  # null where it is not finite
        if not last:
            raise UserError(f"{branch.directory} has no finite loss in the last {self._compared:,} examples.")
        weights = [line.get("pairs", line["target_tokens"]) for line in last]  # the counts that divided each loss
        evaluated = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
        return BranchResult(
            factor=float(branch.sizes.factor),
            batch=branch.sizes.batch,
            learning_rate=trained[-1]["learning_rate"],
            steps=len(trained),
            tokens=sum(line["target_tokens"] for line in trained),
            loss=sum(w * line["loss"] for w, line in zip(weights, last, strict=True)) / sum(weights),
            left_out=len(compared) - len(last),
            eval_loss=evaluated.get(trained[-1]["step"]),
            run_directory=str(branch.directory),
        )


def _nearest(step: int, steps: Sequence[int]) -> str:
    if not steps:
        return "No checkpoint works."
    return f"Nearest that works: {min(steps, key=lambda each: abs(each - step))}."
