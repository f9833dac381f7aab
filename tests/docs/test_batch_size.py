"""Every number of docs/batch_size.md is what the plan, or the run, makes of the same keys."""

import re
from fractions import Fraction

import pytest

from maxtext_lite.analysis.laws import BATCH_LAWS, Budget
from maxtext_lite.analysis.pipeline_view import timetable
from maxtext_lite.batching import count_parameters, make_plan
from maxtext_lite.config import load_config
from maxtext_lite.post_training.keys import RLRunConfig
from maxtext_lite.training.noise import NoiseScale
from maxtext_lite.training.optimizer import LossScaling
from tests.source_tree import REPOSITORY

PAGE = (REPOSITORY / "docs" / "batch_size.md").read_text(encoding="utf-8")
KEYS = RLRunConfig.model_fields
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


def words_of(row, keys=KEYS):
    """The keys of these that a row sets, and the mesh that it names."""
    axes = re.findall(r"(\w+) (\d+)", row.get("mesh of 8 devices", ""))
    words = [f"ici_{axis}_parallelism={size}" for axis, size in axes]
    words += [f"{key}={row[key]}" for key in row if key in keys]
    return " ".join(words)


# What a column is in the plan, where it is not called so.
ATTRIBUTES = {
    "tokens_per_step (length 4096)": "tokens_per_step",
    "batch shards": "batch_shards",
    "slots": "micro_batch_slots",
    "empty": "empty_slots_per_micro_batch",
    "loads per step": "loads_per_step",
    "examples per loading host and load": "examples_per_loading_host",
    "examples trained on": "total_examples",
    "R": "diloco_num_replicas",
}


def check(row, plan):
    """Whether what the row says of the plan is so, of two columns at least."""
    names = {heading: ATTRIBUTES.get(heading, heading) for heading in row}
    told = {heading: name for heading, name in names.items() if hasattr(plan, name)}
    assert len(told) >= 2
    for heading, name in told.items():
        derived = row[heading] == "-1"
        assert derived or getattr(plan, name) == Fraction(row[heading]), heading


def test_the_worked_plans():
    for row in table("per_device_batch_size", "devices"):
        words = f"{DATA_MESH} max_target_length=4096 {words_of(row)}"
        check(row, plan_of(words, num_devices=int(row["devices"])))


def test_what_is_derived():
    for row in table("global_batch_size"):
        plan = plan_of(f"{words_of(row)} {DATA_MESH}", num_devices=int(row["devices"]))
        key, value = row["follows"].split("=")
        assert getattr(plan, key) == Fraction(value)
        assert plan.global_batch_to_train == int(row["global_batch_size"])


def test_the_slots():
    for row in table("per_device_batch_size", "mesh of 8 devices"):
        check(row, plan_of(words_of(row), num_devices=8))


def test_the_loading_hosts():
    for row in table("x"):
        words = f"expansion_factor_real_data={row['x']} global_batch_size={row['global_batch_to_train']}"
        hosts = int(row["hosts"])
        plan = plan_of(
            f"{DATA_MESH} {words} per_device_batch_size=-1",
            num_devices=hosts,
            num_hosts=hosts,
        )
        check(row, plan)
        assert len(plan.loading_hosts) == int(row["loading hosts"])


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
        assert len(timetable(plan.pipeline_shape, "1f1b")[0]) == int(
            row["ticks of 1f1b"]
        )


def test_the_ramp_and_what_a_schedule_counts():
    plan = plan_of(RAMP)
    for stage, row in zip(plan.stages, table("stage", "first step"), strict=True):
        batch, samples = stage.global_batch_to_train, stage.samples
        numbers = stage.first_step, stage.num_steps, batch, samples
        assert [str(number or "") for number in numbers] == [*row.values()][1:]
    for row in table("after step"):
        seen = plan.rampup.samples_before(int(row["after step"]) + 1)
        assert seen == int(row["examples seen"])
        assert Fraction(seen, plan.global_batch_to_train) == Fraction(
            row["position in examples"]
        )


