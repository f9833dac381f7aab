"""The sources of a run over its restarts, and where their limits end it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from maxtext_lite.batching import BatchPlan
from maxtext_lite.batching.schedule import decay, warm_up
from maxtext_lite.config import Config, DataConfig, SourceList, UserError
from maxtext_lite.config.errors import any_of, rounded_text
from maxtext_lite.config.keys import name_of_path
from maxtext_lite.data.source import ExampleSource

MIXTURE = "mixture:"
"""Prefix of a mixture's fingerprint; the run's history records when it had which sources."""


@dataclasses.dataclass(frozen=True)
class MixtureComponent:
    """The part of a source in a mixture.

    Attributes:
      name: for people; the fingerprint identifies the source.
      fingerprint: fingerprint of its rows.
      row_weight: exact, as "3/10"; the rows of a mixture are divided among its sources in proportion to it.
      most_rows: limit on the source's rows in the whole run; None: no limit.
    """

    name: str
    fingerprint: str
    row_weight: str
    most_rows: int | None


@dataclasses.dataclass(frozen=True)
class Mixture:
    """The composition of a run's rows from one position on.

    Attributes:
      examples_seen: examples of the run before the mixture's first row; `tokens_seen`: their target tokens.
      parts: sorted by fingerprint; the order of sources in a config does not matter.
    """

    examples_seen: int
    tokens_seen: int
    parts: tuple[MixtureComponent, ...]

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> Mixture:
        """The mixture in a checkpoint's JSON."""
        parts = tuple(MixtureComponent(**part) for part in entries["parts"])
        return cls(entries["examples_seen"], entries["tokens_seen"], parts)

    @property
    def meaning(self) -> list[tuple[str, Fraction, int | None]]:
        """Everything that the rows depend on: neither names nor the scale of the weights."""
        total = sum(Fraction(part.row_weight) for part in self.parts)
        return [(part.fingerprint, Fraction(part.row_weight) / total, part.most_rows) for part in self.parts]


History = tuple[Mixture, ...]
"""The mixtures of a run, the first from example 0."""


def history_of(parts: Sequence[MixtureComponent]) -> History:
    """The history of a run that begins with these parts."""
    return (Mixture(0, 0, tuple(sorted(parts, key=lambda part: part.fingerprint))),)


def continued(
    history: History,
    parts: Sequence[MixtureComponent],
    *,
    examples_seen: int,
    tokens_seen: int,
) -> History:
    """The history of a run that continues with these parts after `examples_seen` examples.

    Raises:
      UserError: a source has the name of an earlier one but other rows.
    """
    known = {part.fingerprint for mixture in history for part in mixture.parts}
    named = {part.name for mixture in history for part in mixture.parts}
    for part in parts:
        if part.name in named and part.fingerprint not in known:
            raise UserError(
                f"dataset_path: the source named {part.name} has other rows than the run's source of that name. Give "
                "it a name of its own, or use the run's text and tokenizer."
            )
    now = dataclasses.replace(history_of(parts)[0], examples_seen=examples_seen, tokens_seen=tokens_seen)
    if now.meaning == history[-1].meaning:
        return history
    earlier = [mixture for mixture in history if mixture.examples_seen < examples_seen]
    return (*earlier, now)


def parts_of(config: DataConfig, sources: Sequence[ExampleSource]) -> list[MixtureComponent]:
    """The part of each source in the mixture of a config; a single source has all of it.

    A weight is a share of target tokens; divided by the mean target tokens of the source's rows, it is one of rows.

    Raises:
      UserError: two sources have the same rows.
    """
    if sources[0].parts:
        return list(sources[0].parts)
    if not isinstance(config.dataset_path, SourceList):
        name = name_of_path(config.dataset_path) if sources[0].is_of_dataset_path else ""
        return [MixtureComponent(name, sources[0].fingerprint, "1", None)]
    parts: dict[str, MixtureComponent] = {}
    for entry, source in zip(config.dataset_path.entries, sources, strict=True):
        if source.fingerprint in parts:
            raise UserError(
                f"dataset_path: the sources {parts[source.fingerprint].name} and {entry.name} have the same rows. "
                "Leave out one, and give the other the sum of their weights."
            )
        most = None if entry.max_epochs == -1 else int(entry.max_epochs * len(source))
        weight = entry.weight * len(source) / source.num_target_tokens
        parts[source.fingerprint] = MixtureComponent(entry.name, source.fingerprint, str(weight), most)
    return list(parts.values())


