"""Lists of excluded rows, and their examples."""

import dataclasses

import numpy as np
import pytest

from maxtext_lite.config import UserError
from maxtext_lite.data.excluded import ExcludedRow, excluded_ids, excluded_text, left_out, read_excluded
from maxtext_lite.data.mixture_history import SourcePart
from maxtext_lite.data.mixture_source import MixtureSource


@dataclasses.dataclass(frozen=True)
class Source:
    """A source of a given number of examples."""

    fingerprint: str
    num_examples: int

    def __len__(self):
        return self.num_examples


ONE, OTHER = Source("text:one", 10), Source("text:other", 5)
MIXED = MixtureSource(
    (SourcePart("web", "text:one", "1", None), SourcePart("code", "text:other", "1", None)), (ONE, OTHER)
)


def test_written_lists_are_read_back_and_a_minimal_line_is_enough(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [
        ExcludedRow(row=3, source="odd", data="text:1", from_example=8, spike=1, step=2, loss=9.5, grad_norm=None),
        ExcludedRow(row=4),
    ]
    path.write_text(excluded_text([rows[0]]) + '{"row": 4}\n')
    assert read_excluded(path, "excluded_rows=x") == rows
    assert read_excluded(tmp_path / "none.jsonl") == []  # of a run that left nothing out
    no_number = ExcludedRow(row=3, loss=float("nan"), grad_norm=float("inf"))
    path.write_text(excluded_text([no_number]))
    assert read_excluded(path, "x") == [ExcludedRow(row=3)]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\n", "\r", "\r\n"])
def test_a_name_with_a_line_separator_is_one_name(separator, tmp_path):
    rows = [ExcludedRow(row=3, source=f"web{separator}code", data=f"text:{separator}"), ExcludedRow(row=4)]
    path = tmp_path / "rows.jsonl"
    path.write_text(excluded_text(rows), encoding="utf-8")
    assert read_excluded(path) == rows
    path.write_text('{"row": 3, "source": "web\u2028"}\n{"row": -1}\n', encoding="utf-8")
    with pytest.raises(UserError, match="line 2: row"):
        read_excluded(path)


@pytest.mark.parametrize(("text", "message"), [
    (None, "excluded_rows=x cannot be read: No such file or directory."),
    ('{"row": 1}\n{"row": -1}\n', "excluded_rows=x line 2: row: Input should be greater than or equal to 0."),
    ('{"rows": 1}\n', "excluded_rows=x line 1: row: Field required."),
    ('{"row": 1, "place": 3}\n', "excluded_rows=x line 1: place: Extra inputs are not permitted."),
    ("12\n", "excluded_rows=x line 1: what stands there: "),
    ("\n", "excluded_rows=x line 1: what stands there: Invalid JSON"),
])  # fmt: skip
def test_an_invalid_list_is_refused_with_its_line(text, message, tmp_path):
    path = tmp_path / "rows.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError) as refused:
        read_excluded(path, "excluded_rows=x")
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(("source", "rows", "ids"), [
    (ONE, [{"row": 3}, {"row": 9, "data": "text:one", "from_example": 40}], {3: 0, 9: 40}),
    # Ids count on from one source to the next; a row listed twice is left out from the earlier position.
    (MIXED, [{"row": 3, "source": "code"}, {"row": 3, "source": "web"}], {13: 0, 3: 0}),
    (MIXED, [{"row": 4, "data": "text:other", "source": "its old name"}], {14: 0}),
    (MIXED, [{"row": 2, "source": "web", "from_example": 8}, {"row": 2, "source": "web", "from_example": 5}], {2: 5}),
])  # fmt: skip
def test_rows_are_found_by_fingerprint_or_name(source, rows, ids):
    assert excluded_ids(source, [ExcludedRow(**row) for row in rows], "excluded_rows=x") == ids


@pytest.mark.parametrize(("row", "message"), [
    ({"row": 10}, "excluded_rows=x: this run's data have no row 10."),
    ({"row": 1, "source": "web"}, "excluded_rows=x: this run's data have no row 1 of the source web."),
    ({"row": 1, "data": "text:2"}, "excluded_rows=x: this run's data have no row 1 with that fingerprint."),
])  # fmt: skip
def test_a_missing_row_is_refused_only_in_a_list_of_the_config(row, message):
    rows = [ExcludedRow(**row)]
    with pytest.raises(UserError, match=message):
        excluded_ids(ONE, rows, "excluded_rows=x")
    assert excluded_ids(ONE, rows) == {}  # the run had another source then


def test_a_row_is_left_out_from_its_place_on():
    assert left_out(np.array([4, 2, 4, 3]), 10, {4: 12, 2: 11, 3: 14}).tolist() == [False, True, True, False]
    assert left_out(np.array([4]), 10, {}).tolist() == [False]
