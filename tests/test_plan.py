"""The command `plan`: what it prints of machines, data, runs and splits."""

import json

import pytest

from maxtext_lite.cli import run_command
from maxtext_lite.config import UserError
from maxtext_lite.plan import main
from maxtext_lite.prepare import main as prepare

PLAN_JSON = """
num_devices num_hosts mesh per_device_batch_size micro_batch_to_train empty_slots_per_micro_batch
gradient_accumulation_steps global_batch_to_train global_batch_to_load loads_per_step loading_hosts
examples_per_loading_host tokens_per_step num_pipeline_stages num_pipeline_microbatches pipeline_microbatch_size
pipeline_bubble_fraction steps epochs steps_per_epoch learning_rate learning_rate_multiplier rampup memory
"""


@pytest.fixture
def printed(capsys):
    """What the command prints, for words that it accepts."""

    def run(*words):
        assert main(words) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def plan(printed):
    return lambda *words: json.loads(printed(*words, "--json"))


@pytest.mark.fast
def test_a_machine_that_does_not_exist_is_planned(plan):
    machine = "--devices 256 --hosts 64 --device-memory-gb 95 model_name=llama3-8b"
    keys = "per_device_batch_size=1 max_target_length=8192 expansion_factor_real_data=4"
    found = plan(*machine.split(), *keys.split())
    assert found.keys() >= set(PLAN_JSON.split())
    assert found["global_batch_to_train"] == 256
    assert found["tokens_per_step"] == 256 * 8192
    assert found["global_batch_to_load"] == 4 * 256
    assert found["loading_hosts"] == list(range(16))
    assert found["examples_per_loading_host"] == 256 // 16
    parts = ["params", "optimizer_state", "gradients", "activations", "logits", "total"]
    assert found["memory"].keys() >= set(parts)
    assert found["memory"]["limit"] == 95e9
    assert found["epochs"] is None


def test_several_mistakes_are_an_error_line_each(capsys):
    words = "--devices 8 --hosts 3 head_dim=15 run_name=a/b"
    assert run_command(main, words.split()) == 2
    found = [line.split(" ")[1] for line in capsys.readouterr().err.splitlines()]
    assert found == ["head_dim=15", "run_name=a/b", "num_hosts=3"]


def write_lines(path, text, count):
    path.write_text(f'{{"text": "{text}"}}\n' * count)


DATA = [
    "packing=false",
    "max_target_length=16",
    "eval_interval=-1",
    "eval_fraction=0",
    "per_device_batch_size=4",
]


def test_examples_are_those_of_the_data_unless_they_are_given(tmp_path, plan):
    write_lines(tmp_path / "data.jsonl", "x" * 15, 11)
    words = [*DATA, f"dataset_path={tmp_path}/data.jsonl", "num_epochs=2"]
    counted = plan(*words)
    keys = ("num_examples", "steps", "steps_per_epoch", "epochs", "dropped_examples")
    assert [counted[key] for key in keys] == [11, 5, 2.75, 20 / 11, 2]
    assert plan(*words, "--examples", "100")["steps"] == 50


def test_a_mixture_is_shown_and_a_source_that_would_pass_its_max_epochs_refused(
    tmp_path, plan
):
    """Rows of 15 bytes, one per line, 11 and 5 lines: 40 examples take 20 from each source, so b's 4 times."""
    write_lines(tmp_path / "a.jsonl", "a" * 15, 11)
    write_lines(tmp_path / "b.jsonl", "b" * 15, 5)
    words = [*DATA, "steps=10", "warmup_steps=0"]
    listed = "dataset_path=[{{path: {0}/a.jsonl, weight: 1}}, {{path: {0}/b.jsonl, weight: 1, max_epochs: {1}}}]".format
    shown = plan(*words, listed(tmp_path, 4))["mixture"]
    keys = ("name", "examples", "target_tokens", "rows", "token_share", "epochs")
    assert [tuple(row[key] for key in keys) for row in shown] == [
        ("a", 11, 165, 20, 0.5, 20 / 11),
        ("b", 5, 75, 20, 0.5, 4),
    ]
    with pytest.raises(UserError, match="max_epochs of the source b"):
        main([*words, listed(tmp_path, 3)])


def record_run(directory, printed, keys, *options):
    """A run directory that holds a plan and a config."""
    words = [f"{key}={value}" for key, value in keys.items()]
    (directory / "plan.json").write_text(printed(*words, *options, "--json"))
    lines = "".join(f"{key}: {value}\n" for key, value in keys.items())
    (directory / "config.yml").write_text(lines)


def record_checkpoint(directory, *, step, examples_seen):
    """What `plan` reads of a checkpoint."""
    about = directory / "checkpoints" / str(step) / "about"
    about.mkdir(parents=True)
    (about / "metadata").write_text(json.dumps({"examples_seen": examples_seen}))


