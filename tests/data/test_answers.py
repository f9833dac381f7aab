"""Examples for SFT and DPO: whole sequences in rows, with weight only on answers; misfits are counted."""

import numpy as np
import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.data.sources import open_sources
from maxtext_lite.post_training.answers import Sequences
from maxtext_lite.post_training.conversations import Tokenized
from tests.run_directories import write_lines

END = 256
PAIRS = [
    {"prompt": "ab", "chosen": "c", "rejected": "de"},
    {"prompt": "fgh", "chosen": "ij", "rejected": "k"},
    {"prompt": "l", "chosen": "m", "rejected": "mmmmm"},
]
REFERENCE = np.array([[-1, -2], [-3, -4], [-5, -6]], np.float32)
LONG = [
    {"prompt": p, "completion": c}
    for p, c in (("abc", "defgh"), ("abcdefghij", "k"), ("ab", "c"))
]


def opened(tmp_path, lines, kind="sft", **changes):
    path = write_lines(tmp_path / "data.jsonl", lines)
    values = {
        "dataset_type": kind,
        "dataset_path": path,
        "eval_fraction": 0,
        "eval_interval": -1,
    } | changes
    return open_sources(
        load_config(None, [f"{key}={value}" for key, value in values.items()]),
        vocab_size=320,
    )


def sft(prompt, completion):
    return {"prompt": prompt, "completion": completion}


def texts(row):
    """Each array of a row as its numbers, separated by spaces; bytes as letters and end-of-text as $."""
    said = {name: " ".join(f"{x:g}" for x in values) for name, values in row.items()}
    for name in ("tokens", "targets"):
        said[name] = "".join(chr(x) if x < END else "$" for x in row[name]).replace(
            "\0", "."
        )
    return said


def targets_of(source):
    return source.count_targets(np.arange(len(source)))


@pytest.mark.fast
def test_two_short_texts_share_a_row_by_hand(tmp_path):
    source, evaluation = opened(
        tmp_path, [sft("ab", "c"), sft("d", "ef")], max_target_length=8
    )
    assert evaluation is None
    assert len(source) == 1
    assert texts(source[0]) == {
        "tokens": "abcdef..",
        "targets": "bc$ef$..",
        "segments": "1 1 1 2 2 2 0 0",
        "positions": "0 1 2 0 1 2 0 0",
        "weights": "0 1 1 1 1 1 0 0",
    }
    assert {
        values.dtype.name for name, values in source[0].items() if name != "weights"
    } == {"int32"}
    assert source[0]["weights"].dtype == np.float32
    assert source.num_target_tokens == targets_of(source) == 5


def test_a_pair_is_two_rows_by_hand(tmp_path):
    source, _ = opened(tmp_path, PAIRS, "dpo", max_target_length=5, packing="false")
    assert (len(source), len(source.columns[0]), source.num_tokens) == (3, 3, 10)
    assert texts(source.with_reference(REFERENCE)[0]) == {
        "tokens": "abc..abde.",
        "targets": "bc$..bde$.",
        "segments": "1 1 1 0 0 1 1 1 1 0",
        "positions": "0 1 2 0 0 0 1 2 3 0",
        "weights": "0 1 1 0 0 0 1 1 1 0",
        "reference": "-1 0 0 0 0 -2 0 0 0 0",
    }


def test_pairs_share_rows_where_both_of_their_answers_fit(tmp_path):
    source, _ = opened(tmp_path, PAIRS, "dpo", max_target_length=9)
    # They take 4, 5 and 6 slots, the longer of their two rows: the first two fill a row.
    assert [source.rows.of(row).tolist() for row in range(len(source))] == [[0, 1], [2]]
    row = texts(source.with_reference(REFERENCE)[0])
    assert row["segments"] == "1 1 1 2 2 2 2 2 0 1 1 1 1 2 2 2 2 0"
    assert row["reference"] == "-1 0 0 -3 0 0 0 0 0 -2 0 0 0 -4 0 0 0 0"
    apart, _ = opened(tmp_path, PAIRS, "dpo", max_target_length=9, packing="false")
    expected = sum(len(pair["chosen"] + pair["rejected"]) + 2 for pair in PAIRS)
    assert (
        source.num_target_tokens
        == apart.num_target_tokens
        == targets_of(source)
        == expected
    )


def test_lines_that_are_too_long_are_truncated_or_dropped_and_counted_or_refused(
    tmp_path,
):
    source, _ = opened(tmp_path, LONG, max_target_length=7, packing="false")
    # The first loses end-of-text, the second all of its answer.
    assert [texts(source[row])["weights"] for row in range(len(source))] == [
        "0 0 1 1 1 1 1",
        "0 1 1 0 0 0 0",
    ]
    assert [note[:6] for note in source.notes] == ["2 of 3", "1 of 3"]
    source, _ = opened(tmp_path, LONG, max_target_length=7, long_examples="drop")
    assert (len(source), source.notes[0][:6]) == (1, "2 of 3")
    with pytest.raises(
        UserError,
        match=r"data.jsonl:1: .*: max_target_length=8, long_examples=truncate or",
    ):
        opened(tmp_path, LONG, max_target_length=7, long_examples="refuse")
    assert (
        opened(tmp_path, LONG, max_target_length=11, long_examples="refuse")[0].notes
        == ()
    )


