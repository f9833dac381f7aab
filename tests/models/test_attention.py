"""Every kernel that runs here equals attention in float64 on one device and over replicas, gradients included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.kernels import mosaic
from maxtext_lite.kernels import splash as splash_blocks
from maxtext_lite.kernels.cudnn import cudnn_masked_attention, mha_attention
from maxtext_lite.kernels.mosaic import mosaic_attention
from maxtext_lite.kernels.splash import MostTokens, splash_attention
from maxtext_lite.models import Scoring
from maxtext_lite.models import attention as tile_layout
from maxtext_lite.models.attention import attention, tiled_attention
from maxtext_lite.parallel import vmap_over_data
from tests.meshes import mesh_of
from tests.models import exact
from tests.models.exact import (
    EVERYTHING,
    SINK,
    assert_close,
    inputs,
    with_gradients,
)
from tests.models.tokamax_stand_in import Range, StandIn

KERNELS = {
    "tiled": lambda *x, scoring=EVERYTHING: tiled_attention(
        *x, strategy="ring", scoring=scoring
    ),
    "splash": lambda *x, scoring=EVERYTHING: splash_attention(
        *x, scoring=scoring, interpret=True
    ),
    "mosaic": lambda *x, scoring=EVERYTHING: mosaic_attention(*x, scoring=scoring),
    "mha": lambda *x, scoring=EVERYTHING: mha_attention(
        *x[:4], scoring=scoring, interpret=True
    ),
    "cudnn_masked": lambda *x, scoring=EVERYTHING: cudnn_masked_attention(
        *x[:4], scoring=scoring
    ),
}


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    """tokamax's op replaced, and XLA in the place of cuDNN; splash in blocks of 128. Returns what cuDNN was asked."""
    asked, by_name, pair = [], jax.nn.dot_product_attention, (128, 128)

    def attend(*arrays, implementation, **options):
        asked.append(
            (
                implementation,
                sorted(name for name, value in options.items() if value is not None),
            )
        )
        return by_name(*arrays, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    monkeypatch.setattr(mosaic, "flash_attention", lambda: (StandIn(), Range))
    monkeypatch.setattr(StandIn, "rows_of_calls", [])
    monkeypatch.setattr(
        splash_blocks, "MOST_TOKENS", (MostTokens(256, pair, pair, pair, fused=pair),)
    )
    return asked


@pytest.mark.parametrize(
    ("kernel", "num_tokens", "scoring", "sinks", "num_kv_heads", "value_dim", "tile"),
    [
        # Three strips of 16 queries and one of 5; a window inside a strip.
        ("tiled", 53, Scoring(), True, 2, 16, 512),
        ("tiled", 53, Scoring(scale=0.4, window=7, soft_cap=0.7), False, 4, 20, 512),
        # Three tiles and one that is padded; tiles of two strips; windows that see whole tiles, and parts.
        pytest.param(
            "tiled",
            53,
            Scoring(window=9, soft_cap=0.7),
            True,
            4,
            6,
            32,
            marks=pytest.mark.fast,
        ),
        ("tiled", 53, Scoring(scale=0.4, window=18), False, 1, 6, 16),
        # A window across blocks, which keeps the first from the last one's sight; and one kernel for all gradients.
        ("splash", 384, Scoring(scale=0.4, window=140, soft_cap=1.5), True, 2, 8, 512),
        ("splash", 256, Scoring(), False, 2, 16, 512),
        pytest.param("mosaic", 37, EVERYTHING, True, 2, 6, 512, marks=pytest.mark.fast),
        ("mha", 100, Scoring(scale=0.4), False, 2, 16, 512),
        ("cudnn_masked", 53, Scoring(scale=0.4, window=20), False, 2, 16, 512),
    ],
    ids=str,
)
def test_a_kernel_equals_float64_attention(
    kernel, num_tokens, scoring, sinks, num_kv_heads, value_dim, tile, monkeypatch
):
    """Also with sinks so far above the scores that they take all; over other documents in the same program."""
    monkeypatch.setattr(tile_layout, "_STRIP", 16)
    monkeypatch.setattr(tile_layout, "TILE", tile)
    run = jax.jit(with_gradients(lambda *x: KERNELS[kernel](*x, scoring=scoring)))
    for seed, sink in enumerate(
        (SINK, np.array([500.0, -500.0, 0.0, 90.0], np.float32))
    ):
        arrays = inputs(
            num_tokens, seed=seed, num_kv_heads=num_kv_heads, value_dim=value_dim
        )
        given = (*arrays, sink if sinks else None)
        with jax.default_matmul_precision("highest"):
            assert_close(run(*given), exact.attention(*given, scoring))


@pytest.mark.parametrize("kernel", ["tiled", "splash", "mosaic", "mha"])
def test_bfloat16_stays_close_and_the_gradient_of_float32_sinks_is_float32(kernel):
    arrays = inputs(128)
    narrow = [jnp.bfloat16(x) if x.ndim == 4 else x for x in arrays]
    sink, scoring = (None, Scoring()) if kernel == "mha" else (SINK, EVERYTHING)
    run = jax.jit(with_gradients(lambda *x: KERNELS[kernel](*x, scoring=scoring)))
    found = run(*narrow, sink)
    dtypes = [jnp.bfloat16] * 4 + ([] if sink is None else [jnp.float32])
    assert [x.dtype for x in found] == dtypes
    want = exact.attention(
        *(np.asarray(x, np.float64) if x.ndim == 4 else x for x in narrow),
        sink,
        scoring,
    )
    assert_close(found, want, share=0.02)


@pytest.mark.parametrize("kernel", ["mosaic", "mha", "cudnn_masked"])
def test_replicas_are_apart_and_heads_and_rows_lie_on_their_devices(kernel):
    arrays = inputs(32, rows=8)
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    scoring = Scoring(scale=0.4) if kernel == "mha" else Scoring(scale=0.4, window=9)
    sink = SINK if kernel == "mosaic" else None

    def of_replica(sink, *arrays):
        return with_gradients(lambda *x: KERNELS[kernel](*x, scoring=scoring))(
            *arrays, sink
        )

    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        found = jax.jit(vmap_over_data(of_replica, 2, rows=(1, 2, 3, 4, 5)))(
            sink, *arrays
        )
    for replica, rows in enumerate((slice(0, 4), slice(4, 8))):
        want = exact.attention(*(x[rows] for x in arrays), sink, scoring)
        assert_close([x[replica] for x in found], want)
    assert set(StandIn.rows_of_calls) == (
        {2} if kernel == "mosaic" else set()
    )  # 8 over data 2 x fsdp 2, in one call


@pytest.mark.parametrize("scoring", [Scoring(), Scoring(scale=0.4, window=40)], ids=str)
def test_cudnn_without_a_mask_is_right_for_all_tokens_of_rows_of_one_document(
    scoring, stand_ins
):
    q, k, v, _, g = inputs(100)
    segment = np.ones(q.shape[:2], np.int32)
    segment[0, 80:] = 0
    real = (segment > 0)[..., None, None]
    options = {"kernel": "cudnn_flash", "strategy": "ring", "scoring": scoring}
    found = jax.jit(with_gradients(lambda *x: attention(*x, **options)))(
        q, k, v, segment, g * real
    )
    want = exact.attention(q, k, v, segment, g * real, scoring=scoring)
    assert_close([found[0] * real, *found[1:]], [want[0] * real, *want[1:]])
    assert {implementation for implementation, _ in stand_ins} == {"cudnn"}
    assert not any("mask" in names for _, names in stand_ins)


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # of the XLA implementation of 0.0.12
def test_the_op_and_its_vjp_are_called_as_tokamax_has_them(monkeypatch):
    """Its XLA implementation in the place of its kernels: the same base class, `bind`, residuals and `Mask`.

    Its gradient makes the softmax anew, of the keys alone, where the kernels take the log-partition: no sinks here.
    """
    base = pytest.importorskip(
        "tokamax._src.ops.attention.base", reason="tokamax is not installed"
    )

    class Plain(base.DotProductAttention):
        pass

    monkeypatch.undo()
    mosaic.flash_attention()  # absl's flags count as parsed from here on
    monkeypatch.setattr(
        mosaic,
        "flash_attention",
        lambda: (Plain(vjp=base.DotProductAttentionVjp()), base.Mask),
    )
    arrays = inputs(100, value_dim=8)
    found = jax.jit(
        with_gradients(lambda *x: mosaic_attention(*x, scoring=EVERYTHING))
    )(*arrays)
    assert_close(found, exact.attention(*arrays, scoring=EVERYTHING))
