import random
from fractions import Fraction

import pytest

from maxtext_lite.batching.planning import load_plan, make_plan
from maxtext_lite.batching.sizes import Sizes, derive_sizes
from maxtext_lite.batching.solve import refusals
from maxtext_lite.batching.topology import Topology
from maxtext_lite.config import UserError, load_config, parse_value
from maxtext_lite.config.schema import Config
from tests.refusals import RL_FILE, changes, draw, random_words
from tests.suggestions import failures

BASE = load_config()
KEYS = BASE.model_dump()


def configured(values):
    """A config with values as written in a message or on a command line."""
    parsed = {key: parse_value(str(value)).value for key, value in values.items()}
    return Config.model_validate(KEYS | parsed)


def changed(values, machine, edit):
    machine_edit = {key: int(value) for key, value in edit.items() if key in machine}
    return values | {key: value for key, value in edit.items() if key not in machine}, machine | machine_edit


@pytest.mark.parametrize("seed", range(4))
def test_random_configs_plan_or_name_values_that_work(seed):
    rng = random.Random(seed)
    planned = 0
    for _ in range(400):
        values, machine, examples = draw(rng)
        try:
            plan = make_plan(configured(values), **machine, num_examples=examples)
            check_arithmetic(plan, values, machine)
            planned += 1
            continue
        except UserError as error:
            problems = error.problems
        if len(problems) == 1:
            for edit in changes(problems[0]):
                edited, on = changed(values, machine, edit)
                make_plan(configured(edited), **on, num_examples=examples)
        for problem in problems:
            values, machine = changed(values, machine, changes(problem)[0])
        make_plan(configured(values), **machine, num_examples=examples)
    assert planned > 5


def test_shards_of_the_tokens_plan_or_name_values_that_work():
    rng = random.Random(0)
    refused = 0
    for _ in range(300):
        tiles = rng.choice([1, 1, 3, 4, 64])
        values = {"max_target_length": tiles * rng.choice([1, 5, 16, 64]), "num_vocab_tiling": tiles,
                  "attention": rng.choice(["auto", "dot_product", "splash"])}  # fmt: skip
        values |= {f"{scope}_context_parallelism": rng.choice([1, 2, 3, 4, 8, -1][:most])
                   for scope, most in (("ici", 5), ("dcn", 2))}  # fmt: skip
        machine = {"num_devices": rng.choice([8, 16, 48]), "num_hosts": 1}
        try:
            plan = make_plan(configured(values), **machine)
            tokens, rest = divmod(values["max_target_length"], plan.mesh["context"])
            assert rest == tokens % tiles == 0
            assert plan.mesh["context"] == 1 or tokens % (256 if values["attention"] == "splash" else 2) == 0
            continue
        except UserError as error:
            problems = error.problems
        refused += 1
        if len(problems) == 1:
            for edit in changes(problems[0]):
                edited, on = changed(values, machine, edit)
                make_plan(configured(edited), **on)
        for problem in problems:
            values, machine = changed(values, machine, changes(problem)[0])
        make_plan(configured(values), **machine)
    assert 100 < refused < 250


def test_wrong_types_are_refused_along_with_broken_rules():
    rng = random.Random(7)
    wrong = {"per_device_batch_size": ["0", "-2"], "gradient_accumulation_steps": [0, "x"], "global_batch_size": [-3],
             "ici_tensor_parallelism": [0], "per_device_batch_size_start": ["0"], "expansion_factor_real_data": ["-2"],
             "steps": [0, "1.5", 30], "optimizer": ["adam"], "base_num_kv_heads": [3], "last_batch": ["train", "all"],
             "scale_adam_with_batch": ["true"], "base_global_batch_size": [-1], "num_epochs": [-1, "x"],
             "learning_rate_scaling": ["square"], "diloco_num_replicas": [0]}  # fmt: skip
    for _ in range(120):
        values, machine, examples = draw(rng)
        values |= {key: rng.choice(wrong[key]) for key in rng.sample(list(wrong), 2)}
        with pytest.raises(UserError) as refused:
            load_plan(None, [f"{key}={value}" for key, value in values.items()], **machine, num_examples=examples)
        for problem in refused.value.problems:
            values, machine = changed(values, machine, changes(problem)[0])
        load_plan(None, [f"{key}={value}" for key, value in values.items()], **machine, num_examples=examples)


