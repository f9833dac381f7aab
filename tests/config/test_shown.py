"""The keys on what a run shows: every way to write them, and what is refused."""

import importlib.util

import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.config.shown import TracedSteps, require_trackers, tracker_names


def config(*words):
    return load_config(None, words)


@pytest.mark.parametrize(("word", "names"), [
    ("log_to=tensorboard", ["tensorboard"]),
    ("log_to=[tensorboard, wandb]", ["tensorboard", "wandb"]),
    ("log_to=wandb, mlflow", ["wandb", "mlflow"]),
    ("log_to=[]", []),
    ("log_to=", []),
])  # fmt: skip
def test_trackers_may_be_a_list_or_a_text(word, names):
    assert tracker_names(config(word).log_to) == names


@pytest.mark.parametrize(("word", "steps"), [
    ("profiler_steps=0", TracedSteps(0)),
    ("profiler_steps=5", TracedSteps(5)),
    ("profiler_steps=100-104", TracedSteps(steps=(100, 104))),
])  # fmt: skip
def test_traced_steps(word, steps):
    assert TracedSteps.of(config(word).profiler_steps) == steps


@pytest.mark.parametrize(("word", "message"), [
    ("log_to=wandbb", "has wandbb, which is none of tensorboard, wandb, mlflow. Nearest that works: wandb."),
    ("log_to=3", "log_to=3 has 3, which is none of tensorboard, wandb, mlflow."),
    ("log_to=[wandb, wandb]", "names one twice. Nearest that works: wandb."),
    ("profiler_steps=9-3", "is neither a number of steps nor a range such as 100-104. Nearest that works: 0."),
    ("profiler_steps=-1", "is neither a number of steps nor a range"),
    ("profiler_steps=true", "is neither a number of steps nor a range"),
    ("profiler_steps=0-4", "is neither a number of steps nor a range"),
    ("prometheus_port=65536", "prometheus_port=65536 must be at most 65535. Nearest that works: 65535."),
])  # fmt: skip
def test_what_they_refuse(word, message):
    with pytest.raises(UserError) as refused:
        config(word)
    assert message in str(refused.value)


def test_what_is_not_installed_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    require_trackers("tensorboard")
    with pytest.raises(UserError) as refused:
        require_trackers("tensorboard,wandb,mlflow")
    assert str(refused.value).splitlines() == [
        "log_to=wandb needs wandb: pip install 'maxtext-lite[wandb]'.",
        "log_to=mlflow needs mlflow: pip install 'maxtext-lite[mlflow]'.",
    ]
