"""Kernels for GPUs equal attention in float64, gradients included, as far as a CPU can run what is around them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.models import Scoring
from maxtext_lite.models.attention import attention
from maxtext_lite.models.gpu_attention import cudnn_masked_attention, mha_attention
from maxtext_lite.parallel import MESH_AXES, make_mesh
from tests.models.test_attention import SINK, H, N, exact, inputs, with_a_long_document


def both(run, *arrays, g):
    """Context and gradients, of what is not int."""

    @jax.jit
    def of(*arrays):
        context, vjp = jax.vjp(run, *arrays)
        return context, *vjp(g.astype(context.dtype))

    return of(*arrays)


@pytest.mark.parametrize("num_tokens", [128, 100])
def test_mha_equals_float64_for_grouped_heads_documents_and_odd_lengths(num_tokens):
    q, k, v, segment = inputs(num_tokens)
    segment = with_a_long_document(segment)
    g = np.random.default_rng(1).normal(size=q.shape).astype(np.float32)
    run = lambda q, k, v: mha_attention(q, k, v, segment, scoring=Scoring(scale=0.4), interpret=True)  # noqa: E731
    want = exact(q, k, v, segment, g, scoring=Scoring(scale=0.4))
    for got, right in zip(both(run, q, k, v, g=g), want, strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=2e-5)


def test_mha_of_bfloat16_is_as_near_to_float64_as_plain_attention_is():
    q, k, v, segment = inputs()
    q, k, v, g = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, np.random.default_rng(1).normal(size=q.shape)))
    want = exact(*(np.asarray(x, np.float64) for x in (q, k, v)), segment, np.asarray(g, np.float64))
    plain = lambda q, k, v: attention(q, k, v, segment, kernel="dot_product", strategy="ring")  # noqa: E731
    kernel = lambda q, k, v: mha_attention(q, k, v, segment, interpret=True)  # noqa: E731
    for by_kernel, by_matmuls, right in zip(both(kernel, q, k, v, g=g), both(plain, q, k, v, g=g), want, strict=True):
        errors = [np.linalg.norm(np.asarray(x, np.float64) - right) for x in (by_kernel, by_matmuls)]
        assert by_kernel.dtype == jnp.bfloat16
        assert errors[0] < 1.5 * errors[1] < 0.02 * np.linalg.norm(right)


def replicated(run, arrays, mesh):
    """Gradients of one call for each of two replicas of `data`, laid out over the mesh, with sinks that all share."""
    *rows, sink = arrays

    def gradients(q, k, v, segment, g, sink):
        of = lambda q, k, v, sink: jnp.sum(run(q, k, v, segment, sink) * g)  # noqa: E731
        return jax.grad(of, argnums=(0, 1, 2, 3))(q, k, v, sink)

    over = jax.vmap(gradients, in_axes=(0, 0, 0, 0, 0, None), spmd_axis_name="data")
    with jax.set_mesh(mesh):
        return jax.jit(over)(*(x.reshape(2, 4, *x.shape[1:]) for x in rows), sink)


def test_replicas_are_rows_of_one_call_and_heads_and_rows_lie_on_their_devices():
    rng = np.random.default_rng(3)
    q, k, v, g = (rng.normal(size=(8, 32, heads, H)).astype(np.float32) for heads in (N, 2, 2, N))
    segment = np.sort(rng.integers(1, 4, (8, 32)), axis=1).astype(np.int32)
    mesh = make_mesh({**dict.fromkeys(MESH_AXES, 1), "data": 2, "fsdp": 2, "tensor": 2}, dict.fromkeys(MESH_AXES, 1))
    run = lambda q, k, v, segment, sink: mha_attention(q, k, v, segment, interpret=True)  # noqa: E731
    want = (*exact(q, k, v, segment, g), np.zeros(N))
    for got, right in zip(replicated(run, (q, k, v, segment, g, SINK), mesh)[:-1], want[1:], strict=False):
        np.testing.assert_allclose(got.reshape(right.shape), right, rtol=1e-4, atol=2e-5)


def by_xla(monkeypatch):
    """Has XLA do what cuDNN is asked for; returns the list of what it was asked."""
    asked, by_kernel = [], jax.nn.dot_product_attention

    def attend(*arrays, implementation, **options):
        asked.append((implementation, sorted(name for name, value in options.items() if value is not None)))
        return by_kernel(*arrays, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    return asked


@pytest.mark.parametrize("scoring", [Scoring(), Scoring(scale=0.4, window=40)], ids=str)
def test_cudnn_without_a_mask_is_right_for_all_tokens_of_rows_of_one_document(scoring, monkeypatch):
    q, k, v, _ = inputs()
    segment = np.ones(q.shape[:2], np.int32)
    segment[0, 100:] = 0
    real = (segment > 0)[..., None, None]
    g = np.random.default_rng(1).normal(size=q.shape).astype(np.float32) * real
    asked = by_xla(monkeypatch)
    run = lambda q, k, v: attention(q, k, v, segment, kernel="cudnn_flash", strategy="ring", scoring=scoring)  # noqa: E731
    context, *gradients = both(run, q, k, v, g=g)
    right, *right_gradients = exact(q, k, v, segment, g, scoring=scoring)
    np.testing.assert_allclose(context * real, right * real, rtol=2e-5, atol=2e-5)
    for got, want in zip(gradients, right_gradients, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5)
    assert {implementation for implementation, _ in asked} == {"cudnn"}
    assert not any("mask" in names for _, names in asked)


def test_cudnn_with_a_mask_knows_documents_and_windows_for_replicas_too(monkeypatch):
    q, k, v, segment = inputs()
    segment, scoring = with_a_long_document(segment), Scoring(scale=0.4, window=40)
    asked = by_xla(monkeypatch)
    g = np.random.default_rng(1).normal(size=q.shape).astype(np.float32)

    @jax.jit
    @jax.vmap
    def both_of_replica(q, k, v, segment, g):
        run = lambda q, k, v: cudnn_masked_attention(q, k, v, segment, scoring=scoring)  # noqa: E731
        context, vjp = jax.vjp(run, q, k, v)
        return context, *vjp(g)

    found = both_of_replica(*(x[:, None] for x in (q, k, v, segment, g)))
    for got, right in zip(found, exact(q, k, v, segment, g, scoring=scoring), strict=True):
        np.testing.assert_allclose(got[:, 0], right, rtol=1e-4, atol=2e-5)
    assert {implementation for implementation, _ in asked} == {"cudnn"}
