"""The state of a dataset in preparation: its plan, the completed tasks, and who may write it.

The output contains `prepare.json`, the plan, from the start. While incomplete it also contains `journal/`: the lock,
and for each completed task its entry and the lengths of its documents. A task writes its entry last, and the manifest
is the last file of all. An output in a bucket contains the same except for the lock; its files are first made in a
directory of the cache.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from maxtext_lite.config import UserError
from maxtext_lite.config.bucket import is_bucket
from maxtext_lite.config.errors import full_text, value_text, writing
from maxtext_lite.config.json_file import is_there, read_object, user_path
from maxtext_lite.config.registry import load
from maxtext_lite.config.whole_file import TEMPORARY, write_whole
from maxtext_lite.data.cache import cache_directory, file_sha256, token_dtype
from maxtext_lite.data.prepared import (
    DOCUMENTS_FILE,
    MANIFEST_FILE,
    Manifest,
    manifest_text,
    read_manifest,
)
from maxtext_lite.data.text_encoder import TextEncoder
from maxtext_lite.preparation.fetched import BucketDirectory
from maxtext_lite.preparation.keys import PrepareConfig
from maxtext_lite.preparation.shards import TOKENS_PER_RECORD, Entry, Workshop, check_bad
from maxtext_lite.preparation.tasks import InputFile, Task

PLAN_FILE = "prepare.json"
_JOURNAL = "journal"
_LOCK = "lock"
_ENTRY = ".json"  # suffix of a task's entry in the journal


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A complete dataset.

    Attributes:
      empty: documents without a token, which are skipped.
      bad: lines without a document; `problems` describes the first of them.
    """

    manifest: Manifest
    empty: int
    bad: int
    problems: tuple[str, ...]


