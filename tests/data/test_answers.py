"""Examples for SFT and DPO: whole sequences in rows, with weight only on answers; misfits are counted."""

import json

import numpy as np
import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.data.answers import example_shape
from maxtext_lite.data.sources import open_sources

END = 256


def opened(tmp_path, lines, kind="sft", **changes):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    values = {"dataset_type": kind, "dataset_path": path, "eval_fraction": 0, "eval_interval": -1} | changes
    return open_sources(load_config(None, [f"{key}={value}" for key, value in values.items()]), vocab_size=320)


def ids(text):
    return list(text.encode())


def sft(prompt, completion):
    return {"prompt": prompt, "completion": completion}


def test_two_short_texts_share_a_row_by_hand(tmp_path):
    source, evaluation = opened(tmp_path, [sft("ab", "c"), sft("d", "ef")], max_target_length=8)
    assert evaluation is None
    assert len(source) == 1
    row = source[0]
    assert {name: values.tolist() for name, values in row.items()} == {
        "tokens": [*ids("abc"), *ids("def"), 0, 0],
        "targets": [*ids("bc"), END, *ids("ef"), END, 0, 0],
        "segments": [1, 1, 1, 2, 2, 2, 0, 0],
        "positions": [0, 1, 2, 0, 1, 2, 0, 0],
        "weights": [0, 1, 1, 1, 1, 1, 0, 0],
    }
    assert {name: values.dtype.name for name, values in row.items()} == {
        "tokens": "int32", "targets": "int32", "segments": "int32", "positions": "int32", "weights": "float32",
    }  # fmt: skip
    assert source.num_target_tokens == source.count_targets(np.array([0])) == 5
    with pytest.raises(IndexError):
        source[1]


def test_packed_rows_contain_the_same_sequences_as_separate_rows(tmp_path):
    rng = np.random.default_rng(0)
    lines = [sft("x" * rng.integers(0, 12), "y" * rng.integers(1, 12)) for _ in range(60)]
    packed, _ = opened(tmp_path, lines, max_target_length=32)
    apart, _ = opened(tmp_path, lines, max_target_length=32, packing="false")
    assert len(apart) == 60 > 2 * len(packed)

    def pieces(source):
        found = []
        for number in range(len(source)):
            row = source[number]
            for segment in range(1, row["segments"].max() + 1):
                here = row["segments"] == segment
                found.append(
                    tuple((name, tuple(row[name][here])) for name in ("tokens", "targets", "positions", "weights"))
                )
        return sorted(found)

    assert pieces(packed) == pieces(apart)
    everything = np.arange(len(packed))
    assert packed.num_target_tokens == apart.num_target_tokens == packed.count_targets(everything)
    assert packed.num_target_tokens == sum(len(line["completion"]) + 1 for line in lines)


PAIRS = [
    {"prompt": "ab", "chosen": "c", "rejected": "de"},
    {"prompt": "fgh", "chosen": "ij", "rejected": "k"},
    {"prompt": "l", "chosen": "m", "rejected": "mmmmm"},
]


def test_a_pair_is_two_rows_by_hand(tmp_path):
    source, _ = opened(tmp_path, PAIRS, "dpo", max_target_length=5, packing="false")
    assert (len(source), len(source.columns[0]), source.num_tokens) == (3, 3, 10)
    source = source.with_reference(np.array([[-1, -2], [-3, -4], [-5, -6]], np.float32))
    row = source[0]
    assert {name: values.tolist() for name, values in row.items()} == {
        "tokens": [*ids("abc"), 0, 0, *ids("abde"), 0],
        "targets": [*ids("bc"), END, 0, 0, *ids("bde"), END, 0],
        "segments": [1, 1, 1, 0, 0, 1, 1, 1, 1, 0],
        "positions": [0, 1, 2, 0, 0, 0, 1, 2, 3, 0],
        "weights": [0, 1, 1, 0, 0, 0, 1, 1, 1, 0],
        "reference": [-1, 0, 0, 0, 0, -2, 0, 0, 0, 0],
    }
    assert example_shape(load_config(None, ["dataset_type=dpo", "max_target_length=5"])) == (10, source.fields)


def test_pairs_share_rows_where_both_of_their_answers_fit(tmp_path):
    source, _ = opened(tmp_path, PAIRS, "dpo", max_target_length=9)
    source = source.with_reference(np.array([[-1, -2], [-3, -4], [-5, -6]], np.float32))
    # They take 4, 5 and 6 slots, the longer of their two rows: the first two fill a row.
    assert [source.rows.of(row).tolist() for row in range(len(source))] == [[0, 1], [2]]
    row = source[0]
    assert row["segments"].tolist() == [1, 1, 1, 2, 2, 2, 2, 2, 0, 1, 1, 1, 1, 2, 2, 2, 2, 0]
    assert row["reference"].tolist() == [-1, 0, 0, -3, 0, 0, 0, 0, 0, -2, 0, 0, 0, -4, 0, 0, 0, 0]
    apart, _ = opened(tmp_path, PAIRS, "dpo", max_target_length=9, packing="false")
    assert (
        source.num_target_tokens
        == apart.num_target_tokens
        == sum(len(pair["chosen"]) + len(pair["rejected"]) + 2 for pair in PAIRS)
    )
    assert source.count_targets(np.array([0, 0, 1])) == source.num_target_tokens + source.count_targets(np.array([0]))


LONG = [sft("abc", "defgh"), sft("abcdefghij", "k"), sft("ab", "c")]


