from maxtext_lite.analysis.laws import batch_size_advice
from maxtext_lite.analysis.run_data import read_runs
from maxtext_lite.analysis.summary import NONE, advice, summary
from tests.run_directories import eval_line, step_line, write_metrics, write_run


def read(directory):
    (run,) = read_runs([directory])
    return run


def test_the_summary_of_a_run(tmp_path):
    speeds = {1: 1, 2: 500, 3: 900}
    lines = [
        step_line(step, tokens_per_second=speed, mfu=0.4)
        for step, speed in speeds.items()
    ]
    skipped = {"loss": None, "skipped": True, "tokens_per_second": 700.0, "mfu": 0.3}
    lines += [
        eval_line(2, 3.25),
        step_line(4, **skipped, global_batch_to_train=16),
        eval_line(4, 3.5),
    ]
    found = summary(
        read(
            write_run(
                tmp_path / "r", lines, ["steps=10", "warmup_steps=2"], num_devices=2
            )
        )
    )
    assert {name: value for name, (value, _) in found.items() if value != NONE} == {
        "Steps": "4",
        "Loss": "3.97",
        "Held-out loss": "3.5",
        "Tokens seen": "3.2k",
        "Examples seen": "32",
        "Epochs": "0.08",
        "Global batch": "16",
        "Tokens per second": "600",
        "Devices": "2",
        # base.yml by hand: 4 layers of 2*128*(8+4)*16 and 3*128*384 weights, two tables of 320*128, nine norms of 128.
        "Parameters": "869.5k",
    }
    assert found["Held-out loss"][1] == "at step 4; lowest 3.25 at step 2"
    assert found["Tokens per second"][1] == "median; MFU 40.0%"
    assert found["Steps"][1] == "of 10, 1 skipped"
    batches = found["Global batch"][1]
    assert batches == "examples per step: 8 from step 1, 16 from step 4"


def test_a_run_of_reinforcement_learning_leads_with_reward_and_accuracy_and_has_no_loss(
    tmp_path,
):
    lines = [step_line(step, reward=step / 10, loss=-2e-9) for step in range(1, 31)]
    run = write_metrics(tmp_path / "r", [*lines, {"step": 30, "eval_accuracy": 0.75}])
    shown = [
        (name, *cell) for name, cell in summary(read(run)).items() if cell[0] != NONE
    ]
    assert [name for name, _, _ in shown[:3]] == [
        "Steps",
        "Reward",
        "Held-out accuracy",
    ]
    assert shown[1][1:] == ("2.05", "training, mean of steps 11 to 30")
    assert "Loss" not in [name for name, _, _ in shown]


def test_what_is_not_known_is_none(tmp_path):
    found = summary(read(write_metrics(tmp_path / "r", [])))
    assert found.pop("Steps") == ("0", "")
    assert {value for value, _ in found.values()} == {NONE}


def test_advice_is_on_the_last_noise_scale_that_was_measured(tmp_path):
    noise = {"gradient_noise_scale": 900.0, "gradient_noise_scale_error": 0.1}
    last = step_line(3, gradient_noise_scale=None)
    for number, (lines, expected) in enumerate(
        (
            ([step_line(2, **noise), last], batch_size_advice(900.0, 0.1, 8)),
            ([step_line(1)], batch_size_advice(None, None, 8)),
            ([], ""),
        )
    ):
        assert advice(read(write_metrics(tmp_path / str(number), lines))) == expected
    planned = read(write_run(tmp_path / "planned", [], []))
    assert "the batch of 16 examples" in advice(planned)
