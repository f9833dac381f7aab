"""Example sources on several hosts, of which some may not read: those open no file and know what the others found."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from maxtext_lite.config import DataConfig, UserError
from maxtext_lite.data.order import example_ids
from maxtext_lite.data.sources import ExampleSource, open_sources
from maxtext_lite.parallel import exchange, value_of_host

_IDS_AT_A_TIME = 2**18  # of the examples whose target tokens are counted: bounds the memory


@dataclasses.dataclass(frozen=True)
class UnreadSource:
    """What a host that does not read knows of a source."""

    num_examples: int
    num_tokens: int
    num_target_tokens: int
    fingerprint: str
    fields: tuple[str, ...]

    notes = ()

    def __len__(self) -> int:
        return self.num_examples

    def __getitem__(self, example_id: int) -> dict[str, np.ndarray]:
        """Raises AssertionError: the layout gives this host no row to read."""
        raise AssertionError(f"this host reads nothing, but was asked for example {example_id}")

    def count_targets(self, example_ids: np.ndarray) -> int:
        """Raises AssertionError: only hosts that read are asked."""
        raise AssertionError(f"this host reads nothing, but was asked about {len(example_ids)} examples")


def open_sources_on_hosts(
    config: DataConfig, *, vocab_size: int, loading_hosts: Sequence[int], begins_as_elsewhere: bool = False
) -> tuple[ExampleSource, ExampleSource | None]:
    """`open_sources` on the loading hosts; the others learn from them how much data there is. All hosts call it.

    Raises:
      UserError: on every host, if one could not open its data, or if hosts found different data.
    """
    outcome: dict[str, Any] = {}
    sources: tuple[ExampleSource, ExampleSource | None] | None = None
    if jax.process_index() in loading_hosts:
        try:
            sources = open_sources(config, vocab_size=vocab_size, begins_as_elsewhere=begins_as_elsewhere)
            outcome = {"found": [None if source is None else _summary(source) for source in sources]}
        except UserError as error:
            outcome = {"problems": list(error.problems)}
    outcomes = exchange(outcome)
    problems = list(dict.fromkeys(problem for each in outcomes for problem in each.get("problems", ())))
    if problems:
        raise UserError(problems)
    found = outcomes[loading_hosts[0]]["found"]
    others = [host for host in loading_hosts if outcomes[host]["found"] != found]
    if others:
        raise UserError(
            f"dataset_path: host {others[0]} finds other data than host {loading_hosts[0]}. All hosts that read must "
            "see the same files."
        )
    if sources is None:
        train, evaluation = (None if summary is None else UnreadSource(**summary) for summary in found)
        assert train is not None
        return train, evaluation
    return sources


def _summary(source: ExampleSource) -> dict[str, object]:
    unread = UnreadSource(
        len(source), source.num_tokens, source.num_target_tokens, source.fingerprint, tuple(source.fields)
    )
    return dataclasses.asdict(unread)


def target_tokens_of_run(source: ExampleSource, *, total_examples: int, seed: int, loading_hosts: Sequence[int]) -> int:
    """Target tokens of the first `total_examples` examples of a run, exactly. All hosts call it."""
    tokens = 0
    if jax.process_index() == loading_hosts[0]:
        epochs, part = divmod(total_examples, len(source))
        tokens = epochs * source.num_target_tokens
        if source.num_target_tokens == len(source) * source.num_tokens:  # every row is full
            tokens += part * source.num_tokens
        elif part:
            first = epochs * len(source)
            # Of an epoch's parts before and after this place, the smaller one is counted.
            before = 2 * part <= len(source)
            first, count = (first, part) if before else (first + part, len(source) - part)
            counted = 0
            for at in range(first, first + count, _IDS_AT_A_TIME):
                some = min(_IDS_AT_A_TIME, first + count - at)
                counted += source.count_targets(example_ids(at, some, num_examples=len(source), seed=seed))
            tokens += counted if before else source.num_target_tokens - counted
    return value_of_host(loading_hosts[0], tokens)
