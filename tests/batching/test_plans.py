"""Plans are those worked out by hand in plans.yml; what a resume changes; and what all plans have in common."""

import json

import pytest

from maxtext_lite.batching import (
    format_plan,
    load_plan,
    make_plan,
    resumed,
    row_slots,
    scaled_optimizer,
)
from maxtext_lite.config import UserError, load_config
from tests.tables import read_table

ROWS = read_table("batching/plans.yml")


def plan_of(*overrides, num_devices=8, **machine):
    return make_plan(load_config(None, overrides), num_devices=num_devices, **machine)


def entry(plan, name):
    """What plan.json has under a dotted name, or the plan where plan.json has none of its first word."""
    first, *rest = name.split(".")
    written = json.loads(json.dumps(plan.to_json()))
    value = written[first] if first in written else getattr(plan, first)
    for part in rest:
        value = value[int(part)] if isinstance(value, list) else value.get(part)
    return value


@pytest.mark.fast
@pytest.mark.parametrize(
    "row", [pytest.param(row, id=" ".join(row["keys"])) for row in ROWS]
)
def test_a_plan_is_as_worked_out_by_hand(row):
    config = load_config(row.get("file"), row["keys"])
    plan = make_plan(config, **{"num_devices": 1, **row["machine"]})
    if "resumed" in row:
        plan = resumed(config, plan, **row["resumed"])
    for name, expected in row["plan"].items():
        found = entry(plan, name)
        assert found == (
            pytest.approx(expected, rel=1e-15)
            if isinstance(expected, float)
            else expected
        ), name
    table = [line.strip() for line in format_plan(plan).splitlines()]
    for name, text in row.get("table", {}).items():
        (shown,) = [
            line.removeprefix(name).strip()
            for line in table
            if line.startswith(f"{name}  ")
        ]
        assert shown.startswith(text)
    if "warnings" in row:
        assert len(plan.warnings) == len(row["warnings"]), plan.warnings
        for named, warning in zip(row["warnings"], plan.warnings, strict=True):
            assert named in warning


@pytest.mark.parametrize(
    ("examples", "shards", "hosts", "pieces", "slots"),
    [
        (16, 8, 1, 1, 16),
        (17, 8, 1, 1, 24),
        (7, 2, 3, 1, 12),
        (6, 1, 1, 4, 8),
        (16, 4, 2, 4, 16),
        (1, 1, 3, 2, 6),
    ],
)
def test_rows_are_rounded_up_to_shards_hosts_and_pipeline_pieces(
    examples, shards, hosts, pieces, slots
):
    assert row_slots(examples, shards, hosts, pieces) == slots


def test_a_scaled_config_is_not_scaled_again():
    config = load_config(
        None,
        [
            "learning_rate_scaling=sqrt",
            "base_global_batch_size=4",
            "scale_adam_with_batch=true",
        ],
    )
    scaled = scaled_optimizer(config, make_plan(config, num_devices=1))
    assert (scaled.learning_rate, scaled.adam_b1, scaled.adam_b2, scaled.adam_eps) == (
        6e-3,
        0.6,
        0.8,
        5e-9,
    )
    assert scaled_optimizer(scaled, make_plan(scaled, num_devices=1)) == scaled
    assert scaled.origins == config.origins


def test_an_evaluation_that_cannot_fit_is_warned_of():
    """64 times the rows of a micro-batch: the stream twice, and gate and up, beside the state; or a tile's logits."""
    keys = (
        "eval_per_device_batch_size=64",
        "per_device_batch_size=1",
        "base_mlp_dim=4096",
        "remat_policy=full",
        "num_vocab_tiling=-1",
        "ici_fsdp_parallelism=8",
    )
    config, held = load_config(None, keys), plan_of(*keys).memory.held

    def warnings(needed, *more):
        return plan_of(*keys, *more, device_memory_gb=needed / 1e9).warnings

    widths = 4 * (2 * config.base_emb_dim + 2 * 4096)
    needed = held + 64 * config.max_target_length * widths
    assert [warning.rpartition(" ")[2] for warning in warnings(needed - 1)] == [
        "eval_per_device_batch_size."
    ]
    assert warnings(needed) == ()
    assert warnings(needed - 1, "eval_interval=-1") == ()
    assert warnings(needed - 1, "eval_per_device_batch_size=1") == ()


def test_the_memory_of_a_ramp_is_that_of_its_target():
    keys = ["per_device_batch_size=4", "gradient_accumulation_steps=4"]
    ramp = [
        "enable_rampup_batch_size=true",
        "per_device_batch_size_start=1",
        "per_device_batch_size_increment=1",
    ]
    for mode in ("per_device_batch_size", "gradient_accumulation_steps"):
        assert (
            plan_of(*keys, *ramp, f"rampup_mode={mode}").memory == plan_of(*keys).memory
        )


def test_the_length_of_a_ramped_run_in_steps_of_the_target():
    """8 steps of 4, 4 of 8 would follow, of which two are left: 32 + 16 examples = 3 steps of 16."""
    ramp = (
        "enable_rampup_batch_size=true",
        "per_device_batch_size_start=4",
        "per_device_batch_size_increment=4",
    )
    plan = plan_of(
        "per_device_batch_size=16",
        *ramp,
        "global_rampup_samples=90",
        "steps=10",
        num_devices=1,
    )
    assert (
        plan.total_examples,
        plan.schedule_end("examples", 0, 0),
        plan.schedule_end("steps", 0, 0),
    ) == (48, 3, 10)
    assert plan.stage_at(31).global_batch_to_train == 4
    assert plan.stage_at(32).global_batch_to_train == 8


def test_examples_are_counted_only_for_a_config_that_can_be_planned():
    def count(config):
        assert config.num_epochs == 2
        return 1000

    assert (
        load_plan(None, ["num_epochs=2"], num_devices=8, num_examples=count)[1].steps
        == 15
    )
    for overrides in (
        ["num_epochs=2", "per_device_batch_size=0.3"],
        ["num_epochs=2", "stps=3"],
    ):
        with pytest.raises(UserError, match=overrides[1].partition("=")[0]):
            load_plan(
                None,
                overrides,
                num_devices=8,
                num_examples=lambda config: pytest.fail("was counted"),
            )
    assert (
        load_plan(
            None, num_devices=8, num_examples=lambda config: pytest.fail("was counted")
        )[1].epochs
        is None
    )


def test_missing_examples_are_named_with_all_other_problems():
    keys = ("num_epochs=2", "per_device_batch_size=0.3")
    with pytest.raises(UserError) as refused:
        plan_of(*keys)
    assert [each.partition("=")[0] for each in refused.value.problems] == [
        "num_epochs",
        "per_device_batch_size",
    ]