def test_the_epochs():
    for row in table("num_epochs"):
        batch = row["global_batch_to_train"]
        words = words_of(row, ("num_epochs", "last_batch"))
        words += f" per_device_batch_size={batch}"
        plan = plan_of(words, num_examples=int(row["num_examples"]))
        check(row, plan)
        end = f"{plan.dropped_examples} dropped" if plan.dropped_examples else "whole"
        if plan.last_batch_examples is not None:
            end = f"{plan.last_batch_examples} of {batch}"
        assert end == row["at the end"]
    plan = plan_of(f"{RAMP} num_epochs=1 last_batch=train", num_examples=20)
    said = "20 examples under the ramp above are its 10 steps (17 examples) and, with `train`, an eleventh of 3"
    assert said in PAGE
    assert (plan.steps, plan.last_batch_examples) == (11, 3)
    assert plan.rampup.samples_before(11) == 17


def test_the_learning_rates_and_the_settings_of_adam():
    for row in table("base_global_batch_size"):
        plan = plan_of(
            f"{words_of(row)} per_device_batch_size={row['global_batch_to_train']}"
        )
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
        words = f"enable_diloco=true steps=240 {words_of(row)}"
        plan = plan_of(words, num_devices=8)
        check(row, plan)
        per_replica = int(row["slots per replica"])
        replicas = plan.diloco_num_replicas
        per_part = int(row["replicas per part of the data axis"])
        assert replicas == plan.mesh["data"] * per_part
        assert plan.micro_batch_slots == replicas * per_replica
        # Examples fill the slots from the first on.
        firsts = range(0, plan.micro_batch_slots, per_replica)
        idle = sum(first >= plan.micro_batch_to_train for first in firsts)
        assert idle == int(row["replicas without an example"])


def test_the_noise_scales():
    for row in table("groups (target tokens)"):
        examples = int(row["examples"])
        noise = NoiseScale().after(
            group_squares=float(row["sum of w/W x mean gradient squared"]),
            groups=len(row["groups (target tokens)"].split(", ")),
            grad_norm=float(row["gradient squared"]) ** 0.5,
            examples=examples,
        )
        if row["variance"] == "unknown":
            assert noise.examples is None
            continue
        assert noise.noise / examples == pytest.approx(float(row["variance"]))
        assert noise.signal == pytest.approx(float(row["true gradient squared"]))
        assert noise.examples == pytest.approx(float(row["gradient_noise_scale"]))


def test_the_loss_scale_and_the_loss_of_uneven_micro_batches():
    config = load_config(None, ["dtype=float16"])
    scaling = LossScaling(config.loss_scale, config.loss_scale_growth_interval)
    assert f"it starts at {float(scaling.init().scale):.0f}," in PAGE
    assert f"(100 x 2 + 300 x 4) / 400 = {(100 * 2 + 300 * 4) / 400}" in PAGE


def test_the_memory():
    for row in table("model"):
        config = load_config(None, [f"model_name={row['model']}"])
        memory = make_plan(config, num_devices=int(row["devices (fsdp)"])).memory
        assert count_parameters(config).total == int(row["parameters"])
        assert memory.most("params") == int(row["parameters, bytes per device"])
        assert memory.most("optimizer_state") == int(
            row["AdamW state, bytes per device"]
        )
    assert f"norm scales, {count_parameters(config).norms} parameters" in PAGE


def test_what_laws_say():
    units = {"M": 1e6, "B": 1e9, "T": 1e12}
    for row in table("parameters", "tokens", "Step Law"):
        parameters, tokens = (
            float(row[key][:-1]) * units[row[key][-1]]
            for key in ("parameters", "tokens")
        )
        found = [
            law.value(Budget(parameters, parameters, tokens)) for law in BATCH_LAWS
        ]
        assert [f"{value / 1e6:.3g}" for value in found[:-1]] == list(row.values())[2:]


def test_rl_batches():
    for row in table("batch_size", "num_generations"):
        devices = int(row["devices that train"])
        words = words_of(row, ("batch_size", "num_generations", "micro_batch_size"))
        check(row, plan_of(words, "configs/post_train/rl.yml", num_devices=devices))
