"""tokamax's kernels, which have no interpreter: what is around them equals float64 attention, on context shards too."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.models import Scoring, mosaic
from maxtext_lite.models.mosaic import first_keys, mosaic_attention
from maxtext_lite.parallel import MESH_AXES, context_order, make_mesh
from maxtext_lite.xla.hlo import collectives
from tests.models.test_attention import EVERYTHING, SINK, B, H, N, exact, inputs, with_a_long_document
from tests.models.test_gpu_attention import both, replicated


@dataclasses.dataclass(frozen=True)
class Range:
    """What tokamax's `Mask` takes of this project: each query's first key, and that none later is seen, or the end."""

    k_start: Any
    is_causal: bool
    k_end: Any = None


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Sizes of blocks, as tokamax chooses them."""

    block_kv: int = 128
    num_stages: int = 2
    compute_wgs: int = 2


@dataclasses.dataclass
class Bound:
    kwargs: dict[str, Any]
    heuristics_config: Blocks = Blocks()


@dataclasses.dataclass(frozen=True)
class StandIn:
    """Attention with the arguments and results of tokamax's op, and of its vjp, by plain matmuls of whole squares.

    Written from the definition of attention's gradient, with the residuals that it is given.
    """

    config: Blocks | None = None
    rows_of_calls: ClassVar[list[int]] = []
    configs: ClassVar[list[Blocks]] = []

    def bind(self, q, k, v, *, mask, logits_scale, logits_soft_cap, return_residuals=False):
        return Bound({"mask": mask, "logits_scale": logits_scale, "logits_soft_cap": logits_soft_cap,
                      "return_residuals": return_residuals})  # fmt: skip

    def replace(self, *, config):
        return dataclasses.replace(self, config=config)

    @property
    def vjp(self):
        return StandInVjp()

    def __call__(self, q, k, v, *, mask, logits_scale, logits_soft_cap, return_residuals):
        assert return_residuals
        assert mask.k_start.shape == (q.shape[0], 1, q.shape[1])
        assert q.shape[1] % 256 == k.shape[1] % 256 == 0  # whole blocks
        self.rows_of_calls.append(q.shape[0])
        self.configs.append(self.config)
        score = scores(q, k, mask, logits_scale, logits_soft_cap)
        highest = score.max(-1)
        weight = jnp.exp(score - highest[..., None])
        total = weight.sum(-1)
        v = jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)
        context = jnp.einsum("bnts,bsnh->btnh", weight / total[..., None], v)
        return context.astype(q.dtype), (highest, total)


class StandInVjp(StandIn):
    def bind(self, residuals, context, g, q, k, v, **options):
        return StandIn().bind(q, k, v, **options)

    def __call__(self, residuals, context, g, q, k, v, *, mask, logits_scale, logits_soft_cap):
        self.configs.append(self.config)
        highest, total = residuals
        num_kv_heads, group = k.shape[2], q.shape[2] // k.shape[2]
        score = scores(q, k, mask, logits_scale, logits_soft_cap)
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


def scores(q, k, mask, logits_scale, logits_soft_cap):
    """[B, N, T, S], -inf where a query does not see a key."""
    k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    score = logits_scale * jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32)
    score = score if logits_soft_cap is None else logits_soft_cap * jnp.tanh(score / logits_soft_cap)
    at_S = jnp.arange(k.shape[1])
    seen = at_S >= mask.k_start[..., None]
    if mask.is_causal:
        seen &= jnp.arange(q.shape[1])[:, None] >= at_S
    if mask.k_end is not None:
        seen &= at_S < mask.k_end[..., None]
    return jnp.where(seen, score, -jnp.inf)


@pytest.fixture
def by_stand_in(monkeypatch):
    """tokamax's op replaced, which need not be installed; the rows of its calls."""
    monkeypatch.setattr(StandIn, "rows_of_calls", [])
    monkeypatch.setattr(StandIn, "configs", [])
    monkeypatch.setattr(mosaic, "flash_attention", lambda: (StandIn(), Range))
    return StandIn.rows_of_calls


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

    mosaic.flash_attention()  # absl's flags count as parsed from here on
    monkeypatch.setattr(mosaic, "flash_attention", lambda: (Plain(vjp=base.DotProductAttentionVjp()), base.Mask))
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


