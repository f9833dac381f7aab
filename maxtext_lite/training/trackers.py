"""Where a run's records go beside metrics.jsonl: TensorBoard's files, Weights & Biases, MLflow, Prometheus."""

# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownMemberType=false
# wandb and mlflow are extras, and tensorboardX declares some of its functions in part.

import contextlib
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, Protocol

from maxtext_lite.config import Config, UserError
from maxtext_lite.config.errors import without_secrets, writing
from maxtext_lite.config.shown import tracker_names
from maxtext_lite.training.arrays import Record
from maxtext_lite.training.failures import Failures

FILE = "trackers.json"
"""In the run directory: by which ids the services know the run."""
_FLUSH_SECONDS = 30.0
_NOT_NEEDED = ("torch", "boto3", "google.cloud.storage")


class Tracker(Protocol):
    """Is told of each record of metrics.jsonl."""

    def write(self, record: Record) -> None:
        """Takes a record."""
        ...

    def flush(self) -> None:
        """Writes what is only in memory yet."""
        ...

    def close(self) -> None:
        """Flushes, and ends."""
        ...


def open_trackers(
    config: Config,
    directory: Path,
    after_step: int,
    failures: Failures,
    about: Mapping[str, str],
    say: Callable[[str], None],
) -> list[Tracker]:
    """Those that `log_to` and `prometheus_port` name. Call it on the first host, after `about` was worked out.

    Args:
      directory: of the run, or where its files are written first.
      after_step: the step the run goes on from.
      failures: collects what cannot be written there.
      about: the run's config and plan as texts.
      say: takes a sentence where a service does not answer; the run goes on without it.
    Raises:
      UserError: a service refuses the run at its start, or the port is taken.
    """
    services: dict[str, Callable[..., Tracker]] = {"wandb": WandB, "mlflow": MLflow}
    opened: list[Tracker] = []
    with contextlib.ExitStack() as closing:
        for name in tracker_names(config.log_to):
            if name == "tensorboard":
                opened.append(TensorBoard(directory / name, max(after_step + 1, 0), failures, about))
            else:
                with _refused(f"log_to={name}"):
                    opened.append(services[name](importlib.import_module(name), config, directory, say))
            closing.callback(opened[-1].close)
        if config.prometheus_port:
            with _refused(f"prometheus_port={config.prometheus_port}"):
                opened.append(Prometheus(config.prometheus_port, config.run_name))
        closing.pop_all()
    return opened


def finite_numbers(record: Record) -> dict[str, float]:
    """The numbers of a record but for its step, without those that are not finite."""
    return {
        key: float(value)
        for key, value in record.items()
        if key != "step" and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


class TensorBoard:
    """TensorBoard's event file. It is written where it is called: a thread could not say that the disk is full.

    Args:
      purge_step: from which on TensorBoard hides what earlier event files hold.
      about: texts by their names.
    """

    def __init__(self, directory: Path, purge_step: int, failures: Failures, about: Mapping[str, str]):
        with _without(_NOT_NEEDED):
            from tensorboardX import event_file_writer
            from tensorboardX.proto import event_pb2, summary_pb2, tensor_pb2

        self._directory, self._failures = directory, failures
        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        tensors: Any = tensor_pb2
        directory.mkdir(exist_ok=True)
        self._file = event_file_writer.EventsWriter(str(directory / "events"), f".{os.getpid()}")
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._add(self._events.Event(step=purge_step, session_log=start))
        plugin = self._summaries.SummaryMetadata.PluginData(plugin_name="text")
        metadata = self._summaries.SummaryMetadata(plugin_data=plugin)
        for name, text in about.items():  # as Markdown, in which four spaces make a table of monospaced lines
            lines = "\n".join(f"    {line}" for line in text.splitlines()).encode()
            tensor = tensors.TensorProto(dtype="DT_STRING", string_val=[lines])
            value = self._summaries.Summary.Value(tag=name, metadata=metadata, tensor=tensor)
            self._add(self._events.Event(step=purge_step, summary=self._summaries.Summary(value=[value])))
        self._flushed = time.monotonic()

    def write(self, record: Record) -> None:
        """Appends the finite numbers of a record."""
        summary = self._summaries.Summary
        values = [summary.Value(tag=key, simple_value=value) for key, value in finite_numbers(record).items()]
        self._add(self._events.Event(step=record["step"], summary=summary(value=values)))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Writes what is only in memory yet."""
        self._flushed = time.monotonic()
        if not self._failures.found:
            with self._failures.of_writing(self._directory):
                self._file.flush()

    def close(self) -> None:
        """Flushes and closes the file."""
        with self._failures.of_writing(self._directory):
            self._file.close()

    def _add(self, event: Any) -> None:
        event.wall_time = time.time()
        if not self._failures.found:
            with self._failures.of_writing(self._directory):
                self._file.write_event(event)


class _Service:
    """A service that is told of records from here on; what it does not take ends no run.

    A run that goes on is the same run there: its id stands in trackers.json. Steps that are done again are told again.
    """

    def __init__(self, name: str, directory: Path, say: Callable[[str], None]):
        self._name, self._path, self._say, self._lost = name, directory / FILE, say, False

    @property
    def known_id(self) -> str | None:
        """The service's id of this run; None: it does not know the run yet."""
        return self._ids().get(self._name)

    def keep_id(self, found: str) -> None:
        """Writes the service's id of this run down."""
        if found != self.known_id:
            with writing(self._path):
                self._path.write_text(json.dumps(self._ids() | {self._name: found}) + "\n", encoding="utf-8")

    def _ids(self) -> dict[str, str]:
        with contextlib.suppress(FileNotFoundError, ValueError):
            return dict(json.loads(self._path.read_text(encoding="utf-8")))
        return {}

    def _tell(self, what: Callable[[], object]) -> None:
        """Does it, unless the service was lost before; where it is lost now, says so once."""
        if self._lost:
            return
        try:
            what()
        except Exception as error:  # noqa: BLE001  # of another's library; no run of months is to end for a chart
            self._lost = True
            self._say(f"warning: log_to={self._name}: {_first_line(error)}. It is told nothing more by this start.")


class WandB(_Service):
    """Weights & Biases, by its own settings: WANDB_API_KEY, WANDB_PROJECT, WANDB_MODE=offline and so on."""

    def __init__(self, wandb: Any, config: Config, directory: Path, say: Callable[[str], None]):
        super().__init__("wandb", directory, say)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "maxtext_lite"),
            name=config.run_name,
            id=self.known_id,
            resume="allow",
            dir=str(directory),
            config=_stated(config),
        )
        self.keep_id(self._run.id)
        self._run.define_metric("*", step_metric="step")  # its own steps only grow, ours are done again

    def write(self, record: Record) -> None:
        """Takes a record."""
        self._tell(lambda: self._run.log({"step": record["step"], **finite_numbers(record)}))

    def flush(self) -> None:
        """Nothing: a process of its own sends what it is given."""

    def close(self) -> None:
        """Waits until all is sent."""
        self._tell(self._run.finish)