def test_lines_that_are_too_long_are_truncated_or_dropped_and_counted_or_refused(tmp_path):
    source, _ = opened(tmp_path, LONG, max_target_length=7, packing="false")
    # The first loses end-of-text, the second all of its answer.
    assert [source[row]["weights"].tolist() for row in range(len(source))] == [
        [0, 0, 1, 1, 1, 1, 1],
        [0, 1, 1, 0, 0, 0, 0],
    ]
    assert source.notes == (
        "2 of 3 lines are longer than max_target_length=7 and were truncated to it.",
        "1 of 3 lines have no token of an answer in their row and were dropped.",
    )
    source, _ = opened(tmp_path, LONG, max_target_length=7, long_examples="drop")
    assert len(source) == 1
    assert source.notes == ("2 of 3 lines are longer than max_target_length=7 and were dropped.",)
    with pytest.raises(
        UserError,
        match=r"data.jsonl:1: 9 tokens are more than the 8 of max_target_length=7 and one target"
        r"\. Nearest that work: max_target_length=8, long_examples=truncate or",
    ):
        opened(tmp_path, LONG, max_target_length=7, long_examples="refuse")
    assert opened(tmp_path, LONG, max_target_length=11, long_examples="refuse")[0].notes == ()
    with pytest.raises(UserError, match=r"dataset_path='.*' has no answer to learn from\. 1 of 1 lines are longer"):
        opened(tmp_path, LONG[1:2], max_target_length=7)


def test_a_pair_is_dropped_with_either_answer_or_if_both_are_equal(tmp_path):
    lines = [
        *PAIRS,
        {"prompt": "x", "chosen": "y", "rejected": "y"},
        {"prompt": "abcdefgh", "chosen": "i", "rejected": "jk"},
    ]
    source, _ = opened(tmp_path, lines, "dpo", max_target_length=7)
    assert len(source.columns[0]) == 3
    assert source.notes == (
        "1 of 5 lines are longer than max_target_length=7 and were truncated to it.",
        "1 of 5 lines have no token of an answer in their row and were dropped.",
        "1 of 5 lines have the same chosen and rejected answer and were dropped.",
    )


def test_a_pair_whose_answers_differ_only_beyond_the_row_is_dropped(tmp_path):
    """It has no gradient, but would count among the pairs."""
    lines = [*PAIRS, {"prompt": "ab", "chosen": "cdefgh", "rejected": "cdefgi"}]
    source, _ = opened(tmp_path, lines, "dpo", max_target_length=6)
    assert len(source.columns[0]) == len(PAIRS)
    assert "1 of 4 lines have answers that do not differ in their tokens in a row and were dropped." in source.notes


def test_the_last_lines_are_held_out(tmp_path):
    lines = [sft(f"{number:03}", "y") for number in range(100)]
    training, held_out = opened(tmp_path, lines, eval_fraction=0.29, max_target_length=64)

    def prompts(source):
        rows = [source[number] for number in range(len(source))]
        firsts = [(row, at) for row in rows for at in np.flatnonzero((row["positions"] == 0) & (row["segments"] > 0))]
        return {bytes(row["tokens"][at : at + 3].astype(np.uint8)).decode() for row, at in firsts}

    said = [prompts(training), prompts(held_out)]
    assert said == [{f"{number:03}" for number in range(71)}, {f"{number:03}" for number in range(71, 100)}]
    (tmp_path / "held.jsonl").write_text(json.dumps(lines[0]))
    training, held_out = opened(tmp_path, lines, eval_fraction=0.5, eval_dataset_path=tmp_path / "held.jsonl")
    assert (training.num_target_tokens, held_out.num_target_tokens) == (200, 2)
    with pytest.raises(UserError, match=r"eval_fraction=0.5 holds out 1 of 1 lines and leaves none to train on"):
        opened(tmp_path, lines[:1], eval_fraction=0.5)


def test_fingerprints_tell_data_apart(tmp_path):
    found = [
        opened(tmp_path, lines, kind, **changes)[0].fingerprint
        for lines, kind, changes in (
            ([sft("ab", "cd")], "sft", {}),
            ([sft("abc", "d")], "sft", {}),  # the same tokens, other answers
            ([sft("ab", "cd")] * 2, "sft", {}),
            ([sft("ab", "cd")] * 2, "sft", {"packing": "false"}),
            ([sft("ab", "cd")], "sft", {"max_target_length": 9}),
            (PAIRS, "dpo", {}),
            (PAIRS[:2], "dpo", {}),
        )
    ]
    assert len(set(found)) == len(found)
    assert opened(tmp_path, [sft("ab", "cd")])[0].fingerprint == found[0]
    source = opened(tmp_path, PAIRS, "dpo")[0]
    assert source.with_reference(np.ones((3, 2), np.float32)).fingerprint == source.fingerprint == found[5]


def test_invalid_lines_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match=r"dataset_type=sft reads .jsonl files, not '.*a.txt'"):
        opened(tmp_path, [], dataset_path=tmp_path / "a.txt")
    (tmp_path / "b.jsonl").write_text('{"prompt": "x", "completion": "y"}\n\n{"prompt": ')
    with pytest.raises(UserError, match=r"b.jsonl:3: not JSON"):
        opened(tmp_path, [], dataset_path=tmp_path / "b.jsonl")
    with pytest.raises(UserError, match=r"data.jsonl:1: not a JSON object with \"chosen\""):
        opened(tmp_path, [["x"]], "dpo")
    with pytest.raises(UserError, match=r"has no answer to learn from\.$"):
        opened(tmp_path, [])
