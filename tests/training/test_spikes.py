"""Runs that go back before a loss that left its band, beside runs that are told from their start what to leave out."""

import json
import types

import jax
import numpy as np
import pytest

from maxtext_lite.config import load_config
from maxtext_lite.data.excluded import ExcludedRow
from maxtext_lite.operations.row_losses import RowLoss
from maxtext_lite.operations.spikes import (
    MOST,
    PreviousStepRows,
    SpikesHook,
    find_outlier_rows,
    refuse_to_go_back_often,
)
from maxtext_lite.training import LossSpike, train
from maxtext_lite.training.hooks import hooks_of
from tests.run_directories import lines_of

SIZES = """
base_emb_dim=16 base_mlp_dim=32 base_num_decoder_layers=1 base_num_query_heads=2 base_num_kv_heads=1 head_dim=8
max_target_length=32 per_device_batch_size=8 warmup_steps=1 packing=best_fit eval_interval=-1 eval_fraction=0
checkpoint_period=20 learning_rate=0.05 learning_rate_schedule=constant data_shuffle_seed=-1 steps=26
"""
PLANTED = {24 * 8 + 1: "@#!" * 10, 24 * 8 + 6: "~^|" * 10}
"""Texts by their place in the run, of which eight make a step."""


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Of a run over two sources in turn, whose texts are all alike but for the planted ones."""
    directory = tmp_path_factory.mktemp("runs")
    lines = [
        json.dumps({"text": PLANTED.get(place, "the cat sat on the mat there")}) + "\n"
        for place in range(320)
    ]
    for name, own in (("even", lines[::2]), ("odd", lines[1::2])):
        (directory / f"{name}.jsonl").write_text("".join(own))
    sources = ", ".join(
        f"{{name: {name}, path: {directory}/{name}.jsonl, weight: 1}}"
        for name in ("even", "odd")
    )
    return [
        *SIZES.split(),
        f"dataset_path=[{sources}]",
        f"base_output_directory={directory}",
    ]


def steps_of(directory):
    """The steps' lines, without what a clock says."""
    lines = lines_of(directory)
    words = ("seconds", "per_second", "tflops", "mfu", "memory")
    return [
        {
            name: value
            for name, value in line.items()
            if not any(word in name for word in words)
        }
        for line in lines
    ]


def test_a_run_that_finds_outliers_ends_in_the_bits_of_one_that_was_told(
    words, bucket, tmp_path, capsys, one_device
):
    """The first in a bucket, where its list is written and read."""
    own = [f"base_output_directory={bucket}", "run_name=found", "max_loss_spike=1.5"]
    found = train(load_config(None, [*words, *own]))
    said = capsys.readouterr().out
    back = [line for line in said.splitlines() if "the run rolls back" in line]
    assert [line.split()[1] for line in back] == ["25"]
    text = (bucket / "found" / "excluded_rows.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    where = [
        (row["source"], row["row"], row["from_example"], row["step"], row["spike"])
        for row in rows
    ]
    assert sorted(where) == [
        ("even", (24 * 8 + 6) // 2, 24 * 8, 25, 1),
        ("odd", (24 * 8 + 1) // 2, 24 * 8, 25, 1),
    ]
    (tmp_path / "rows.jsonl").write_text(text)
    told = train(
        load_config(
            None, [*words, "run_name=told", f"excluded_rows={tmp_path}/rows.jsonl"]
        )
    )
    assert "rolls back" not in capsys.readouterr().out
    assert not (told.run_directory / "excluded_rows.jsonl").exists()
    got, want = steps_of(bucket / "found"), steps_of(told.run_directory)
    assert [line["step"] for line in got] == list(range(1, 27))  # each once
    assert got == want
    # A text of 28 letters has 28 targets, a planted one 30; its slot is empty.
    assert [line["target_tokens"] for line in got[23:]] == [8 * 28, 6 * 28, 8 * 28]
    assert {line["examples"] for line in got} == {8}
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.device_get(found.state),
        jax.device_get(told.state),
    )


def row_of(number, loss, grad_norm=1.0, tokens=10):
    return RowLoss("", number, "", 1, tokens, loss, loss * tokens, grad_norm, tokens)


ALIKE = [row_of(number, 2.0) for number in range(8)]
LIGHT = [row_of(number, 9.0, tokens=0.01) for number in range(8)]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("rows", "before", "expected"),
    [
        # One and two rows that stand out by their loss, one by its gradient, one that is no number.
        ([*ALIKE, row_of(8, 9.0), row_of(9, 30.0)], None, (80, [8, 9])),
        ([*ALIKE, row_of(8, 2.0, grad_norm=1.2)], None, (80, [8])),
        # None stands out, there are too few for one to do so, or the others are not in the band (2.5) without it.
        (
            [*(row_of(number, 3.0) for number in range(8)), row_of(8, 9.0)],
            None,
            (80, list(range(9))),
        ),
        # By the parameters before the last update the step was in its band: the update is to blame.
        (
            ALIKE,
            PreviousStepRows(72, [*ALIKE[:7], row_of(17, 2.0, grad_norm=50.0)], ALIKE),
            (72, [17]),
        ),
        # The same of a custom loss, whose weights are below 1.
        (LIGHT, PreviousStepRows(72, ALIKE, LIGHT), (80, list(range(8)))),
    ],
)
def test_rows_that_stand_out_in_the_step_to_blame_are_excluded_or_all_of_it(
    rows, before, expected
):
    found = find_outlier_rows(80, rows, before, limit=2.5, width=8)
    assert (found.first, [row.row for row in found.rows]) == expected


def run_of(tmp_path, steps):
    recorded = [
        ExcludedRow(row=0, spike=number, step=step)
        for number, step in enumerate(steps, start=1)
    ]
    return types.SimpleNamespace(recorded=recorded, directory=tmp_path)


def test_a_run_goes_back_a_few_times_only(tmp_path):
    spike = LossSpike("step 100 has loss 9", 100, 792, 2.5)
    refuse_to_go_back_often(
        run_of(tmp_path, [1] * 9 + [100] * (MOST - 1)), spike
    )  # long ago does not count
    with pytest.raises(LossSpike, match="rolled back 5 times"):
        refuse_to_go_back_often(run_of(tmp_path, [98, 98, 99, 100, 100]), spike)


def test_only_a_run_that_excludes_rows_goes_back():
    """Any other ends at the spike."""
    for words, goes_back in (
        (["max_loss_spike=8"], True),
        (["max_loss_spike=8", "loss_spike_action=stop"], False),
        ([], False),
    ):
        hooks = hooks_of(load_config(None, ["dataset_type=synthetic", *words]))
        assert any(isinstance(hook, SpikesHook) for hook in hooks) == goes_back