class MLflow(_Service):
    """MLflow, by its own settings: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and so on."""

    def __init__(self, mlflow: Any, config: Config, directory: Path, say: Callable[[str], None]):
        super().__init__("mlflow", directory, say)
        self._mlflow = mlflow
        known = self.known_id
        named: dict[str, Any] = {"run_name": config.run_name} if known is None else {"run_id": known}
        self._id: str = mlflow.start_run(**named).info.run_id
        if known is None:
            self.keep_id(self._id)
            mlflow.log_params(_stated(config))

    def write(self, record: Record) -> None:
        """Takes a record."""
        numbers, step = finite_numbers(record), record["step"]
        self._tell(lambda: self._mlflow.log_metrics(numbers, step=step, run_id=self._id, synchronous=False))

    def flush(self) -> None:
        """Waits until all is sent."""
        self._tell(self._mlflow.flush_async_logging)

    def close(self) -> None:
        """Waits until all is sent."""
        self.flush()
        self._tell(self._mlflow.end_run)


class Prometheus:
    """The numbers of the newest record of each kind, at http://127.0.0.1:PORT/metrics as maxtext_lite_NAME."""

    def __init__(self, port: int, run_name: str):
        import prometheus_client as client

        self._client: Any = client
        self._registry, self._run_name = client.CollectorRegistry(), run_name
        self._gauges: dict[str, Any] = {}
        self._server, self._thread = client.start_http_server(port, addr="127.0.0.1", registry=self._registry)

    def write(self, record: Record) -> None:
        """Takes a record."""
        for key, value in {"step": record["step"], **finite_numbers(record)}.items():
            if key not in self._gauges:
                gauge = self._client.Gauge(f"maxtext_lite_{key}", key, ["run_name"], registry=self._registry)
                self._gauges[key] = gauge.labels(self._run_name)
            self._gauges[key].set(value)

    def flush(self) -> None:
        """Nothing: it is asked."""

    def close(self) -> None:
        """Answers no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _stated(config: Config) -> dict[str, Any]:
    """Each key with its value, as config.yml has them: without passwords."""
    values = config.model_dump(mode="json")
    return {key: without_secrets(value) if isinstance(value, str) else value for key, value in values.items()}


@contextlib.contextmanager
def _refused(key: str) -> Generator[None]:
    """Ends on what goes wrong as on a value of this key."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of another's library, whose errors have no class in common
        raise UserError(f"{key} does not work here: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


@contextlib.contextmanager
def _without(names: tuple[str, ...]) -> Generator[None]:
    """What is imported here does not find these modules, unless they are there already.

    tensorboardX imports them wherever they are installed, for an annotation and for buckets that it is never given,
    which takes up to seconds and 200 MB of memory.
    """
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # importing None raises ImportError
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
