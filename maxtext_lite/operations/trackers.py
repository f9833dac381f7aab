"""Receivers of a run's records beside metrics.jsonl: TensorBoard's files, Weights & Biases, MLflow, Prometheus."""

# pyright: reportMissingImports=false
# wandb and mlflow are extras.

import contextlib
import importlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

from maxtext_lite.batching import format_plan
from maxtext_lite.config import Config, UserError
from maxtext_lite.config.errors import value_text, without_secrets, writing
from maxtext_lite.config.json_file import read_object
from maxtext_lite.config.keys import listed
from maxtext_lite.config.whole_file import write_whole
from maxtext_lite.training.arrays import Record
from maxtext_lite.training.checkpoint import TrainProgress
from maxtext_lite.training.hooks import Hook
from maxtext_lite.training.run import TrainingRun
from maxtext_lite.training.state import TrainState

FILE = "trackers.json"
"""In the run directory: the id of the run at each service."""
_FLUSH_SECONDS = 30.0
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
    services: dict[str, Callable[..., Tracker]] = {"wandb": WandB, "mlflow": MLflow}
    opened: list[Tracker] = []
    with contextlib.ExitStack() as closing:
        for name in listed(config.log_to):
            if name == "tensorboard":
                opened.append(TensorBoard(directory / name, max(after_step + 1, 0), about))
            else:
                with _refused(f"log_to={name}"):
                    opened.append(services[name](importlib.import_module(name), config, directory, say))
            closing.callback(opened[-1].close)
        if config.prometheus_port:
            host, port = config.prometheus_host, config.prometheus_port
            with _refused(f"prometheus_host={value_text(host)} with prometheus_port={port}"):
                opened.append(Prometheus(host, port, config.run_name))
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
        with _without(_NOT_NEEDED):
            from tensorboardX import event_file_writer
            from tensorboardX.proto import event_pb2

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


class Service(Tracker):
    """A service that receives records from here on; its failure ends no run.

    A resumed run is the same run there: trackers.json has its id. Steps that are repeated are sent again.

    Args:
      module: the service's library.
    Raises:
      UserError: trackers.json is damaged.
    """

    def __init__(self, module: Any, config: Config, directory: Path, say: Callable[[str], None]):
        self._name = type(self).__name__.lower()
        self._say = say
        self._is_lost = False
        path = directory / FILE
        ids = read_object(path) if path.exists() else {}
        known = ids.get(self._name)
        if known is not None and not isinstance(known, str):
            raise UserError(f"{path}: {self._name}={value_text(known)} is not the id of a run. Remove the file.")
        found = self._start(module, config, directory, known)
        if found != known:
            with writing(path):
                write_whole(path, json.dumps(ids | {self._name: found}) + "\n")

    def _start(self, module: Any, config: Config, directory: Path, known: str | None) -> str:
        """Starts the run there, or resumes the one with the id `known`, and returns its id."""
        raise NotImplementedError

    def _send(self, call: Callable[..., object], *arguments: Any, **named: Any) -> None:
        """Calls the service, unless an earlier call failed; the first failure is a warning."""
        if self._is_lost:
            return
        try:
            call(*arguments, **named)
        except Exception as error:  # noqa: BLE001  # of another's library; no run of months is to end for a chart
            self._is_lost = True
            self._say(f"warning: log_to={self._name}: {_first_line(error)}. It is told nothing more by this start.")


class WandB(Service):
    """Weights & Biases, set up by its own variables: WANDB_API_KEY, WANDB_PROJECT, WANDB_MODE=offline and so on."""

    def _start(self, module: Any, config: Config, directory: Path, known: str | None) -> str:
        self._run = module.init(
            project=os.environ.get("WANDB_PROJECT", "maxtext_lite"),
            name=config.run_name,
            id=known,
            resume="allow",
            dir=str(directory),
            config=_stated(config),
        )
        self._run.define_metric("*", step_metric="step")  # W&B's own steps only grow; ours may be repeated
        return self._run.id

    def write(self, record: Record) -> None:
        self._send(self._run.log, {"step": record["step"], **finite_numbers(record)})

    def close(self) -> None:
        self._send(self._run.finish)


class MLflow(Service):
    """MLflow, set up by its own variables: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and so on."""

    def _start(self, module: Any, config: Config, directory: Path, known: str | None) -> str:
        self._mlflow = module
        named = {"run_name": config.run_name} if known is None else {"run_id": known}
        self._id: str = module.start_run(**named).info.run_id
        if known is None:
            module.log_params(_stated(config))
        return self._id

    def write(self, record: Record) -> None:
        how = {"step": record["step"], "run_id": self._id, "synchronous": False}
        self._send(self._mlflow.log_metrics, finite_numbers(record), **how)

    def flush(self) -> None:
        self._send(self._mlflow.flush_async_logging)

    def close(self) -> None:
        self.flush()
        self._send(self._mlflow.end_run)


class Prometheus(Tracker):
    """The newest value of each number, at http://HOST:PORT/metrics as maxtext_lite_NAME.

    Characters that not every version of Prometheus takes in a name are `_` there, as in maxtext_lite_rewards_NAME. Of
    several numbers with one such name, the last is shown.
    """

    def __init__(self, host: str, port: int, run_name: str):
        import prometheus_client as client

        self._client: Any = client
        self._registry, self._run_name = client.CollectorRegistry(), run_name
        self._gauges: dict[str, Any] = {}
        self._server, self._thread = client.start_http_server(port, addr=host, registry=self._registry)

    def write(self, record: Record) -> None:
        for key, value in {"step": record["step"], **finite_numbers(record)}.items():
            name = f"maxtext_lite_{re.sub('[^a-zA-Z0-9_:]', '_', key)}"
            if name not in self._gauges:
                gauge = self._client.Gauge(name, key, ["run_name"], registry=self._registry)
                self._gauges[name] = gauge.labels(self._run_name)
            self._gauges[name].set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _stated(config: Config) -> dict[str, Any]:
    """Each key and its value as in config.yml, without passwords."""
    values = config.model_dump(mode="json")
    return {key: without_secrets(value) if isinstance(value, str) else value for key, value in values.items()}


@contextlib.contextmanager
def _refused(key: str) -> Generator[None]:
    """Turns any error inside into a refusal of this key's value."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of another's library, whose errors have no class in common
        raise UserError(f"{key} does not work here: {_first_line(error).removesuffix('.')}.") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


@contextlib.contextmanager
def _without(names: tuple[str, ...]) -> Generator[None]:
    """Hides modules that are not imported yet from the imports inside.

    tensorboardX imports these wherever they are installed, for an annotation and for buckets that it never gets here.
    That takes up to seconds and 200 MB of memory.
    """
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # importing None raises ImportError
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
