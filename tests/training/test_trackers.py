"""What each service is given of a run's records, by stand-ins of those that are extras, and that none ends a run."""

import math
import struct
import sys
import types
import urllib.request

import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.operations.services import MLflow, Prometheus, WandB
from maxtext_lite.operations.trackers import TensorBoard, open_trackers

RECORD = {
    "step": 4,
    "loss": 0.5,
    "grad_norm": math.inf,
    "skipped": False,
    "name": "x",
    "tokens": 7,
    "none": None,
}
NUMBERS = {"loss": 0.5, "tokens": 7.0}  # the finite ones


def config(*words):
    return load_config(None, ["run_name=here", "steps=7", *words])


def test_tensorboard_has_numbers_texts_and_where_the_run_goes_on(tmp_path):
    from tensorboardX.proto import event_pb2

    board = TensorBoard(tmp_path / "tensorboard", 4, {"plan": "rows  16\ntokens 4"})
    board.write(RECORD)
    board.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    data, events = file.read_bytes(), []
    while data:  # length, its checksum, the event, its checksum
        (size,) = struct.unpack("<Q", data[:8])
        events.append(event_pb2.Event.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    assert [event.step for event in events] == [0, 4, 4, 4]
    assert (
        events[1].session_log.status == 1
    )  # hides what an earlier file has of step 4 and later
    (text,) = events[2].summary.value
    assert list(text.tensor.string_val) == [b"    rows  16\n    tokens 4"]
    assert {
        value.tag: value.simple_value for value in events[3].summary.value
    } == NUMBERS


class Service:
    """Stands in for the modules wandb and mlflow: notes what it is asked, and fails when it is told to."""

    def __init__(self):
        self.asked, self.fails = [], False

    def __getattr__(self, name):
        def call(*args, **named):
            self.asked.append((name, args, named))
            if self.fails:
                raise ConnectionError("no route\nto the server")
            run = {
                "id": "abc",
                "info": types.SimpleNamespace(run_id="abc"),
                "define_metric": self.define_metric,
            }
            return types.SimpleNamespace(**run, log=self.log, finish=self.finish)

        return call

    def calls(self, name):
        return [(args, named) for asked, args, named in self.asked if asked == name]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("tracker", "opens", "known"),
    [(WandB, "init", "id"), (MLflow, "start_run", "run_id")],
)
def test_a_service_is_given_the_config_and_each_record_and_a_run_that_goes_on_is_the_same_there(
    tracker, opens, known, tmp_path, monkeypatch
):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    service = Service()
    for _ in range(2):
        tracker(service, config(), tmp_path, pytest.fail).write(RECORD)
    (_, first), (_, second) = service.calls(opens)
    assert (first.get(known), second[known]) == (None, "abc")
    if tracker is WandB:
        assert (first["name"], first["config"]["steps"]) == ("here", 7)
        assert service.calls("define_metric")[0] == (("*",), {"step_metric": "step"})
        assert service.calls("log")[0] == (({"step": 4, **NUMBERS},), {})
    else:
        (((params,), _),) = service.calls("log_params")
        assert params["steps"] == 7
        assert service.calls("log_metrics")[0] == (
            (NUMBERS,),
            {"step": 4, "run_id": "abc", "synchronous": False},
        )
    words = ["rollout_engine=vllm", "rollout_url=http://me:secret@here:8000"]
    (tmp_path / "rl").mkdir()
    rl, service = load_config("configs/post_train/rl.yml", words), Service()
    tracker(service, rl, tmp_path / "rl", pytest.fail)
    assert "http://***@here:8000" in repr(service.asked)
    assert "secret" not in repr(service.asked)


def test_a_service_that_is_gone_ends_no_run_but_one_that_refuses_it_at_its_start_does(
    tmp_path, monkeypatch
):
    service, said = Service(), []
    tracker = WandB(service, config(), tmp_path, said.append)
    service.fails = True
    for _ in range(3):
        tracker.write(RECORD)
    tracker.close()
    assert len(service.calls("log")) == len(said) == 1
    assert not service.calls("finish")
    monkeypatch.setitem(sys.modules, "wandb", service)
    with pytest.raises(UserError, match=r"^log_to=wandb"):
        open_trackers(config("log_to=tensorboard,wandb"), tmp_path, 0, {}, pytest.fail)


@pytest.mark.parametrize("text", ['{"wandb": ', "[]", '{"wandb": 5}'])
def test_a_damaged_file_of_ids_is_refused_by_name(text, tmp_path, monkeypatch):
    (tmp_path / "trackers.json").write_text(text)
    monkeypatch.setitem(sys.modules, "wandb", Service())
    with pytest.raises(UserError, match=r"trackers\.json") as refused:
        open_trackers(config("log_to=wandb"), tmp_path, 0, {}, pytest.fail)
    assert len(refused.value.problems) == 1


def test_prometheus_reads_the_newest_numbers_on_this_machine_alone():
    tracker = Prometheus("127.0.0.1", 0, "here")
    address, port = tracker._server.server_address
    assert address == "127.0.0.1"
    for loss in (0.25, 0.5):
        tracker.write({**RECORD, "loss": loss, "rewards/a.b": 1.0, "rewards/a_b": 2.0})
    with urllib.request.urlopen(
        f"http://127.0.0.1:{port}/metrics", timeout=10
    ) as answer:
        lines = [
            line
            for line in answer.read().decode().splitlines()
            if not line.startswith("#")
        ]
    # Of the two rewards one is left: their names are the same there.
    values = {"step": 4.0, **NUMBERS, "rewards_a_b": 2.0}
    assert lines == [
        f'maxtext_lite_{name}{{run_name="here"}} {value}'
        for name, value in values.items()
    ]
    tracker.close()


def test_prometheus_answers_where_it_is_told_to(tmp_path):
    where = config("log_to=", "prometheus_host=127.0.0.2", "prometheus_port=9")
    tracker = Prometheus(where.prometheus_host, 0, "here")
    assert tracker._server.server_address[0] == "127.0.0.2"
    tracker.close()
    for host in ("203.0.113.1", "no-such-host.invalid"):  # of no machine
        where = config("log_to=", f"prometheus_host={host}", "prometheus_port=9099")
        with pytest.raises(UserError, match=rf"^prometheus_host={host}.*[^.]\.$"):
            open_trackers(where, tmp_path, 0, {}, pytest.fail)
