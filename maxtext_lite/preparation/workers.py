"""Tasks executed by several processes, or by this one; the result does not depend on their number."""

from __future__ import annotations

import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from maxtext_lite.config import UserError
from maxtext_lite.data.text_encoder import TextEncoder
from maxtext_lite.data.tokenizer import load_tokenizer
from maxtext_lite.preparation.keys import PrepareConfig
from maxtext_lite.preparation.shards import Entry, Workshop, document_reader, run_task
from maxtext_lite.preparation.tasks import Task

_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


@dataclasses.dataclass(frozen=True)
class Made:
    """A report of progress.

    Attributes:
      tokens: tokens made since the worker's last report.
      cpu_seconds: time that these took.
      entry: the entry of the task that this completes, or None.
    """

    tokens: int
    cpu_seconds: float
    entry: Entry | None


def run_here(tasks: Sequence[Task], workshop: Workshop, config: PrepareConfig, encoder: TextEncoder) -> Iterator[Made]:
    """Executes tasks in this process, one after the other; the tokenizer's library may use several threads."""
    reader = document_reader(config, encoder)
    for task in tasks:
        steps: list[int] = []
        start = time.process_time()
        entry = run_task(task, workshop, reader, made=steps.append)
        yield Made(sum(steps), time.process_time() - start, entry)


def run_in_processes(
    tasks: Sequence[Task], workshop: Workshop, config: PrepareConfig, fingerprint: str, *, num_workers: int
) -> Iterator[Made]:
    """Executes tasks in several processes, each with its own tokenizer and a single thread.

    They end with this process, however it ends: a worker exits when its pipe closes.

    Args:
      fingerprint: the tokenizer's, which each worker must find.
    Raises:
      UserError: from a task.
      RuntimeError: a worker failed otherwise, or was killed.
    """
    context = multiprocessing.get_context("spawn")
    waiting = list(reversed(tasks))
    workers: dict[Connection, BaseProcess] = {}
    before = {name: os.environ.get(name) for name in _ONE_THREAD}
    os.environ.update(_ONE_THREAD)
    try:
        for _ in range(min(num_workers, len(tasks))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, workshop, config, fingerprint), daemon=True)
            process.start()
            theirs.close()
            workers[ours] = process
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    try:
        while workers:
            for connection in multiprocessing.connection.wait(list(workers)):
                assert isinstance(connection, Connection)
                message = _receive(connection, workers[connection])
                if message is None or message.entry is not None:  # it is ready, or has finished a task
                    if waiting:
                        connection.send(waiting.pop())
                    else:
                        connection.close()
                        workers.pop(connection).join()
                if message is not None:
                    yield message
    finally:
        for process in workers.values():
            process.kill()
        for connection, process in workers.items():
            process.join()
            connection.close()


def _receive(connection: Connection, process: BaseProcess) -> Made | None:
    """A worker's report; None: it is ready."""
    try:
        message = connection.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        raise RuntimeError(
            f"a worker of prepare ended with exit code {process.exitcode}; -9 is what happens where the memory is "
            "full: set fewer num_workers. The same command continues from here."
        ) from None
    if isinstance(message, UserError):
        raise message
    if isinstance(message, str):
        raise RuntimeError(f"a worker of prepare failed:\n{message}")
    return message


def _work(connection: Connection, workshop: Workshop, config: PrepareConfig, fingerprint: str) -> None:
    """A worker: reports when it is ready, and the progress of each task that it receives; ends when the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the parent decides
    message: Any
    try:
        tokenizer = load_tokenizer(config)
        if tokenizer.fingerprint != fingerprint:
            raise UserError(f"tokenizer_path={config.tokenizer_path!r} has changed since prepare began.")
        reader = document_reader(config, TextEncoder(config, tokenizer))
        connection.send(None)
        while True:
            clock = _Clock(connection)
            entry = run_task(connection.recv(), workshop, reader, made=clock.made)
            connection.send(Made(0, clock.elapsed(), entry))
    except (EOFError, BrokenPipeError, ConnectionResetError, _ParentGoneError):
        return
    except UserError as error:
        message = error
    except Exception:  # noqa: BLE001  (the parent raises it)
        message = traceback.format_exc()
    connection.send(message)


class _ParentGoneError(Exception):
    """The parent was killed. Not an OSError, because a task reports those as problems of the disk."""


class _Clock:
    """Reports tokens to the parent as they are made, with the CPU time that they took."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._since = time.process_time()

    def elapsed(self) -> float:
        """CPU seconds since the last call."""
        before, self._since = self._since, time.process_time()
        return self._since - before

    def made(self, tokens: int) -> None:
        """Reports tokens. Raises _ParentGoneError if the parent was killed."""
        try:
            self._connection.send(Made(tokens, self.elapsed(), None))
        except OSError:
            raise _ParentGoneError from None
