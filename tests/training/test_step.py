"""The update is that of the formulas; the compiled program has the promised collectives and memory.

That it does not depend on how a batch is split: tests/invariance/test_matrix.py.
"""

import math
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from maxtext_lite.analysis.hlo import collectives
from maxtext_lite.batching import make_plan
from maxtext_lite.parallel import sharding
from maxtext_lite.training.evaluation import EVAL_BATCH_AXES, make_eval_step
from maxtext_lite.training.synchronise import make_summarise
from tests.training.conftest import LENGTH, ONE_DEVICE, ROWS, norm


@pytest.mark.fast
def test_metrics_are_those_of_the_update(setup, rows, mean_loss):
    """Of two micro-batches, by the gradient of all rows at once without our loss."""
    keys = "optimizer=sgd learning_rate=0.5 gradient_clipping_threshold=0 weight_decay=0 warmup_steps=4"
    it = setup(*keys.split())
    params = it.initial.params
    with jax.default_matmul_precision("highest"):
        of_loss = jax.jit(jax.value_and_grad(lambda p: mean_loss(it.decoder, p, rows)))
        loss, gradients = jax.device_get(of_loss(params))
    batch = it.batch(rows, 2, 8)
    state, (metrics,) = it.run(it.compile_step(batch), batch, 1)
    assert metrics["learning_rate"] == pytest.approx(
        0.5 / 4
    )  # the first of four steps of warm-up
    assert metrics["loss"] == pytest.approx(loss, rel=1e-6)
    assert metrics["grad_norm"] == pytest.approx(norm(gradients), rel=1e-5)
    expected = jax.tree.map(lambda p, g: p - 0.5 / 4 * g, params, gradients)
    assert metrics["param_norm"] == pytest.approx(norm(expected), rel=1e-6)
    jax.tree.map(lambda a, b: assert_allclose(a, b, atol=1e-6), state.params, expected)
    assert state.progress.examples.tolist() == [0, ROWS]
    assert state.progress.tokens.tolist() == [0, np.count_nonzero(rows["weights"])]


def test_the_norm_of_narrow_parameters_is_summed_in_float32(setup, rows):
    it = setup("weight_dtype=bfloat16", "optimizer=sgd")
    batch = it.batch(rows, 1, 16)
    state, (metrics,) = it.run(it.compile_step(batch), batch, 1)
    exact = norm(jax.tree.map(lambda p: np.asarray(p, np.float64), state.params))
    assert metrics["param_norm"] == pytest.approx(exact, rel=1e-5)


RING = "context_parallel_strategy=ring"


HOST = "optimizer_memory_host_offload=true"
ZERO = "shard_optimizer_over_data=true"
DECAY_ALL = "weight_decay_on_norms_and_embeddings=true"


@pytest.fixture(scope="module")
def adamw(setup, rows):
    """Two micro-batches on data 2 x fsdp 2, and the step of them."""
    it = setup("optimizer=adamw", DECAY_ALL, data=2, fsdp=2)
    batch = it.batch(rows, 2, 8)
    return it, batch, it.compile_step(batch)


def test_a_step_without_targets_has_no_gradient_and_changes_nothing(adamw):
    """Not even by weight decay or momentum."""
    it, batch, compiled = adamw
    state, (metrics,) = it.run(
        compiled, batch | {"weights": jnp.zeros_like(batch["weights"])}, 1
    )
    assert metrics["skipped"]
    assert metrics["loss"] == metrics["target_tokens"] == metrics["grad_norm"] == 0
    for part in ("params", "opt_state", "progress"):
        jax.tree.map(
            assert_array_equal,
            getattr(state, part),
            getattr(it.initial, part),
        )
    assert state.step == 1


def shapes_of(collective):
    """The dims of its results in float32."""
    text = collective.line.split(f" {collective.kind}")[0]
    return [
        [int(size) for size in dims.split(",")]
        for dims in re.findall(r"f32\[([\d,]+)\]", text)
    ]


def numbers_in(found):
    """How many numbers in float32 these collectives have as results."""
    return sum(math.prod(shape) for c in found for shape in shapes_of(c))


def num_parameters(it):
    return sum(leaf.size for leaf in jax.tree.leaves(it.decoder.abstract_params))