class Journal:
    """The record of one output, for one config and its inputs.

    Raises:
      UserError: the output contains something else, or was begun with other settings or inputs.
    """

    def __init__(self, config: PrepareConfig, files: list[InputFile], tasks: list[Task], encoder: TextEncoder) -> None:
        self._plan = _plan(config, files, tasks, encoder)
        self._output = config.output
        self._chat = config.chat
        self._remote = None
        self.directory = user_path(config.output)
        if is_bucket(config.output):
            self._remote = BucketDirectory("output", config.output.rstrip("/"))
            known_by = json.dumps([self._remote.url, self._plan]).encode()
            self.directory = cache_directory("prepare") / hashlib.sha256(known_by).hexdigest()[:32]
        self.tasks = tasks
        self._encoder = encoder
        self._journal = self.directory / _JOURNAL
        inputs = {file.path: file for file in files}
        self.workshop = Workshop(
            self.directory, self._journal, inputs, len(tasks), config.max_bad_fraction, self._remote
        )
        with writing(self.directory):
            names = [name for name in sorted(self._names()) if not name.endswith(TEMPORARY)]
            if names and PLAN_FILE not in names:
                raise UserError(
                    f"output={config.output!r} holds {value_text(names[0])} already, and nothing that prepare began."
                )
            self.directory.mkdir(parents=True, exist_ok=True)
            path = self.directory / PLAN_FILE
            if self._remote is not None:
                self._remote.create(PLAN_FILE, _text(self._plan))
                self._look()
            elif not is_there(path):
                write_whole(path, _text(self._plan))
            problems = _differences(read_object(path), json.loads(_text(self._plan)))
            if problems:
                raise UserError(
                    f"{full_text(self._output)} was begun differently: {'; '.join(problems)}. Give another output, or "
                    "remove this one."
                )

    def _names(self) -> Collection[str]:
        """The contents of the output, or at least the files and directories at its top."""
        if self._remote is not None:
            return self._remote.listed()
        return [each.name for each in self.directory.iterdir()] if self.directory.is_dir() else ()

    def _look(self) -> None:
        """Fetches the plan, the manifest and the entries of the journal from a bucket."""
        if self._remote is not None:
            self._in_bucket = frozenset(self._names())
            self._remote.fetch_all([name for name in self._in_bucket if name.endswith(".json")], self.directory)

    def _has(self, name: str) -> bool:
        return is_there(self.directory / name) if self._remote is None else name in self._in_bucket

    def _publish(self, path: Path, content: bytes | None = None) -> None:
        """Writes a file of the output, and uploads it to a bucket; without content, the file exists already."""
        if content is not None:
            write_whole(path, content)
        if self._remote is not None:
            self._remote.upload(path, path.relative_to(self.directory).as_posix())

    @contextlib.contextmanager
    def hold(self, *, shared: bool) -> Iterator[None]:
        """Locks the output against other writers, or those that do not share it; the lock ends with the process.

        Raises:
          UserError: another process writes there.
        """
        with writing(self._journal):
            self._journal.mkdir(exist_ok=True)
            opened = (self._journal / _LOCK).open("ab")
        with opened:
            try:
                fcntl.flock(opened, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"{full_text(self._output)} is in use: another prepare writes there. Wait for it, or stop it first."
                ) from None
            self._opened = opened
            yield

    def is_complete(self) -> bool:
        """Whether the manifest is there."""
        return self._has(MANIFEST_FILE)

    def done(self) -> dict[int, Entry]:
        """The completed tasks, by number.

        Raises:
          UserError: one has more bad lines than the config allows now.
        """
        entries = [self._entry(task.number) for task in self.tasks]
        return {entry.number: entry for entry in entries if entry is not None}

    def _entry(self, number: int) -> Entry | None:
        name = f"{_JOURNAL}/{number:05d}"
        if not self._has(name + _ENTRY):
            return None
        fields: dict[str, Any] = read_object(self.directory / (name + _ENTRY))
        entry = Entry(**fields)
        shard = entry.shard
        if shard is not None and not (self._has(shard.file) and self._has(f"{name}.lengths")):
            return None  # its files were removed; the task is done again
        lines = (shard.documents if shard else 0) + entry.empty + entry.bad
        check_bad(f"task {number}", entry.bad, lines, entry.problems, self.workshop.max_bad_fraction)
        return entry

    def record(self, entry: Entry) -> None:
        """Records that a task is done; its files exist."""
        with writing(self._journal):
            self._publish(self._journal / f"{entry.number:05d}{_ENTRY}", _text(dataclasses.asdict(entry)))

    def finish(self) -> Outcome | None:
        """Writes the manifest once all tasks are done; returns None before that. To be called within `hold`."""
        with writing(self.directory):
            self._look()
            if len(self.done()) < len(self.tasks) and not self.is_complete():
                return None
            fcntl.flock(self._opened, fcntl.LOCK_EX)  # of shares that end together, only one finishes
            self._look()
            if self.is_complete():
                return self.outcome()
            done = self.done()
            entries = [done[task.number] for task in self.tasks]
            full = [entry for entry in entries if entry.shard is not None]
            if not full:
                raise UserError(
                    f"input={value_text(self._plan['settings']['input'])} has no text: every document is empty."
                )
            self._write_documents(full)
            counts = {
                "empty": sum(entry.empty for entry in entries),
                "bad": sum(entry.bad for entry in entries),
                "problems": [problem for entry in entries for problem in entry.problems][:5],
            }
            self._publish(self.directory / PLAN_FILE, _text(self._plan | {"counts": counts}))
            encoder = self._encoder
            vocab_size = encoder.tokenizer.vocab_size
            manifest = Manifest(
                encoder.tokenizer.fingerprint,
                vocab_size,
                token_dtype(vocab_size),
                TOKENS_PER_RECORD,
                tuple(entry.shard for entry in full if entry.shard is not None),
                file_sha256(self.directory / DOCUMENTS_FILE),
                begin_ids=None if self._chat else tuple(encoder.begin_ids.tolist()),
                add_eos=encoder.adds_end,
                special_tokens_in_text=encoder.in_text,
                spelled_special_tokens=sum(entry.spelled for entry in entries),
            )
            for partial in self.directory.rglob(f"*{TEMPORARY}"):
                partial.unlink(missing_ok=True)
            self._publish(self.directory / MANIFEST_FILE, manifest_text(manifest).encode())
            return self.outcome()

    def _write_documents(self, entries: list[Entry]) -> None:
        """Turns the lengths of documents into where each starts."""
        partial = self.directory / f"{DOCUMENTS_FILE}{TEMPORARY}"
        with partial.open("wb") as opened:
            start = 0
            for entry in entries:
                path = self.workshop.lengths_path(entry.number)
                found = path.read_bytes() if self._remote is None else self._remote.read(f"{_JOURNAL}/{path.name}")
                lengths = np.frombuffer(found, "<i8")
                stops = start + np.cumsum(lengths)
                opened.write((stops - lengths).astype("<i8").tobytes())
                start = int(stops[-1])
            opened.write(np.array([start], "<i8").tobytes())
            opened.flush()
            os.fsync(opened.fileno())
        partial.replace(self.directory / DOCUMENTS_FILE)
        self._publish(self.directory / DOCUMENTS_FILE)

    def outcome(self) -> Outcome:
        """The contents of a complete output; removes its journal.

        Raises:
          UserError: it has more bad lines than the config allows now.
        """
        shutil.rmtree(self._journal, ignore_errors=True)
        if self._remote is not None:
            self._remote.remove([name for name in self._in_bucket if name.startswith(f"{_JOURNAL}/")])
            (self.directory / DOCUMENTS_FILE).unlink(missing_ok=True)
        counts: dict[str, Any] = read_object(self.directory / PLAN_FILE)["counts"]
        manifest = read_manifest(self.directory)
        lines = manifest.documents + counts["empty"] + counts["bad"]
        check_bad(full_text(self._output), counts["bad"], lines, counts["problems"], self.workshop.max_bad_fraction)
        return Outcome(manifest, counts["empty"], counts["bad"], tuple(counts["problems"]))


def _plan(config: PrepareConfig, files: list[InputFile], tasks: list[Task], encoder: TextEncoder) -> dict[str, Any]:
    """Everything that the output's bytes depend on, except the content of the inputs."""
    names = ("input", "tokenizer_type", "field", "chat", "task_megabytes")
    settings = {name: getattr(config, name) for name in names} | {"tokenizer": encoder.tokenizer.fingerprint}
    settings |= encoder.settings
    if config.chat:
        settings["chat_template"] = load("documents", "chat")(config, encoder.tokenizer).template_fingerprint()
    inputs = [dataclasses.asdict(file) for file in files]
    return {"settings": settings, "tasks": len(tasks), "inputs": inputs}


def _differences(stated: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Why two plans describe different datasets: the first few reasons."""
    problems = [
        f"with {key}={value_text(stated['settings'].get(key))}, not {value_text(value)}"
        for key, value in ours["settings"].items()
        if stated["settings"].get(key) != value and key != "input"  # the files that it finds are compared instead
    ]
    before = {file["path"]: file for file in stated["inputs"]}
    now = {file["path"]: file for file in ours["inputs"]}
    for path, file in (before | now).items():
        if path not in before:
            problems.append(f"{file['name']} is new")
        elif path not in now:
            problems.append(f"{file['name']} is no longer among the inputs")
        elif any(file[field] != before[path][field] for field in ("num_bytes", "changed_ns")):
            problems.append(f"{file['name']} has changed since")
    if not problems and list(before) != list(now):
        problems.append("its inputs were in another order")
    return sorted(problems)[:5]


def _text(value: object) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()
