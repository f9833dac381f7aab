"""Receivers of a run's records beside metrics.jsonl; TensorBoard's files, and by name what `services` has."""

import contextlib
import importlib
import math
import os
import sys
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

from maxtext_lite.batching import format_plan
from maxtext_lite.config import Config, UserError
from maxtext_lite.config.errors import value_text, writing
from maxtext_lite.config.keys import listed
from maxtext_lite.config.registry import resolve
from maxtext_lite.training.arrays import Record
from maxtext_lite.training.checkpoint import TrainProgress
from maxtext_lite.training.hooks import Hook
from maxtext_lite.training.run import TrainingRun
from maxtext_lite.training.state import TrainState

_FLUSH_SECONDS = 30.0
_SERVICES = "maxtext_lite.operations.services"
_NOT_NEEDED = ("torch", "boto3", "google.cloud.storage")


class TrackersHook(Hook):
    """Gives the records of a run to its trackers, on the first host."""

    def __init__(self) -> None:
        self._trackers: list[Tracker] = []

    def start(self, run: TrainingRun, state: TrainState, counts: TrainProgress, say: Callable[[str], None]) -> None:
        if not run.is_first:
            return
        directory = run.files.directory
        after_step = counts.step or -1  # an evaluation before the first step has step 0
        with writing(run.directory):
            about = {"config": (directory / "config.yml").read_text(encoding="utf-8"), "plan": format_plan(run.plan)}
            self._trackers = open_trackers(run.config, directory, after_step, about, say)

    def written(self, record: Record) -> None:
        for tracker in self._trackers:
            tracker.write(record)

    def after_last_step(self) -> None:
        for tracker in self._trackers:
            tracker.flush()

    def close(self) -> None:
        for tracker in self._trackers:
            with contextlib.suppress(UserError):  # after the last step it has been flushed
                tracker.close()


class Tracker:
    """A receiver of each record of metrics.jsonl."""

    def write(self, record: Record) -> None:
        """Takes a record."""
        raise NotImplementedError

    def flush(self) -> None:
        """Sends or writes what is still in memory."""

    def close(self) -> None:
        """Flushes, then ends."""


def open_trackers(
    config: Config,
    directory: Path,
    after_step: int,
    about: Mapping[str, str],
    say: Callable[[str], None],
) -> list[Tracker]:
    """The trackers that `log_to` and `prometheus_port` name; for the first host, once `about` is known.

    Args:
      directory: the run directory, or the local one in which its files are written first.
      after_step: the step from which the run resumes.
      about: texts about the run by name: its config and its plan.
      say: takes a warning when a service stops answering; the run continues without it.
    Raises:
      UserError: a service refuses the run at its start, or the port is taken.
    """
    services = {"wandb": f"{_SERVICES}:WandB", "mlflow": f"{_SERVICES}:MLflow"}
    opened: list[Tracker] = []
    with contextlib.ExitStack() as closing:
        for name in listed(config.log_to):
            if name == "tensorboard":
                opened.append(TensorBoard(directory / name, max(after_step + 1, 0), about))
            else:
                with _refused(f"log_to={name}"):
                    service = resolve(services[name])
                    opened.append(service(importlib.import_module(name), config, directory, say))
            closing.callback(opened[-1].close)
        if config.prometheus_port:
            host = config.prometheus_host
            port = config.prometheus_port
            with _refused(f"prometheus_host={value_text(host)} with prometheus_port={port}"):
                opened.append(resolve(f"{_SERVICES}:Prometheus")(host, port, config.run_name))
        closing.pop_all()
    return opened


def finite_numbers(record: Record) -> dict[str, float]:
    """The finite numbers of a record, except its step."""
    found: dict[str, float] = {}
    for key, value in record.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if key != "step" and is_number and math.isfinite(value):
            found[key] = float(value)
    return found


class TensorBoard(Tracker):
    """TensorBoard's event file, written by the caller's thread: another thread could not report a full disk.

    Args:
      purge_step: the step from which TensorBoard hides the contents of earlier event files.
      about: texts by name.
    """

    def __init__(self, directory: Path, purge_step: int, about: Mapping[str, str]):
        # tensorboardX imports these wherever they are installed, for an annotation and for buckets that it never gets
        # here. That takes up to seconds and 200 MB of memory.
        hidden = dict.fromkeys(name for name in _NOT_NEEDED if name not in sys.modules)
        sys.modules.update(hidden)  # type: ignore[arg-type]  # importing None raises ImportError
        try:
            from tensorboardX import event_file_writer
            from tensorboardX.proto import event_pb2
        finally:
            for name in hidden:
                del sys.modules[name]

        self._directory = directory
        events: Any = event_pb2
        self._event: Callable[..., Any] = events.Event
        directory.mkdir(exist_ok=True)
        self._file = event_file_writer.EventsWriter(str(directory / "events"), f".{os.getpid()}")
        self._flushed = time.monotonic()
        self._add(purge_step, session_log={"status": "START"})
        for name, text in about.items():  # Markdown: four spaces make monospaced lines
            lines = "\n".join(f"    {line}" for line in text.splitlines()).encode()
            shown_as = {"plugin_data": {"plugin_name": "text"}}
            text_value = {"tag": name, "metadata": shown_as, "tensor": {"dtype": "DT_STRING", "string_val": [lines]}}
            self._add(purge_step, summary={"value": [text_value]})

    def write(self, record: Record) -> None:
        values = [{"tag": key, "simple_value": value} for key, value in finite_numbers(record).items()]
        self._add(record["step"], summary={"value": values})
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        self._flushed = time.monotonic()
        with writing(self._directory):
            self._file.flush()

    def close(self) -> None:
        with writing(self._directory):
            self._file.close()

    def _add(self, step: int, **content: Any) -> None:
        with writing(self._directory):
            self._file.write_event(self._event(step=step, wall_time=time.time(), **content))


@contextlib.contextmanager
def _refused(key: str) -> Generator[None]:
    """Turns any error inside into a refusal of this key's value."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of another's library, whose errors have no class in common
        raise UserError(f"{key} does not work here: {first_line(error).removesuffix('.')}.") from error


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its class."""
    return next(iter(str(error).splitlines()), type(error).__name__)
