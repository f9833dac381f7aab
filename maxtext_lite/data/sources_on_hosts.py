"""Example sources on several hosts, some of which do not read: these open no file and learn what the others found."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxtext_lite.config import Config, UserError
from maxtext_lite.config.errors import value_text
from maxtext_lite.config.json_file import user_path
from maxtext_lite.data.excluded import ExcludedRow, excluded_ids, read_excluded
from maxtext_lite.data.mixture import MixtureSource, Opened, joined, opened_sources, target_tokens_between
from maxtext_lite.data.order import Source
from maxtext_lite.data.sources import ExampleSource
from maxtext_lite.parallel import exchange, value_of_host


@dataclasses.dataclass(frozen=True)
class UnreadSource(Source):
    """What a host that does not read knows about a source."""

    num_examples: int
    num_tokens: int
    num_target_tokens: int
    fingerprint: str
    fields: tuple[str, ...]

    notes = ()

    def __len__(self) -> int:
        return self.num_examples

    def __getitem__(self, example_id: int) -> dict[str, np.ndarray]:
        """Raises AssertionError: the layout gives this host no rows to read."""
        raise AssertionError(f"this host reads nothing, but was asked for example {example_id}")

    def count_targets(self, example_ids: np.ndarray) -> int:
        """Raises AssertionError: only reading hosts count."""
        raise AssertionError(f"this host reads nothing, but was asked about {len(example_ids)} examples")

    def documents(self, example_ids: np.ndarray) -> None:
        """None: only reading hosts know."""


def open_sources_on_hosts(
    config: Config, *, vocab_size: int, loading_hosts: Sequence[int]
) -> tuple[ExampleSource, ExampleSource | None]:
    """`open_sources` on the loading hosts, whose summaries the other hosts receive. All hosts must call it.

    Raises:
      UserError: this host cannot open its data; or, on every host, hosts find different data.
    """
    summaries: list[Any] | None = None
    opened: tuple[Sequence[Opened], Sequence[ExampleSource]] | None = None
    if jax.process_index() in loading_hosts:
        opened = opened_sources(config, vocab_size=vocab_size)
        pairs, held_out = opened
        summaries = [
            [None if source is None else _summary(source) for pair in pairs for source in pair],
            [_summary(source) for source in held_out],
        ]
    of_hosts = exchange(summaries)
    found = of_hosts[loading_hosts[0]]
    others = [host for host in loading_hosts if of_hosts[host] != found]
    if others:
        raise UserError(
            f"dataset_path: host {others[0]} finds different data than host {loading_hosts[0]}. All hosts that read "
            "must see the same files."
        )
    if opened is None:
        of_pairs, named = found
        known = [None if summary is None else UnreadSource(**summary) for summary in of_pairs]
        pairs = [
            (train, held_out) for train, held_out in zip(known[::2], known[1::2], strict=True) if train is not None
        ]
        opened = pairs, [UnreadSource(**summary) for summary in named]
    return joined(config, *opened)


def _summary(source: ExampleSource) -> dict[str, object]:
    unread = UnreadSource(
        len(source), source.num_tokens, source.num_target_tokens, source.fingerprint, tuple(source.fields)
    )
    return dataclasses.asdict(unread)


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
    key = f"excluded_rows={value_text(path)}"
    listed = excluded_rows_on_hosts(user_path(path), "excluded_rows")
    excluded_ids(source, listed, key)
    return listed


def target_tokens_of_run(source: ExampleSource, *, total_examples: int, seed: int, loading_hosts: Sequence[int]) -> int:
    """Exact target tokens of the first `total_examples` examples of a run. All hosts must call it."""
    tokens = 0
    if jax.process_index() == loading_hosts[0]:
        first = 0
        if isinstance(source, MixtureSource) and source.stream:  # the run has counted those of earlier mixtures
            first, tokens = source.stream.last.examples_seen, source.stream.last.tokens_seen
        tokens += target_tokens_between(source, first, max(total_examples, first), seed=seed)
    return value_of_host(loading_hosts[0], tokens)


def source_tokens_of_run(
    source: MixtureSource, first: int, stop: int, *, seed: int, loading_hosts: Sequence[int]
) -> dict[str, int]:
    """Target tokens of each source between two positions of a run, by name. All hosts must call it."""
    reads = jax.process_index() == loading_hosts[0]
    return value_of_host(loading_hosts[0], source.target_tokens(first, stop, seed) if reads else None)
