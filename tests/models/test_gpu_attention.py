"""Kernels for GPUs equal attention in float64, gradients included, as far as a CPU can run what is around them."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.models import Scoring, gpu_attention
from maxtext_lite.models.attention import attention
from maxtext_lite.models.gpu_attention import cudnn_masked_attention, first_keys, mha_attention, mosaic_attention
from maxtext_lite.parallel import MESH_AXES, make_mesh
from tests.models.test_attention import EVERYTHING, SINK, B, H, N, exact, inputs, with_a_long_document


@dataclasses.dataclass(frozen=True)
class Range:
    """What tokamax's `Mask` takes of this project: the first key of each query, and that no later one is seen."""

    k_start: Any
    is_causal: bool


@dataclasses.dataclass
class Bound:
    kwargs: dict[str, Any]


class StandIn:
    """Attention with the arguments and results of tokamax's op, and of its vjp, by plain matmuls of whole squares.

    Written from the definition of attention's gradient, with the residuals that it is given.
    """

    rows_of_calls: ClassVar[list[int]] = []

    def bind(self, q, k, v, *, mask, logits_scale, logits_soft_cap, return_residuals=False):
        return Bound({"mask": mask, "logits_scale": logits_scale, "logits_soft_cap": logits_soft_cap,
                      "return_residuals": return_residuals})  # fmt: skip

    def _scores(self, q, k, mask, logits_scale, logits_soft_cap):
        k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
        score = logits_scale * jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32)
        score = score if logits_soft_cap is None else logits_soft_cap * jnp.tanh(score / logits_soft_cap)
        at = jnp.arange(k.shape[1])
        assert mask.is_causal
        seen = (at[:, None] >= at) & (at >= mask.k_start[..., None])
        return jnp.where(seen, score, -jnp.inf)

    def __call__(self, q, k, v, *, mask, logits_scale, logits_soft_cap, return_residuals):
        assert return_residuals
        assert mask.k_start.shape == (q.shape[0], 1, q.shape[1])
        self.rows_of_calls.append(q.shape[0])
        score = self._scores(q, k, mask, logits_scale, logits_soft_cap)
        highest = score.max(-1)
        weight = jnp.exp(score - highest[..., None])
        total = weight.sum(-1)
        v = jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)
        context = jnp.einsum("bnts,bsnh->btnh", weight / total[..., None], v)
        return context.astype(q.dtype), (highest, total)

    def vjp(self, residuals, context, g, q, k, v, *, mask, logits_scale, logits_soft_cap):
        highest, total = residuals
        num_kv_heads, group = k.shape[2], q.shape[2] // k.shape[2]
        score = self._scores(q, k, mask, logits_scale, logits_soft_cap)
        slope = logits_scale * (1 if logits_soft_cap is None else 1 - (score / logits_soft_cap) ** 2)
        weight = jnp.exp(score - highest[..., None]) / total[..., None]
        k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
        delta = jnp.einsum("btnh,btnh->bnt", g, context)[..., None]
        dproduct = weight * (jnp.einsum("btnh,bsnh->bnts", g, v) - delta)
        dproduct = jnp.where(jnp.isfinite(score), dproduct * slope, 0)
        shared = lambda x: x.reshape(*x.shape[:2], num_kv_heads, group, -1).sum(3)  # noqa: E731
        return {
            "q": jnp.einsum("bnts,bsnh->btnh", dproduct, k).astype(q.dtype),
            "k": shared(jnp.einsum("bnts,btnh->bsnh", dproduct, q)).astype(q.dtype),
            "v": shared(jnp.einsum("bnts,btnh->bsnh", weight, g)).astype(q.dtype),
        }


@pytest.fixture
def by_stand_in(monkeypatch):
    """tokamax's op replaced: its kernels have no interpreter, and it need not be installed."""
    monkeypatch.setattr(StandIn, "rows_of_calls", [])
    monkeypatch.setattr(gpu_attention, "tokamax_flash", lambda: (StandIn(), Range))
    return StandIn.rows_of_calls


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


@pytest.mark.parametrize("num_tokens", [128, 37])
@pytest.mark.parametrize("scoring", [Scoring(), EVERYTHING], ids=str)
def test_around_a_range_kernel_are_documents_windows_caps_sinks_and_values_of_another_width(
    scoring, num_tokens, by_stand_in
):
    q, k, v, segment = inputs(num_tokens)
    segment, v = with_a_long_document(segment), v[..., :6]
    g = np.random.default_rng(1).normal(size=(*q.shape[:3], 6)).astype(np.float32)
    run = lambda q, k, v, sink: mosaic_attention(q, k, v, segment, sink, scoring=scoring)  # noqa: E731
    for got, right in zip(both(run, q, k, v, SINK, g=g), exact(q, k, v, segment, g, SINK, scoring), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=2e-5)
    without = lambda q, k, v: mosaic_attention(q, k, v, segment, scoring=scoring)  # noqa: E731
    for got, right in zip(both(without, q, k, v, g=g), exact(q, k, v, segment, g, scoring=scoring), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=2e-5)
    assert set(by_stand_in) == {B}


