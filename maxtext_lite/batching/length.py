"""The length of a run: stated steps, or passes over the data that end with a whole or a short batch."""

import itertools
import math
from dataclasses import dataclass, replace
from fractions import Fraction

from maxtext_lite.batching.batch import smaller_batches
from maxtext_lite.batching.rampup import BatchStage, stage_at
from maxtext_lite.config import Config
from maxtext_lite.config.errors import number_text, unwhole_text
from maxtext_lite.config.rules import NOTHING_STATES_THE_LENGTH
from maxtext_lite.config.violation import Violation, multiples


@dataclass(frozen=True)
class RunLength:
    """The steps of a run and the examples of each, computed from the stages without walking the steps.

    Attributes:
      stages: all stages of the run, in order; the last one has no end.
      stated_steps: `steps`; None where num_epochs states the length.
      stated_examples: num_epochs x examples in the data; None where `steps` states the length.
      trains_short_batch: whether examples at the end that fill no batch make one more step (`last_batch`).
      done: (steps, examples) before this start of the run; those of a checkpoint where it resumes.
    """

    stages: tuple[BatchStage, ...]
    stated_steps: int | None
    stated_examples: int | None
    trains_short_batch: bool
    done: tuple[int, int] = (0, 0)

    @property
    def steps(self) -> int:
        """Steps of the whole run, unless a later start changes its plan."""
        return self.end_after(*self.done)[0]

    @property
    def total_examples(self) -> int:
        """Examples of the whole run, including a short last batch, unless a later start changes its plan."""
        return self.end_after(*self.done)[1]

    @property
    def short_batch_examples(self) -> int:
        """Examples at the end that fill no batch; 0 if the last batch is whole, or already done."""
        if self.stated_examples is None:
            return 0
        return max(self.stated_examples - self._whole_batches(self.done[1])[1], 0)

    @property
    def stages_ahead(self) -> tuple[BatchStage, ...]:
        """The stages that are not over, each with the steps and examples that this start has before it and in it."""
        found: list[BatchStage] = []
        step, seen = self.done
        for stage, following in itertools.pairwise(self.stages):
            if steps := max(-(-(following.samples_before - seen) // stage.global_batch_to_train), 0):
                found.append(replace(stage, first_step=step + 1, num_steps=steps, samples_before=seen))
                step, seen = step + steps, seen + steps * stage.global_batch_to_train
        return (*found, replace(self.stages[-1], first_step=step + 1, samples_before=seen))

    def step_examples(self, examples_seen: int) -> int:
        """Examples of the next step once `examples_seen` have been consumed; 0 at the end of the run's data.

        Raises:
          ValueError: examples_seen is negative.
        """
        batch = stage_at(self.stages, examples_seen).global_batch_to_train
        if self.stated_examples is None or examples_seen + batch <= self.stated_examples:
            return batch
        return max(self.stated_examples - examples_seen, 0) if self.trains_short_batch else 0

    def steps_left(self, step: int, examples_seen: int) -> int:
        """Steps that remain after `step` steps that consumed `examples_seen` examples.

        Stated steps are simply counted. Epochs end with their examples, however many steps those took.

        Raises:
          ValueError: step or examples_seen is negative.
        """
        if min(step, examples_seen) < 0:
            raise ValueError(f"step={step}, examples_seen={examples_seen}: neither may be negative")
        if self.stated_examples is None:
            assert self.stated_steps is not None
            return max(self.stated_steps - step, 0)
        steps, seen = self._whole_batches(examples_seen)
        return steps + (self.trains_short_batch and seen < self.stated_examples)

    def end_after(self, step: int, examples_seen: int) -> tuple[int, int]:
        """(steps, examples) at the end of a run after `step` steps that consumed `examples_seen` examples.

        It is the same after each step of a run, and another one after a change of its batches or of its length.

        Raises:
          ValueError: step or examples_seen is negative.
        """
        left = self.steps_left(step, examples_seen)
        return step + left, self.examples_after(left, examples_seen)

    def examples_after(self, steps: int, examples_seen: int) -> int:
        """Examples seen after `steps` further steps, which must be among the `steps_left` after `examples_seen`."""
        left, seen = steps, examples_seen
        for stage, following in itertools.pairwise(self.stages):
            batch = stage.global_batch_to_train
            steps = min(left, max(-(-(following.samples_before - seen) // batch), 0))
            left, seen = left - steps, seen + steps * batch
        seen += left * self.stages[-1].global_batch_to_train
        return seen if self.stated_examples is None else max(min(seen, self.stated_examples), examples_seen)

    def steps_within(self, examples_seen: int, end: int) -> int:
        """Whole batches that fit between `examples_seen` and `end` examples."""
        return replace(self, stated_examples=end)._whole_batches(examples_seen)[0]

    def _whole_batches(self, examples_seen: int) -> tuple[int, int]:
        """(whole batches that fit before the end of the data, examples seen after them)."""
        assert self.stated_examples is not None
        steps, seen = 0, examples_seen
        for stage, following in itertools.pairwise(self.stages):
            batch = stage.global_batch_to_train
            fitting = max(self.stated_examples - seen, 0) // batch
            to_next_stage = max(-(-(following.samples_before - seen) // batch), 0)
            if fitting < to_next_stage:
                return steps + fitting, seen + fitting * batch
            steps, seen = steps + to_next_stage, seen + to_next_stage * batch
        batch = self.stages[-1].global_batch_to_train
        fitting = max(self.stated_examples - seen, 0) // batch
        return steps + fitting, seen + fitting * batch


def epochs_violation(config: Config, num_examples: int | None) -> Violation | None:
    """Refuses a length that nothing states, and epochs that are not a whole number of examples."""
    key, epochs = "num_epochs", config.num_epochs
    if epochs == 0:
        if config.steps != -1:
            return None
        return Violation("steps", NOTHING_STATES_THE_LENGTH, (max(config.warmup_steps, 1),))
    if num_examples is None or (epochs * num_examples).denominator == 1:
        return None
    return Violation(
        key,
        f"{key}={number_text(epochs)} x {num_examples} examples in the data = {unwhole_text(epochs * num_examples, 6)} "
        "examples, not a whole number.",
        (multiples(key, Fraction(1, num_examples), epochs), Fraction(math.ceil(epochs))),
        rule=f"{key} is whole",
    )


def derive_length(
    config: Config, stages: tuple[BatchStage, ...], num_examples: int | None
) -> RunLength | Violation | None:
    """The length of a run; None if num_epochs states it and the number of examples is unknown.

    Args:
      config: a config without an `epochs_violation`.
    """
    trains_short = config.last_batch == "train"
    if config.num_epochs == 0:
        return RunLength(stages, config.steps, None, trains_short)
    if num_examples is None:
        return None
    length = RunLength(stages, None, int(config.num_epochs * num_examples), trains_short)
    return length if length.steps else _no_step(config, stages[0], num_examples)


def _no_step(config: Config, first: BatchStage, num_examples: int) -> Violation:
    total, wanted = int(config.num_epochs * num_examples), first.global_batch_to_train
    return Violation(
        "num_epochs",
        f"num_epochs={number_text(config.num_epochs)} is {total} example{'' if total == 1 else 's'}, fewer than the "
        f"{wanted} of one batch, and last_batch=drop trains whole batches only: no step.",
        (lambda: [smaller_batches(config, first, total)], {"num_epochs": Fraction(wanted, num_examples)}),
        rule="a step",
    )
