"""Several sources as one, mixed as a run's history says; and functions that treat a single source the same way."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxtext_lite.config import Config, DataConfig, SourceList, UserError
from maxtext_lite.config.source_list import name_of_path
from maxtext_lite.data.examples import check_id
from maxtext_lite.data.mixture_history import RowStream, SourcePart
from maxtext_lite.data.order import example_ids, examples_hash
from maxtext_lite.data.own_examples import OwnExamples
from maxtext_lite.data.packing import Documents
from maxtext_lite.data.sources import ExampleSource, Opened, open_path, open_sources

MIXTURE = "mixture:"
"""Prefix of a mixture's fingerprint; the run's history records when it had which sources."""

_MOST_COUNTED = 2**20  # ids at a time


@dataclasses.dataclass(frozen=True)
class MixtureSource:
    """Sources whose examples are numbered consecutively: those of the first, then those of the second, and so on.

    Attributes:
      parts: the part of each source in the mixture, in the order of fingerprints; for held-out examples those of the
        corresponding training sources, or the held-out sets of the config, in their order.
      sources: in the same order.
      stream: the example at each position of the run; None for held-out examples, which have no such positions.
    """

    parts: tuple[SourcePart, ...]
    sources: tuple[ExampleSource, ...]
    stream: RowStream | None = None

    @functools.cached_property
    def _first_ids(self) -> np.ndarray:
        return np.cumsum([0, *(len(source) for source in self.sources)], dtype=np.int64)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the sources, without their weights."""
        return MIXTURE + ",".join(part.fingerprint for part in self.parts)

    @property
    def fields(self) -> Sequence[str]:
        """See `ExampleSource`; the same for all sources."""
        return self.sources[0].fields

    @property
    def notes(self) -> Sequence[str]:
        """The notes of the sources, with their names."""
        named = zip(self.parts, self.sources, strict=True)
        return [f"{part.name}: {note}" for part, source in named for note in source.notes]

    @property
    def num_sequences(self) -> int:
        """See `ExampleSource`."""
        return sum(source.num_sequences for source in self.sources)

    @property
    def ends(self) -> tuple[int, ...]:
        """The special tokens with which the answers of some source end."""
        return tuple(dict.fromkeys(itertools.chain.from_iterable(source.ends for source in self.sources)))

    def describe(self) -> list[dict[str, Any]]:
        """The entries of all sources, with their names."""
        named = zip(self.parts, self.sources, strict=True)
        return [about | {"name": part.name} for part, source in named for about in source.describe()]

    @property
    def num_tokens(self) -> int:
        """See `ExampleSource`; the same for all sources."""
        return self.sources[0].num_tokens

    @property
    def num_target_tokens(self) -> int:
        """Target tokens of all examples."""
        return sum(source.num_target_tokens for source in self.sources)

    def __len__(self) -> int:
        return int(self._first_ids[-1])

    def __getitem__(self, example_id: int) -> dict[str, np.ndarray]:
        """One example. Raises IndexError outside [0, len)."""
        check_id(example_id, len(self))
        number = int(np.searchsorted(self._first_ids, example_id, side="right")) - 1
        return self.sources[number][example_id - int(self._first_ids[number])]

    def count_targets(self, example_ids: np.ndarray) -> int:
        """Target tokens of these examples; repeated ids count repeatedly."""
        numbers = self._numbers(example_ids)
        return sum(
            source.count_targets(example_ids[numbers == number] - first)
            for number, (source, first) in enumerate(zip(self.sources, self._first_ids.tolist(), strict=False))
        )

    def documents(self, example_ids: np.ndarray) -> Documents | None:
        """See `ExampleSource`."""
        numbers, found = self._numbers(example_ids), list[Documents]()
        for number in np.unique(numbers).tolist():
            own = np.flatnonzero(numbers == number)
            documents = self.sources[number].documents(example_ids[own] - self._first_ids[number])
            if documents is None:
                return None
            found.append(documents._replace(rows=own[documents.rows]))
        return Documents(*map(np.concatenate, zip(*found, strict=True)))

    def _numbers(self, ids: np.ndarray) -> np.ndarray:
        """The number of each example's source; int64."""
        return np.searchsorted(self._first_ids, ids, side="right") - 1

    def with_stream(self, stream: RowStream) -> MixtureSource:
        """The same sources in a run with this history."""
        return dataclasses.replace(self, stream=stream)

    def ids_of_run(self, first: int, count: int, seed: int) -> np.ndarray:
        """The examples at these positions of the run, int64."""
        numbers, positions, fingerprints = self._stream.rows(first, count)
        ids = np.empty(count, np.int64)
        places = {part.fingerprint: place for place, part in enumerate(self.parts)}
        for number, fingerprint in enumerate(fingerprints):
            own = numbers == number
            if not own.any():
                continue
            if (place := places.get(fingerprint)) is None:
                raise UserError("dataset_path: the run has read rows here from a source that is no longer listed.")
            keys = {"num_examples": len(self.sources[place]), "seed": self._stream.seed(fingerprint, seed)}
            # The positions within a source are consecutive, whatever lies between its rows.
            ids[own] = self._first_ids[place] + example_ids(int(positions[own][0]), int(own.sum()), **keys)
        return ids

    def hashed(self, ids: np.ndarray) -> np.ndarray:
        """Values for `order.examples_hash` in place of ids, which change with the list of sources; uint64."""
        hashed = np.empty(len(ids), np.uint64)
        numbers = self._numbers(ids)
        for number, part in enumerate(self.parts):
            own = numbers == number
            rows = (ids[own] - self._first_ids[number]).astype(np.uint64)
            hashed[own] = rows + np.uint64(self._stream.salt(part.fingerprint))
        return hashed

    def named_rows(self, ids: np.ndarray) -> list[tuple[str, int]]:
        """For each example the name of its source and its number there."""
        numbers = self._numbers(ids)
        rows = (ids - self._first_ids[numbers]).tolist()
        return [(self.parts[number].name, row) for number, row in zip(numbers.tolist(), rows, strict=True)]

    def epochs(self, examples_seen: int) -> dict[str, float]:
        """How often each source has been read up to a position of the run, by name."""
        given = self._stream.given(examples_seen)
        named = zip(self.parts, self.sources, strict=True)
        return {part.name: given.get(part.fingerprint, 0) / len(source) for part, source in named}

    def target_tokens(self, first: int, stop: int, seed: int) -> dict[str, int]:
        """Exact target tokens that each source gives between two positions of the run, by name."""
        before, after = self._stream.given(first), self._stream.given(stop)
        return {
            part.name: _target_tokens(
                source,
                before.get(part.fingerprint, 0),
                after.get(part.fingerprint, 0),
                self._stream.seed(part.fingerprint, seed),
            )
            for part, source in zip(self.parts, self.sources, strict=True)
        }

    @property
    def _stream(self) -> RowStream:
        assert self.stream is not None, "these examples belong to no run"
        return self.stream


