import re
import shlex
from fractions import Fraction
from pathlib import Path

import pytest

from maxtext_lite.batching import count_parameters, make_plan
from maxtext_lite.cli import run_command
from maxtext_lite.config import load_config
from maxtext_lite.plan import main

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


def plan_of(*overrides, num_devices, num_hosts=1):
    return make_plan(load_config(None, overrides), num_devices=num_devices, num_hosts=num_hosts)


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


def test_the_ramp():
    plan = plan_of("enable_rampup_batch_size=true", "per_device_batch_size_start=1", "per_device_batch_size=4",
                   "per_device_batch_size_increment=1", "global_rampup_samples=15", num_devices=1)  # fmt: skip
    rows = table("stage", "first step")
    for stage, row in zip(plan.stages, rows, strict=True):
        shown = (stage.first_step, stage.num_steps, stage.global_batch_to_train, stage.samples)
        assert ["" if number is None else str(number) for number in shown] == list(row.values())[1:]


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
    assert len(list(commands())) == 2
