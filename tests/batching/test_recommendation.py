"""What the laws recommend is legal on the machine, near what they say, and consistent with itself."""

import json
import math
from fractions import Fraction

import pytest

from maxtext_lite.analysis.laws import (
    Interval,
    Measured,
    budget_of,
    critical_at,
    doubling_tokens,
    interval,
)
from maxtext_lite.analysis.recommendation import (
    Machine,
    measured_batch,
    nearest_legal,
    ramp_of,
    recommend,
)
from maxtext_lite.batching import flops_per_example, make_plan
from maxtext_lite.batching.devices import device_named
from maxtext_lite.config import load_config

EIGHT_B = ["model_name=llama3-8b", "max_target_length=4096"]
H200 = device_named("h200", option="--device")


def test_legal_batches_plan_as_they_stand_and_fit():
    config, machine = load_config(overrides=EIGHT_B), Machine(64, 8, H200)
    budget = budget_of(config, tokens=160e9, loss=None)
    found = recommend(config, budget, machine)
    best = interval(budget, "best")
    # The batch nearest to half of the lower end is below the widened interval, and not listed.
    wanted = [best.low, best.middle, best.high, best.high * 2]
    for legal, tokens in zip(found.legal, wanted, strict=True):
        assert abs(math.log(legal.tokens / tokens)) <= math.log(1.2)
        assert best.low / 2 <= legal.tokens <= best.high * 2
        assert legal.fits
        keys = {
            "per_device_batch_size": legal.per_device_batch_size,
            "gradient_accumulation_steps": legal.gradient_accumulation_steps,
            "steps": legal.steps,
        }
        plan = make_plan(config.model_copy(update=keys), num_devices=64, num_hosts=8)
        assert plan.global_batch_to_train == legal.examples
        assert legal.tokens == legal.examples * 4096
        assert (legal.steps - 1) * legal.tokens < 160e9 <= legal.steps * legal.tokens
        flops = legal.steps * legal.examples * flops_per_example(config, 4096)
        seconds = [share * 64 * 989.4e12 for share in (0.5, 0.3)]
        days = (legal.days.low, legal.days.high)
        assert days == pytest.approx([flops / peak / 86_400 for peak in seconds])


def test_short_memory_lowers_the_per_device_batch():
    config = load_config(overrides=[*EIGHT_B, "per_device_batch_size=32"])
    small = nearest_legal(
        config, 4e6, 160e9, Machine(64, 8, device_named("h100", option="--device"))
    )
    large = nearest_legal(config, 4e6, 160e9, Machine(64, 8, None))
    assert small.fits
    assert small.per_device_batch_size < large.per_device_batch_size
    assert large.fits is large.days is None
    v5e = device_named("v5e", option="--device")
    none = nearest_legal(config, 4e6, 160e9, Machine(8, 1, v5e))
    assert (
        none.fits is False
    )  # 8B of weights and moments are more than 8 x 16 GB hold with activations


@pytest.mark.parametrize(("devices", "tokens"), [(1, 100), (3, 2_000), (96, 7_777_777)])
def test_the_nearest_batch_on_any_machine(devices, tokens):
    config = load_config(
        overrides=[
            "per_device_batch_size=4",
            "ici_fsdp_parallelism=1",
            "ici_data_parallelism=-1",
        ]
    )
    legal = nearest_legal(config, tokens, 1e9, Machine(devices, 1, None))
    examples = max(tokens / 256, 1)
    assert abs(math.log(legal.examples / examples)) <= math.log(
        1.5 if tokens == 2_000 else 1.2
    )
    assert (
        legal.per_device_batch_size * devices * legal.gradient_accumulation_steps
        == legal.examples
    )
    assert legal.per_device_batch_size <= 4


