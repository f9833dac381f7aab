"""A random config plans, with arithmetic that holds, or is refused with changes that lead to a plan."""

import random

import yaml

from maxtext_lite.batching import load_plan
from maxtext_lite.config import UserError
from tests.refusals import changes
from tests.source_tree import REPOSITORY

# Every scalar stays the text that the command line would have.
DRAWN = yaml.load(
    (REPOSITORY / "tests" / "batching" / "suggestions.yml").read_text(),
    Loader=yaml.CBaseLoader,
)


def asked(rng):
    """Words of a command line and a machine."""
    machine = {
        "num_devices": rng.choice([1, 4, 6, 8, 64]),
        "num_hosts": rng.choice([1, 1, 1, 1, 2, 3]),
    }
    words = ["num_experts=24"]  # for an expert axis to divide
    for often, share in (("often", 0.15), ("seldom", 0.04)):
        words += [
            f"{key}={rng.choice(values)}"
            for key, values in DRAWN[often].items()
            if rng.random() < share
        ]
    return words, machine


def planned(words, machine, changed):
    """(the plan or None, what is wrong) of a config with changes of keys and of the machine."""
    on = {name: int(changed.get(name, number)) for name, number in machine.items()}
    keys = [f"{key}={value}" for key, value in changed.items() if key not in machine]
    try:
        return load_plan(None, [*words, *keys], **on, num_examples=1000)[1], ()
    except UserError as error:
        return None, error.problems


def check_arithmetic(plan):
    trainers, slots = plan.num_devices, plan.micro_batch_slots
    assert plan.micro_batch_to_train == plan.per_device_batch_size * trainers
    assert (
        plan.global_batch_to_train
        == plan.micro_batch_to_train * plan.gradient_accumulation_steps
    )
    assert (
        plan.global_batch_to_load
        >= plan.global_batch_to_train * plan.expansion_factor_real_data
    )
    assert slots % plan.layout_shards == slots % plan.batch_shards == 0
    assert slots % plan.num_hosts == slots % plan.num_pipeline_microbatches == 0
    assert slots >= plan.micro_batch_to_train >= 1
    assert plan.steps >= 1
    assert 0 <= plan.adam_b1 < 1
    assert (plan.diloco_num_replicas or 0) % plan.mesh["data"] == 0
    assert 0 <= plan.dropped_examples < plan.global_batch_to_train


def test_a_random_config_plans_or_names_changes_that_lead_to_a_plan():
    """It may take more rounds of what the problems name first."""
    rng = random.Random(3)
    plans = 0
    for _ in range(60):
        words, machine = asked(rng)
        changed = {}
        plan, problems = planned(words, machine, changed)
        plans += plan is not None
        for _ in range(4):
            if plan is not None:
                break
            for gone in (
                problem.partition("=")[0]
                for problem in problems
                if "Nearest" not in problem
            ):
                words = [word for word in words if word.partition("=")[0] != gone]
            named = [changes(problem) for problem in problems if "Nearest" in problem]
            for first, *_ in named:
                changed |= first
            plan, problems = planned(words, machine, changed)
        assert not problems, (words, machine, changed, problems)
        check_arithmetic(plan)
    assert 10 < plans < 50