def test_replicas_are_rows_of_one_call_and_heads_and_rows_lie_on_their_devices(by_stand_in):
    rng = np.random.default_rng(3)
    q, k, v, g = (rng.normal(size=(8, 32, heads, H)).astype(np.float32) for heads in (N, 2, 2, N))
    segment = np.sort(rng.integers(1, 4, (8, 32)), axis=1).astype(np.int32)
    mesh = make_mesh({**dict.fromkeys(MESH_AXES, 1), "data": 2, "fsdp": 2, "tensor": 2}, dict.fromkeys(MESH_AXES, 1))
    run = lambda q, k, v, segment, sink: mosaic_attention(q, k, v, segment, sink, scoring=EVERYTHING)  # noqa: E731
    want = exact(q, k, v, segment, g, SINK, EVERYTHING)
    *of_rows, dsink_RN = replicated(run, (q, k, v, segment, g, SINK), mesh)
    for got, right in zip(of_rows, want[1:], strict=False):
        np.testing.assert_allclose(got.reshape(right.shape), right, rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(dsink_RN.sum(0), want[-1], rtol=1e-4, atol=2e-5)
    assert set(by_stand_in) == {2}  # the rows of one replica on one device: 8 over data 2 x fsdp 2


def on_shards(arrays, sink, *, sizes, **options):
    """What kinds of collectives cross the shards, and context and gradients in the order of the tokens."""
    count = int(np.prod(list(sizes.values())))
    mesh = make_mesh(dict.fromkeys(MESH_AXES, 1) | sizes, dict.fromkeys(MESH_AXES, 1), jax.devices()[:count])
    order = context_order(arrays[0].shape[1], sizes["context"])

    def run(q, k, v, segment, g, sink):
        def of(q, k, v, sink):
            context = mosaic_attention(q, k, v, segment, sink, **options)
            return jnp.sum(context * g), context

        gradients, context = jax.grad(of, argnums=(0, 1, 2, 3), has_aux=True)(q, k, v, sink)
        return context, *gradients

    if "data" in sizes:  # replicas, each with half of the rows
        of_half = jax.vmap(run, in_axes=(0, 0, 0, 0, 0, None), spmd_axis_name="data")
        halves = lambda x: x.reshape(2, -1, *x.shape[1:])  # noqa: E731
        both_halves = lambda *x: of_half(*map(halves, x[:-1]), x[-1])  # noqa: E731
    else:
        both_halves = run
    arguments = (*(x[:, order] for x in arrays), sink)
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        compiled = jax.jit(both_halves).lower(*arguments).compile()
        found = [np.asarray(x, np.float32) for x in compiled(*arguments)]
    if "data" in sizes:
        found = [*(x.reshape(-1, *x.shape[2:]) for x in found[:-1]), found[-1].sum(0)]
    back = np.argsort(order)
    along = {c.kind for c in collectives(compiled.as_text()) if "context" in c.axes(mesh)}
    return along, [*(x[:, back] for x in found[:-1]), found[-1]]


@pytest.mark.parametrize(("strategy", "sizes", "num_tokens", "scoring"), [
    ("all_gather", {"context": 2, "tensor": 2, "data": 2}, 40, EVERYTHING),
    ("all_gather", {"context": 4}, 64, Scoring()),
    ("ring", {"context": 2, "tensor": 2}, 48, Scoring(scale=0.4, soft_cap=1.5)),
    ("ring", {"context": 4, "data": 2}, 64, EVERYTHING),
], ids=str)  # fmt: skip
def test_on_context_shards_are_documents_windows_grouped_heads_and_sinks(
    strategy, sizes, num_tokens, scoring, by_stand_in
):
    q, k, v, segment = inputs(num_tokens)
    segment, v = with_a_long_document(segment), v[..., :6]  # the long document crosses all chunks
    g = np.random.default_rng(1).normal(size=(*q.shape[:3], 6)).astype(np.float32)
    along, results = on_shards((q, k, v, segment, g), SINK, sizes=sizes, strategy=strategy, scoring=scoring)
    for got, want in zip(results, exact(q, k, v, segment, g, SINK, scoring), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5)
    # Of whole examples only the documents' numbers are gathered where keys go round.
    assert ("collective-permute" in along) == (strategy == "ring")
    rows = B // sizes.get("data", 1)
    assert set(by_stand_in) == {rows, 2 * rows}  # of a device's own keys; of two pairs of chunks


@pytest.mark.parametrize(("width", "value_width", "forward", "backward"), [
    (64, 64, Blocks(block_kv=256, num_stages=3), Blocks()),
    (256, 256, Blocks(), Blocks(compute_wgs=1)),
    (64, 32, Blocks(), Blocks()),
    (128, 128, Blocks(), Blocks()),
])  # fmt: skip
def test_blocks_are_those_that_were_the_fastest(width, value_width, forward, backward, by_stand_in):
    q, k, v = (jnp.ones((1, 256, heads, size)) for heads, size in ((2, width), (1, width), (1, value_width)))
    total = lambda q, k, v: mosaic_attention(q, k, v, jnp.ones((1, 256), jnp.int32)).sum()  # noqa: E731
    jax.eval_shape(jax.grad(total, argnums=(0, 1, 2)), q, k, v)
    assert StandIn.configs[0] == forward
    assert StandIn.configs[-1] == backward