def each_config(config: DataConfig) -> list[DataConfig]:
    """The config of each source by itself; the first also gets the held-out text, if there is one without a name."""
    if isinstance(config.eval_dataset_path, SourceList):
        config = config.model_copy(update={"eval_dataset_path": "", "eval_fraction": 0.0})
    if not isinstance(config.dataset_path, SourceList):
        return [config]
    first, *others = [{"dataset_path": entry.path} for entry in config.dataset_path.entries]
    none = {"eval_dataset_path": "", "eval_fraction": 0.0} if config.eval_dataset_path else {}
    return [config.model_copy(update=update) for update in [first, *(other | none for other in others)]]


def joined(config: DataConfig, opened: Sequence[Opened], held_out: Sequence[ExampleSource]) -> Opened:
    """The sources opened for each of `each_config`, as one; the source itself if the config does not list several.

    Args:
      held_out: the held-out sets that the config names.
    Raises:
      UserError: two sources have the same rows.
    """
    training, held_out_of_training = _joined(config, opened)
    if not isinstance(config.eval_dataset_path, SourceList):
        return training, held_out_of_training
    named = zip(config.eval_dataset_path.entries, held_out, strict=True)
    parts = tuple(SourcePart(entry.name, source.fingerprint, "1", None) for entry, source in named)
    return training, MixtureSource(parts, tuple(held_out))


def _joined(config: DataConfig, opened: Sequence[Opened]) -> Opened:
    if not isinstance(config.dataset_path, SourceList):
        return opened[0]
    parts = parts_of(config, [training for training, _ in opened])
    training = _in_order(parts, [training for training, _ in opened])
    named = [(part, source) for part, (_, source) in zip(parts, opened, strict=True) if source is not None]
    if not named or config.eval_dataset_path:
        return training, opened[0][1]
    return training, _in_order(*zip(*named, strict=True))


def open_mixture(config: Config, *, vocab_size: int | None = None) -> Opened:
    """All sources that the config lists, opened by `open_sources` as for a run, as one.

    Raises:
      UserError: one cannot be opened, or two have the same rows.
    """
    return joined(config, *opened_sources(config, vocab_size=vocab_size))


