"""Random batch schedules, planned and run, and resumed with other splits: scripts/trial_schedules.py."""

import dataclasses
import importlib
import random

import pytest

from maxtext_lite.config import load_config
from maxtext_lite.training import train
from tests.source_tree import REPOSITORY


@pytest.fixture
def trials(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "scripts")
    return importlib.import_module("trial_schedules")


@pytest.mark.parametrize("number", range(10))
def test_plans_equal_a_replay(trials, number):
    assert (
        trials.check_plans(trials.draw(random.Random(f"suite {number}"), runs=False))
        == []
    )


@pytest.mark.parametrize("number", range(20))
def test_a_run_keeps_its_batches_on_another_machine(trials, number):
    assert trials.check_move(trials.draw_move(random.Random(f"suite {number}"))) == []


@pytest.mark.parametrize("number", range(2))
def test_a_run_resumed_twice_equals_an_unbroken_one(trials, number, tmp_path):
    trial = trials.draw(random.Random(f"suite {number}"), runs=True)
    machines = []
    for machine in (
        trial.machines
    ):  # with the micro-batches of three machines, on the devices of the tests
        per_device = machine.per_device * machine.devices / 8
        machines.append(
            dataclasses.replace(
                machine, hosts=1, devices=8, per_device=per_device, factor=1
            )
        )

    def run(folder, name, words, machine):
        train(load_config(None, [*words, *machine.words, f"run_name={name}"]))

    trial = dataclasses.replace(trial, machines=tuple(machines))
    assert trials.check_run(trial, tmp_path, run) == []
