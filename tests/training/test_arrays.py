"""Trees of arrays: their dtype and their size."""

import jax.numpy as jnp

from maxtext_lite.training.arrays import as_float32, num_elements


def test_a_tree_in_float32_keeps_its_form_and_counts_its_numbers():
    tree = {"a": jnp.ones((2, 3), jnp.bfloat16), "b": {"c": jnp.zeros(4, jnp.int32)}}
    wide = as_float32(tree)
    assert {name: x.dtype.name for name, x in {"a": wide["a"], "c": wide["b"]["c"]}.items()} == dict.fromkeys(
        "ac", "float32"
    )
    assert num_elements(tree) == num_elements(wide) == 10