def planned(file, words, machine, edit=()):
    """The problems of a config with changes, as a user makes them; none where it can be planned."""
    keys = {key: value for key, value in dict(edit).items() if key not in machine}
    machine = machine | {key: int(value) for key, value in dict(edit).items() if key in machine}
    try:
        load_plan(file, [*words, *(f"{key}={value}" for key, value in keys.items())], **machine, num_examples=1000)
    except UserError as error:
        return error.problems
    return ()


def test_the_suggestions_of_a_refusal_agree_and_work_together():
    rng = random.Random(5)
    refused = further = 0
    for _ in range(50):
        is_rl = rng.random() < 0.4
        file, words = RL_FILE if is_rl else None, random_words(rng, is_rl=is_rl)
        machine = {"num_devices": rng.choice([1, 6, 8, 64, 0, 10**12]), "num_hosts": rng.choice([1, 1, 2, 3])}
        for problem in planned(file, words, machine):
            if "Nearest" not in problem:  # nothing but to remove it
                assert " has no effect in RL, " in problem or problem.startswith("model_name="), problem
                words = [word for word in words if not word.startswith(problem.partition("=")[0] + "=")]
        named = [changes(problem) for problem in planned(file, words, machine)]
        refused += bool(named)
        together = {}
        for first, *_ in named:
            for key, value in first.items():
                assert together.setdefault(key, value) == value, (words, named)
        assert not planned(file, words, machine, together), (file, words, machine, together)
        for at, (_, *others) in enumerate(named):
            rest = {key: value for line in (*named[:at], *named[at + 1 :]) for key, value in line[0].items()}
            for other in others:
                further += 1
                assert not planned(file, words, machine, rest | other), (file, words, machine, rest, other)
    assert refused > 33
    assert further > 8


def test_first_suggestions_plan_and_take_under_a_second():
    refused, slowest_seconds, failed = failures(200, seed=0)  # `python -m tests.suggestions` tries more
    assert refused == 200
    assert not failed
    assert slowest_seconds < 1


def check_arithmetic(plan, values, machine):
    config = configured(values)
    num_devices, slots = machine["num_devices"], plan.micro_batch_slots
    assert plan.micro_batch_to_train == plan.per_device_batch_size * num_devices
    assert plan.global_batch_to_train == plan.micro_batch_to_train * plan.gradient_accumulation_steps
    assert plan.global_batch_to_load >= plan.global_batch_to_train * plan.expansion_factor_real_data
    assert config.global_batch_size in (0, plan.global_batch_to_train)
    assert config.per_device_batch_size in (-1, plan.per_device_batch_size)
    assert slots % plan.layout_shards == slots % plan.batch_shards == 0
    assert slots % machine["num_hosts"] == slots % plan.num_pipeline_microbatches == 0
    assert slots >= plan.micro_batch_to_train >= 1
    assert plan.steps >= 1
    assert 0 <= plan.adam_b1 < 1
    assert (plan.diloco_num_replicas or 0) % plan.mesh["data"] == 0
    if config.num_epochs:
        spent = plan.total_examples + plan.dropped_examples
        assert spent == config.num_epochs * plan.num_examples
        assert plan.dropped_examples < plan.global_batch_to_train
    assert plan.num_pipeline_microbatches % plan.num_pipeline_stages == 0


