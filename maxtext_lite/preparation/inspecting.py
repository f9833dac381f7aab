"""Inspection of a prepared dataset: its contents, its integrity, and rows as a model sees them."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from maxtext_lite.config import UserError
from maxtext_lite.config.errors import counted
from maxtext_lite.data.best_fit import BestFitRows
from maxtext_lite.data.cache import IndexPlace
from maxtext_lite.data.prepared import RecordStream, open_prepared
from maxtext_lite.data.rows import FIELDS, Rows, count_by_length
from maxtext_lite.data.sources import rows_of
from maxtext_lite.data.text_encoder import spelled_notes
from maxtext_lite.data.tokenizer import Tokenizer, load_tokenizer
from maxtext_lite.preparation.fetched import find_prepared
from maxtext_lite.preparation.keys import InspectConfig
from maxtext_lite.preparation.shards import verify

_PACKING: dict[str, bool | str] = {"concat": True, "none": False, "best_fit": "best_fit"}
_BAR = 40  # characters of the longest bar
_MOST_FREQUENT = 10


def report(path: str | Path, config: InspectConfig) -> Iterator[str]:
    """Lines about a prepared dataset; `verify` reads all of it.

    Raises:
      UserError: it is not a prepared dataset, or a file is not what the manifest says.
    """
    directory, shards = find_prepared("PATH", path)
    stream, starts = open_prepared("PATH", directory, shards)
    manifest = stream.manifest
    num_bytes = sum(shard.bytes for shard in manifest.shards)
    documents, tokens = counted(manifest.documents, "document"), counted(manifest.tokens, "token")
    begin = f"token {', '.join(map(str, manifest.begin_ids))}" if manifest.begin_ids else "their text"
    begin = "what the chat template renders" if manifest.begin_ids is None else begin
    yield f"{path}: {documents}, {tokens}"
    yield f"documents begin with {begin} and end with {'end-of-text' if manifest.add_eos else 'their text'}"
    yield from spelled_notes(manifest.spelled_special_tokens, manifest.special_tokens_in_text)
    yield f"shards: {len(manifest.shards):,} of {num_bytes:,} bytes; ids are {manifest.dtype}"
    yield f"fingerprint: {manifest.fingerprint}"
    yield f"tokenizer: {manifest.tokenizer}, {manifest.vocab_size:,} ids"
    yield ""
    yield from _lengths(starts)
    yield ""
    yield from _packing(directory, stream, starts, config)
    yield ""
    if not config.verify:
        yield "checksums: not compared (verify=false)"
        return
    counts = np.zeros(manifest.vocab_size, np.int64)
    files = sum(1 for _ in verify(stream, starts, lambda ids: _count(ids, counts)))
    yield f"checksums: {counted(files, 'file')} as the manifest says"
    used, size = int(np.count_nonzero(counts)), len(counts)
    frequent = np.sort(counts)[::-1][:_MOST_FREQUENT].sum() / counts.sum()
    yield (
        f"vocabulary: {used:,} of {size:,} ids occur ({used / size:.1%}); the {_MOST_FREQUENT} most frequent are "
        f"{frequent:.1%} of the tokens"
    )


def _lengths(starts: np.ndarray) -> Iterator[str]:
    counts, shortest, longest = count_by_length(starts)
    mean = int(starts[-1]) / (len(starts) - 1)
    yield f"tokens of a document: {shortest:,} to {longest:,}, {mean:,.1f} on average"
    used = np.flatnonzero(counts)
    width = len(f"{2 ** (int(used[-1]) + 1) - 1:,}")
    for power in range(int(used[0]), int(used[-1]) + 1):
        bar = "#" * -(-int(counts[power]) * _BAR // int(counts.max()))
        yield f"  {2**power:>{width},} to {2 ** (power + 1) - 1:>{width},} {int(counts[power]):>13,} {bar}".rstrip()


def _rows(path: Path, stream: RecordStream, starts: np.ndarray, packing: str, num_tokens: int) -> Rows:
    """The rows that a run would have; keeps the index for the run."""
    return rows_of(_PACKING[packing], starts, num_tokens, IndexPlace(path / "rows", stream.manifest.fingerprint))


def _packing(path: Path, stream: RecordStream, starts: np.ndarray, config: InspectConfig) -> Iterator[str]:
    """Rows, targets and padding of an epoch for each way of making rows."""
    length = config.max_target_length
    yield f"an epoch in rows of {length:,} tokens:"
    for name in [config.packing] if config.packing else _PACKING:
        rows = _rows(path, stream, starts, name, length)
        targets = rows.count_targets_between(0, len(rows)) if len(rows) else 0
        share = targets / (len(rows) * length) if len(rows) else 0.0
        cut = f"; {rows.cut_documents:,} documents are cut" if isinstance(rows, BestFitRows) else ""
        yield f"  {name:<9}{len(rows):>14,} rows {targets:>18,} target tokens, {share:.2%} of the slots{cut}"


def _count(ids: np.ndarray, counts: np.ndarray) -> None:
    """Adds the number of times that each id occurs in a record to `counts`."""
    largest = int(ids.max(initial=0))
    if largest >= len(counts):
        raise UserError(f"token id {largest} is not one of the tokenizer's {len(counts)}.")
    np.add.at(counts, ids, 1)


def shown_rows(path: str | Path, config: InspectConfig, first: int, stop: int, *, as_json: bool) -> Iterator[str]:
    """Rows `first` to `stop - 1` of the data in order: as arrays, or as text with documents and loss marked.

    Raises:
      UserError: there are fewer rows, or the tokenizer is not the data's.
    """
    directory, shards = find_prepared("PATH", path)
    stream, starts = open_prepared("PATH", directory, shards)
    rows = _rows(directory, stream, starts, config.packing or "concat", config.max_target_length)
    if not 0 <= first < stop <= len(rows):
        raise UserError(f"--rows {first}:{stop}: the rows are 0:{len(rows)}.")
    if as_json:
        for row in range(first, stop):
            arrays = rows.build(stream, row)
            yield json.dumps({"row": row} | {name: arrays[name].tolist() for name in FIELDS})
        return
    tokenizer = load_tokenizer(config)
    if tokenizer.fingerprint != stream.manifest.tokenizer:
        raise UserError(
            f"{path} was prepared with the tokenizer {stream.manifest.tokenizer}, not with that of tokenizer_type="
            f"{config.tokenizer_type} tokenizer_path={config.tokenizer_path!r} ({tokenizer.fingerprint}). Name the "
            "tokenizer of the data, or show the rows with --json."
        )
    for row in range(first, stop):
        yield from _shown(row, rows.build(stream, row), tokenizer)


def _shown(row: int, arrays: dict[str, np.ndarray], tokenizer: Tokenizer) -> Iterator[str]:
    """The text of a row: parts without loss are in [[ ]], and each document begins on its own line."""
    real = int(np.count_nonzero(arrays["segments"]))
    learned = int(np.count_nonzero(arrays["weights"]))
    yield f"=== row {row}: {real} tokens, {learned} of them with a target, {len(arrays['segments']) - real} padding"
    for segment, places in itertools.groupby(range(real), key=lambda place: arrays["segments"][place]):
        members = np.fromiter(places, np.int64)
        yield f"--- document {segment}: {len(members)} tokens, positions from {arrays['positions'][members[0]]}"
        text = ""
        for has_loss, stretch in itertools.groupby(members, key=lambda place: arrays["weights"][place] != 0):
            ids = arrays["tokens"][list(stretch)]
            parts = np.split(ids, np.flatnonzero(ids == tokenizer.end_of_text_id))
            written = "end of text".join(map(tokenizer.decode, parts))
            text += written if has_loss else f"[[{written}]]"
        yield text
