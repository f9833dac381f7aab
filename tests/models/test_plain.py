"""What kernels are compared with, beside loops."""

import jax
import numpy as np
import pytest

from maxtext_lite.models import Scoring
from maxtext_lite.models.plain import plain_attention, plain_experts

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("scoring", [Scoring(), Scoring(scale=0.7, window=3, soft_cap=2.0)])
def test_attention_is_a_softmax_over_the_keys_that_a_query_sees(scoring):
    q, k, v = (RNG.normal(size=(1, 12, heads, 4)).astype(np.float32) for heads in (4, 2, 2))
    segment, sink = np.array([[1] * 5 + [2] * 5 + [0] * 2]), np.array([0.5, -1, 2, 0], np.float32)
    place = np.array([0, 1, 2, 9, 10, 11, 3, 4, 5, 6, 7, 8])  # as on two context shards
    there = {"segment_BT": segment[:, place], "place_T": place, "scoring": scoring}
    found = plain_attention(q[:, place], k[:, place], v[:, place], sink, **there)
    for at, t in enumerate(place):
        for n in range(4):
            first = 0 if scoring.window is None else t + 1 - scoring.window
            keys = [s for s in range(max(first, 0), t + 1) if segment[0, s] == segment[0, t]]
            score = k[0, keys, n // 2] @ q[0, t, n] * (scoring.scale or 0.5)
            score = score if scoring.soft_cap is None else scoring.soft_cap * np.tanh(score / scoring.soft_cap)
            weight = np.exp(score) / (np.exp(score).sum() + np.exp(sink[n]))
            np.testing.assert_allclose(found[0, at, n], weight @ v[0, keys, n // 2], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("on_input", [False, True])
def test_experts_are_what_was_chosen_times_its_share(on_input):
    x, share = RNG.normal(size=(1, 3, 4)), RNG.random((1, 3, 2))
    gate, up, down = RNG.normal(size=(2, 4, 5)), RNG.normal(size=(2, 4, 5)), RNG.normal(size=(2, 5, 4))
    expert = np.array([[[0, 1], [1, 0], [2, 2]]])  # the last is padding
    how = {"expert_BTJ": expert, "activation": "relu", "on_input": on_input}
    found = plain_experts(*(jax.numpy.asarray(a, np.float32) for a in (x, share, gate, up, down)), **how)
    for t in range(3):
        right = np.zeros(4)
        for j, e in enumerate(expert[0, t]):
            if e < 2:
                given = x[0, t] * (share[0, t, j] if on_input else 1)
                out = (np.maximum(given @ gate[e], 0) * (given @ up[e])) @ down[e]
                right += out if on_input else share[0, t, j] * out
        np.testing.assert_allclose(found[0, t], right, rtol=1e-4, atol=1e-5)
