"""Trackers of a run that are services: Weights & Biases, MLflow, Prometheus."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from maxtext_lite.config import Config, UserError
from maxtext_lite.config.errors import value_text, without_secrets, writing
from maxtext_lite.config.json_file import read_object
from maxtext_lite.config.whole_file import write_whole
from maxtext_lite.operations.trackers import Tracker, finite_numbers, first_line
from maxtext_lite.training.arrays import Record

FILE = "trackers.json"
"""In the run directory: the id of the run at each service."""


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
            self._say(f"warning: log_to={self._name}: {first_line(error)}. It is told nothing more by this start.")


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
        self._registry = client.CollectorRegistry()
        self._run_name = run_name
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
