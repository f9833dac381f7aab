"""Every kernel that runs here equals a loop over heads and positions in float64, gradients included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.models import Scoring, tile_layout
from maxtext_lite.models import attention as attention_module
from maxtext_lite.models.attention import attention
from maxtext_lite.models.splash import splash_attention
from maxtext_lite.models.tiled_attention import tiled_attention

B, T, N, K, H = 2, 128, 4, 2, 16


def inputs(num_tokens=T, seed=0):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=(B, num_tokens, heads, H)).astype(np.float32) for heads in (N, K, K))
    segment = np.cumsum(rng.random((B, num_tokens)) < 0.05, axis=1) + 1
    segment[:, -num_tokens // 8 :] = 0  # padding at the end
    return q, k, v, segment.astype(np.int32)


def with_a_long_document(segment):
    """The first row is one document up to its padding, so that windows end inside of it."""
    return np.concatenate([np.minimum(segment[:1], 1), segment[1:]])


def by_loops(q, k, v, segment, sink=None, scoring=Scoring()):  # noqa: B008
    """Context in float64, one query at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros((*q.shape[:3], v.shape[3]))
    scale = 1 / np.sqrt(q.shape[3]) if scoring.scale is None else scoring.scale
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            first = 0 if scoring.window is None else max(0, t + 1 - scoring.window)
            keys = [s for s in range(first, t + 1) if segment[b, s] == segment[b, t]]
            for n in range(q.shape[2]):
                kv_head = n * k.shape[2] // q.shape[2]
                score = k[b, keys, kv_head] @ q[b, t, n] * scale
                if scoring.soft_cap is not None:
                    score = scoring.soft_cap * np.tanh(score / scoring.soft_cap)
                highest = score.max() if sink is None else max(score.max(), sink[n])
                weight = np.exp(score - highest)
                total = weight.sum() + (0 if sink is None else np.exp(sink[n] - highest))
                out[b, t, n] = weight / total @ v[b, keys, kv_head]
    return out


