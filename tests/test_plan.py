import json
import os
import resource
import subprocess
import sys

import pytest

from maxtext_lite.cli import run_command
from maxtext_lite.plan import main


def test_a_machine_that_does_not_exist_is_planned(capsys):
    assert (
        main(
            [
                "--devices",
                "256",
                "--hosts",
                "64",
                "--device-memory-gb",
                "95",
                "model_name=llama3-8b",
                "--json",
                "per_device_batch_size=1",
                "max_target_length=8192",
                "expansion_factor_real_data=4",
            ]
        )
        == 0
    )
    plan = json.loads(capsys.readouterr().out)
    assert plan["global_batch_to_train"] == 256
    assert plan["tokens_per_step"] == 256 * 8192
    assert plan["loading_hosts"] == list(range(16))
    assert plan["memory"]["limit"] == 95e9
    assert plan["epochs"] is None


def test_the_table_is_printed(capsys):
    assert main(["ici_context_parallelism=2", "--devices", "4"]) == 0
    out = capsys.readouterr().out
    assert "global_batch_to_train        64 examples = 16 per device x 4 devices x 1 accumulation\n" in out


HELP = "`maxtext-lite plan --help` lists what there is."


@pytest.mark.parametrize(
    ("argv", "errors"),
    [
        (["stps=3", "steps=0"], ["unknown key 'stps' (command line). Did you mean 'steps'?",
                                 "steps=0 must be at least 1, or -1. Nearest that works: 1."]),
        (["--device", "3"], [f"unrecognized arguments: --device. {HELP}"]),
        (["--devices", "0"], ["num_devices=0 must be at least 1. Nearest that works: 1."]),
        (["--devices", "x"], [f"argument --devices: invalid int value: 'x'. {HELP}"]),
        (["--device-memory-gb", "nan"], [f"argument --device-memory-gb: nan is not a number above 0. {HELP}"]),
        (["nowhere.yml"], ["no config file 'nowhere.yml'."]),
        (["steps=30", "base.yml"], ["'base.yml' (command line) is not of the form key=value."]),
    ],
)  # fmt: skip
def test_mistakes_are_error_lines_and_exit_code_2(argv, errors, capsys):
    assert run_command(main, argv) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [f"error: {error}" for error in errors]
    assert captured.out == ""


def test_the_pipeline_is_drawn_as_text_and_into_a_file(tmp_path, capsys):
    keys = ["ici_pipeline_parallelism=4", "pipeline_schedule=1f1b", "--devices", "4"]
    assert main([*keys, "--draw", "pipeline"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1f1b: 10 ticks forwards and backwards in a step of 1 micro-batch x 4 microbatches")
    assert lines[4] == "stage 3   .    .    .    F0B0 F1B1 F2B2 F3B3 .    .    ."
    assert main([*keys, "--draw", "pipeline", "--draw-to", str(tmp_path / "p.svg")]) == 0
    assert (tmp_path / "p.svg").read_text().startswith("<svg ")
    assert run_command(main, [*keys, "--draw-to", str(tmp_path / "no" / "p.svg")]) == 2
    assert "cannot be written: No such file or directory." in capsys.readouterr().err
    assert run_command(main, ["--draw", "pipeline"]) == 2
    assert "Nearest that works: ici_pipeline_parallelism=2." in capsys.readouterr().err


def test_it_imports_no_jax_and_answers_at_once():
    program = (
        "import sys; from maxtext_lite.plan import main; code = main(['--devices', '4096', '--hosts', '1024',"
        " 'ici_data_parallelism=-1', 'ici_fsdp_parallelism=1']);"
        "import maxtext_lite; sys.exit(code or any(name in sys.modules for name in ('jax', 'flax', 'optax', 'numpy')))"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    # Processor time: what the clock says depends on who else is at work.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_examples_are_those_of_the_data_unless_they_are_given(tmp_path, capsys):
    (tmp_path / "data.jsonl").write_text("".join('{"text": "' + "x" * 15 + '"}\n' for _ in range(11)))
    keys = [f"dataset_path={tmp_path}/data.jsonl", "packing=false", "max_target_length=16", "eval_interval=-1",
            "eval_fraction=0", "num_epochs=2", "per_device_batch_size=4", "--json"]  # fmt: skip
    assert main(keys) == 0
    counted = json.loads(capsys.readouterr().out)
    assert [counted[key] for key in ("num_examples", "steps", "steps_per_epoch", "epochs", "dropped_examples")] == [
        11, 5, 2.75, 20 / 11, 2]  # fmt: skip
    assert main([*keys, "--examples", "100"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 50
    assert run_command(main, [*keys, "--examples", "0"]) == 2
    assert capsys.readouterr().err == "error: num_examples=0: there is no training example.\n"


def test_counting_the_examples_imports_no_jax():
    program = (
        "import sys; from maxtext_lite.plan import main; code = main(['num_epochs=2']);"
        "sys.exit(code or any(name in sys.modules for name in ('jax', 'flax', 'optax', 'grain')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr
    assert "steps_per_epoch" in done.stdout


def test_as_a_module_it_ends_with_the_exit_code():
    done = subprocess.run(
        [sys.executable, "-m", "maxtext_lite.plan", "steps=0"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, "error: steps=0 must be at least 1, or -1. Nearest that works: 1.\n")
