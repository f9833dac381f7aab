"""Every number of docs/batch_size.md is what the plan, or the run, makes of the same keys."""

import re
from fractions import Fraction

import pytest

from maxtext_lite.batching import count_parameters, make_plan
from maxtext_lite.batching.laws import BATCH_LAWS, Budget
from maxtext_lite.config import UserError, load_config
from maxtext_lite.training.accumulate import loss_scaling
from maxtext_lite.training.noise import NoiseScale
from tests.source_tree import REPOSITORY

PAGE = (REPOSITORY / "docs" / "batch_size.md").read_text(encoding="utf-8")
DATA_MESH = "ici_data_parallelism=-1 ici_fsdp_parallelism=1"
RAMP = (
    "enable_rampup_batch_size=true per_device_batch_size_start=1 per_device_batch_size=4 "
    "per_device_batch_size_increment=1 global_rampup_samples=15"
)


def table(*headings):
    """The rows of the one table of the page that has these column headings first, as dicts by heading."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE):
        names, _, *rows = [
            [cell.strip() for cell in line.strip("|\n").split("|")]
            for line in block.splitlines()
        ]
        if names[: len(headings)] == list(headings):
            found.append([dict(zip(names, row, strict=True)) for row in rows])
    (rows,) = found
    return rows


def plan_of(words, file=None, *, num_devices=1, **machine):
    return make_plan(
        load_config(file, words.split()), num_devices=num_devices, **machine
    )


def words_of(row, *keys):
    return " ".join(f"{key}={row[key]}" for key in keys)


def mesh_of(row):
    axes = re.findall(r"(\w+) (\d+)", row["mesh of 8 devices"])
    return " ".join(f"ici_{axis}_parallelism={size}" for axis, size in axes)


def numbers(row, *headings):
    return [Fraction(row[heading]) for heading in headings]


def test_the_worked_plans():
    for row in table("per_device_batch_size", "devices"):
        words = words_of(row, "per_device_batch_size", "gradient_accumulation_steps")
        plan = plan_of(
            f"{DATA_MESH} max_target_length=4096 {words}",
            num_devices=int(row["devices"]),
        )
        found = [
            plan.micro_batch_to_train,
            plan.global_batch_to_train,
            plan.tokens_per_step,
        ]
        tokens = "tokens_per_step (length 4096)"
        assert found == numbers(
            row, "micro_batch_to_train", "global_batch_to_train", tokens
        )


def test_what_is_derived():
    for row in table("global_batch_size"):
        words = words_of(
            row,
            "global_batch_size",
            "per_device_batch_size",
            "gradient_accumulation_steps",
        )
        plan = plan_of(f"{words} {DATA_MESH}", num_devices=int(row["devices"]))
        key, value = row["follows"].split("=")
        assert getattr(plan, key) == Fraction(value)
        assert plan.global_batch_to_train == int(row["global_batch_size"])


def test_the_slots():
    for row in table("per_device_batch_size", "mesh of 8 devices"):
        plan = plan_of(
            f"{mesh_of(row)} {words_of(row, 'per_device_batch_size')}", num_devices=8
        )
        found = [
            plan.batch_shards,
            plan.micro_batch_to_train,
            plan.micro_batch_slots,
            plan.empty_slots_per_micro_batch,
        ]
        assert found == numbers(
            row, "batch shards", "micro_batch_to_train", "slots", "empty"
        )


def test_the_loading_hosts():
    for row in table("x"):
        words = f"expansion_factor_real_data={row['x']} global_batch_size={row['global_batch_to_train']}"
        hosts = int(row["hosts"])
        plan = plan_of(
            f"{DATA_MESH} {words} per_device_batch_size=-1",
            num_devices=hosts,
            num_hosts=hosts,
        )
        found = [
            plan.global_batch_to_load,
            len(plan.loading_hosts),
            plan.examples_per_loading_host,
        ]
        assert found == numbers(
            row,
            "global_batch_to_load",
            "loading hosts",
            "examples per loading host and load",
        )
        assert plan.loads_per_step == int(row["loads per step"])


def test_the_bubbles_and_the_schedules():
    stages = "ici_pipeline_parallelism={S} num_pipeline_microbatches={M} base_num_decoder_layers="
    for row in table("S", "R", "M"):
        words = stages.format(**row) + str(int(row["S"]) * int(row["R"]))
        plan = plan_of(words, num_devices=int(row["S"]))
        assert (
            f"{float(plan.pipeline_bubble_fraction):.4f}"
            == row["pipeline_bubble_fraction"]
        )
    for row in table("S", "M", "A", "gpipe"):
        words = (
            f"{stages.format(**row)}{row['S']} gradient_accumulation_steps={row['A']}"
        )
        plan = plan_of(words, num_devices=int(row["S"]))
        for schedule, cost in plan.pipeline_schedules.items():
            assert f"{float(cost.bubble_fraction):.4f}" == row[schedule]
        assert len(plan.pipeline_shape.timetable("1f1b")[0]) == int(
            row["ticks of 1f1b"]
        )


def test_the_ramp_and_what_a_schedule_counts():
    plan = plan_of(RAMP)
    for stage, row in zip(plan.stages, table("stage", "first step"), strict=True):
        shown = (
            stage.first_step,
            stage.num_steps,
            stage.global_batch_to_train,
            stage.samples,
        )
        assert ["" if number is None else str(number) for number in shown] == list(
            row.values()
        )[1:]
    for row in table("after step"):
        seen = plan.rampup.samples_before(int(row["after step"]) + 1)
        assert seen == int(row["examples seen"])
        assert Fraction(seen, plan.global_batch_to_train) == Fraction(
            row["position in examples"]
        )


def test_the_epochs():
    for row in table("num_epochs"):
        batch = row["global_batch_to_train"]
        words = (
            f"{words_of(row, 'num_epochs', 'last_batch')} per_device_batch_size={batch}"
        )
        plan = plan_of(words, num_examples=int(row["num_examples"]))
        assert [plan.steps, plan.total_examples] == numbers(
            row, "steps", "examples trained on"
        )
        end = f"{plan.dropped_examples} dropped" if plan.dropped_examples else "whole"
        if plan.last_batch_examples is not None:
            end = f"{plan.last_batch_examples} of {batch}"
        assert end == row["at the end"]
    plan = plan_of(f"{RAMP} num_epochs=1 last_batch=train", num_examples=20)
    assert (
        "20 examples under the ramp above are its 10 steps (17 examples) and, with `train`, an eleventh of 3"
        in PAGE
    )
    assert (plan.steps, plan.last_batch_examples, plan.rampup.samples_before(11)) == (
        11,
        3,
        17,
    )
    with pytest.raises(UserError, match=r"num_epochs=0\.5"):
        plan_of("num_epochs=0.5", num_examples=1001)


def test_the_learning_rates_and_the_settings_of_adam():
    for row in table("base_global_batch_size"):
        words = words_of(row, "base_global_batch_size", "learning_rate_scaling")
        plan = plan_of(f"{words} per_device_batch_size={row['global_batch_to_train']}")
        assert plan.scaling.batch_ratio == Fraction(row["m"])
        assert plan.learning_rate_multiplier == float(row["learning_rate_multiplier"])
        assert plan.scaling.scaled["learning_rate"] == float(
            row["learning_rate 0.003 becomes"]
        )
    for row in table("m"):
        scaled = "base_global_batch_size=40 learning_rate_scaling=sqrt scale_adam_with_batch=true"
        plan = plan_of(f"{scaled} per_device_batch_size={Fraction(row['m']) * 40}")
        assert (plan.adam_b1, plan.adam_b2) == (
            float(row["adam_b1"]),
            float(row["adam_b2"]),
        )
        assert f"{plan.adam_eps:.4g}" == row["adam_eps"]


def test_the_replicas():
    for row in table("mesh of 8 devices"):
        words = f"{mesh_of(row)} {words_of(row, 'per_device_batch_size', 'diloco_num_replicas')}"
        plan = plan_of(f"enable_diloco=true steps=240 {words}", num_devices=8)
        found = [
            plan.diloco_num_replicas,
            plan.micro_batch_to_train,
            plan.micro_batch_slots,
        ]
        assert found == numbers(row, "R", "micro_batch_to_train", "slots")
        assert found[0] == plan.mesh["data"] * int(
            row["replicas per part of the data axis"]
        )
        assert found[2] == found[0] * int(row["slots per replica"])
        firsts = range(
            0, found[2], int(row["slots per replica"])
        )  # examples fill the slots from the first on
        idle = sum(first >= found[1] for first in firsts)
        assert idle == int(row["replicas without an example"])
        assert [
            f"leaves {idle} of {found[0]} DiLoCo" in warning
            for warning in plan.warnings
        ] == [True] * bool(idle)


def test_the_noise_scales():
    for row in table("groups (target tokens)"):
        squares, whole = (
            float(row[name])
            for name in ("sum of w/W x mean gradient squared", "gradient squared")
        )
        groups, examples = (
            len(row["groups (target tokens)"].split(", ")),
            int(row["examples"]),
        )
        noise = NoiseScale().after(
            group_squares=squares,
            groups=groups,
            grad_norm=whole**0.5,
            examples=examples,
        )
        if row["variance"] == "unknown":
            assert noise.examples is None
            continue
        assert noise.noise / examples == pytest.approx(float(row["variance"]))
        assert noise.signal == pytest.approx(float(row["true gradient squared"]))
        assert noise.examples == pytest.approx(float(row["gradient_noise_scale"]))


def test_the_loss_scale_and_the_loss_of_uneven_micro_batches():
    scaling = loss_scaling(load_config(None, ["dtype=float16"]))
    assert f"it starts at {float(scaling.init().scale):.0f}," in PAGE
    assert f"(100 x 2 + 300 x 4) / 400 = {(100 * 2 + 300 * 4) / 400}" in PAGE


def test_the_memory():
    for row in table("model"):
        config = load_config(None, [f"model_name={row['model']}"])
        memory = make_plan(config, num_devices=int(row["devices (fsdp)"])).memory
        assert count_parameters(config).total == int(row["parameters"])
        assert memory.params == int(row["parameters, bytes per device"])
        assert memory.optimizer_state == int(row["AdamW state, bytes per device"])
    assert f"the norm scales, {count_parameters(config).norms} parameters" in PAGE


def test_what_laws_say():
    units = {"M": 1e6, "B": 1e9, "T": 1e12}
    for row in table("parameters", "tokens", "Step Law"):
        parameters, tokens = (
            float(row[key][:-1]) * units[row[key][-1]]
            for key in ("parameters", "tokens")
        )
        found = [
            law.tokens(Budget(parameters, parameters, tokens)) for law in BATCH_LAWS
        ]
        assert [f"{value / 1e6:.3g}" for value in found[:-1]] == list(row.values())[2:]


def test_rl_batches():
    for row in table("batch_size", "num_generations"):
        words = words_of(row, "batch_size", "num_generations", "micro_batch_size")
        plan = plan_of(
            words,
            "configs/post_train/rl.yml",
            num_devices=int(row["devices that train"]),
        )
        for name in (
            "global_batch_to_train",
            "gradient_accumulation_steps",
            "per_device_batch_size",
        ):
            assert getattr(plan, name) == Fraction(row[name])
