"""Shards: the documents of a task tokenized into one, its hashes, and the check of a dataset against its manifest."""

import contextlib
import dataclasses
import hashlib
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
from array_record.python.array_record_module import ArrayRecordWriter

from maxtext_lite.config import UserError
from maxtext_lite.config.errors import writing
from maxtext_lite.config.registry import load
from maxtext_lite.config.whole_file import partial_name, write_whole
from maxtext_lite.data.cache import file_sha256, token_dtype
from maxtext_lite.data.prepared import (
    DOCUMENTS_FILE,
    MANIFEST_FILE,
    RecordStream,
    Shard,
    num_records,
    open_shard,
    size_and_ends,
)
from maxtext_lite.data.text_encoder import TextEncoder
from maxtext_lite.data.text_files import batches
from maxtext_lite.preparation.fetched import BucketDirectory
from maxtext_lite.preparation.keys import PrepareConfig
from maxtext_lite.preparation.tasks import BadLine, DocumentReader, InputFile, Task

_IN_ORDER = "readahead_buffer_size:4M,max_parallelism:1"  # two requests to a bucket, instead of one for each record
_RECORDS_AT_A_TIME = 512
_DOCUMENTS_AT_A_TIME = 2**20


def stored_shard(directory: Path, file: str, *, documents: int, tokens: int, content: str) -> Shard:
    """The entry of a finished shard; reads its whole file."""
    size, ends = size_and_ends(directory / file)
    return Shard(file, documents, tokens, file_sha256(directory / file), content, size, ends)


def content_of(
    file: Path, records: int, lengths: Iterable[np.ndarray], see: Callable[[bytes], object] = lambda record: None
) -> str:
    """`Shard.content` of a shard; reads its whole file.

    Args:
      lengths: lengths of its documents, in parts.
      see: called with every record.
    Raises:
      UserError: the file cannot be read, or has another number of records.
    """
    content = hashlib.sha256()
    reader = open_shard(file, records, _IN_ORDER)
    for part in lengths:
        content.update(part.astype("<i8").tobytes())
    try:
        for start in range(0, records, _RECORDS_AT_A_TIME):
            for record in reader.read(start, min(start + _RECORDS_AT_A_TIME, records)):
                content.update(record)
                see(record)
        reader.close()
    except (RuntimeError, IndexError, ValueError) as error:
        raise UserError(f"{file}: cannot be read ({str(error).partition(';')[0]}).") from None
    return content.hexdigest()


def verify(
    stream: RecordStream, starts: np.ndarray, see: Callable[[np.ndarray], object] = lambda ids: None
) -> Iterator[str]:
    """Reads a whole prepared dataset; yields the name of each file that proves correct.

    Args:
      stream, starts: as from `open_prepared`.
      see: called with all token ids, a record at a time.
    Raises:
      UserError: a file is not what the manifest says; names it.
    """
    manifest = stream.manifest
    document = 0
    for shard in manifest.shards:
        file = stream.directory / shard.file
        if file_sha256(file) != shard.sha256:
            raise UserError(f"{file}: the SHA-256 of its bytes is not the one in {MANIFEST_FILE}.")
        lengths = _lengths(stream, starts, document, document + shard.documents)
        document += shard.documents
        content = content_of(
            file, num_records(shard, manifest), lengths, lambda record: see(np.frombuffer(record, stream.dtype))
        )
        if content != shard.content:
            raise UserError(f"{file} or {DOCUMENTS_FILE}: its documents are not those of {MANIFEST_FILE}.")
        yield shard.file
    yield DOCUMENTS_FILE


def _lengths(stream: RecordStream, starts: np.ndarray, first: int, stop: int) -> Iterator[np.ndarray]:
    """Tokens of each of these documents, in parts."""
    for at in range(first, stop, _DOCUMENTS_AT_A_TIME):
        lengths = np.diff(starts[at : min(at + _DOCUMENTS_AT_A_TIME, stop) + 1])
        if lengths.min(initial=1) < 1:
            file = stream.directory / DOCUMENTS_FILE
            raise UserError(f"{file}: documents do not follow each other from number {at} on.")
        yield lengths