def steps_left(
    config: DataConfig,
    plan: BatchPlan,
    source: ExampleSource,
    *,
    step: int,
    examples_seen: int,
) -> int:
    """A run's remaining steps; with mixture_exhausted=stop, only those before a source ends.

    Raises:
      UserError: a source would exceed its max_epochs, or no source would be left.
    """
    left = plan.length.steps_left(step, examples_seen)
    end = plan.length.examples_after(left, examples_seen)
    exhausted = source.exhausted(end)
    if not exhausted:
        return left
    mode = config.mixture_exhausted
    name, position = next(iter(exhausted.items()))
    reached = f"max_epochs of the source {name} is reached at example {position:,}"
    if mode == "drop":
        if end <= source.end:
            return left
        position = source.end
        reached = f"max_epochs leaves no source after example {position:,}"
    fitting = plan.length.steps_within(examples_seen, position)
    works: list[str] = []
    if step + fitting:
        if mode == "stop":
            return fitting
        works += [f"steps={step + fitting}", "mixture_exhausted=stop"]
    if end <= source.end:
        works.append("mixture_exhausted=drop")
    nearest = any_of([*works, "a larger max_epochs"])
    raise UserError(f"dataset_path: {reached}, and the run has {end:,}. Nearest that work: {nearest}.")


def nothing_left(plan: BatchPlan, *, step: int, examples_seen: int) -> str:
    """Why a run with no steps left has none."""
    if plan.length.steps_left(step, examples_seen):
        return "its data end there"
    stated = plan.length.stated_steps
    return "its epochs are over" if stated is None else f"steps={stated} asks for no more"


def mixture_sentences(
    config: DataConfig,
    source: ExampleSource,
    first: int,
    end: int,
) -> list[str]:
    """The `shares` of a source for people, with the sources that the run drops, or the one that ends it."""
    sentences = [
        f"source {row['name']}: {row['examples']:,} examples, {row['target_tokens']:,} target tokens; {row['rows']:,} "
        f"rows to be read, {row['token_share']:.4%} of the tokens; {rounded_text(row['epochs'])} epochs in the "
        "whole run"
        for row in source.shares(first, end)
    ]
    stops = config.mixture_exhausted == "stop"
    for name, position in source.exhausted(sys.maxsize if stops else end).items():
        then = f"the run ends with example {end:,}" if stops else "the others continue"
        sentences.append(f"source {name} reaches its max_epochs at example {position:,}: {then}")
        if stops:
            break
    return sentences


def early_stop_note(
    config: Config,
    plan: BatchPlan,
    *,
    steps: int,
    examples_seen: int,
) -> list[str]:
    """A sentence on the learning rate of a run whose data end before its schedule; [] for other runs.

    The schedule ends where the run would with unlimited data, because a run that resumes with more data needs it there.

    Args:
      steps, examples_seen: at the end of the run.
    """
    if not plan.length.steps_left(steps, examples_seen):
        return []
    last = plan.schedule_end(config.schedule_unit, steps, examples_seen)
    # Tokens are taken to be as many in each example.
    end = steps if config.schedule_unit == "steps" else examples_seen / plan.global_batch_to_train
    positions = np.array([end, last], float)
    at_end, planned = (decay(config, positions, last, np) * warm_up(config, positions, last, np)).tolist()
    if at_end <= planned:
        return []
    return [
        f"the run ends after {steps:,} of steps={plan.steps}, for which its learning rate is scheduled: the rate is "
        f"then still about {at_end:.1%} of its peak, not {planned:.1%}. A new run with steps={steps} completes its "
        "schedule."
    ]
