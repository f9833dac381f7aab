"""Attention of tokens split over the context axis equals float64 attention; what crosses the shards, and memory."""

import math
import re

import jax
import numpy as np
import pytest

from maxtext_lite.analysis.hlo import collectives
from maxtext_lite.kernels import mosaic
from maxtext_lite.kernels import splash as splash_blocks
from maxtext_lite.kernels.mosaic import mosaic_attention
from maxtext_lite.kernels.splash import MostTokens, splash_attention
from maxtext_lite.models import Scoring
from maxtext_lite.models import attention as tile_layout
from maxtext_lite.models.attention import attention
from maxtext_lite.parallel import context_order, sharding
from tests.meshes import mesh_of
from tests.models import exact
from tests.models.exact import (
    EVERYTHING,
    SINK,
    B,
    H,
    N,
    assert_close,
    inputs,
    with_gradients,
)
from tests.models.tokamax_stand_in import Range, StandIn

KERNELS = {
    "tiled": lambda *x, **how: attention(*x, kernel="dot_product", **how),
    "splash": lambda *x, **how: splash_attention(*x, interpret=True, **how),
    "mosaic": mosaic_attention,
}


def on_shards(arrays, sink=None, *, kernel="tiled", sizes, **how):
    """The compiled function of the arrays as they lie on the shards, these, and the mesh."""
    mesh = mesh_of(**sizes)
    order = context_order(arrays[0].shape[1], sizes["context"])
    run = with_gradients(lambda *x: KERNELS[kernel](*x, **how))
    axes = ("batch", "length", "activation_heads", None)
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        given = [
            jax.device_put(x[:, order], sharding(mesh, axes[: x.ndim])) for x in arrays
        ]
        return jax.jit(run).lower(*given, sink).compile(), (*given, sink), mesh


def in_true_order(results, shards):
    back = np.argsort(context_order(results[0].shape[1], shards))
    return [np.float64(x)[:, back] if x.ndim == 4 else np.float64(x) for x in results]


@pytest.mark.parametrize(
    ("kernel", "strategy", "sizes", "num_tokens", "tile", "scoring"),
    [
        # A chunk of 16 tokens is two tiles; a window that crosses chunks, and passes by tiles.
        ("tiled", "ring", {"context": 3}, 96, 8, Scoring()),
        ("tiled", "ring", {"context": 4}, 96, 4, Scoring(window=31, soft_cap=1.5)),
        # With a window, keys are gathered.
        ("splash", "ring", {"context": 2}, 512, 512, Scoring(window=140, soft_cap=1.5)),
        ("splash", "ring", {"context": 2, "tensor": 2}, 512, 512, Scoring(scale=0.4)),
        ("mosaic", "ring", {"context": 2, "tensor": 2}, 40, 512, EVERYTHING),
    ],
    ids=str,
)
def test_shards_equal_float64_attention_of_whole_examples(
    kernel, strategy, sizes, num_tokens, tile, scoring, monkeypatch
):
    """Documents cross the chunks, and values are of another width. Scores of some thousands overflow no exponential."""
    monkeypatch.setattr(mosaic, "flash_attention", lambda: (StandIn(), Range))
    monkeypatch.setattr(tile_layout, "TILE", tile)
    pair = (128, 128)
    monkeypatch.setattr(
        splash_blocks, "MOST_TOKENS", (MostTokens(256, pair, pair, pair, fused=pair),)
    )
    arrays, sink = (
        inputs(num_tokens, value_dim=6 if kernel != "splash" else H),
        None if scoring == Scoring() else SINK,
    )
    compiled, given, mesh = on_shards(
        arrays, sink, kernel=kernel, sizes=sizes, strategy=strategy, scoring=scoring
    )
    found = in_true_order(compiled(*given), sizes["context"])
    want = exact.attention(*arrays, sink, scoring)
    assert_close(found, want, share=2e-6)
    assert_close(found, want)
    if scoring == Scoring():
        found = in_true_order(compiled(3000 * given[0], *given[1:]), sizes["context"])
        assert_close(found, exact.attention(3000 * arrays[0], *arrays[1:]), share=1e-3)
    if kernel == "splash":
        kinds = {
            c.kind for c in collectives(compiled.as_text()) if "context" in c.axes(mesh)
        }
        gathers = scoring.window is not None
        assert ("all-gather" in kinds, "collective-permute" in kinds) == (
            gathers,
            not gathers,
        )


@pytest.mark.fast
def test_tiles_beyond_every_window_are_passed_over(monkeypatch):
    """Keys that are not numbers spoil what is computed from them, even where a mask then hides it."""
    monkeypatch.setattr(tile_layout, "TILE", 4)
    q, k, v, segment, g = inputs(32)
    k, v = (
        np.where(np.arange(32)[:, None, None] < 4, np.float32(np.nan), x)
        for x in (k, v)
    )
    compiled, given, _ = on_shards(
        (q, k, v, segment, g),
        sizes={"context": 2},
        strategy="ring",
        scoring=Scoring(window=6),
    )
    reached = (
        12  # query 8 is the last whose window holds key 3, and its tile ends at 11
    )
    for got in in_true_order(compiled(*given), 2):
        assert np.isnan(got[:, :4]).all()
        assert np.isfinite(got[:, reached:]).all()


# ---- What crosses, and memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2])
def test_scores_do_not_travel_and_memory_is_linear_in_the_tokens_of_a_shard(shards):
    """Each shard has copies of the scores of one tile and its share of the arrays, and none has two dims of tokens.

    A ring passes on k, v and documents, and backward these and two gradients; none waits in a loop where there is one
    other shard.
    """
    sizes = {"context": shards}
    compiled = on_shards(inputs(4096), sizes=sizes, strategy="ring")[0]
    text = compiled.as_text()
    kinds = [c.kind for c in collectives(text)]
    assert set(kinds) <= {"collective-permute"}
    assert len(kinds) in ((0,), (5, 8))[shards - 1]  # keys may be one exchange
    tile, queries = B * N * 512**2, B * N * H * 4096 // shards
    found = re.findall(r"[a-z]+[0-9]+\[([0-9,]+)\]", text)
    assert max(math.prod(map(int, dims.split(","))) for dims in found) <= max(
        tile, queries
    )
    assert compiled.memory_analysis().temp_size_in_bytes <= 4 * (
        5 * tile + 12 * queries
    )
