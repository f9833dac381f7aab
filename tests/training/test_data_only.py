"""`train data_only=true` reads what the run would read."""

import json

import numpy as np

from maxtext_lite.data import example_ids, examples_hash
from maxtext_lite.train import main

KEYS = """
max_target_length=32 per_device_batch_size=1 ici_fsdp_parallelism=4 ici_data_parallelism=2 data_only=true ids=true
enable_rampup_batch_size=true per_device_batch_size_start=0.5 per_device_batch_size_increment=0.5
global_rampup_samples=8 eval_fraction=0.2 steps=14 data_shuffle_seed=3
"""


def test_the_ids_of_each_step_are_those_of_the_order_also_in_a_ramp(tmp_path, capsys):
    text = tmp_path / "a.txt"
    text.write_text("abc " * 900)
    paths = f"dataset_path={text}", f"base_output_directory={tmp_path}/runs"
    assert main([*KEYS.split(), *paths]) == 0
    rows = -(-3600 // 32)  # the document and its end of text, which is no input
    training = rows - rows // 5
    sizes = [4, 4, *[8] * 12]
    expected = example_ids(0, sum(sizes), num_examples=training, seed=3)
    assert sum(sizes) > training  # the second epoch has begun
    steps = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for number, (step, ids) in enumerate(
        zip(steps, np.split(expected, np.cumsum(sizes)[:-1]), strict=True), start=1
    ):
        assert step == {
            "step": number,
            "examples_hash": examples_hash(ids),
            "ids": ids.tolist(),
        }
    assert not (tmp_path / "runs").exists()


def lines_of(capsys, *words):
    assert main([*words, "data_only=true"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_rows_are_shown_with_the_weight_of_each_token_as_a_target(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"prompt": "ab", "completion": "c"}\n{"prompt": "d", "completion": "\u00e9"}\n'
    )
    words = [f"dataset_path={path}", "eval_fraction=0", "eval_interval=-1"]
    (row,) = lines_of(
        capsys, "dataset_type=sft", "max_target_length=8", "rows=0:4", *words
    )
    assert row == {
        "ids": [97, 98, 99, 256, 100, 195, 169, 256],
        "tokens": [
            "a",
            "b",
            "c",
            "<|endoftext|>",
            "d",
            "<0xC3>",
            "<0xA9>",
            "<|endoftext|>",
        ],
        "weights": [0, 0, 1, 1, 0, 1, 1, 1],
        "segments": [1, 1, 1, 1, 2, 2, 2, 2],
    }
    path.write_text('{"prompt": "a", "chosen": "b", "rejected": "cd"}\n')
    chosen, rejected = lines_of(
        capsys, "configs/post_train/dpo.yml", "rows=0:1", *words
    )
    assert (chosen["ids"], rejected["ids"]) == ([97, 98, 256], [97, 99, 100, 256])


def test_rows_of_text_end_with_the_next_rows_first_token(tmp_path, capsys):
    text = tmp_path / "a.txt"
    text.write_text("abcdef")
    words = [f"dataset_path={text}", "eval_fraction=0", "eval_interval=-1"]
    first, second = lines_of(capsys, "max_target_length=4", "rows=0:2", *words)
    assert first == {
        "ids": [97, 98, 99, 100, 101],
        "tokens": list("abcde"),
        "weights": [0, 1, 1, 1, 1],
        "segments": [1] * 5,
    }
    assert (second["ids"], second["weights"]) == ([101, 102, 256], [0, 1, 1])
