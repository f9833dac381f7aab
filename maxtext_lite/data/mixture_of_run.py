"""The mixture of a run: its history over restarts, where its sources end, and their shares. Imports no jax."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from maxtext_lite.batching import BatchPlan
from maxtext_lite.batching.rate_shape import decay, warm_up
from maxtext_lite.config import Config, DataConfig, UserError
from maxtext_lite.config.errors import any_of, rounded_text
from maxtext_lite.config.kinds import source_kind
from maxtext_lite.data.mixture_history import Mixture, RowStream, as_json, continued, history_of
from maxtext_lite.data.mixture_source import MixtureSource, parts_of


def in_run(
    config: DataConfig, source: Any, saved: Sequence[Mapping[str, Any]] = (), seen: tuple[int, int] = (0, 0)
) -> tuple[Any, list[dict[str, Any]]]:
    """A source as a run reads it, and the history of the run's mixtures as JSON for further checkpoints.

    A run that never had another source reads the source itself. Data that cannot be mixed have no history.

    Args:
      saved: the history in the checkpoint from which the run continues.
      seen: examples and target tokens that the run has seen.
    Raises:
      UserError: a source has the name of an earlier one but other rows.
    """
    if not source_kind(config.dataset_type).is_mixable:
        return source, []
    parts = parts_of(config, [source])
    history = history_of(parts)
    if saved:
        before = tuple(Mixture.of(entries) for entries in saved)
        history = continued(before, parts, examples_seen=seen[0], tokens_seen=seen[1])
    if isinstance(source, MixtureSource):
        source = source.with_stream(RowStream(history))
    elif len(history) > 1:
        source = MixtureSource(tuple(parts), (source,), RowStream(history))
    return source, as_json(history)


def steps_left(config: DataConfig, plan: BatchPlan, source: Any, *, step: int, examples_seen: int) -> int:
    """Steps that a run has left; with mixture_exhausted=stop, only those that end before a source does.

    Raises:
      UserError: a source would exceed its max_epochs, or no source would be left.
    """
    left = plan.length.steps_left(step, examples_seen)
    ends = plan.length.examples_after(left, examples_seen)
    ended = _ended(source, ends)
    if not ended:
        return left
    (name, position), *_ = ended.items()
    mode, last = config.mixture_exhausted, source.stream.end
    is_never_empty = last is None or ends <= last
    if mode == "drop" and is_never_empty:
        return left
    said = f"max_epochs of the source {name} is reached at example {position:,}"
    if mode == "drop" and last is not None:
        said, position = f"max_epochs leaves no source after example {last:,}", last
    fitting = plan.length.steps_within(examples_seen, position)
    if mode == "stop" and step + fitting:
        return fitting
    works = [f"steps={step + fitting}", "mixture_exhausted=stop"] if step + fitting else []
    works += ["mixture_exhausted=drop"] if is_never_empty else []
    raise UserError(
        f"dataset_path: {said}, and the run has {ends:,}. Nearest that work: {any_of([*works, 'a larger max_epochs'])}."
    )


def nothing_left(plan: BatchPlan, *, step: int, examples_seen: int) -> str:
    """Why a run of which `steps_left` are 0 has none left."""
    if plan.length.steps_left(step, examples_seen):
        return "its data end there"
    stated = plan.length.stated_steps
    return "none is left" if stated is None else f"none is left of the {stated} that are asked for"


def _ended(source: Any, end: int) -> dict[str, int]:
    """The sources that reach their limit before a run's end: names, and the positions of their next turns."""
    if not isinstance(source, MixtureSource) or source.stream is None:
        return {}
    names = {part.fingerprint: part.name for part in source.parts}
    return {names[each]: position for each, position in source.stream.left_out.items() if position < end}


def mixture_table(source: Any, first: int, end: int) -> list[dict[str, Any]]:
    """What a run takes from each source between two positions, as JSON; [] without a mixture.

    `rows` and `token_share` are for these positions, by the sources' mean target tokens; `epochs` for the whole run.
    """
    if not isinstance(source, MixtureSource) or source.stream is None:
        return []
    before, after = source.epochs(first), source.epochs(end)
    table: list[dict[str, Any]] = [
        {
            "name": part.name,
            "examples": len(each),
            "target_tokens": each.num_target_tokens,
            "rows": round((after[part.name] - before[part.name]) * len(each)),
            "token_share": (after[part.name] - before[part.name]) * each.num_target_tokens,
            "epochs": after[part.name],
        }
        for part, each in zip(source.parts, source.sources, strict=True)
    ]
    total = sum(row["token_share"] for row in table) or 1
    return [row | {"token_share": row["token_share"] / total} for row in table]


def mixture_sentences(config: DataConfig, source: Any, first: int, end: int) -> list[str]:
    """A `mixture_table` for people, with the sources that the run leaves out, or the one that ends it."""
    stops = config.mixture_exhausted == "stop"
    ended = list(_ended(source, sys.maxsize if stops else end).items())
    what = f"the run ends with example {end:,}" if stops else "the others go on"
    return [
        f"source {row['name']}: {row['examples']:,} examples, {row['target_tokens']:,} target tokens; {row['rows']:,} "
        f"rows to be read, {row['token_share']:.4%} of the tokens; {rounded_text(row['epochs'])} epochs in the "
        "whole run"
        for row in mixture_table(source, first, end)
    ] + [
        f"source {name} has given all rows of its max_epochs when its turn comes at example {position:,}: {what}"
        for name, position in (ended[:1] if stops else ended)
    ]


def early_end(config: Config, plan: BatchPlan, *, steps: int, examples_seen: int) -> list[str]:
    """A sentence on the learning rate of a run that its data end before its schedule does; [] for any other run.

    The schedule ends where the run would without a limit of its data, as a run that resumes with more needs it.

    Args:
      steps, examples_seen: at the end of the run.
    """
    if not plan.length.steps_left(steps, examples_seen):
        return []
    last = plan.schedule_end(config.schedule_unit, steps, examples_seen)
    # Tokens are taken to be as many in each example.
    end = steps if config.schedule_unit == "steps" else examples_seen / plan.global_batch_to_train
    at_end, planned = (
        float(decay(config, np.float64(u), last, np) * warm_up(config, np.float64(u), last, np)) for u in (end, last)
    )
    if at_end <= planned:
        return []
    return [
        f"the run ends after {steps:,} of steps={plan.steps}, for which its learning rate is scheduled: the rate is "
        f"then still about {at_end:.1%} of its peak, not {planned:.1%}. A new run with steps={steps} completes its "
        "schedule."
    ]
