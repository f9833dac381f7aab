"""Times the reader of prepared datasets beside Grain's stock pipeline on the same files and a plain sequential reader.

    python scripts/bench_data.py                              the shipped text, repeated, rows of 2,048 tokens
    python scripts/bench_data.py --rows 4000 --workers 2      more rows a round, and processes that read ahead
    python scripts/bench_data.py --dataset DIR                a prepared dataset of your own

Prints a table in Markdown: the best of the rounds, in which all readers take turns, so that a slow minute of the
machine falls on all of them. Each reader is timed until it has given the same number of target tokens, tokens that
have a next one in their document.

- `ours, P`: what a run does with packing=P: shuffled rows of 2,048 tokens, with targets, segments, positions and
  weights, read ahead by Grain as the run's settings say, up to the transfer to the devices.
- `grain`: grain.MapDataset over ArrayRecordDataSource, shuffled by record, decoded to rows of tokens, targets and
  weights (no segments, no positions; a row never goes on in another record), batched, with Grain's own settings.
- `sequential`: one record after the other in the order of the files, decoded in the same way, without any thread.
"""

import argparse
import functools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import absl.flags
import grain
import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter
from machine import machine

from maxtext_lite.config import load_config
from maxtext_lite.data import ExampleSource, open_sources
from maxtext_lite.data.feed import HostReads, read_ahead
from maxtext_lite.data.prepared import (
    DOCUMENTS_FILE,
    MANIFEST_FILE,
    Manifest,
    manifest_text,
    read_manifest,
)
from maxtext_lite.preparation.shards import stored_shard