@pytest.mark.parametrize(
    ("values", "machine", "message"),
    [
        ({"per_device_batch_size": "0.3"}, (8, 1),
         "per_device_batch_size=0.3 x 8 devices = 2.4 examples, not a whole number. Nearest that work: 0.25 or 0.375."),
        ({"per_device_batch_size": "0.1"}, (8, 1),
         "per_device_batch_size=0.1 x 8 devices = 0.8 examples, not a whole number. Nearest that works: 0.125."),
        ({"pipeline_schedule": "1f1b", "ici_pipeline_parallelism": 2}, (4, 1),
         "pipeline_schedule=1f1b passes the stages once, but 4 layers on 2 stages with num_layers_per_pipeline_stage=1 "
         "go round 2 times. Nearest that work: num_layers_per_pipeline_stage=2 or pipeline_schedule=gpipe."),
        ({"num_pipeline_microbatches": 3, "ici_pipeline_parallelism": 2}, (4, 1),
         "num_pipeline_microbatches=3 is not a multiple of the 2 pipeline stages. Nearest that work: 2 or 4."),
        ({"expansion_factor_real_data": 3}, (8, 8),
         "expansion_factor_real_data=3: 8 hosts / 3 = 2.667 loading hosts, not a whole number. "
         "Nearest that work: 2 or 4."),
        ({"global_batch_size": 100}, (8, 1),
         "global_batch_size=100 contradicts per_device_batch_size=16 x 8 devices x gradient_accumulation_steps=1 = "
         "128. Nearest that work: global_batch_size=128 or per_device_batch_size=-1."),
        ({"ici_context_parallelism": 8, "max_target_length": 100}, (8, 1),
         "ici_context_parallelism=8 x 2 chunks = 16 does not divide max_target_length=100. "
         "Nearest that work: max_target_length=96 or max_target_length=112."),
        ({"ici_context_parallelism": 8, "max_target_length": 10, "num_vocab_tiling": 5}, (8, 1),
         "ici_context_parallelism=8 x 2 chunks = 16 does not divide max_target_length=10. "
         "Nearest that works: max_target_length=80."),
        ({"ici_context_parallelism": 4, "num_vocab_tiling": 128}, (8, 1),
         "num_vocab_tiling=128 does not divide the 64 tokens of each of 4 context shards. Nearest that works: 64."),
        ({"ici_context_parallelism": 4, "attention": "splash"}, (8, 1),
         "attention=splash needs max_target_length=256 to be a multiple of 1024, 128 for each of 2 chunks on 4 context "
         "shards. Nearest that works: max_target_length=1024."),
        ({}, (6, 1), "ici_fsdp_parallelism=-1, the remaining 6, does not divide base_emb_dim=128. "
                     "Nearest that works: ici_data_parallelism=3."),
    ],
)  # fmt: skip
def test_the_text_of_a_refusal(values, machine, message):
    with pytest.raises(UserError) as refused:
        make_plan(configured(values), num_devices=machine[0], num_hosts=machine[1])
    assert refused.value.problems == (message,)


def test_a_neighbour_that_another_rule_forbids_is_not_suggested():
    # 0.875 x 8 = 7 examples are whole, but 64 examples a step are no multiple of 7; nor of 5 or 6.
    values = {"per_device_batch_size": "0.9", "gradient_accumulation_steps": -1, "global_batch_size": 64}
    with pytest.raises(UserError, match=r"Nearest that work: 0\.5 or 1\.$"):
        make_plan(configured(values), num_devices=8)


def test_a_legal_plan_is_not_refused():
    assert refusals(BASE, Topology(1), []) == []
    assert isinstance(derive_sizes(BASE, Topology(1)), Sizes)
    assert Fraction(16) == BASE.per_device_batch_size


@pytest.mark.parametrize(
    ("num_devices", "stated", "nearest"),
    [(6, 4, "ici_fsdp_parallelism=2 ici_data_parallelism=3"), (12, 8, "ici_fsdp_parallelism=4 ici_data_parallelism=3")],
)
def test_a_mesh_that_does_not_fit_keeps_as_many_weight_shards_as_it_can(num_devices, stated, nearest):
    """The 128 dims of the model are not divisible by 3, 6 or 12, so that copies take the rest."""
    with pytest.raises(UserError, match=f"Nearest that works: {nearest}"):
        make_plan(configured({"ici_fsdp_parallelism": stated}), num_devices=num_devices)