def test_a_sink_far_above_the_scores_takes_all_and_overflows_nothing(by_stand_in):
    q, k, v, segment = inputs(40)
    sink = np.array([500.0, -500.0, 0.0, 90.0], np.float32)
    g = np.random.default_rng(1).normal(size=q.shape).astype(np.float32)
    run = lambda q, k, v, sink: mosaic_attention(q, k, v, segment, sink)  # noqa: E731
    for got, right in zip(both(run, q, k, v, sink, g=g), exact(q, k, v, segment, g, sink), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=2e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the XLA implementation of 0.0.12
def test_the_op_and_its_vjp_are_called_as_tokamax_has_them(monkeypatch):
    """Its XLA implementation in the place of its kernels: the same base class, `bind`, residuals and `Mask`.

    Its gradient makes the softmax anew, of the keys alone, where the kernels take the log-partition: no sinks here.
    """
    base = pytest.importorskip("tokamax._src.ops.attention.base", reason="tokamax is not installed")

    class Plain(base.DotProductAttention):
        pass

    monkeypatch.setattr(gpu_attention, "tokamax_flash", lambda: (Plain(vjp=base.DotProductAttentionVjp()), base.Mask))
    q, k, v, segment = inputs(100)
    segment, v = with_a_long_document(segment), v[..., :8]
    g = np.random.default_rng(1).normal(size=(*q.shape[:3], 8)).astype(np.float32)
    run = lambda q, k, v: mosaic_attention(q, k, v, segment, scoring=EVERYTHING)  # noqa: E731
    for got, right in zip(both(run, q, k, v, g=g), exact(q, k, v, segment, g, scoring=EVERYTHING), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=2e-5)


def test_first_keys_by_hand():
    segment = jnp.array([[1, 1, 1, 1, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]], jnp.int32)
    assert first_keys(segment, None).tolist() == [[0, 0, 0, 0, 4, 4, 6, 6], [0] * 8]
    assert first_keys(segment, 3).tolist() == [[0, 0, 0, 1, 4, 4, 6, 6], [0, 0, 0, 1, 2, 3, 4, 5]]


def replicated(run, arrays, mesh):
    """Gradients of one call for each of two replicas of `data`, laid out over the mesh, with sinks that all share."""
    *rows, sink = arrays

    def gradients(q, k, v, segment, g, sink):
        of = lambda q, k, v, sink: jnp.sum(run(q, k, v, segment, sink) * g)  # noqa: E731
        return jax.grad(of, argnums=(0, 1, 2, 3))(q, k, v, sink)

    over = jax.vmap(gradients, in_axes=(0, 0, 0, 0, 0, None), spmd_axis_name="data")
    with jax.set_mesh(mesh):
        return jax.jit(over)(*(x.reshape(2, 4, *x.shape[1:]) for x in rows), sink)


@pytest.mark.parametrize("kernel", ["mosaic", "mha"])
def test_replicas_are_rows_of_one_call_and_heads_and_rows_lie_on_their_devices(kernel, by_stand_in):
    rng = np.random.default_rng(3)
    q, k, v, g = (rng.normal(size=(8, 32, heads, H)).astype(np.float32) for heads in (N, 2, 2, N))
    segment = np.sort(rng.integers(1, 4, (8, 32)), axis=1).astype(np.int32)
    mesh = make_mesh({**dict.fromkeys(MESH_AXES, 1), "data": 2, "fsdp": 2, "tensor": 2}, dict.fromkeys(MESH_AXES, 1))
    if kernel == "mosaic":
        run = lambda q, k, v, segment, sink: mosaic_attention(q, k, v, segment, sink, scoring=EVERYTHING)  # noqa: E731
        want = exact(q, k, v, segment, g, SINK, EVERYTHING)
    else:
        run = lambda q, k, v, segment, sink: mha_attention(q, k, v, segment, interpret=True)  # noqa: E731
        want = (*exact(q, k, v, segment, g), np.zeros(N))
    *of_rows, dsink_RN = replicated(run, (q, k, v, segment, g, SINK), mesh)
    for got, right in zip(of_rows, want[1:], strict=False):
        np.testing.assert_allclose(got.reshape(right.shape), right, rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(dsink_RN.sum(0), want[-1], rtol=1e-4, atol=2e-5)
    assert set(by_stand_in) <= {2}  # the rows of one replica on one device: 8 over data 2 x fsdp 2


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
