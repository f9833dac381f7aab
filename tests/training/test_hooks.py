"""The moments of a run at which hooks are called, in their order, and what of the library needs none."""

import json

import pytest

from maxtext_lite.config import load_config, registry
from maxtext_lite.training import Hook, train
from tests.run_directories import lines_of
from tests.training.conftest import TINY

KEYS = """
dataset_type=synthetic eval_interval=2 eval_steps=1 warmup_steps=1 learning_rate_schedule=constant
per_device_batch_size=1 steps=2 optimizer=sgd
"""
RUN = (*TINY, *KEYS.split())
MOMENTS = (
    "opened",
    "start",
    "after_compile",
    "before_first_step",
    "before_step",
    "written",
    "after_step",
    "after_evaluation",
    "after_checkpoint",
    "after_last_step",
    "close",
)


class Seen(Hook):
    """Notes the moments."""

    def __init__(self):
        self.moments = []

    def entries(self, step):
        return {"half_step": step / 2}

    def saved(self):
        self.moments.append("saved")
        return "the hook's last line"


def _noting(name, method):
    def note(self, *arguments):
        self.moments.append(name)
        return method(self, *arguments)

    return note


for _name in MOMENTS:
    setattr(Seen, _name, _noting(_name, getattr(Hook, _name)))


pytestmark = pytest.mark.usefixtures("one_device_for_all")


def test_a_hook_is_called_at_each_moment_and_adds_to_each_step(tmp_path, capsys):
    seen = Seen()
    config = load_config(None, [*RUN, f"base_output_directory={tmp_path}"])
    result = train(config, callbacks=[seen])
    assert seen.moments == [
        *("opened", "start", "after_compile", "before_first_step"),
        *(
            "before_step",
            "before_step",
        ),  # the first step is recorded while the second runs
        *("written", "after_step", "written", "after_step"),
        *("written", "after_evaluation", "after_checkpoint"),
        *("after_last_step", "saved", "close"),
    ]
    lines = lines_of(result.run_directory)
    assert [line["half_step"] for line in lines if "loss" in line] == [0.5, 1.0]
    assert "the hook's last line" in capsys.readouterr().out


def test_without_operations_a_run_is_the_same_and_has_fewer_files(
    tmp_path, monkeypatch
):
    """As where their folder is absent; keys at their defaults ask for none of them."""

    def trained(name):
        words = [*RUN, f"base_output_directory={tmp_path}", f"run_name={name}"]
        result = train(load_config(None, words))
        return [
            line["loss"] for line in lines_of(result.run_directory) if "loss" in line
        ]

    whole = trained("whole")
    kinds = ("hook", "lock", "observer", "diagnosis")
    absent = {
        kind: dict.fromkeys(registry._BUILT_IN[kind], "maxtext_lite.no_such_room:it")
        for kind in kinds
    }
    monkeypatch.setattr(registry, "_BUILT_IN", {**registry._BUILT_IN, **absent})
    registry._targets.cache_clear()
    try:
        assert trained("bare") == whole
    finally:
        registry._targets.cache_clear()
    names = {path.name for path in (tmp_path / "bare").iterdir()}
    more = {path.name for path in (tmp_path / "whole").iterdir()} - names
    assert more == {"goodput.json", "memory.json", "tensorboard"}
    assert json.loads((tmp_path / "bare" / "plan.json").read_text())["steps"] == 2


def test_what_is_no_callback_is_refused_before_the_run(tmp_path):
    class Duck:
        wants_state = False

    taken = Seen()
    taken.saved = []
    config = load_config(None, [*RUN, f"base_output_directory={tmp_path}"])
    for callback, name in ((Duck(), "Duck"), (taken, r"Seen\.saved")):
        with pytest.raises(TypeError, match=name):
            train(config, callbacks=[callback])