BATCH_ROWS = 32
SHARDS = 4
SCENES_OF = 3000  # characters of each document that the shipped text is split into, at a line's end


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="", help="a prepared dataset; default: the shipped text")
    parser.add_argument("--rows", type=int, default=2000, help="rows that each reader gives in a round, about")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens a row")
    parser.add_argument("--copies", type=int, default=8, help="of the shipped text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=0, help="grain_worker_count of our reader")
    parser.add_argument(
        "--trains", type=float, default=6000, help="tokens/s that the model trains, for the last column"
    )
    arguments = parser.parse_args()
    absl.flags.FLAGS.mark_as_parsed()
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(arguments.dataset or scratch)
        if not arguments.dataset:
            write_shipped_text(directory, arguments.copies)
        readers = readers_of(directory, arguments.tokens, arguments.workers)
        due = arguments.rows * arguments.tokens
        best: dict[str, tuple[float, float]] = {}
        for _ in range(arguments.rounds):
            for name, read in readers.items():
                best[name] = max(best.get(name, (0.0, 0.0)), rates(read(), due), key=lambda rate: rate[1])
    print(f"{machine()}\n")
    print("| reader | rows/s | target tokens/s | of grain's | times what is trained |\n|---|---|---|---|---|")
    stock = best["grain"][1]
    for name, (rows, tokens) in best.items():
        print(f"| {name} | {rows:,.0f} | {tokens:,.0f} | {tokens / stock:.2f} | {tokens / arguments.trains:,.0f} |")


def rates(batches: Iterator[np.ndarray], due: int) -> tuple[float, float]:
    """Rows/s and target tokens/s of a reader, from its start until it has yielded `due` target tokens.

    Args:
      batches: the weights of each batch, [rows, tokens].
    """
    rows = tokens = 0
    started = time.perf_counter()
    while tokens < due:
        weights = next(batches)
        rows, tokens = rows + len(weights), tokens + int(np.count_nonzero(weights))
    seconds = time.perf_counter() - started
    return rows / seconds, tokens / seconds


def readers_of(directory: Path, num_tokens: int, workers: int) -> dict[str, Callable[[], Iterator[np.ndarray]]]:
    """The readers by name; each yields batches endlessly."""
    manifest = read_manifest(directory)
    files = [str(directory / shard.file) for shard in manifest.shards]
    end_of_text = 256

    def decode(record: bytes) -> dict[str, np.ndarray]:
        ids = np.frombuffer(record, manifest.dtype).astype(np.int32)
        rows = np.zeros((-(-len(ids) // num_tokens), num_tokens), np.int32)
        targets = np.zeros_like(rows)
        rows.reshape(-1)[: len(ids)] = ids
        targets.reshape(-1)[: len(ids) - 1] = ids[1:]
        weights = (rows != end_of_text).astype(np.float32)
        weights.reshape(-1)[len(ids) - 1 :] = 0
        return {"tokens": rows, "targets": targets, "weights": weights}

    def joined(decoded: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        return {name: np.concatenate([each[name] for each in decoded]) for name in decoded[0]}

    def stock() -> Iterator[np.ndarray]:
        source: Any = grain.sources.ArrayRecordDataSource(files)
        records_of_batch = max(BATCH_ROWS * num_tokens // manifest.tokens_per_record, 1)
        dataset = grain.MapDataset.source(source).shuffle(seed=0).repeat().map(decode).to_iter_dataset()
        for batch in dataset.batch(records_of_batch, batch_fn=joined):
            yield batch["weights"]

    def sequential() -> Iterator[np.ndarray]:
        while True:
            for file in files:
                reader = ArrayRecordReader(file)
                for _ in range(reader.num_records()):
                    yield decode(reader.read())["weights"]

    readers: dict[str, Callable[[], Iterator[np.ndarray]]] = {}
    for packing in ("concat", "best_fit", "none"):
        readers[f"ours, {packing}"] = functools.partial(ours, source_of(directory, num_tokens, packing), workers)
    return readers | {"grain": stock, "sequential": sequential}


def source_of(directory: Path, num_tokens: int, packing: str) -> ExampleSource:
    """The rows of a run."""
    keys = ["dataset_type=array_record", "eval_fraction=0", "eval_interval=-1"]
    config = load_config(
        None, [*keys, f"dataset_path={directory}", f"max_target_length={num_tokens}", f"packing={packing}"]
    )
    return open_sources(config)[0]


def ours(source: ExampleSource, workers: int) -> Iterator[np.ndarray]:
    """Batches as one host of a run reads them."""
    reads = HostReads(
        source,
        host_slots=np.arange(BATCH_ROWS),
        first_example=0,
        num_examples=2**31 * BATCH_ROWS,
        step_examples=BATCH_ROWS,
        seed=0,
    )
    reader = read_ahead([reads], workers)
    try:
        for load in reader:
            yield load.rows["weights"]
    finally:
        reader.close()


def write_shipped_text(directory: Path, copies: int) -> None:
    """The shipped plays as a prepared dataset of the byte tokenizer: documents of a few thousand tokens."""
    plays, _ = open_sources(load_config(None, ["eval_fraction=0", "eval_interval=-1", "packing=none"]))
    ids = np.concatenate([plays[number]["tokens"][plays[number]["weights"] > 0] for number in range(len(plays))])
    ids = ids.astype("<u2")
    line_ends = np.flatnonzero(ids == ord("\n"))
    cuts = np.unique(line_ends[np.searchsorted(line_ends, np.arange(SCENES_OF, line_ends[-1], SCENES_OF))])
    documents = [np.append(part, np.uint16(256)) for part in np.split(ids, cuts) if len(part)] * copies
    shards = []
    for number in range(SHARDS):
        own, name = documents[number::SHARDS], f"{number:05d}.array_record"
        tokens = np.concatenate(own)
        writer = ArrayRecordWriter(str(directory / name), "group_size:1")
        for first in range(0, len(tokens), 4096):
            writer.write(tokens[first : first + 4096].tobytes())
        writer.close()
        shards.append(stored_shard(directory, name, documents=len(own), tokens=len(tokens), content=""))
    in_order = [document for number in range(SHARDS) for document in documents[number::SHARDS]]
    np.cumsum([0, *map(len, in_order)]).astype("<i8").tofile(directory / DOCUMENTS_FILE)
    (directory / MANIFEST_FILE).write_text(manifest_text(Manifest("byte", 257, "uint16", 4096, tuple(shards))))


if __name__ == "__main__":
    main()