def test_gradients_cross_the_data_axis_once_a_step_in_which_memory_is_flat_and_adam_runs_once(
    setup,
):
    """On data 4 x fsdp 2, of 2 and of 8 micro-batches."""
    it = setup("optimizer=adamw", "base_emb_dim=64", "base_mlp_dim=256", data=4, fsdp=2)
    few, many = (it.compile_step(it.abstract_batch(a, 16, LENGTH)) for a in (2, 8))
    found = collectives(many.as_text())
    inside = [c.axes(it.mesh) for c in found if c.in_loop]
    assert any("fsdp" in axes for axes in inside)  # sharded weights are gathered
    assert not any("data" in axes for axes in inside)
    across = [c for c in found if "reduce" in c.kind and "data" in c.axes(it.mesh)]
    parameters = num_parameters(it)
    # Each device reduces its fsdp half, once.
    assert parameters / 2 <= numbers_in(across) <= parameters + 100
    few, most = (step.memory_analysis().temp_size_in_bytes for step in (few, many))
    assert abs(most - few) <= 0.02 * few
    # Adam takes one square root for each parameter, and none in a loop.
    roots = re.findall(r".*f32\[[\d,]+\]\S* sqrt\(.*", many.as_text())
    assert len(roots) == len(jax.tree.leaves(it.decoder.abstract_params))
    assert not [line for line in roots if "while/body" in line]


def test_tokens_cross_fsdp_for_the_embedding_and_the_head_s_gradient_does_once(setup):
    """Not the table, nor its gradient; and of each weight the half that its tensor axis leaves is gathered."""
    keys = "optimizer=sgd", "base_emb_dim=64", "num_vocab_tiling=4"
    it = setup(*keys, data=2, fsdp=2, tensor=2)
    found = collectives(it.compile_step(it.abstract_batch(2, 8, LENGTH)).as_text())
    half = 264 // 2  # of all tokens
    ends = [
        (c.kind, c.times, [64, half] in shapes_of(c))
        for c in found
        if "fsdp" in c.axes(it.mesh) and any(half in shape for shape in shapes_of(c))
    ]
    assert [end for end in ends if end[2]] == [("all-gather", 2, True)]
    assert [times for kind, times, _ in ends if kind == "all-reduce"] == [2]
    shapes = [shape for c in found for shape in shapes_of(c)]
    assert not [shape for shape in shapes if 264 in shape or shape == [half, 64]]
    tokens = [c for c in found if c.kind == "all-to-all"]
    assert [(c.axes(it.mesh), c.times) for c in tokens] == [(("fsdp",), 2)] * 2


@pytest.mark.parametrize("ring", [True, False])
def test_tokens_are_not_gathered_over_context_for_gradients_of_weights(ring, setup):
    """Of a ring's not the keys either; and gradients still cross the data axis once."""
    keys, mesh = (
        ((RING,), {"context": 4}) if ring else ((), {"context": 2, "tensor": 2})
    )
    it = setup("optimizer=sgd", *keys, data=2, **mesh)
    found = collectives(it.compile_step(it.abstract_batch(2, 8, LENGTH)).as_text())
    inside = [c for c in found if c.in_loop]
    assert not [c.line for c in inside if "data" in c.axes(it.mesh)]
    gathers = [c for c in inside if c.kind == "all-gather"]
    sizes = {size for c in gathers for shape in shapes_of(c) for size in shape}
    if not ring:  # of keys and values too, but of 32 tokens each device keeps 16
        assert {c.axes(it.mesh) for c in gathers} == {("context",), ("tensor",)}
        assert LENGTH not in sizes
        return
    assert sizes == {1, 2, 4, 16, 24, 264}  # of weights: a shard has 8 tokens
    # Keys; looked-up tokens; weights where they are used, which lie over context too; their gradients.
    along = [c for c in found if "context" in c.axes(it.mesh)]
    kinds = {"collective-permute", "all-to-all", "all-gather", "all-reduce"}
    assert {c.kind for c in along if c.in_loop} == kinds
    # Tokens, targets, documents, positions and weights, arranged before the loop, are all else that is gathered.
    assert len([c for c in along if c.kind == "all-gather" and not c.in_loop]) == 5


def test_a_sharded_optimizer_state_is_gathered_and_reduced_once(
    setup, rows, monkeypatch
):
    """Parameters cross the data axis once on their way back, gradients once on their way; nothing in the loop.

    Parameters that are gathered beside the donated ones, as on a TPU, are the same to the bit, also where a step is
    skipped, and with one gathering still.
    """
    ends = []
    for in_place in (True, False):
        monkeypatch.setattr(
            "maxtext_lite.training.step._gathers_in_place",
            lambda mesh, value=in_place: value,
        )
        it = setup("optimizer=sgd", "sgd_momentum=0.9", ZERO, data=4, fsdp=2)
        batch = it.batch(rows, 2, 8)
        step = it.compile_step(batch)
        state, metrics = step(it.state(), batch, None)
        metrics = jax.device_get(metrics)  # waits, as `run` does
        state, skipped = step(state, batch | {"weights": batch["weights"] * 0}, None)
        assert skipped["skipped"]
        ends.append(jax.device_get((state, metrics, skipped)))
        across = [c for c in collectives(step.as_text()) if "data" in c.axes(it.mesh)]
        assert not [c.line for c in across if c.in_loop]
        gathered = [c for c in across if c.kind == "all-gather"]
        assert len(gathered) == len(jax.tree.leaves(it.decoder.abstract_params))
        if in_place:  # a CPU writes a reduce-scatter as an all-reduce and a slice
            half = num_parameters(it) / 2  # of fsdp
            summed = numbers_in(c for c in across if c.kind == "all-reduce")
            scattered = numbers_in(c for c in across if c.kind == "reduce-scatter")
            assert half <= summed + 4 * scattered <= half + 300
            assert half - 100 <= numbers_in(gathered) <= half + 300
    jax.tree.map(assert_array_equal, *ends)


