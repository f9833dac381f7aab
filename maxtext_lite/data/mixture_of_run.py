"""What a run mixes: its history over restarts, where its sources end, and what it takes of each. Imports no jax."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from maxtext_lite.batching import BatchPlan
from maxtext_lite.config import DataConfig, UserError
from maxtext_lite.config.errors import any_of
from maxtext_lite.config.source_list import MIXABLE
from maxtext_lite.data.mixture_history import History, Mixture, RowStream, continued, history_of
from maxtext_lite.data.mixture_source import MixtureSource, parts_of
from maxtext_lite.data.sources import ExampleSource


def history_now(
    config: DataConfig, source: Any, saved: Sequence[Mapping[str, Any]], *, examples_seen: int, tokens_seen: int
) -> History:
    """The mixtures of a run up to the one that it goes on with; none of a run whose data cannot be mixed.

    Args:
      saved: the history of its checkpoint, as JSON; none at its start.
    Raises:
      UserError: a source has other rows than under this name before.
    """
    if config.dataset_type not in MIXABLE:
        return ()
    parts = parts_of(config, [source])
    if not saved:
        return history_of(parts)
    history = tuple(Mixture.of(entries) for entries in saved)
    return continued(history, parts, examples_seen=examples_seen, tokens_seen=tokens_seen)


def in_run(source: ExampleSource, history: History) -> ExampleSource:
    """The source of a run of this history: of one that never had another source, the source itself."""
    if isinstance(source, MixtureSource):
        return source.with_stream(RowStream(history))
    if not history or (len(history) == 1 and len(history[0].parts) == 1):
        return source
    return MixtureSource(history[-1].parts, (source,), RowStream(history))


def steps_left(config: DataConfig, plan: BatchPlan, source: Any, *, step: int, examples_seen: int) -> int:
    """Steps that a run has left; where mixture_exhausted=stop, those that end before a source does.

    Raises:
      UserError: a source would pass its max_epochs, or none would be left.
    """
    left = plan.steps_left(step, examples_seen)
    ends = plan.examples_after(left, examples_seen)
    ended = sources_ended(source, ends)
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
    fitting = plan.steps_within(examples_seen, position)
    if mode == "stop" and step + fitting:
        return fitting
    works = [f"steps={step + fitting}", "mixture_exhausted=stop"] if step + fitting else []
    works += ["mixture_exhausted=drop"] if is_never_empty else []
    raise UserError(
        f"dataset_path: {said}, and the run has {ends:,}. Nearest that work: {any_of([*works, 'a larger max_epochs'])}."
    )


def sources_ended(source: Any, end: int) -> dict[str, int]:
    """The sources that have no row to give where their turn comes, before a run's end: names, and where that is."""
    if not isinstance(source, MixtureSource) or source.stream is None:
        return {}
    names = {part.fingerprint: part.name for part in source.parts}
    return {names[out.fingerprint]: out.position for out in source.stream.left_out if out.position < end}


def sentences_on_ends(config: DataConfig, source: Any, end: int) -> list[str]:
    """For people: which sources a run leaves out before it ends with `end` examples, or which one ends it."""
    stops = config.mixture_exhausted == "stop"
    ended = list(sources_ended(source, sys.maxsize if stops else end).items())
    what = f"the run ends with example {end:,}" if stops else "the others go on"
    return [
        f"{name} has given all rows of its max_epochs when its turn comes at example {position:,}: {what}"
        for name, position in (ended[:1] if stops else ended)
    ]


def mixture_table(source: Any, first: int, end: int) -> list[dict[str, Any]]:
    """What a run takes of each source from one place to another, as JSON; [] without a mixture.

    `rows` and `token_share` are of these places, by the sources' mean target tokens; `epochs` are of the whole run.
    """
    if not isinstance(source, MixtureSource) or source.stream is None:
        return []
    if source.stream.end is not None:
        end = min(end, source.stream.end)
    before, after = source.stream.given(first), source.stream.given(end)
    rows = [after.get(part.fingerprint, 0) - before.get(part.fingerprint, 0) for part in source.parts]
    tokens = [n * each.num_target_tokens / len(each) for n, each in zip(rows, source.sources, strict=True)]
    return [
        {
            "name": part.name,
            "examples": len(each),
            "target_tokens": each.num_target_tokens,
            "rows": n,
            "token_share": of_tokens / max(sum(tokens), 1),
            "epochs": after.get(part.fingerprint, 0) / len(each),
        }
        for part, each, n, of_tokens in zip(source.parts, source.sources, rows, tokens, strict=True)
    ]


def mixture_text(table: Sequence[Mapping[str, Any]]) -> str:
    """A `mixture_table` in lines."""
    heading = ("source", "examples", "target tokens", "rows in this run", "of tokens", "epochs")
    lines = [heading] + [
        (
            row["name"],
            f"{row['examples']:,}",
            f"{row['target_tokens']:,}",
            f"{row['rows']:,}",
            f"{row['token_share']:.4%}",
            f"{row['epochs']:.4g}",
        )
        for row in table
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heading))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(text.rjust(n) for text, n in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )
