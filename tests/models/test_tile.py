"""What is found over parts of the keys is put together as over all of them, and masks say what they should."""

import jax.numpy as jnp
import numpy as np

from maxtext_lite.models.tile import Keys, attend, grouped, may_see, merge
from tests.models.test_attention import inputs

B, T, N, K, H = 2, 128, 4, 2, 16


def test_what_is_found_over_two_parts_of_the_keys_merges_into_the_whole():
    q, k, v, segment = (jnp.asarray(x) for x in inputs())
    q_BKGTH = grouped(q, K).transpose(0, 2, 3, 1, 4)
    keys = Keys.of(k, v, segment)
    found = []
    for first, count in ((0, 128), (0, 40), (40, 88)):
        part = keys.part(first, count)
        # Every query sees a key of the first part: documents and order masked only in the second.
        seen = may_see(segment, part.segment_BS, 0, first) if first else jnp.ones((B, 1, 1, T, count), bool)
        whole = jnp.concatenate([jnp.ones((B, 1, 1, T, 40), bool), may_see(segment, segment[:, 40:], 0, 40)], axis=-1)
        found.append(attend(q_BKGTH, part, whole if count == T else seen))
    want, *parts = found
    for got, expected in zip(merge(*parts), want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_a_part_without_any_key_to_see_counts_for_nothing():
    q, k, v, segment = (jnp.asarray(x) for x in inputs())
    q_BKGTH, keys = grouped(q, K).transpose(0, 2, 3, 1, 4), Keys.of(k, v, segment)
    everything = jnp.ones((B, 1, 1, T, T), bool)
    one = attend(q_BKGTH, keys, everything)
    for got, want in zip(merge(one, attend(q_BKGTH, keys, ~everything)), one, strict=True):
        np.testing.assert_array_equal(got, want)


def test_may_see_is_causal_and_within_documents():
    segment_T, segment_S = jnp.array([[1, 1, 2]]), jnp.array([[1, 2]])
    seen = lambda *firsts: may_see(segment_T, segment_S, *firsts)[0, 0, 0].tolist()  # noqa: E731
    assert seen(5, 5) == [[True, False], [True, False], [False, True]]
    assert seen(0, 1) == [[False, False], [True, False], [False, True]]
    assert seen(None, 7) == [[True, False], [True, False], [False, True]]
    # Queries 5, 6 and 7, keys 4 and 5.
    assert seen(5, 4, 3) == [[True, False], [True, False], [False, True]]
    assert seen(5, 4, 2) == [[True, False], [False, False], [False, False]]