@pytest.mark.parametrize(
    ("words", "examples", "per_device", "accumulation", "empty"),
    [
        (
            ["per_device_batch_size=1", "ici_fsdp_parallelism=8"],
            12,
            1,
            2,
            0,
        ),  # not 3 x 4, in 8 slots each
        (
            ["per_device_batch_size=1", "ici_fsdp_parallelism=8"],
            2,
            Fraction(1, 4),
            1,
            6,
        ),  # the laws want no more
    ],
)
def test_slots_are_full_where_the_batch_has_as_many_examples_and_days_count_the_empty(
    words, examples, per_device, accumulation, empty
):
    config = load_config(overrides=[*words, "dtype=bfloat16", "ici_data_parallelism=1"])
    legal = nearest_legal(config, examples * 256, 2.56e9, Machine(8, 1, H200))
    assert (legal.per_device_batch_size, legal.gradient_accumulation_steps) == (
        per_device,
        accumulation,
    )
    assert legal.empty_slots == empty
    rows = legal.steps * (legal.examples + legal.empty_slots)
    assert legal.days.low == pytest.approx(
        rows * flops_per_example(config, 256) / (0.5 * 8 * 989.4e12) / 86_400
    )


def test_adamw_ramps_by_doublings_that_plan_and_muon_does_not():
    ramp = ramp_of("adamw", 2.6e6, 160e9)
    assert ramp.batches == (325_000, 650_000, 1_300_000, 2_600_000)
    assert ramp.starts == tuple(doubling_tokens(batch) for batch in ramp.batches[1:])
    assert ramp_of("adamw", 2.6e6, 1e9).batches == (
        325_000,
        650_000,
        1_300_000,
    )  # 2.6M comes after 3.9B tokens
    assert not ramp_of("muon", 2.6e6, 160e9).batches
    assert not ramp_of("lion", 2.6e6, 160e9).batches
    config = load_config(overrides=EIGHT_B)
    found = recommend(
        config, budget_of(config, tokens=160e9, loss=None), Machine(64, 8, H200)
    )
    words = [*EIGHT_B, *found.ramp.overrides]
    plan = make_plan(load_config(overrides=words), num_devices=64, num_hosts=8)
    starts = [0, *(start.middle for start in found.ramp.starts)]
    for stage, start, factor in zip(plan.stages, starts, (8, 4, 2, 1), strict=True):
        assert stage.global_batch_to_train * factor == plan.global_batch_to_train
        # Thresholds are printed with three digits.
        assert stage.threshold * 4096 == pytest.approx(start, rel=5e-3)


def test_a_schedule_follows_from_a_measured_critical_batch():
    measured = Measured(650_000, 1e9, "branches")
    # The laws' exponents, 0.47 and 0.462, through the measured point.
    assert doubling_tokens(650_000, measured) == Interval(1e9, 1e9)
    doubled = doubling_tokens(1_300_000, measured)
    assert doubled.low == pytest.approx(1e9 * 2 ** (1 / 0.47))
    assert doubled.high == pytest.approx(1e9 * 2 ** (1 / 0.462))
    assert critical_at(4e9, measured) == pytest.approx(650_000 * 4**0.462)
    assert ramp_of("adamw", 2.6e6, 2e9, measured).batches == (325_000, 650_000)


@pytest.mark.parametrize(
    ("branches", "lines", "expected"),
    [
        ([(3, 20.0), (6, None)], [8.0], (20 * 256, 30 * 256)),
        ([], [None, 8.0, None], (8 * 256, 20 * 256)),
    ],
)
def test_the_critical_batch_of_a_run_is_that_of_its_branches_or_its_noise_scale(
    tmp_path, branches, lines, expected
):
    run = tmp_path / "run"
    run.mkdir()
    for step, critical in branches:
        directory = tmp_path / f"run-branches-{step}"
        directory.mkdir()
        outcome = {"step": step, "examples_seen": 10 * step, "critical_batch": critical}
        (directory / "branches.json").write_text(json.dumps(outcome))
    records = [
        {"step": step, "examples_seen": 10 * step, "gradient_noise_scale": scale}
        for step, scale in enumerate(lines, 1)
    ]
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(each) + "\n" for each in records)
    )
    found = measured_batch(run, load_config())
    assert (found.batch, found.tokens) == expected