def test_a_run_is_held_against_another_machine(tmp_path, printed, plan):
    keys = {"global_batch_size": 48, "per_device_batch_size": 2}
    keys["gradient_accumulation_steps"] = -1
    record_run(tmp_path, printed, keys, "--devices", "8", "--examples", "1000")
    run = ["--from", str(tmp_path), "--devices"]
    assert "gradient_accumulation_steps  3 -> 6\n" in printed(*run, "4")
    assert plan(*run, "8")["changes"] == {}
    record_checkpoint(tmp_path, step=9, examples_seen=432)
    said = printed(*run, "8", "global_batch_size=96", "steps=20")
    # 432 and 11 steps of 96.
    assert "total_examples               12000 -> 1488\n" in said
    with pytest.raises(UserError, match=f"--from={tmp_path}"):
        main(["--from", str(tmp_path), "base.yml"])


SOLVED = (
    "--devices 8 --device v5e global_batch_size=16 per_device_batch_size=-1 gradient_accumulation_steps=-1 "
    "model_name=llama3.2-1b dtype=bfloat16 max_target_length=1024"
)


def test_both_batch_keys_are_found_and_the_line_plans_what_was_found(printed, plan):
    table, _, best = printed(*SOLVED.split()).rstrip().rpartition("\n\nbest: ")
    assert len(table.splitlines()) == 11
    told = plan(*SOLVED.split())
    assert told["best"] == best
    seconds = [each["seconds"] for each in told["plans"]]
    assert len(seconds) == 10
    assert seconds == sorted(seconds)
    first = told["plans"][0]
    found = plan("--devices", "8", "--device", "v5e", *best.split())
    assert found["global_batch_to_train"] == 16
    assert found["memory"]["total"] == first["memory"] <= found["memory"]["limit"]
    for key in ("mesh", "per_device_batch_size", "gradient_accumulation_steps"):
        assert found[key] == first[key]


@pytest.mark.parametrize(
    ("words", "measured"),
    [
        (
            "model_name=llama3.2-1b max_target_length=4096 per_device_batch_size=4 remat_policy=full",
            0.3418,
        ),
        (
            "model_name=llama3.2-1b max_target_length=4096 per_device_batch_size=4 remat_policy=minimal",
            0.3089,
        ),
        (
            "model_name=qwen3-0.6b max_target_length=8192 per_device_batch_size=2 remat_policy=minimal",
            0.3146,
        ),
    ],
)
def test_the_step_time_to_expect_is_what_an_h200_took(plan, words, measured):
    """The measurements are those of docs/performance.md."""
    found = plan(
        *words.split(), "dtype=bfloat16", "dataset_type=synthetic", "--device", "h200"
    )["prediction"]
    best, worst = found["step_seconds"]["expected"]
    assert best * 0.995 <= measured <= worst * 1.005
    assert found["step_seconds"]["bound"] < best
    assert found["mfu"]["bound"] > found["mfu"]["expected"][0]


def test_parameters_are_planned_without_a_device(plan):
    assert plan("model_name=llama3-8b")["prediction"] == {"parameters": 8_030_261_248}


def test_a_step_that_does_not_fit_is_shown_with_one_that_does(printed):
    machine = ["--devices", "64", "--device", "h200", "model_name=llama3-8b"]
    large = [*machine, "max_target_length=8192", "per_device_batch_size=16"]
    line = printed(*large).splitlines()[-1]
    assert line.startswith("This fits and makes the same updates: ")
    smaller = printed(*large, *line.split(": ")[1].split())
    assert "global_batch_to_train        1024 examples" in smaller
    assert "per device are needed" not in smaller


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(tmp_path, printed):
    write_lines(tmp_path / "data.jsonl", "to be or not to be", 20)
    path = tmp_path / "tokenizer"
    prepare(
        [
            "tokenizer",
            f"input={tmp_path}/data.jsonl",
            f"output={path}",
            "vocab_size=260",
        ]
    )
    words = ["tokenizer_type=huggingface", f"tokenizer_path={path}"]
    with pytest.raises(UserError, match="vocab_size=64 is smaller than the tokenizer"):
        main([*words, "vocab_size=64"])
    assert printed(*words, "vocab_size=260")
    assert printed(words[0], "tokenizer_path=elsewhere.json", "vocab_size=64")


def test_each_stage_has_its_tokens_time_and_price(printed):
    words = [
        "--devices",
        "8",
        "--device",
        "h200",
        "per_device_batch_size=8",
        "steps=30",
        "--price",
        "3",
    ]
    schedule = ["batch_schedule=[[0, 64], [640, 128], [99999, 256]]", "warmup_steps=0"]
    found = json.loads(printed(*words, *schedule, "--json"))["prediction"]["stages"]
    assert [(each["first_step"], each["num_steps"]) for each in found] == [
        (1, 10),
        (11, 20),
    ]
    assert [each["tokens"] for each in found] == [640 * 256, 20 * 128 * 256]
    for stage, batch in zip(
        found, (64, 128), strict=True
    ):  # as a run of this batch alone
        alone = json.loads(
            printed(*words, f"gradient_accumulation_steps={batch // 64}", "--json")
        )
        seconds = alone["prediction"]["step_seconds"]["bound"] * stage["num_steps"]
        assert stage["seconds"]["bound"] == pytest.approx(seconds)
        price = [8 * 3 * each / 3600 for each in stage["seconds"]["expected"]]
        assert stage["price"] == pytest.approx(price)
    assert "hours, at a price of" in printed(*words, *schedule)