def opened_sources(config: Config, *, vocab_size: int | None) -> tuple[Sequence[Opened], Sequence[ExampleSource]]:
    """What a run has of each source that the config lists, and each held-out set that it names.

    Arguments and errors as of `open_sources`.
    """
    opened = [open_sources(each, vocab_size=vocab_size) for each in each_config(config)]
    listed = config.eval_dataset_path
    entries = listed.entries if isinstance(listed, SourceList) else ()
    held_out = [open_path(config, key="eval_dataset_path", path=entry.path, vocab_size=vocab_size) for entry in entries]
    return opened, held_out


def parts_of(config: DataConfig, sources: Sequence[ExampleSource]) -> list[SourcePart]:
    """The part of each source in the mixture of a config; a single source has all of it.

    A weight is a share of target tokens; divided by the mean target tokens of the source's rows, it is one of rows.

    Raises:
      UserError: two sources have the same rows.
    """
    if isinstance(sources[0], MixtureSource):
        return list(sources[0].parts)
    if isinstance(sources[0], OwnExamples):
        return [SourcePart("", sources[0].fingerprint, "1", None)]
    if not isinstance(config.dataset_path, SourceList):
        return [SourcePart(name_of_path(config.dataset_path), sources[0].fingerprint, "1", None)]
    parts: dict[str, SourcePart] = {}
    for entry, source in zip(config.dataset_path.entries, sources, strict=True):
        if twin := parts.get(source.fingerprint):
            raise UserError(
                f"dataset_path: the sources {twin.name} and {entry.name} have the same rows. Leave out one, and "
                "give the other the sum of their weights."
            )
        most = None if entry.max_epochs == -1 else int(entry.max_epochs * len(source))
        weight = entry.weight * len(source) / source.num_target_tokens
        parts[source.fingerprint] = SourcePart(entry.name, source.fingerprint, str(weight), most)
    return list(parts.values())


def _in_order(parts: Sequence[SourcePart], sources: Sequence[ExampleSource]) -> MixtureSource:
    ordered = sorted(zip(parts, sources, strict=True), key=lambda pair: pair[0].fingerprint)
    return MixtureSource(tuple(part for part, _ in ordered), tuple(source for _, source in ordered))


def named_sources(source: ExampleSource) -> dict[str, ExampleSource]:
    """The sources of a mixture by name; any other source under an empty name."""
    if not isinstance(source, MixtureSource):
        return {"": source}
    return {part.name: each for part, each in zip(source.parts, source.sources, strict=True)}


def ids_of_run(source: ExampleSource, first: int, count: int, *, seed: int) -> np.ndarray:
    """The examples at positions `first` to `first + count - 1` of a run with one source or a mixture; int64."""
    if isinstance(source, MixtureSource):
        return source.ids_of_run(first, count, seed)
    return example_ids(first, count, num_examples=len(source), seed=seed)


def hash_of_run(source: ExampleSource, ids: np.ndarray) -> str:
    """`order.examples_hash` of examples that a run consumed, from one source or a mixture."""
    return examples_hash(source.hashed(ids) if isinstance(source, MixtureSource) else ids)


def target_tokens_between(source: ExampleSource, first: int, stop: int, *, seed: int) -> int:
    """Exact target tokens of the examples at positions `first` to `stop - 1` of a run."""
    if isinstance(source, MixtureSource):
        return sum(source.target_tokens(first, stop, seed).values())
    return _target_tokens(source, first, stop, seed)


def _target_tokens(source: ExampleSource, first: int, stop: int, seed: int) -> int:
    """The same for one source; of an incomplete epoch, the smaller of the part and the rest is counted."""
    if source.num_target_tokens == len(source) * source.num_tokens:  # every row is full
        return (stop - first) * source.num_tokens

    def count(start: int, end: int) -> int:
        pieces = [(at, min(at + _MOST_COUNTED, end)) for at in range(start, end, _MOST_COUNTED)]
        return sum(
            source.count_targets(example_ids(at, to - at, num_examples=len(source), seed=seed)) for at, to in pieces
        )

    tokens = 0
    while first < stop:
        epoch, place = divmod(first, len(source))
        here = min(stop - first, len(source) - place)
        if here == len(source):  # this and all other whole epochs
            here = (stop - first) // len(source) * len(source)
            tokens += here // len(source) * source.num_target_tokens
        elif 2 * here <= len(source):
            tokens += count(first, first + here)
        else:
            start, end = epoch * len(source), (epoch + 1) * len(source)
            tokens += source.num_target_tokens - count(start, first) - count(first + here, end)
        first += here
    return tokens
