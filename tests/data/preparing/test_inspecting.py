"""Reports about a prepared dataset agree with its input, and rows are shown with documents and loss."""

import collections

import pytest

from maxtext_lite.config import load_config
from maxtext_lite.data import open_sources
from maxtext_lite.preparation.inspecting import report
from maxtext_lite.preparation.keys import InspectConfig
from tests.prepared import byte_shards, write_prepared

TEXTS = [
    "abc",
    "d" * 10,
    "",
    "Größe",
    "e" * 14,
]  # 4, 11, 1, 8 and 15 tokens with end-of-text


@pytest.fixture
def prepared(tmp_path):
    write_prepared(tmp_path / "p", byte_shards(TEXTS, 2))
    return tmp_path / "p"


@pytest.mark.fast
def test_the_report_counts_the_contents(prepared, monkeypatch):
    text = "\n".join(
        " ".join(line.split())
        for line in report(prepared, InspectConfig(max_target_length=10))
    )
    ids = [token for text in TEXTS for token in [*text.encode(), 256]]
    counts = sorted(collections.Counter(ids).values(), reverse=True)
    for said in (
        "5 documents, 39 tokens",
        "1 to 15, 7.8 on average\n1 to 1 1 ##############\n2 to 3 0\n4 to 7 1 ##############\n8 to 15 3 ####",
        # 39 - 5 targets; concat: 38 inputs that have a next token in 4 rows; none: 1 + 1 + 0 + 1 + 2 rows.
        "concat 4 rows 34 target tokens, 85.00% of the slots",
        "none 5 rows 34 target tokens, 68.00% of the slots",
        # Of 3, 10, 7 and 14 slots the last is cut, into 10 and 4: rows of 10, 10, 7 + 3 and 4.
        "best_fit 4 rows 34 target tokens, 85.00% of the slots; 1 documents are cut",
        f"{len(counts)} of 257 ids occur ({len(counts) / 257:.1%})",
        f"the 10 most frequent are {sum(counts[:10]) / 39:.1%}",
    ):
        assert said in text
    monkeypatch.setattr("maxtext_lite.data.rows._DOCUMENTS_AT_ONCE", 2)
    in_parts = report(prepared, InspectConfig(max_target_length=10))
    assert "\n".join(" ".join(line.split()) for line in in_parts) == text


def test_a_runs_summary_of_its_data_agrees_with_inspect(prepared):
    keys = [
        "dataset_type=array_record",
        "eval_fraction=0",
        "eval_interval=-1",
        "max_target_length=10",
    ]
    config = load_config(None, [*keys, f"dataset_path={prepared}", "packing=best_fit"])
    source, _ = open_sources(config)
    (found,) = source.describe()
    assert found == {
        "name": "",
        "documents": 5,
        "tokens": 39,
        "examples": 4,
        "target_tokens": 34,
        "slots_used": 0.85,
        "cut_documents": 1,
        "lengths": [1, 0, 1, 3],
    }
    synthetic, _ = open_sources(load_config(None, ["dataset_type=synthetic"]))
    assert synthetic.describe() == []