TOKENS_PER_RECORD = 4096
"""Size of every record of a shard except its last: a row of 2,048 tokens spans at most two records."""
_OPTIONS = "group_size:1,uncompressed"  # random reads take half the time of compressed records
_CHARACTERS_AT_ONCE = 2**22  # bounds the memory of the tokenizer library's results
_DOCUMENTS_AT_ONCE = 4096
_PROBLEMS_NAMED = 5


@pydantic.dataclasses.dataclass(frozen=True)
class Entry:
    """The journal's entry of a completed task.

    Attributes:
      shard: None if the task has no token.
      empty: documents without a token, which are skipped.
      spelled: special tokens that its documents spell.
      bad: lines without a document.
      problems: descriptions of the first of them.
      cpu_seconds: CPU time of the task.
    """

    number: int
    shard: Shard | None
    empty: int
    bad: int
    problems: tuple[str, ...]
    spelled: int = 0
    cpu_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Workshop:
    """The context that tasks run in.

    Attributes:
      directory: directory for shards.
      journal: directory for entries and the lengths of documents.
      inputs: by path, as they must still be.
      num_tasks: tasks of the whole dataset.
      max_bad_fraction: limit for the lines of each task.
      remote: the output, if it is in a bucket.
    """

    directory: Path
    journal: Path
    inputs: dict[str, InputFile]
    num_tasks: int
    max_bad_fraction: float
    remote: BucketDirectory | None = None

    def shard_name(self, number: int) -> str:
        """The name of a task's shard."""
        return f"{number:05d}-of-{self.num_tasks:05d}.array_record"

    def lengths_path(self, number: int) -> Path:
        """The file with the lengths of its documents, int64, including end-of-text tokens."""
        return self.journal / f"{number:05d}.lengths"

    def deliver(self, path: Path) -> None:
        """Moves a complete file into the bucket, if the output is in one."""
        if self.remote is not None:
            self.remote.upload(path, path.relative_to(self.directory).as_posix())
            path.unlink()


def document_reader(config: PrepareConfig, encoder: TextEncoder) -> DocumentReader:
    """The reader of the inputs of a config."""
    conversations = load("documents", "chat")(config, encoder.tokenizer) if config.chat else None
    return DocumentReader(encoder, config.field, conversations)


def run_task(task: Task, workshop: Workshop, reader: DocumentReader) -> Entry:
    """Writes the shard of a task and the lengths of its documents, under names that they get once complete.

    Raises:
      UserError: an input cannot be read or has changed, too many of its lines are bad, or the disk is full.
    """
    began = time.process_time()
    _check_inputs(task, workshop)
    partial = partial_name(workshop.directory / workshop.shard_name(task.number))
    try:
        with writing(workshop.directory):
            entry = _write_shard(task, workshop, reader, partial)
    finally:
        partial.unlink(missing_ok=True)
    return dataclasses.replace(entry, cpu_seconds=time.process_time() - began)