def exact(q, k, v, segment, g, sink=None, scoring=Scoring()):  # noqa: B008
    """Context, and the gradients of its product with g for q, k, v and, where there are any, sinks, in float64."""
    q, k, v, g = (np.asarray(x, np.float64) for x in (q, k, v, g))
    num_queries, num_kv_heads = q.shape[1], k.shape[2]
    k, v = (x.repeat(q.shape[2] // num_kv_heads, axis=2) for x in (k, v))
    scale = 1 / np.sqrt(q.shape[3]) if scoring.scale is None else scoring.scale
    distance = np.arange(num_queries)[:, None] - np.arange(num_queries)
    seen = (distance >= 0) & (distance < (scoring.window or num_queries))
    seen = seen & (segment[:, :, None] == segment[:, None, :])
    score, slope = scale * np.einsum("btnh,bsnh->bnts", q, k), scale
    if scoring.soft_cap is not None:
        bounded = np.tanh(score / scoring.soft_cap)
        score, slope = scoring.soft_cap * bounded, scale * (1 - bounded**2)
    score = np.where(seen[:, None], score, -np.inf)
    nothing = np.full((*score.shape[:3], 1), -np.inf) if sink is None else np.zeros((*score.shape[:3], 1))
    nothing = nothing if sink is None else nothing + np.asarray(sink, np.float64)[:, None, None]
    score = np.concatenate([score, nothing], axis=-1)  # the sink is one more key, whose value is 0
    weight = np.exp(score - score.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    context = np.einsum("bnts,bsnh->btnh", weight[..., :-1], v)
    dweight = np.einsum("btnh,bsnh->bnts", g, v)
    dweight = np.concatenate([dweight, np.zeros_like(nothing)], axis=-1)
    dscore = weight * (dweight - np.sum(weight * dweight, -1, keepdims=True))
    dproduct = dscore[..., :-1] * slope
    dq = np.einsum("bnts,bsnh->btnh", dproduct, k)
    dk, dv = np.einsum("bnts,btnh->bsnh", dproduct, q), np.einsum("bnts,btnh->bsnh", weight[..., :-1], g)
    shared = lambda x: x.reshape(*x.shape[:2], num_kv_heads, -1, x.shape[3]).sum(axis=3)  # noqa: E731
    return context, dq, shared(dk), shared(dv), *(() if sink is None else (dscore[..., -1].sum(axis=(0, 2)),))


EVERYTHING = Scoring(scale=0.4, window=9, soft_cap=1.5)
SINK = np.array([-1.0, 0.5, 2.0, 4.0], np.float32)


def test_the_references_agree_with_each_other_and_with_finite_differences():
    q, k, v, segment = inputs(40)
    v, g = v[..., :6], np.random.default_rng(1).normal(size=(B, 40, N, 6))
    context, *gradients = exact(q, k, v, segment, g, SINK, EVERYTHING)
    np.testing.assert_allclose(context, by_loops(q, k, v, segment, SINK, EVERYTHING), rtol=1e-12, atol=1e-12)
    arrays, rng, step = [np.asarray(x, np.float64) for x in (q, k, v, SINK)], np.random.default_rng(2), 1e-5
    for number, gradient in enumerate(gradients):
        direction = rng.normal(size=arrays[number].shape)

        def at(distance, number=number, direction=direction):
            q, k, v, sink = (x + distance * direction if i == number else x for i, x in enumerate(arrays))
            return np.sum(g * exact(q, k, v, segment, g, sink, EVERYTHING)[0])

        np.testing.assert_allclose(np.sum(gradient * direction), (at(step) - at(-step)) / (2 * step), rtol=1e-7)


def in_tiles(tile, strip):
    """Attention in tiles of that size, as if they were the largest there are."""

    def run(q, k, v, segment):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tile_layout, "_TILE", tile)
            patch.setattr(tile_layout, "_STRIP", strip)
            return tiled_attention(q, k, v, segment, "ring")

    return run


KERNELS = {
    "one tile": in_tiles(T, T),
    "strips that do not divide": in_tiles(T, 50),
    "tiles that do not divide": in_tiles(40, 16),
    "splash": lambda q, k, v, segment: splash_attention(q, k, v, segment, interpret=True),
    "dot_product": lambda q, k, v, segment: attention(q, k, v, segment, kernel="dot_product", strategy="ring"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_equals_loops(name):
    q, k, v, segment = inputs()
    got = jax.jit(KERNELS[name])(q, k, v, segment)
    np.testing.assert_allclose(got, by_loops(q, k, v, segment), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", [name for name in KERNELS if name != "dot_product"])
def test_gradients_equal_automatic_ones_of_the_full_square(name):
    q, k, v, segment = inputs()

    def full_square(q, k, v, segment):
        mask = (segment[:, :, None] == segment[:, None, :])[:, None]
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation="xla")

    def gradients(function):
        return jax.jit(jax.grad(lambda q, k, v: jnp.sum(jnp.sin(function(q, k, v, segment))), argnums=(0, 1, 2)))(
            q, k, v
        )

    for got, want in zip(gradients(KERNELS[name]), gradients(full_square), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", ["splash", "dot_product"])
def test_gradients_of_float32_sinks_are_float32_whatever_the_queries_are(kernel):
    q, k, v, segment = (jnp.asarray(x) for x in inputs())
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    run = (
        (lambda sink: splash_attention(q, k, v, segment, sink, interpret=True))
        if kernel == "splash"
        else (lambda sink: attention(q, k, v, segment, sink, kernel=kernel, strategy="ring"))
    )
    context, (dsink,) = jax.jit(lambda sink: (run(sink), jax.vjp(run, sink)[1](q)))(SINK)
    assert (context.dtype, dsink.dtype) == (jnp.bfloat16, jnp.float32)
    wide = (np.asarray(x, np.float32) for x in (q, k, v, segment, q))
    want = exact(*wide, SINK)[-1]
    assert np.linalg.norm(dsink - want) < 0.02 * np.linalg.norm(want)


def test_a_window_that_reaches_every_key_costs_nothing():
    q, k, v, segment = inputs()

    def lowered(scoring):
        run = lambda *x: attention(*x, kernel="dot_product", strategy="ring", scoring=scoring)  # noqa: E731
        return jax.jit(run).lower(q, k, v, segment).as_text()

    assert lowered(Scoring(window=T)) == lowered(Scoring()) != lowered(Scoring(window=T - 1))


def test_heads_that_do_not_group_are_refused():
    x = jnp.zeros((1, 4, 3, 8))
    with pytest.raises(ValueError, match="3 query heads are not a multiple of 2 kv heads"):
        attention(x, x[:, :, :2], x[:, :, :2], jnp.ones((1, 4), jnp.int32), kernel="dot_product", strategy="ring")


def test_a_kernel_that_lacks_what_it_is_asked_for_is_refused():
    q, k, v, segment = inputs()
    for values, sink, soft_cap, what in (
        (v, SINK, None, "attention sinks"),
        (v, None, 2.0, r"a soft cap of scores \(2.0\)"),
        (v[..., :8], None, None, "values of another width"),
    ):
        with pytest.raises(ValueError, match=f"attention=cudnn_flash does not support {what}"):
            attention(
                q, k, values, segment, sink, kernel="cudnn_flash", strategy="ring", scoring=Scoring(soft_cap=soft_cap)
            )


@pytest.mark.parametrize(("values", "reason"), [
    ({"window": 0}, "window=0 keys leaves a query without its own. Nearest that works: 1"),
    ({"soft_cap": 0.0}, "soft_cap=0.0 is not positive"),
])  # fmt: skip
def test_a_scoring_without_sense_is_refused(values, reason):
    with pytest.raises(ValueError, match=reason):
        Scoring(**values)


def test_a_kernel_for_whole_examples_is_refused_on_shards(monkeypatch):
    monkeypatch.setattr(attention_module, "context_shards", lambda: 2)
    q, k, v, segment = inputs()
    with pytest.raises(ValueError, match="attention=cudnn_flash does not work on 2 shards of the tokens"):
        attention(q, k, v, segment, kernel="cudnn_flash", strategy="ring")
