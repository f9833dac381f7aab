"""Lists of excluded rows, and their examples."""

import dataclasses
import gzip

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.data.excluded import (
    ExcludedRow,
    excluded_ids,
    read_excluded,
)
from maxtext_lite.data.history import MixtureComponent
from maxtext_lite.data.mixture import MixtureSource
from maxtext_lite.data.source import ExampleSource


@dataclasses.dataclass(frozen=True)
class Source(ExampleSource):
    """A source of a given number of examples."""

    fingerprint: str
    num_examples: int

    def __len__(self):
        return self.num_examples


ONE, OTHER = Source("text:one", 10), Source("text:other", 5)
PARTS = tuple(
    MixtureComponent(name, f"text:{data}", "1", None)
    for name, data in (("web", "one"), ("code", "other"))
)
MIXED = MixtureSource(PARTS, (ONE, OTHER))


@pytest.mark.parametrize("line", ['{"row": -1}', '{"rows": 1}'])
def test_an_invalid_list_is_refused_with_its_line(line, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"row": 3, "source": "web\u2028"}\n' + line + "\n", encoding="utf-8"
    )
    with pytest.raises(UserError, match=r"excluded_rows: .*:2: "):
        read_excluded(path, "excluded_rows")


def test_a_list_is_read_as_data_are(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'\xef\xbb\xbf{"row": 3}\r\n\r\n{"row": 4}'))
    assert [each.row for each in read_excluded(path, "excluded_rows")] == [3, 4]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("source", "rows", "ids"),
    [
        (ONE, [{"row": 3}], {3: 0}),
        # Ids count on from one source to the next; a row listed twice is left out from the earlier position.
        (
            MIXED,
            [{"row": 3, "source": "code"}, {"row": 3, "source": "web"}],
            {13: 0, 3: 0},
        ),
        (MIXED, [{"row": 4, "data": "text:other", "source": "its old name"}], {14: 0}),
        (
            MIXED,
            [{"row": 2, "source": "web", "from_example": at} for at in (8, 5, 6)],
            {2: 5},
        ),
    ],
)
def test_rows_are_found_by_fingerprint_or_name(source, rows, ids):
    assert (
        excluded_ids(source, [ExcludedRow(**row) for row in rows], "excluded_rows=x")
        == ids
    )


@pytest.mark.parametrize("row", [{"row": 10}, {"row": 1, "source": "web"}])
def test_a_missing_row_is_refused_only_in_a_list_of_the_config(row):
    with pytest.raises(UserError, match="excluded_rows=x"):
        excluded_ids(ONE, [ExcludedRow(**row)], "excluded_rows=x")
    assert (
        excluded_ids(ONE, [ExcludedRow(**row)]) == {}
    )  # the run had another source then