def test_row_losses_are_exact_on_any_mesh(setup, rows):
    it = setup("num_vocab_tiling=2", data=2, context=2, tensor=2)
    params, one = it.initial.params, setup()
    with jax.default_matmul_precision("highest"):
        x = jax.jit(one.decoder.hidden)(
            params, rows["tokens"], rows["segments"], rows["positions"]
        )
        batch = jax.device_put(rows, sharding(it.mesh, EVAL_BATCH_AXES))
        with jax.set_mesh(it.mesh):
            found = make_eval_step(it.parts)(it.state().params, batch)
    logits = np.float64(x) @ np.float64(one.decoder.head(params))
    of_target = np.take_along_axis(logits, rows["targets"][..., None], -1)[..., 0]
    nll = np.log(np.exp(logits).sum(-1)) - of_target
    sums, counts = jax.device_get(found)
    want = (nll * rows["weights"]).sum(-1)
    assert_allclose(sums, want, rtol=1e-5, atol=1e-5)
    assert_array_equal(counts, np.count_nonzero(rows["weights"], axis=1))


def test_the_plan_estimates_what_the_compiler_allocates(setup):
    """The plan's memory other than the state is within a tenth of the step's temporaries."""
    keys = """
    base_num_decoder_layers=8 base_emb_dim=64 base_num_query_heads=4 base_num_kv_heads=2 head_dim=16 base_mlp_dim=192
    max_target_length=128 per_device_batch_size=8 steps=20 remat_policy=full
    """
    it = setup(*keys.split())
    memory = make_plan(it.config, num_devices=1, platform="cpu").memory
    found = (
        it.compile_step(it.abstract_batch(1, 8, 128))
        .memory_analysis()
        .temp_size_in_bytes
    )
    assert memory.total - memory.held == pytest.approx(found, rel=0.1)


def test_an_optimizer_state_on_the_host_gives_the_same_update_to_the_bit(
    setup, adamw, rows
):
    here, batch, step = adamw
    want = here.run(step, batch, 3)
    it = setup("optimizer=adamw", DECAY_ALL, HOST, data=2, fsdp=2)
    there = it.compile_step(batch)
    jax.tree.map(assert_array_equal, it.run(there, batch, 3), want)
    kinds = {
        leaf.sharding.memory_kind
        for leaf in jax.tree.leaves(it.state().opt_state)
        if leaf.ndim
    }
    assert kinds == {"pinned_host"}
    state_out, _ = there.output_shardings
    assert {
        where.memory_kind
        for where in jax.tree.leaves(state_out.opt_state.inner_opt_state)
    } >= {"pinned_host"}


def test_after_the_skipped_step_that_ends_the_run_nothing_is_applied(setup, rows):
    """With two allowed in a row. Steps are dispatched before the host has read those before them."""
    it = setup("optimizer=sgd", "skip_nonfinite_updates=true", "max_skipped_updates=2")
    good = it.batch(rows, 1, 16)
    bad = good | {"weights": good["weights"] * np.nan}
    compiled, state = it.compile_step(good), it.state()
    for number, (batch, is_skipped, in_a_row) in enumerate(
        (
            (bad, True, 1),
            (good, False, 0),
            (bad, True, 1),
            (bad, True, 2),
            (good, True, 2),
            (good, True, 2),
        ),
        start=1,
    ):
        before = jax.device_get((state.params, state.opt_state, state.progress))
        state, metrics = compiled(state, batch, None)
        after = jax.device_get((state.params, state.opt_state, state.progress))
        assert bool(metrics["skipped"]) == is_skipped
        assert (int(state.skipped_in_a_row), int(state.step)) == (in_a_row, number)
        assert is_skipped == all(
            map(np.array_equal, jax.tree.leaves(before), jax.tree.leaves(after))
        )


@pytest.mark.parametrize("weights", [(1, 3), (1e-6, 3e-6)])
def test_the_loss_of_replicas_is_their_weighted_mean_however_small_the_weights(weights):
    objective = SimpleNamespace(divisor="loss_weight", reductions={})
    summarise = make_summarise(SimpleNamespace(objective=objective, mesh=ONE_DEVICE))
    losses = {"loss": jnp.array([2.0, 4.0])}
    found = summarise(losses | {"loss_weight": jnp.array(weights)})
    assert found["loss"] == pytest.approx(3.5)
    assert found["loss_weight"] == pytest.approx(sum(weights))
    assert summarise(losses | {"loss_weight": jnp.zeros(2)})["loss"] == 0
