"""A user's examples as a source: missing fields are filled in, and invalid ones refused."""

import numpy as np
import pytest

from maxtext_lite.config import UserError
from maxtext_lite.data import own_examples

SIZES = {"key": "source", "num_tokens": 4, "vocab_size": 10}


class Examples(list):
    fingerprint = "mine"


def example(**fields):
    return {"tokens": np.arange(4), "targets": np.arange(1, 5), **fields}


def test_optional_fields_default_to_one_document_of_weight_1():
    source = own_examples(Examples([example()]), **SIZES)
    assert (len(source), source.num_tokens, source.fingerprint) == (1, 4, "own:mine")
    row = source[0]
    assert {name: x.tolist() for name, x in row.items()} == {
        "tokens": [0, 1, 2, 3], "targets": [1, 2, 3, 4], "segments": [1, 1, 1, 1], "positions": [0, 1, 2, 3],
        "weights": [1, 1, 1, 1],
    }  # fmt: skip
    assert {name: x.dtype.name for name, x in row.items() if name != "weights"} == dict.fromkeys(
        row.keys() - {"weights"}, "int32"
    )
    assert row["weights"].dtype == np.float32


def test_padding_is_no_target_wherever_it_is():
    """Also where the caller does not give weights."""
    for segments in ([1, 1, 2, 0], [0, 0, 1, 1]):
        source = own_examples(Examples([example(segments=np.array(segments))]), **SIZES)
        assert source[0]["weights"].tolist() == [float(segment > 0) for segment in segments]
        assert source[0]["weights"].dtype == np.float32


def test_custom_fields_are_float32_and_targets_are_counted():
    examples = [example(weights=np.array([0, 1, 0.5, 0]), price=np.full(4, 0.25 * number)) for number in range(3)]
    source = own_examples(Examples(examples), **SIZES)
    assert set(source.fields) == {"tokens", "targets", "segments", "positions", "weights", "price"}
    assert source[2]["price"].dtype == np.float32
    assert source[2]["price"].tolist() == [0.5] * 4
    assert source.num_target_tokens == 6
    assert source.count_targets(np.array([1, 1])) == 4


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_large_whole_numbers_that_float32_has_are_accepted(dtype):
    given = np.array([0, 2**24, 2**62, 2**63 - 2**39], dtype)
    row = own_examples(Examples([example(price=given)]), **SIZES)[0]
    assert [int(x) for x in row["price"]] == [0, 2**24, 2**62, 2**63 - 2**39]


def test_any_type_that_keeps_the_values_is_accepted():
    mask = np.array([True, True, False, False])
    given = example(segments=mask, positions=np.arange(4, dtype=np.uint64), weights=mask, price=[-0.1, np.nan, 1, 2])
    row = own_examples(Examples([given]), **SIZES)[0]
    assert (row["segments"].tolist(), row["weights"].tolist()) == ([1, 1, 0, 0], [1, 1, 0, 0])
    np.testing.assert_array_equal(row["price"], np.float32([-0.1, np.nan, 1, 2]))  # rounded, as any float64 is


@pytest.mark.parametrize(("examples", "message"), [
    ([], "source has no examples"),
    ([{"tokens": np.arange(4)}], r"source\[0\] has no targets"),
    ([example(weights=np.ones(3))], r"source\[0\]: weights has the shape \(3,\), not \(max_target_length,\) = \(4,\)"),
    ([example(weights=np.ones(4), segments=np.array([0, 1, 1, 0]))],
     r"source\[0\]: weights are above 0 at 2 places of padding, the first of which is 0"),
    ([example(segments=np.ones(3))], r"source\[0\]: segments has the shape \(3,\)"),
    ([example(tokens=np.arange(7, 11))], r"source\[0\]: tokens are 7 to 10, not 0 to vocab_size - 1 = 9"),
    ([example(tokens=[1.7, 2.9, 3, 4])], r"source\[0\]: tokens have the type float64, not one of whole numbers"),
    ([example(tokens=["1", "2", "3", "4"])], r"source\[0\]: tokens have the type <U1, not one of whole numbers"),
    ([example(segments=[1, 1, 2, 2**32 + 1])], r"source\[0\]: segments are 1 to 4294967297, not 0 to 2\^31 - 1 = "),
    ([example(segments=[1, 1.5, 2, 2])], r"source\[0\]: segments have the type float64"),
    ([example(positions=[0, 1, 2, 2**31])], r"source\[0\]: positions are 0 to 2147483648, not 0 to 2\^31 - 1 = "),
    ([example(positions=[-1, 0, 1, 2])], r"source\[0\]: positions are -1 to 2, not 0 to 2\^31 - 1 = 2147483647"),
    ([example(weights=[1, 1, -1, 1])], r"source\[0\]: weights are -1 to 1, not finite numbers of at least 0"),
    ([example(weights=[1, 1, np.nan, 1])], r"source\[0\]: weights are nan to nan, not finite numbers of at least 0"),
    ([example(weights=[1, 1, 1e-60, 1])], r"source\[0\]: weights have the value 1e-60, which float32 cannot"),
    ([example(weights=["a"] * 4)], r"source\[0\]: weights have the type <U1, not one of numbers"),
    ([example(price=[1, 2**24 + 1, 2, 3])], r"source\[0\]: price have the value 16777217, which float32 cannot"),
    ([example(price=np.full(4, 2**63 - 1))], "price have the value 9223372036854775807, which float32 cannot"),
    ([example(price=np.full(4, 2**64 - 1, np.uint64))], "price have the value 18446744073709551615, which float32"),
    ([example(price=np.zeros(4, [("a", "i4")]))], r"source\[0\]: price have the type .*, not one of numbers"),
    ([example(targets=[[1], [2, 3], [4], [5]])], r"source\[0\]: targets is not an array: "),
    ([example(price=[1, 1e39, 2, 3])], r"source\[0\]: price have the value 1e\+39, which float32 cannot"),
    ([example(), example(price=np.ones(4))], r"source\[1\] has the fields .*price.*, not"),
])  # fmt: skip
def test_an_invalid_example_is_refused(examples, message):
    with pytest.raises(UserError, match=message):
        own_examples(Examples(examples), **SIZES)[len(examples) - 1]
