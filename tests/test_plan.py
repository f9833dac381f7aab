import json
import os
import random
import resource
import subprocess
import sys

import pytest

from maxtext_lite.cli import run_command
from maxtext_lite.config import KEYS, RL_KEYS, UserError
from maxtext_lite.plan import main
from tests.refusals import EXTREME, RL_FILE, random_words


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


@pytest.mark.parametrize(("argv", "limit"), [
    (["--device", "v5e"], 16e9), (["--device", "H100"], 80e9), (["--device", "v5e", "--device-memory-gb", "7"], 7e9),
    ([], None),
])  # fmt: skip
def test_a_named_device_has_its_memory_and_its_platform(argv, limit, capsys):
    assert main(["--json", *argv]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["limit"] == limit


def test_the_table_is_printed(capsys):
    assert main(["ici_context_parallelism=2", "--devices", "4"]) == 0
    out = capsys.readouterr().out
    assert "global_batch_to_train        64 examples = 16 per device x 4 devices x 1 accumulation\n" in out


HELP = "`maxtext-lite plan --help` lists all arguments."


@pytest.mark.parametrize(
    ("argv", "errors"),
    [
        (["stps=3", "steps=0"], ["unknown key 'stps' (command line). Did you mean 'steps'?",
                                 "steps=0 must be at least 1, or -1. Nearest that works: 1."]),
        (["--devicse", "3"], [f"unrecognized arguments: --devicse. Did you mean '--device'? {HELP}"]),
        (["--device", "h10"], ["--device=h10 is no device. Did you mean 'h100'? There are: v4, v5e, v5p, v6e, 7x, "
                               "a100-40, a100-80, h100-pcie, h100-nvl, h100, h200, b200, gb200, l4."]),
        (["--device", "v5e", "--platform", "gpu"],
         ["--platform=gpu contradicts --device=v5e. Nearest that works: --platform=tpu."]),
        (["--devices", "0"], ["num_devices=0 must be at least 1. Nearest that works: 1."]),
        (["--devices", "x"], [f"argument --devices: x is not a whole number. {HELP}"]),
        (["--devices", "1_000"], [f"argument --devices: 1_000 is not a whole number. {HELP}"]),
        (["--devices", "\u0661\u0662"], [f"argument --devices: \u0661\u0662 is not a whole number. {HELP}"]),
        (["--device-memory-gb", "1_000"], [f"argument --device-memory-gb: 1_000 is not a number. {HELP}"]),
        (["--device-memory-gb", "nan"], [f"argument --device-memory-gb: nan is not a number. {HELP}"]),
        (["--device-memory-gb", "0"],
         ["device_memory_gb=0 must be above 0 and at most 1000000. Nearest that works: 1."]),
        (["--device-memory-gb", "0", "--examples", "0", "num_epochs=1", "seed=-1"],
         ["num_examples=0: there is no training example.",
          "device_memory_gb=0 must be above 0 and at most 1000000. Nearest that works: 1.",
          "seed=-1 must be at least 0. Nearest that works: 0."]),
        (["--device-memory-gb", "1e7"],
         ["device_memory_gb=10000000 must be above 0 and at most 1000000. Nearest that works: 1000000."]),
        (["nowhere.yml"], ["no config file 'nowhere.yml'."]),
        (["steps=30", "base.yml"], ["'base.yml' (command line) is not of the form key=value."]),
    ],
)  # fmt: skip
def test_mistakes_are_error_lines_and_exit_code_2(argv, errors, capsys):
    assert run_command(main, argv) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [f"error: {error}" for error in errors]
    assert captured.out == ""


def outcome(argv, capsys):
    """The exit code, after a check of stderr: empty, or error lines of bounded length."""
    code = run_command(main, argv)
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert code == (2 if lines else 0), argv
    assert bool(said.out) == (code == 0), argv
    for line in lines:
        assert line.startswith("error: "), argv
        assert line.isprintable(), argv
        assert len(line) < 1000, argv
    return code


def test_every_key_takes_every_value_or_says_in_one_line_why_not(capsys):
    for number, key in enumerate((*KEYS, *RL_KEYS)):
        file = [RL_FILE] if key in RL_KEYS else []
        for step in (0, 17, 29):  # each key gets other values
            outcome([*file, f"{key}={EXTREME[(7 * number + step) % len(EXTREME)]}"], capsys)


def test_random_configs_plan_or_are_refused_in_lines(capsys):
    rng = random.Random(1)
    planned = 0
    for _ in range(150):
        is_rl = rng.random() < 0.3
        argv = [RL_FILE] * is_rl + random_words(rng, is_rl=is_rl)
        for option in ("--devices", "--hosts", "--examples", "--device-memory-gb"):
            if rng.random() < 0.3:
                argv += [option, rng.choice(EXTREME) if rng.random() < 0.3 else rng.choice("1248")]
        planned += outcome(argv, capsys) == 0
    assert 2 < planned < 100


@pytest.mark.parametrize("argv", [
    ["base_num_query_heads=1000000007", "base_num_kv_heads=500000000"],
    ["num_experts=100000000000", "n_routing_groups=3"],
    ["num_experts=2147483629", "n_routing_groups=2147483000"],
    [RL_FILE, "batch_size=100000000000", "micro_batch_size=7"],
    [RL_FILE, "batch_size=2147483647", "num_generations=2147483647", "micro_batch_size=7"],
    ["enable_rampup_batch_size=true", "per_device_batch_size=1000000", "per_device_batch_size_increment=1e-6",
     "--devices", "1000000"],
    ["enable_rampup_batch_size=true", "num_epochs=1e12", "per_device_batch_size=1e12", "--examples", "1000000000000",
     "per_device_batch_size_start=1", "per_device_batch_size_increment=1"],
    ["per_device_batch_size=0.333333333333333333", "num_epochs=1e-12", "--examples", "4611686018427387904"],
    ["ici_data_parallelism=999983", "ici_fsdp_parallelism=999979", "--devices", "720720"],
    ["--draw", "pipeline", "--devices", "4", "ici_pipeline_parallelism=4", "gradient_accumulation_steps=2000000000"],
    ["base_num_decoder_layers=10000", "--devices", "1000000", "per_device_batch_size=1000000", "max_target_length=1000",
     "ici_fsdp_parallelism=64", "ici_data_parallelism=-1"],
])  # fmt: skip
def test_no_value_makes_planning_take_long(argv, capsys):
    # Work in proportion to a value, such as a search number by number, would take hours here.
    outcome(argv, capsys)


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


@pytest.mark.parametrize(("argv", "nearest"), [
    (["--devices", "8"], ["ici_pipeline_parallelism=2"]),
    (["--devices", "3", "base_num_decoder_layers=6", "base_emb_dim=192"], ["ici_pipeline_parallelism=3"]),
    ([], ["--devices=2", "--hosts=1", "ici_pipeline_parallelism=2"]),
    (["--devices", "4", "--hosts", "4"], ["ici_pipeline_parallelism=2"]),
])  # fmt: skip
def test_without_stages_the_fewest_that_can_be_drawn_are_named(argv, nearest, capsys):
    assert run_command(main, [*argv, "--draw", "pipeline"]) == 2
    said = capsys.readouterr().err
    assert said.endswith(f"with 1 pipeline stage. Nearest that works: {' '.join(nearest)}.\n")
    assert main([*argv, *nearest, "--draw", "pipeline"]) == 0


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
    # Processor time: wall time depends on the other processes.
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


def test_a_mixture_is_shown_and_a_source_that_would_pass_its_max_epochs_refused(tmp_path, capsys):
    """Rows of 15 bytes, one per line, 11 and 5 lines: 40 examples take 20 from each source, so b's 4 times."""
    for name, lines in (("a", 11), ("b", 5)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{name * 15}"}}\n' for _ in range(lines)))
    keys = ["packing=false", "max_target_length=16", "eval_interval=-1", "eval_fraction=0", "per_device_batch_size=4",
            "steps=10", "warmup_steps=0"]  # fmt: skip
    listed = "dataset_path=[{{path: {0}/a.jsonl, weight: 1}}, {{path: {0}/b.jsonl, weight: 1, max_epochs: {1}}}]".format
    assert main([*keys, listed(tmp_path, 4), "--json"]) == 0
    table = {row["name"]: row for row in json.loads(capsys.readouterr().out)["mixture"]}
    assert table == {
        "a": {"name": "a", "examples": 11, "target_tokens": 165, "rows": 20, "token_share": 0.5, "epochs": 20 / 11},
        "b": {"name": "b", "examples": 5, "target_tokens": 75, "rows": 20, "token_share": 0.5, "epochs": 4},
    }
    assert main([*keys, listed(tmp_path, 4)]) == 0
    said = "source b: 5 examples, 75 target tokens; 20 rows to be read, 50.0000% of the tokens; 4 epochs"
    assert said in capsys.readouterr().out
    assert run_command(main, [*keys, listed(tmp_path, 3)]) == 2
    assert capsys.readouterr().err.startswith("error: dataset_path: max_epochs of the source b is reached at example 3")
    assert main([*keys, listed(tmp_path, 3), "mixture_exhausted=stop", "--json"]) == 0
    stopped = json.loads(capsys.readouterr().out)["mixture"]
    assert sum(row["rows"] for row in stopped) == 28
    assert main([*keys, listed(tmp_path, 3), "mixture_exhausted=stop", "learning_rate_schedule=linear"]) == 0
    early = "the run ends after 7 of steps=10, for which its learning rate is scheduled: the rate is then still about "
    assert early in capsys.readouterr().out
    # The data need not exist where the number of examples is stated.
    assert main([*keys, listed("nowhere", 3), "--examples", "16"]) == 0


@pytest.mark.parametrize(("limit", "exhausted", "may_end_before"), [
    (3, "stop", True), (4, "error", True), (3, "drop", False), (-1, "error", False),
])  # fmt: skip
def test_a_run_whose_sources_are_limited_may_end_before(tmp_path, capsys, limit, exhausted, may_end_before):
    sources = f"[{{path: a.jsonl, weight: 1}}, {{path: b.jsonl, weight: 1, max_epochs: {limit}}}]"
    keys = {"dataset_path": sources, "mixture_exhausted": exhausted, "steps": 10, "warmup_steps": 0}
    assert main([*(f"{key}={value}" for key, value in keys.items()), "--examples", "16", "--json"]) == 0
    (tmp_path / "plan.json").write_text(capsys.readouterr().out)
    (tmp_path / "config.yml").write_text("".join(f"{key}: {value}\n" for key, value in keys.items()))
    (tmp_path / "checkpoints" / "4" / "about").mkdir(parents=True)
    (tmp_path / "checkpoints" / "4" / "about" / "metadata").write_text('{"examples_seen": 64}')
    assert main(["--from", str(tmp_path), "--examples", "16"]) == 0
    assert (", if no source is exhausted before." in capsys.readouterr().out) == may_end_before
    assert main(["--from", str(tmp_path), "--examples", "16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["resumed"]["may_end_before"] == may_end_before


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


SOLVED = ["--devices", "8", "--device", "v5e", "model_name=llama3.2-1b", "global_batch_size=16", "dtype=bfloat16",
          "max_target_length=1024", "per_device_batch_size=-1", "gradient_accumulation_steps=-1"]  # fmt: skip


def test_both_batch_keys_are_found_and_the_line_plans_what_was_found(capsys):
    assert main(SOLVED) == 0
    said = capsys.readouterr()
    table, _, best = said.out.rstrip().rpartition("\n\nbest: ")
    assert said.err.startswith("Times are least times")
    assert len(table.splitlines()) == 11
    assert main([*SOLVED, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["best"] == best
    assert len(told["plans"]) == 10
    seconds = [each["seconds"] for each in told["plans"]]
    assert seconds == sorted(seconds)
    assert main(["--devices", "8", "--device", "v5e", "--json", *best.split()]) == 0
    plan, first = json.loads(capsys.readouterr().out), told["plans"][0]
    assert plan["global_batch_to_train"] == 16
    assert plan["memory"]["total"] == first["memory"] <= plan["memory"]["limit"]
    assert {key: plan[key] for key in ("mesh", "per_device_batch_size", "gradient_accumulation_steps")} == {
        key: first[key] for key in ("mesh", "per_device_batch_size", "gradient_accumulation_steps")
    }


@pytest.mark.parametrize(("argv", "error"), [
    (SOLVED[:2] + SOLVED[4:], "per_device_batch_size=-1 and gradient_accumulation_steps=-1 are chosen by a device's "
                              "peak, memory and links: --device, as in --device=h200, is missing."),
    ([*SOLVED, "--draw", "pipeline"], "--draw shows one plan: use it with the arguments that plan prints as the best."),
    ([*SOLVED, "--compile", "0"], "--compile=0 must be at least 1. Nearest that works: 1."),
    (["--compile", "2"], "--compile checks the plans for per_device_batch_size=-1 "
                         "gradient_accumulation_steps=-1."),
    (["--devices", "2", "--device", "l4", "global_batch_size=32", "per_device_batch_size=auto"],
     "--device=l4: what it sends to others on a machine of so many is not known, so that no step can be predicted. "
     "Nearest that works: per_device_batch_size=16 gradient_accumulation_steps=1."),
    ([*SOLVED, "steps=0"], "steps=0 must be at least 1, or -1. Nearest that works: 1."),
    ([*SOLVED, "--devices", "-1"], "num_devices=-1 must be at least 1. Nearest that works: 1."),
    ([*SOLVED, "--devices", "1000000000000000000"],
     "num_devices=1000000000000000000 must be at most 1000000. Nearest that works: 1."),
    ([*SOLVED, "--hosts", "3"],
     "num_hosts=3 does not divide num_devices=8: every host has equally many devices. Nearest that work: 2 or 4."),
])  # fmt: skip
def test_what_cannot_be_solved_is_one_error_line(argv, error, capsys):
    assert run_command(main, argv) == 2
    assert capsys.readouterr().err == f"error: {error}\n"


def test_what_solving_lacks_is_said_beside_the_problems_of_the_config(capsys):
    assert run_command(main, [*SOLVED[:2], *SOLVED[4:], "steps=0", "--draw", "pipeline"]) == 2
    assert [line.split(" ")[1] for line in capsys.readouterr().err.splitlines()] == [
        "steps=0", "per_device_batch_size=-1", "--draw"]  # fmt: skip


def test_what_solving_lacks_is_said_beside_the_problems_of_the_machine(capsys):
    assert run_command(main, [*SOLVED[:2], *SOLVED[4:], "--hosts", "3", "--draw", "pipeline"]) == 2
    assert [line.split(" ")[1] for line in capsys.readouterr().err.splitlines()] == [
        "num_hosts=3", "per_device_batch_size=-1", "--draw"]  # fmt: skip


def test_what_was_found_is_printed_before_it_is_compiled(capsys):
    words = ["gb200" if word == "v5e" else word for word in SOLVED]
    assert run_command(main, [*words, "--compile", "1"]) == 2
    said = capsys.readouterr()
    assert "\nbest: model_name=llama3.2-1b" in said.out
    assert "names no device that can be compiled for here" in said.err


def test_solving_imports_no_jax():
    program = f"import sys; from maxtext_lite.plan import main; main({SOLVED}); sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


def test_a_run_is_held_against_another_machine(tmp_path, capsys):
    words = ["global_batch_size=48", "per_device_batch_size=2", "gradient_accumulation_steps=-1"]
    assert main([*words, "--devices", "8", "--json", "--examples", "1000"]) == 0
    (tmp_path / "plan.json").write_text(capsys.readouterr().out)
    (tmp_path / "config.yml").write_text("".join(f"{word.replace('=', ': ')}\n" for word in words))
    assert main(["--from", str(tmp_path), "--devices", "4"]) == 0
    assert "gradient_accumulation_steps  3 -> 6\n" in capsys.readouterr().out
    assert main(["--from", str(tmp_path), "--devices", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changes"] == {}
    (tmp_path / "checkpoints" / "9" / "about").mkdir(parents=True)
    (tmp_path / "checkpoints" / "9" / "about" / "metadata").write_text('{"examples_seen": 432}')
    assert main(["--from", str(tmp_path), "--devices", "8", "global_batch_size=96", "steps=20"]) == 0
    said = capsys.readouterr().out
    assert "total_examples               12000 -> 1488\n" in said
    assert "of step 9 after 432 examples, the run ends at step 20 after 1,488 examples.\n" in said


@pytest.mark.parametrize("words", [["base.yml"], ["per_device_batch_size=auto"]])
def test_a_run_brings_its_config_along_and_is_held_against_one_plan(words, tmp_path, capsys):
    assert main(["--devices", "8", "--json", "global_batch_size=16", "per_device_batch_size=2"]) == 0
    (tmp_path / "plan.json").write_text(capsys.readouterr().out)
    (tmp_path / "config.yml").write_text("global_batch_size: 16\nper_device_batch_size: 2\n")
    with pytest.raises(UserError, match=f"--from={tmp_path}"):
        main(["--from", str(tmp_path), *words])
