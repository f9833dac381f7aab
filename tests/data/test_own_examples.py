"""A user's examples as a source: missing fields are filled in, and invalid ones refused."""

import numpy as np
import pytest

from maxtext_lite.config import UserError
from maxtext_lite.data.own_examples import own_examples


class Examples(list):
    fingerprint = "mine"


def source_of(*examples):
    full = [
        {"tokens": np.arange(4), "targets": np.arange(1, 5), **fields}
        for fields in examples
    ]
    return own_examples(Examples(full), key="source", num_tokens=4, vocab_size=10)


def test_optional_fields_default_to_one_document_of_weight_1():
    source = source_of({})
    assert (len(source), source.num_tokens, source.fingerprint) == (1, 4, "own:mine")
    row = source[0]
    assert {name: x.tolist() for name, x in row.items()} == {
        "tokens": [0, 1, 2, 3],
        "targets": [1, 2, 3, 4],
        "segments": [1] * 4,
        "positions": [0, 1, 2, 3],
        "weights": [1] * 4,
    }
    assert {name: x.dtype.name for name, x in row.items()} == dict.fromkeys(
        row, "int32"
    ) | {"weights": "float32"}


@pytest.mark.fast
@pytest.mark.parametrize("segments", [[1, 1, 2, 0], [0, 0, 1, 1]])
def test_padding_is_no_target_wherever_it_is(segments):
    assert source_of({"segments": np.array(segments)})[0]["weights"].tolist() == [
        segment > 0 for segment in segments
    ]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("weights", np.ones(3)),
        ("tokens", np.arange(7, 11)),  # vocab_size is 10
        ("segments", [1, 1, 2, 2**32 + 1]),
        ("weights", [1, 1, -1, 1]),
        ("price", [1, 2**24 + 1, 2, 3]),  # float32 has no such number
    ],
)
def test_an_invalid_field_is_refused(field, values):
    with pytest.raises(UserError, match=rf"source\[0\]: {field}"):
        source_of({field: values})


def test_invalid_examples_are_refused():
    with pytest.raises(UserError):
        source_of()
    with pytest.raises(UserError, match=r"source\[0\] .*targets"):
        own_examples(
            Examples([{"tokens": np.arange(4)}]),
            key="source",
            num_tokens=4,
            vocab_size=10,
        )
    with pytest.raises(UserError, match=r"source\[0\]: weights"):  # of padding
        source_of({"weights": np.ones(4), "segments": np.array([0, 1, 1, 0])})
    with pytest.raises(UserError, match=r"source\[1\] .*price"):
        source_of({}, {"price": np.ones(4)})[1]
