import re
import shlex
from fractions import Fraction
from pathlib import Path

import jax.numpy as jnp
import pytest

from maxtext_lite.batching import count_parameters, make_plan
from maxtext_lite.batching.laws import BATCH_LAWS, Budget
from maxtext_lite.cli import run_command
from maxtext_lite.config import UserError, load_config
from maxtext_lite.plan import main
from maxtext_lite.training.accumulate import loss_scaling
from maxtext_lite.training.noise import NoiseScale

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "batch_size.md").read_text(encoding="utf-8")
DATA_MESH = ["ici_data_parallelism=-1", "ici_fsdp_parallelism=1"]


def table(*headings):
    """The rows of the one table of the page that has these column headings first, as dicts by heading."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE):
        names, _, *rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines()]
        if names[: len(headings)] == list(headings):
            found.append([dict(zip(names, row, strict=True)) for row in rows])
    (rows,) = found
    return rows


def plan_of(*overrides, num_devices, **machine):
    return make_plan(load_config(None, overrides), num_devices=num_devices, **machine)


def test_the_worked_plans():
    rows = table("per_device_batch_size", "devices", "gradient_accumulation_steps", "micro_batch_to_train")
    for row in rows:
        plan = plan_of(f"per_device_batch_size={row['per_device_batch_size']}", *DATA_MESH, "max_target_length=4096",
                       f"gradient_accumulation_steps={row['gradient_accumulation_steps']}",
                       num_devices=int(row["devices"]))  # fmt: skip
        assert plan.micro_batch_to_train == int(row["micro_batch_to_train"])
        assert plan.global_batch_to_train == int(row["global_batch_to_train"])
        assert plan.tokens_per_step == int(row["tokens_per_step (length 4096)"])
        # And by hand, from the formulas of the page.
        micro = Fraction(row["per_device_batch_size"]) * int(row["devices"])
        assert micro == int(row["micro_batch_to_train"])
        assert micro * int(row["gradient_accumulation_steps"]) == int(row["global_batch_to_train"])


def test_what_is_derived():
    for row in table("global_batch_size"):
        keys = ("global_batch_size", "per_device_batch_size", "gradient_accumulation_steps")
        plan = plan_of(*(f"{key}={row[key]}" for key in keys), *DATA_MESH, num_devices=int(row["devices"]))
        key, value = row["follows"].split("=")
        assert getattr(plan, key) == Fraction(value)
        assert plan.global_batch_to_train == int(row["global_batch_size"])


def test_what_laws_say():
    units = {"M": 1e6, "B": 1e9, "T": 1e12}
    for row in table("parameters", "tokens", "Step Law"):
        N, D = (float(row[key][:-1]) * units[row[key][-1]] for key in ("parameters", "tokens"))
        by_hand = {
            "Step Law": 0.58 * D**0.571,
            "DeepSeek": 0.292 * (6 * N * D) ** 0.3271,
            "Power Lines": 2048 * 0.0306 * D**0.383,
            "OLMo ladder": 327_680 * (N / 108e6) ** (2 / 3),
            "critical: Zhang": 512 * 22.91 * (D / 1e6) ** 0.47,
            "critical: Power Lines": 2048 * 0.0471 * D**0.462,
        }
        assert {law: row[law] for law in by_hand} == {law: f"{value / 1e6:.3g}" for law, value in by_hand.items()}
        tokens = [law.tokens(Budget(N, N, D)) for law in BATCH_LAWS]
        assert tokens[:-1] == pytest.approx([*by_hand.values()])


def test_the_slots():
    for row in table("per_device_batch_size", "mesh of 8 devices"):
        axes = re.findall(r"(\w+) (\d+)", row["mesh of 8 devices"])
        plan = plan_of(f"per_device_batch_size={row['per_device_batch_size']}",
                       *(f"ici_{axis}_parallelism={size}" for axis, size in axes), num_devices=8)  # fmt: skip
        assert [plan.batch_shards, plan.micro_batch_to_train, plan.micro_batch_slots,
                plan.empty_slots_per_micro_batch] == [
            int(row[name]) for name in ("batch shards", "micro_batch_to_train", "slots", "empty")]  # fmt: skip


def test_the_loading_hosts():
    for row in table("x"):
        batch, hosts = int(row["global_batch_to_train"]), int(row["hosts"])
        plan = plan_of(f"expansion_factor_real_data={row['x']}", f"global_batch_size={batch}", *DATA_MESH,
                       "per_device_batch_size=-1", num_devices=hosts, num_hosts=hosts)  # fmt: skip
        assert [plan.global_batch_to_load, len(plan.loading_hosts), plan.examples_per_loading_host,
                plan.loads_per_step] == [
            int(row[name]) for name in ("global_batch_to_load", "loading hosts",
                                        "examples per loading host and load", "loads per step")]  # fmt: skip


def test_the_bubbles():
    for row in table("S", "R", "M"):
        stages, repeats, pieces = (int(row[name]) for name in "SRM")
        plan = plan_of(f"ici_pipeline_parallelism={stages}", f"num_pipeline_microbatches={pieces}",
                       f"base_num_decoder_layers={stages * repeats}", num_devices=stages)  # fmt: skip
        assert f"{float(plan.pipeline_bubble_fraction):.4f}" == row["pipeline_bubble_fraction"]


def test_the_schedules():
    for row in table("S", "M", "A", "gpipe"):
        stages, pieces, accumulation = (int(row[name]) for name in "SMA")
        plan = plan_of(f"ici_pipeline_parallelism={stages}", f"num_pipeline_microbatches={pieces}",
                       f"gradient_accumulation_steps={accumulation}", f"base_num_decoder_layers={stages}",
                       num_devices=stages)  # fmt: skip
        for schedule, cost in plan.pipeline_schedules.items():
            assert f"{float(cost.bubble_fraction):.4f}" == row[schedule]
        assert len(plan.pipeline_shape.timetable("1f1b")[0]) == int(row["ticks of 1f1b"])


RAMP = ("enable_rampup_batch_size=true", "per_device_batch_size_start=1", "per_device_batch_size=4",
        "per_device_batch_size_increment=1", "global_rampup_samples=15")  # fmt: skip


def test_the_ramp():
    plan = plan_of(*RAMP, num_devices=1)
    rows = table("stage", "first step")
    for stage, row in zip(plan.stages, rows, strict=True):
        shown = (stage.first_step, stage.num_steps, stage.global_batch_to_train, stage.samples)
        assert ["" if number is None else str(number) for number in shown] == list(row.values())[1:]


def test_the_epochs():
    for row in table("num_epochs"):
        batch, examples = int(row["global_batch_to_train"]), int(row["num_examples"])
        plan = plan_of(f"num_epochs={row['num_epochs']}", f"last_batch={row['last_batch']}",
                       f"per_device_batch_size={batch}", num_devices=1, num_examples=examples)  # fmt: skip
        assert (plan.steps, plan.total_examples) == (int(row["steps"]), int(row["examples trained on"]))
        end = f"{plan.dropped_examples} dropped" if plan.dropped_examples else "whole"
        if plan.last_batch_examples is not None:
            end = f"{plan.last_batch_examples} of {batch}"
        assert end == row["at the end"]
        # And by hand.
        whole, rest = divmod(Fraction(row["num_epochs"]) * examples, batch)
        assert plan.steps == whole + (row["last_batch"] == "train" and rest > 0)
        assert row["at the end"].split()[0] == (str(rest) if rest else "whole")


def test_the_epochs_under_the_ramp():
    plan = plan_of(*RAMP, "num_epochs=1", "last_batch=train", num_devices=1, num_examples=20)
    assert (plan.steps, plan.last_batch_examples, plan.rampup.total_steps, plan.rampup.samples_before(11)) == (
        11,
        3,
        10,
        17,
    )
    assert "20 examples under the ramp above are its 10 steps (17 examples) and, with `train`, an eleventh of 3" in PAGE
    with pytest.raises(UserError, match=r"num_epochs=0\.5 x 1001 examples"):
        plan_of("num_epochs=0.5", num_devices=1, num_examples=1001)


def test_the_learning_rates():
    for row in table("base_global_batch_size"):
        plan = plan_of(*(f"{key}={row[key]}" for key in ("base_global_batch_size", "learning_rate_scaling")),
                       f"per_device_batch_size={row['global_batch_to_train']}", num_devices=1)  # fmt: skip
        assert plan.scaling.batch_ratio == Fraction(row["m"])
        assert plan.learning_rate_multiplier == float(row["learning_rate_multiplier"])
        assert plan.scaling.scaled["learning_rate"] == float(row["learning_rate 0.003 becomes"])
        # And by hand.
        ratio = int(row["global_batch_to_train"]) / int(row["base_global_batch_size"])
        multiplier = ratio if row["learning_rate_scaling"] == "linear" else ratio**0.5
        assert float(row["learning_rate 0.003 becomes"]) == pytest.approx(0.003 * multiplier, rel=1e-12)


def test_the_settings_of_adam():
    for row in table("m"):
        ratio = Fraction(row["m"])
        plan = plan_of("base_global_batch_size=40", "learning_rate_scaling=sqrt", "scale_adam_with_batch=true",
                       f"per_device_batch_size={ratio * 40}", num_devices=1)  # fmt: skip
        assert (plan.adam_b1, plan.adam_b2) == (float(row["adam_b1"]), float(row["adam_b2"]))
        assert f"{plan.adam_eps:.4g}" == row["adam_eps"]
        assert float(row["adam_b1"]) == pytest.approx(1 - float(ratio) * 0.1, abs=1e-12)
        assert float(row["adam_b2"]) == pytest.approx(1 - float(ratio) * 0.05, abs=1e-12)
        assert float(row["adam_eps"]) == pytest.approx(1e-8 / float(ratio) ** 0.5, rel=1e-3)


def test_what_a_schedule_counts():
    plan = plan_of(*RAMP, num_devices=1)
    for row in table("after step"):
        seen = plan.rampup.samples_before(int(row["after step"]) + 1)
        assert seen == int(row["examples seen"])
        assert Fraction(seen, plan.global_batch_to_train) == Fraction(row["position in examples"])
        assert row["position in steps"] == row["after step"]


def test_the_replicas():
    for row in table("mesh of 8 devices"):
        axes = dict.fromkeys(("data", "fsdp"), 1) | dict(re.findall(r"(\w+) (\d+)", row["mesh of 8 devices"]))
        plan = plan_of("enable_diloco=true", *(f"ici_{axis}_parallelism={size}" for axis, size in axes.items()),
                       *(f"{key}={row[key]}" for key in ("per_device_batch_size", "diloco_num_replicas")),
                       "steps=240", num_devices=8)  # fmt: skip
        replicas, slots = plan.diloco_num_replicas, plan.micro_batch_slots
        assert [replicas, replicas // int(axes["data"]), plan.micro_batch_to_train, slots] == [
            int(row[name]) for name in ("R", "replicas per part of the data axis", "micro_batch_to_train", "slots")
        ]
        assert slots == int(row["slots per replica"]) * replicas
        # Examples fill the slots from the first on.
        firsts = range(0, slots, int(row["slots per replica"]))
        idle = sum(first >= plan.micro_batch_to_train for first in firsts)
        assert idle == int(row["replicas without an example"])
        assert [f"leaves {idle} of {replicas} DiLoCo" in warning for warning in plan.warnings] == [True] * bool(idle)


def test_the_noise_scales():
    for row in table("groups (target tokens)"):
        groups = row["groups (target tokens)"].split(", ")
        squares, whole = (float(row[name]) for name in ("sum of w/W x mean gradient squared", "gradient squared"))
        noise = NoiseScale().after(
            group_squares=squares, groups=len(groups), grad_norm=whole**0.5, examples=int(row["examples"])
        )
        if row["variance"] == "unknown":
            assert noise.examples is None
            continue
        assert noise.noise / int(row["examples"]) == pytest.approx(float(row["variance"]))
        assert noise.signal == pytest.approx(float(row["true gradient squared"]))
        assert noise.examples == pytest.approx(float(row["gradient_noise_scale"]))


def test_the_loss_scale():
    scaling = loss_scaling(load_config(None, ["dtype=float16"]))
    assert f"it starts at {float(scaling.init().scale):.0f}," in PAGE
    assert float(scaling.next(scaling.init(), jnp.bool_(False)).scale) == 65536 / 2


def test_the_memory():
    for row in table("model"):
        devices = int(row["devices (fsdp)"])
        config = load_config(None, [f"model_name={row['model']}"])
        memory = make_plan(config, num_devices=devices).memory
        count = count_parameters(config)
        assert count.total == int(row["parameters"])
        assert memory.params == int(row["parameters, bytes per device"])
        assert memory.optimizer_state == int(row["AdamW state, bytes per device"])
        assert memory.params == 4 * ((count.total - count.norms) // devices + count.norms)
    assert f"the norm scales, {count.norms} parameters" in PAGE


def commands():
    for block in re.findall(r"```\n\$ (python .*\n(?:.+\n)*)```", PAGE):
        command, *output = block.splitlines()
        yield pytest.param(command, output, id=command)


@pytest.mark.parametrize(("command", "output"), list(commands()))
def test_the_commands_print_what_the_page_says(command, output, capsys):
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "maxtext_lite.plan"]
    code = run_command(main, words[3:])
    printed = capsys.readouterr()
    assert set(output) <= set((printed.out + printed.err).splitlines())
    assert code == (2 if output[0].startswith("error: ") else 0)


def test_the_loss_of_uneven_micro_batches():
    assert "(100 x 2 + 300 x 4) / 400 = 3.5" in PAGE
    assert (100 * 2 + 300 * 4) / (100 + 300) == 3.5


def test_the_page_holds_the_commands_it_should():
    assert len(list(commands())) == 4


def test_rl_batches():
    for row in table("batch_size", "num_generations"):
        keys = [f"{key}={row[key]}" for key in ("batch_size", "num_generations", "micro_batch_size")]
        config = load_config("configs/post_train/rl.yml", keys)
        plan = make_plan(config, num_devices=int(row["devices that train"]))
        for key in ("global_batch_to_train", "gradient_accumulation_steps", "per_device_batch_size"):
            assert getattr(plan, key) == Fraction(row[key])
        assert plan.global_batch_to_train == int(row["batch_size"]) * int(row["num_generations"])