def _write_shard(task: Task, workshop: Workshop, reader: DocumentReader, partial: Path) -> Entry:
    dtype = np.dtype(token_dtype(reader.encoder.tokenizer.vocab_size)).newbyteorder("<")
    stream = _RecordWriter(partial, dtype)
    lengths: list[np.ndarray] = []
    empty = bad = spelled = 0
    problems: list[str] = []
    read = (each for piece in task.pieces for each in reader.read(piece))
    for documents in batches(read, _DOCUMENTS_AT_ONCE, _CHARACTERS_AT_ONCE):
        texts = [each for each in documents if not isinstance(each, BadLine)]
        problems += [each.problem for each in documents if isinstance(each, BadLine)][: _PROBLEMS_NAMED - len(problems)]
        bad += len(documents) - len(texts)
        if bad and not workshop.max_bad_fraction:
            raise UserError([*problems[:-1], f"{problems[-1]} {_HOW_TO_GO_ON}"])
        encoded = reader.encode(texts, dtype)
        lengths.append(encoded.lengths[encoded.lengths > 0])
        empty += len(texts) - len(lengths[-1])
        spelled += encoded.num_spelled
        stream.write(encoded.stream)
    of_documents = np.concatenate([np.zeros(0, "<i8"), *lengths]).astype("<i8")
    check_bad(f"task {task.number}", bad, len(of_documents) + empty + bad, problems, workshop.max_bad_fraction)
    stream.close()
    _check_inputs(task, workshop)
    shard = None
    if tokens := int(of_documents.sum()):
        content = content_of(partial, -(-tokens // TOKENS_PER_RECORD), [of_documents])
        documents = len(of_documents)
        shard = stored_shard(workshop.directory, partial.name, documents=documents, tokens=tokens, content=content)
        lengths_path = workshop.lengths_path(task.number)
        write_whole(lengths_path, of_documents.tobytes())
        with partial.open("rb") as opened:
            os.fsync(opened.fileno())
        path = partial.replace(workshop.directory / workshop.shard_name(task.number))
        workshop.deliver(path)
        workshop.deliver(lengths_path)
        shard = dataclasses.replace(shard, file=path.name)
    return Entry(task.number, shard, empty, bad, tuple(problems), spelled)


def check_bad(where: str, bad: int, lines: int, problems: Sequence[str], max_bad_fraction: float) -> None:
    """Refuses bad lines, described by `problems`, if they are more than this fraction of all lines."""
    if bad and bad / lines > max_bad_fraction:
        enough = -(-bad * 1000 // lines) / 1000
        raise UserError([
            f"{bad} of the {lines} lines of {where} are bad, more than max_bad_fraction={max_bad_fraction:g} of them. "
            f"Nearest that works for these: {enough:g}. The first:", *problems,
        ])  # fmt: skip


_HOW_TO_GO_ON = "Correct or remove the line, or allow a share of bad lines, such as max_bad_fraction=0.001."


class _RecordWriter:
    """Writes a stream of token ids as records of TOKENS_PER_RECORD ids, the last one shorter."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self._path = path
        self._rest = np.zeros(0, dtype)
        with self._errors():
            self._writer: Any = ArrayRecordWriter(str(path), _OPTIONS)

    def write(self, ids: np.ndarray) -> None:
        """Adds token ids to the stream."""
        whole = np.concatenate([self._rest, ids])
        stop = len(whole) - len(whole) % TOKENS_PER_RECORD
        with self._errors():
            for start in range(0, stop, TOKENS_PER_RECORD):
                self._writer.write(whole[start : start + TOKENS_PER_RECORD].tobytes())
        self._rest = whole[stop:]

    def close(self) -> None:
        """Writes the rest."""
        with self._errors():
            if len(self._rest):
                self._writer.write(self._rest.tobytes())
            self._writer.close()

    @contextlib.contextmanager
    def _errors(self) -> Generator[None]:
        try:
            yield
        except RuntimeError as error:
            raise UserError(f"{self._path} cannot be written: {str(error).partition(';')[0]}.") from None


def _check_inputs(task: Task, workshop: Workshop) -> None:
    """Refuses inputs that have changed since they were split into tasks."""
    for path in dict.fromkeys(piece.path for piece in task.pieces):
        file = workshop.inputs[path]
        try:
            status = Path(path).stat()
        except OSError as error:
            raise UserError(f"{file.name}: cannot be read ({error}).") from error
        if (status.st_size, status.st_mtime_ns) != (file.num_bytes, file.changed_ns):
            raise UserError(f"{file.name} has changed since prepare began. Remove the output and start again.")
