"""What is told of a run's records: what each service is given, by stand-ins of those that are extras, and what it
costs a run that one is gone."""

import json
import math
import struct
import sys
import types
import urllib.request

import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.training.failures import Failures
from maxtext_lite.training.trackers import MLflow, Prometheus, TensorBoard, WandB, finite_numbers, open_trackers

RECORD = {"step": 4, "loss": 0.5, "grad_norm": math.inf, "skipped": False, "name": "x", "tokens": 7, "none": None}
NUMBERS = {"loss": 0.5, "tokens": 7.0}


def config(*words):
    return load_config(None, ["run_name=here", *words])


def test_the_numbers_of_a_record_are_the_finite_ones():
    assert finite_numbers(RECORD) == NUMBERS


def test_tensorboard_has_numbers_texts_and_where_the_run_goes_on(tmp_path):
    from tensorboardX.proto import event_pb2

    board = TensorBoard(tmp_path / "tensorboard", 4, Failures(), {"plan": "rows  16\ntokens 4"})
    board.write(RECORD)
    board.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    data, events = file.read_bytes(), []
    while data:  # length, its checksum, the event, its checksum
        (size,) = struct.unpack("<Q", data[:8])
        events.append(event_pb2.Event.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    assert [event.step for event in events] == [0, 4, 4, 4]
    assert events[1].session_log.status == 1  # hides what an earlier file has of step 4 and later
    (text,) = events[2].summary.value
    assert (text.tag, text.metadata.plugin_data.plugin_name) == ("plan", "text")
    assert list(text.tensor.string_val) == [b"    rows  16\n    tokens 4"]
    assert {value.tag: value.simple_value for value in events[3].summary.value} == NUMBERS


def test_tensorboardx_is_imported_without_what_it_has_no_use_for_here(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] in ("tensorboardX", "boto3")]:
        monkeypatch.delitem(sys.modules, name)
    TensorBoard(tmp_path / "tensorboard", 0, Failures(), {}).close()
    assert "tensorboardX" in sys.modules
    assert "boto3" not in sys.modules


class Service:
    """Stands in for the modules wandb and mlflow: notes what it is asked, and fails when it is told to."""

    def __init__(self):
        self.asked, self.fails = [], False

    def __getattr__(self, name):
        def call(*args, **named):
            self.asked.append((name, args, named))
            if self.fails:
                raise ConnectionError("no route\nto the server")
            return types.SimpleNamespace(
                id="abc", info=types.SimpleNamespace(run_id="abc"), define_metric=self.define_metric, log=self.log,
                finish=self.finish,
            )  # fmt: skip

        return call

    def calls(self, name):
        return [(args, named) for asked, args, named in self.asked if asked == name]


@pytest.mark.parametrize(("tracker", "opens", "known"), [(WandB, "init", "id"), (MLflow, "start_run", "run_id")])
def test_a_run_that_goes_on_is_the_same_run_for_a_service(tracker, opens, known, tmp_path):
    service = Service()
    for _ in range(2):
        tracker(service, config(), tmp_path, pytest.fail).close()
    (_, first), (_, second) = service.calls(opens)
    assert (first.get(known), second[known]) == (None, "abc")
    assert json.loads((tmp_path / "trackers.json").read_text()) == {tracker.__name__.lower(): "abc"}


@pytest.mark.parametrize("damaged", ["null", "[1]", '"ab"', '{"wandb": 5}', '{"wandb": "x"', "", '{"wandb": "x"}' * 2])
def test_where_the_ids_are_damaged_a_service_gets_a_new_run_and_it_is_told(damaged, tmp_path):
    (tmp_path / "trackers.json").write_text(damaged)
    service, said = Service(), []
    WandB(service, config(), tmp_path, said.append)
    assert said == ["warning: trackers.json is damaged: from here on this is a new run at wandb."]
    ((_, named),) = service.calls("init")
    assert named["id"] is None
    assert json.loads((tmp_path / "trackers.json").read_text()) == {"wandb": "abc"}


def test_wandb_is_given_the_config_and_each_record_by_the_runs_own_step(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    service = Service()
    WandB(service, config("steps=7"), tmp_path, pytest.fail).write(RECORD)
    ((_, named),) = service.calls("init")
    assert (named["project"], named["name"], named["config"]["steps"], named["dir"]) == (
        "maxtext_lite", "here", 7, str(tmp_path),
    )  # fmt: skip
    assert service.calls("define_metric") == [(("*",), {"step_metric": "step"})]
    assert service.calls("log") == [(({"step": 4, **NUMBERS},), {})]


def test_a_service_is_told_no_password(tmp_path):
    words = ["rollout_engine=http", "rollout_url=http://me:secret@here:8000"]
    asked = load_config("configs/post_train/rl.yml", words)
    for tracker in (WandB, MLflow):
        service = Service()
        tracker(service, asked, tmp_path, pytest.fail)
        assert "secret" not in repr(service.asked)
        assert "http://***@here:8000" in repr(service.asked)


def test_mlflow_is_given_the_config_once_and_each_record(tmp_path):
    service = Service()
    for _ in range(2):
        MLflow(service, config("steps=7"), tmp_path, pytest.fail).write(RECORD)
    (((params,), _),) = service.calls("log_params")
    assert params["steps"] == 7
    assert service.calls("log_metrics")[0] == ((NUMBERS,), {"step": 4, "run_id": "abc", "synchronous": False})


def test_a_service_that_is_gone_is_told_nothing_more_and_ends_no_run(tmp_path):
    service, said = Service(), []
    tracker = WandB(service, config(), tmp_path, said.append)
    service.fails = True
    for _ in range(3):
        tracker.write(RECORD)
    tracker.close()
    assert len(service.calls("log")) == 1
    assert service.calls("finish") == []
    assert said == ["warning: log_to=wandb: no route. It is told nothing more by this start."]


def test_one_that_refuses_the_run_at_its_start_ends_it(tmp_path, monkeypatch):
    service = Service()
    service.fails = True
    monkeypatch.setitem(sys.modules, "wandb", service)
    with pytest.raises(UserError, match=r"^log_to=wandb does not work here: no route$"):
        open_trackers(config("log_to=tensorboard,wandb"), tmp_path, 0, Failures(), {}, pytest.fail)


def test_those_that_the_config_names_are_opened(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", Service())
    opened = open_trackers(config("log_to=[mlflow, tensorboard]"), tmp_path, 0, Failures(), {}, pytest.fail)
    assert [type(each) for each in opened] == [MLflow, TensorBoard]
    opened[1].close()
    assert open_trackers(config("log_to="), tmp_path, 0, Failures(), {}, pytest.fail) == []


def test_prometheus_reads_the_newest_numbers_on_this_machine_alone(tmp_path):
    tracker = Prometheus(0, "here")
    address, port = tracker._server.server_address
    assert address == "127.0.0.1"
    for loss in (0.25, 0.5):
        tracker.write({**RECORD, "loss": loss, "rewards/a.b": 1.0, "rewards/a_b": 2.0})
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    assert lines == [
        'maxtext_lite_step{run_name="here"} 4.0',
        'maxtext_lite_loss{run_name="here"} 0.5',
        'maxtext_lite_tokens{run_name="here"} 7.0',
        'maxtext_lite_rewards_a_b{run_name="here"} 2.0',  # of both: their names are the same there
    ]
    with pytest.raises(UserError, match=rf"^prometheus_port={port} does not work here: .*in use"):
        open_trackers(config("log_to=", f"prometheus_port={port}"), tmp_path, 0, Failures(), {}, pytest.fail)
    tracker.close()
