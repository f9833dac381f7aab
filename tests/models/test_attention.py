"""Every kernel that runs here equals a loop over heads and positions in float64, gradients included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.models.attention import attention, blockwise_attention, resolve_attention, splash_attention

B, T, N, K, H = 2, 128, 4, 2, 16


def inputs(num_tokens=T):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(B, num_tokens, heads, H)).astype(np.float32) for heads in (N, K, K))
    segment = np.cumsum(rng.random((B, num_tokens)) < 0.05, axis=1) + 1
    segment[:, -num_tokens // 8 :] = 0  # padding at the end
    return q, k, v, segment.astype(np.int32)


def by_loops(q, k, v, segment):
    """Context in float64, one query at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            keys = [s for s in range(t + 1) if segment[b, s] == segment[b, t]]
            for n in range(N):
                score = k[b, keys, n // (N // K)] @ q[b, t, n] / np.sqrt(H)
                weight = np.exp(score - score.max())
                out[b, t, n] = weight / weight.sum() @ v[b, keys, n // (N // K)]
    return out


KERNELS = {
    "one block": lambda q, k, v, segment: blockwise_attention(q, k, v, segment, T),
    "blocks that do not divide": lambda q, k, v, segment: blockwise_attention(q, k, v, segment, 50),
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


def test_heads_that_do_not_group_are_refused():
    x = jnp.zeros((1, 4, 3, 8))
    with pytest.raises(ValueError, match="3 query heads are not a multiple of 2 kv heads"):
        attention(x, x[:, :, :2], x[:, :, :2], jnp.ones((1, 4), jnp.int32), kernel="dot_product", strategy="ring")


@pytest.mark.parametrize(("name", "platform", "dtype", "num_tokens", "shards", "kernel"), [
    ("auto", "cpu", jnp.bfloat16, 256, 1, "dot_product"),
    ("auto", "gpu", jnp.bfloat16, 256, 1, "cudnn_flash"),
    ("auto", "gpu", jnp.float32, 256, 1, "dot_product"),  # cuDNN's has no float32
    ("auto", "tpu", jnp.bfloat16, 256, 1, "splash"),
    ("auto", "tpu", jnp.bfloat16, 100, 1, "dot_product"),  # splash works in blocks of 128
    ("auto", "gpu", jnp.bfloat16, 256, 2, "dot_product"),  # the others take whole examples
    ("auto", "tpu", jnp.bfloat16, 256, 2, "dot_product"),
    ("dot_product", "tpu", jnp.bfloat16, 256, 1, "dot_product"),
])  # fmt: skip
def test_auto_names_a_kernel_that_runs(name, platform, dtype, num_tokens, shards, kernel):
    where = {"platform": platform, "dtype": dtype, "num_tokens": num_tokens}
    assert resolve_attention(name, **where, num_context_shards=shards) == kernel


def test_a_kernel_that_does_not_run_here_is_refused():
    with pytest.raises(ValueError, match=r"attention=splash needs a TPU, .* Nearest that works: dot_product."):
        resolve_attention("splash", platform="cpu", dtype=jnp.float32, num_tokens=256)
    with pytest.raises(ValueError, match=r"one context shard; here are gpu, bfloat16, 256 tokens and 2 context shards"):
        resolve_attention("cudnn_flash", platform="gpu", dtype=jnp.bfloat16, num_tokens=256, num_context_shards=2)
