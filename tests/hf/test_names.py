"""Patterns by hand, and every table in both directions."""

import numpy as np
import pytest

from maxtext_lite.config.hf.config import FAMILIES
from maxtext_lite.hf.names import TABLES, Name

SIZES = {"V": 11, "D": 6, "T": 7, "N": 4, "K": 2, "H": 6, "F": 5, "E": 3, "I": 4, "S": 8, "Q": 5, "R": 3, "P": 2,
         "O": 4, "C": 7, "W": 3}  # fmt: skip


def test_every_family_has_a_table():
    assert TABLES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("kind", TABLES)
def test_what_is_imported_is_exported(kind):
    table = TABLES[kind]
    for name in (*table.root, *table.layer):
        tensor = np.arange(np.prod(name.their_shape(SIZES))).reshape(name.their_shape(SIZES))
        ours = [name.to_ours(tensor, part, SIZES) for part in range(len(name.ours))]
        for part, x in enumerate(ours):
            assert x.shape == name.our_shape(part, SIZES)[name.per_expert :], name
        assert sum(x.size for x in ours) == tensor.size, name
        np.testing.assert_array_equal(name.to_theirs(ours, SIZES), tensor)


def test_a_linear_layer_is_transposed_and_cut_into_heads():
    name = Name(("query",), "q", "(N H) D -> D N H")
    tensor = np.arange(24 * 6).reshape(24, 6)
    ours = name.to_ours(tensor, 0, SIZES)
    assert ours.base is not None, "a view"
    assert ours[2, 3, 1] == tensor[3 * 6 + 1, 2]


def test_parts_stand_one_after_another():
    name = Name(("query", "key", "value"), "qkv", "(Z H) D -> D Z H", ("N", "K", "K"))
    tensor = np.arange(48 * 6).reshape(48, 6)
    assert name.to_ours(tensor, 0, SIZES)[5, 3, 2] == tensor[3 * 6 + 2, 5]
    assert name.to_ours(tensor, 1, SIZES)[5, 1, 2] == tensor[(4 + 1) * 6 + 2, 5]
    assert name.to_ours(tensor, 2, SIZES)[5, 1, 2] == tensor[(4 + 2 + 1) * 6 + 2, 5]


def test_parts_take_turns():
    name = Name(("gate", "up"), "gate_up", "E D (I Z) -> E D I", ("1", "1"))
    tensor = np.arange(3 * 6 * 8).reshape(3, 6, 8)
    np.testing.assert_array_equal(name.to_ours(tensor, 0, SIZES), tensor[..., ::2])
    np.testing.assert_array_equal(name.to_ours(tensor, 1, SIZES), tensor[..., 1::2])


def test_pairs_become_halves_behind_the_dims_that_are_not_rotated():
    name = Name(("kv_down",), "kv", "C D -> D C", pairs="C")
    tensor = np.arange(7 * 6).reshape(7, 6)
    order = name.to_ours(tensor, 0, SIZES)[0] // 6
    assert order.tolist() == [0, 1, 2, 3, 5, 4, 6]
