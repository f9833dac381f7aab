"""A gradient that is not finite is traced to its micro-batch, its examples and its first parameter."""

import jax
import numpy as np
import pytest

from maxtext_lite.training.nonfinite import NonFinite, find_nonfinite


def _find(it, rows, accumulation, slots):
    ids = np.arange(100, 116)
    with jax.set_mesh(it.mesh):
        batch = it.batch(rows, accumulation, slots)
        return find_nonfinite(it.parts, it.state(), batch, ids, micro_batches=accumulation)


@pytest.mark.parametrize(("accumulation", "slots", "mesh"), [(1, 16, {}), (3, 8, {"data": 2, "fsdp": 4})], ids=str)
@pytest.mark.parametrize("culprits", [[11], [4, 10]])
def test_names_the_examples(accumulation, slots, mesh, culprits, setup, rows):
    it = setup("optimizer=sgd", **mesh)
    bad = {name: array.copy() for name, array in rows.items()}
    for row in culprits:
        bad["weights"][row, 0] = np.nan
    found = _find(it, bad, accumulation, slots)
    assert found.micro_batch == min(row % accumulation for row in culprits)
    assert found.example_ids == tuple(100 + row for row in culprits if row % accumulation == found.micro_batch)
    assert found.parameter == "embedding.table"


def test_nothing_is_found_where_all_is_finite(setup, rows):
    it = setup("optimizer=sgd")
    assert _find(it, rows, 2, 8) is None


def test_the_sentence_names_a_few():
    text = str(NonFinite(2, tuple(range(30)), "layers.mlp.up"))
    assert text == (
        "micro-batch 2, example ids 0, 1, 2, 3, 4, 5, 6, 7, ..., first parameter whose gradient is not finite: "
        "layers.mlp.up"
    )