@pytest.mark.parametrize(
    "pair",
    [
        {"prompt": "x", "chosen": "y", "rejected": "y"},
        {
            "prompt": "abcdefgh",
            "chosen": "i",
            "rejected": "jk",
        },  # no token of an answer in its row
        {
            "prompt": "ab",
            "chosen": "cdefgh",
            "rejected": "cdefgi",
        },  # they differ beyond it: no gradient, but a pair
    ],
)
def test_a_pair_without_two_answers_in_its_row_is_dropped_and_counted(tmp_path, pair):
    source, _ = opened(tmp_path, [*PAIRS, pair], "dpo", max_target_length=6)
    assert len(source.columns[0]) == 3
    assert source.notes[-1].startswith("1 of 4 ")


def test_the_ends_of_answers_are_the_special_tokens_that_the_last_of_them_end_with():
    """By hand: an end, one of an earlier answer, an answer that a row truncated, and none."""
    sequences = Sequences.of([
        Tokenized(np.array(tokens, np.int32), np.array(learned, bool), 0)
        for tokens, learned in (
            ([1, 2, 9, 3], [0, 1, 1, 0]),
            ([1, 7, 2, 8], [0, 1, 0, 1]),
            ([1, 2, 9, 4, 5], [0, 1, 1, 0, 1]),
            ([1, 2], [0, 0]),
        )
    ])  # fmt: skip
    assert sequences.ends(row_tokens=4) == {(2, 9): 2, (8,): 1}
    assert sequences.ends(row_tokens=5) == {(2, 9): 1, (8,): 1, (5,): 1}


# An answer closes with ! if it is the last: each answer needs a text of its own.
LAST_CLOSES = (
    "{% for m in messages %}{{ m.role[0] + m.content }}{{ '!' if loop.last and m.role == 'assistant' else ';' }}"
    "{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)
TURNS = [
    {"role": "user", "content": "1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "3"},
    {"role": "assistant", "content": "4"},
]


def test_lines_with_a_text_for_each_answer_are_held_out_as_lines_and_counted(tmp_path):
    (tmp_path / "t.jinja").write_text(LAST_CLOSES)
    lines = [{"messages": TURNS}, {"messages": TURNS[:2]}, {"messages": TURNS}]
    changes = {"chat_template": tmp_path / "t.jinja", "packing": "false"}
    source, evaluation = opened(tmp_path, lines, eval_fraction=0.4, **changes)
    assert [texts(source[row])["targets"].strip(".") for row in range(len(source))] == [
        "1;a2!",
        "1;a2;u3;a4!",
        "1;a2!",
    ]
    assert len(evaluation) == 2
    assert source.notes[0].startswith(
        "1 of 2 lines became an example for each answer, 3 examples in all"
    )
    with pytest.raises(UserError, match=r"data.jsonl:1: "):
        opened(
            tmp_path,
            [{"prompt": [], "chosen": TURNS, "rejected": TURNS[:2]}],
            "dpo",
            **changes,
        )


SHAREGPT = [{"from": "human", "value": "1"}, {"from": "gpt", "value": "2"}]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"messages": TURNS[:2]}, "u1;a2!"),
        ({"conversations": SHAREGPT}, "u1;a2!"),
        ({"system": "0", "conversations": SHAREGPT}, "s0;u1;a2!"),
        ({"conversations": TURNS[:2]}, "u1;a2!"),
        ({"instruction": "1", "input": "", "output": "2"}, "u1;a2!"),
        ({"instruction": "1", "input": "3", "output": "2"}, "u1\n3;a2!"),
    ],
)
def test_conversations_come_in_the_spellings_of_sharegpt_and_alpaca_also_in_parquet(
    line, expected, tmp_path
):
    (tmp_path / "t.jinja").write_text(LAST_CLOSES)
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([line | {"other": None}]), path)
    for changes in ({}, {"dataset_path": path}):
        source, _ = opened(
            tmp_path, [line], chat_template=tmp_path / "t.jinja", **changes
        )
        assert "".join(map(chr, source.columns[0].token_ids)) == expected


@pytest.mark.parametrize(
    "line",
    [
        {"conversations": [SHAREGPT[0], {"from": "observation", "value": "2"}]},
        {"conversations": SHAREGPT[::-1]},
        {"instruction": "1", "output": ""},
        {"instruction": "1", "output": "2", "history": [["3", "4"]]},
        {"instruction": "1"},
    ],
)
def test_lines_that_are_no_conversation_are_refused_with_their_place(line, tmp_path):
    (tmp_path / "t.jinja").write_text(LAST_CLOSES)
    with pytest.raises(UserError, match=r"data.jsonl:1: "):
        opened(tmp_path, [line], chat_template=tmp_path / "t.jinja")
