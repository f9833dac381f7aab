"""Example sources on several hosts. Hosts that do not read open no file and learn what the others found."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from maxtext_lite.config import Config, UserError
from maxtext_lite.config.errors import value_text
from maxtext_lite.config.json_file import user_path
from maxtext_lite.data.excluded import ExcludedRow, excluded_ids, read_excluded
from maxtext_lite.data.history import MixtureComponent
from maxtext_lite.data.source import ExampleSource
from maxtext_lite.data.sources import open_sources
from maxtext_lite.parallel import value_of_host


@dataclasses.dataclass(frozen=True)
class UnreadSource(ExampleSource):
    """What a host that does not read knows about a source."""

    num_examples: int
    num_tokens: int
    num_target_tokens: int
    fingerprint: str
    fields: tuple[str, ...]

    def __len__(self) -> int:
        return self.num_examples


def open_sources_on_hosts(
    config: Config, *, vocab_size: int, loading_hosts: Sequence[int]
) -> tuple[ExampleSource, ExampleSource | None]:
    """`open_sources` on the loading hosts; the others learn what the first of them found. All hosts must call it.

    Raises:
      UserError: this host cannot open its data, or finds other data than the first host that reads.
    """
    if jax.process_index() not in loading_hosts:
        training, held_out = value_of_host(loading_hosts[0], None)
        return _unread(training), None if held_out is None else _unread(held_out)
    opened = open_sources(config, vocab_size=vocab_size)
    summaries = [None if source is None else _summary(source) for source in opened]
    if value_of_host(loading_hosts[0], summaries) != summaries:
        raise UserError(
            f"dataset_path: host {jax.process_index()} finds different data than host {loading_hosts[0]}. All hosts "
            "that read must see the same files."
        )
    return opened


def _summary(source: ExampleSource) -> dict[str, Any]:
    """What `_unread` needs, as JSON."""
    if source.parts:
        parts = [dataclasses.asdict(part) for part in source.parts]
        return {"parts": parts, "sources": [_summary(each) for each in source.named().values()]}
    return {
        "num_examples": len(source),
        "num_tokens": source.num_tokens,
        "num_target_tokens": source.num_target_tokens,
        "fingerprint": source.fingerprint,
        "fields": list(source.fields),
    }


def _unread(summary: dict[str, Any]) -> ExampleSource:
    if "parts" in summary:
        from maxtext_lite.data.mixture import mix

        parts = [MixtureComponent(**part) for part in summary["parts"]]
        return mix(list(zip(parts, map(_unread, summary["sources"]), strict=True)))
    summary["fields"] = tuple(summary["fields"])  # a list in JSON
    return UnreadSource(**summary)


def excluded_rows_on_hosts(path: Path, key: str = "") -> list[ExcludedRow]:
    """`read_excluded` on the first host, for all hosts. All hosts must call it.

    Raises:
      UserError: on the first host, which cannot read it.
    """
    rows: list[dict[str, Any]] = []
    if jax.process_index() == 0:
        rows = [row.model_dump() for row in read_excluded(path, key)]
    return [ExcludedRow(**row) for row in value_of_host(0, rows)]


def listed_rows_on_hosts(config: Config, source: ExampleSource) -> list[ExcludedRow]:
    """The rows that `excluded_rows` lists, of a run's source. All hosts must call it.

    Raises:
      UserError: the first host cannot read the list; or, on every host, the source lacks a row.
    """
    path = config.excluded_rows
    if not path:
        return []
    listed = excluded_rows_on_hosts(user_path(path), "excluded_rows")
    excluded_ids(source, listed, f"excluded_rows={value_text(path)}")
    return listed


def target_tokens_of_run(
    source: ExampleSource,
    *,
    total_examples: int,
    seed: int,
    loading_hosts: Sequence[int],
) -> int:
    """Exact target tokens of the first `total_examples` examples of a run. All hosts must call it."""
    tokens = 0
    if jax.process_index() == loading_hosts[0]:
        first, tokens = source.counted  # of earlier mixtures
        tokens += source.target_tokens(first, max(total_examples, first), seed)
    return value_of_host(loading_hosts[0], tokens)


def source_tokens_of_run(
    source: ExampleSource,
    first: int,
    stop: int,
    *,
    seed: int,
    loading_hosts: Sequence[int],
) -> dict[str, int]:
    """Target tokens of each source between two positions of a run, by name. All hosts must call it."""
    reads = jax.process_index() == loading_hosts[0]
    return value_of_host(loading_hosts[0], source.tokens_by_source(first, stop, seed) if reads else None)
