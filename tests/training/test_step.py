"""The update is that of the formulas; the compiled program has the promised collectives and memory.

That it does not depend on how a batch is split: tests/invariance/test_matrix.py.
"""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.batching import make_plan
from maxtext_lite.data.feed import DeviceBatch
from maxtext_lite.parallel import sharding
from maxtext_lite.training import failures
from maxtext_lite.training.accumulate import master_of
from maxtext_lite.training.failures import UnreadError
from maxtext_lite.training.objective import NEXT_TOKEN
from maxtext_lite.training.step import (
    EVAL_BATCH_AXES,
    make_eval_step,
    make_summarise,
    scores_of,
)
from maxtext_lite.xla.hlo import collectives
from tests.training.conftest import ONE_DEVICE, ROWS


def norm(tree):
    return np.sqrt(
        sum(np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(tree))
    )


def test_initial_values_do_not_depend_on_the_mesh(setup, agrees):
    it = setup("optimizer=sgd", data=2, fsdp=2, tensor=2)
    agrees(jax.device_get(it.created().params), it.initial.params)


@pytest.mark.fast
def test_metrics_are_those_of_the_update(setup, rows, mean_loss):
    """Of two micro-batches, by the gradient of all rows at once without our loss."""
    it = setup(
        "optimizer=sgd",
        "learning_rate=0.5",
        "gradient_clipping_threshold=0",
        "weight_decay=0",
        "warmup_steps=4",
    )
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
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state.params, expected
    )
    assert state.progress.examples.tolist() == [0, ROWS]
    assert state.progress.tokens.tolist() == [0, np.count_nonzero(rows["weights"])]


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
            np.testing.assert_array_equal,
            getattr(state, part),
            getattr(it.initial, part),
        )
    assert state.step == 1


@pytest.fixture(scope="module")
def compiled(setup, rows):
    """The step on data 4 x fsdp 2 for several A; memory wants rows enough for activations to be the same size."""
    it = setup("optimizer=adamw", "base_emb_dim=64", "base_mlp_dim=256", data=4, fsdp=2)
    steps = {}
    for accumulation in (1, 2, 8):
        many = {name: np.tile(array, (accumulation, 1)) for name, array in rows.items()}
        steps[accumulation] = it.compile_step(it.batch(many, accumulation, 16))
    return it, steps


def test_gradients_cross_the_data_axis_once_a_step(compiled):
    it, steps = compiled
    found = collectives(steps[8].as_text())
    assert any(
        c.in_loop and "fsdp" in c.axes(it.mesh) for c in found
    )  # sharded weights are gathered in the loops
    assert not [c.line for c in found if c.in_loop and "data" in c.axes(it.mesh)]
    parameters = sum(leaf.size for leaf in jax.tree.leaves(it.decoder.abstract_params))
    reduced = sum(
        np.prod([int(n) for n in sizes.split(",")], dtype=int)
        for c in found
        if c.kind in ("all-reduce", "reduce-scatter") and "data" in c.axes(it.mesh)
        for sizes in re.findall(r"f32\[([\d,]+)\]", c.line.split(c.kind + "(")[0])
    )
    assert (
        parameters / 2 <= reduced <= parameters + 100
    )  # each device reduces its fsdp half, once


def test_tokens_cross_fsdp_for_the_embedding_and_the_head_s_gradient_does_once(
    setup, rows
):
    """Not the table, nor its gradient; and of each weight the half that its tensor axis leaves is gathered."""
    it = setup(
        "optimizer=sgd",
        "base_emb_dim=64",
        "num_vocab_tiling=4",
        data=2,
        fsdp=2,
        tensor=2,
    )
    found = collectives(it.compile_step(it.batch(rows, 2, 8)).as_text())
    ends = [
        c for c in found if "fsdp" in c.axes(it.mesh) and "132" in c.line.split("(%")[0]
    ]  # half of 264 tokens
    assert [(c.kind, c.times) for c in ends if "[64,132]" in c.line] == [
        ("all-gather", 2)
    ]
    assert [c.times for c in ends if c.kind == "all-reduce"] == [2]
    assert not [
        c.line for c in found if "264" in c.line.split("(%")[0] or "[132,64]" in c.line
    ]
    tokens = [c for c in found if c.kind == "all-to-all"]
    assert [(c.axes(it.mesh), c.times) for c in tokens] == [(("fsdp",), 2)] * 2


def test_a_ring_s_keys_are_not_gathered_and_gradients_still_cross_the_data_axis_once(
    setup, rows
):
    it = setup("optimizer=sgd", RING, data=2, context=4)
    found = collectives(it.compile_step(it.batch(rows, 2, 8)).as_text())
    assert not [c.line for c in found if c.in_loop and "data" in c.axes(it.mesh)]
    along = [c for c in found if "context" in c.axes(it.mesh)]
    # Keys; looked-up tokens; weights where they are used, which lie over context too; their gradients.
    kinds = {"collective-permute", "all-to-all", "all-gather", "all-reduce"}
    assert {c.kind for c in along if c.in_loop} == kinds
    gathers = [c for c in along if c.kind == "all-gather"]
    shapes = [
        re.findall(r"f32\[([\d,]+)\]", c.line.split("(%")[0])
        for c in gathers
        if c.in_loop
    ]
    sizes = {size for found in shapes for shape in found for size in shape.split(",")}
    assert sizes == {
        "1",
        "2",
        "4",
        "16",
        "24",
        "264",
    }  # of weights: an example has 32 tokens, a shard 8
    # Tokens, targets, documents, positions and weights, arranged before the loop, are all else that is gathered.
    assert len([c for c in gathers if not c.in_loop]) == 5


def test_with_a_tensor_axis_too_tokens_are_not_gathered_over_context_for_gradients_of_weights(
    setup, rows
):
    """Keys, values and weights are; of 32 tokens of an example each device keeps 16 throughout."""
    it = setup("optimizer=sgd", data=2, context=2, tensor=2)
    found = [
        c
        for c in collectives(it.compile_step(it.batch(rows, 2, 8)).as_text())
        if c.in_loop
    ]
    gathers = [c for c in found if c.kind == "all-gather"]
    assert {c.axes(it.mesh) for c in gathers} == {("context",), ("tensor",)}
    shapes = [
        (c, re.findall(r"f32\[([\d,]+)\]", c.line.split("(%")[0])) for c in gathers
    ]
    whole = [
        c.line
        for c, of_result in shapes
        for shape in of_result
        if "32" in shape.split(",")
    ]
    assert not whole


def test_memory_is_flat_in_accumulation(compiled):
    """From A = 2 on nothing grows; A = 2 adds one float32 accumulator, and where weights are sharded, XLA keeps
    re-laid copies of this device's parts of the embedding and the head through the loop."""
    it, steps = compiled
    temporaries = {
        a: step.memory_analysis().temp_size_in_bytes for a, step in steps.items()
    }
    parameters = it.decoder.abstract_params
    accumulator = (
        4 * sum(leaf.size for leaf in jax.tree.leaves(parameters)) // 2
    )  # float32, fsdp half
    ends = (
        4
        * (
            parameters["embedding"]["table"].size
            + parameters["head"]["projection"].size
        )
        // 2
    )
    assert temporaries[2] - temporaries[1] <= accumulator + ends
    assert abs(temporaries[8] - temporaries[2]) <= 0.02 * temporaries[2]


def test_the_inner_optimizer_is_compiled_once(compiled):
    """Adam takes one square root for each parameter: as many outside the loops as parameters, and none inside one."""
    it, steps = compiled
    lowered = steps[8].as_text()
    roots = [
        line
        for line in lowered.splitlines()
        if re.search(r"f32\[[\d,]+\]\S* sqrt\(", line)
    ]
    assert len(roots) == len(jax.tree.leaves(it.decoder.abstract_params))
    assert not [line for line in roots if "while/body" in line]


def test_row_losses_are_exact_for_any_mesh(setup, rows):
    one = setup()
    params = one.initial.params
    with jax.default_matmul_precision("highest"):
        x = jax.jit(one.decoder.hidden)(
            params, rows["tokens"], rows["segments"], rows["positions"]
        )
    logits = np.asarray(x, np.float64) @ np.asarray(
        one.decoder.head(params), np.float64
    )
    nll = (
        np.log(np.exp(logits).sum(-1))
        - np.take_along_axis(logits, rows["targets"][..., None], -1)[..., 0]
    )
    for keys, mesh in (
        ((), {}),
        (("num_vocab_tiling=2",), {"data": 2, "context": 2, "tensor": 2}),
    ):
        it = setup(*keys, **mesh)
        batch = jax.device_put(rows, sharding(it.mesh, EVAL_BATCH_AXES))
        with jax.set_mesh(it.mesh), jax.default_matmul_precision("highest"):
            sums, counts = jax.device_get(
                make_eval_step(it.parts)(it.state().params, batch)
            )
        np.testing.assert_allclose(
            sums, (nll * rows["weights"]).sum(-1), rtol=1e-5, atol=1e-5
        )
        np.testing.assert_array_equal(counts, np.count_nonzero(rows["weights"], axis=1))


def test_bfloat16_steps_run_and_stay_close_to_float32(setup, rows):
    """Compiled and run, as some bfloat16 matmuls compile on a CPU but fail when run (docs/performance.md).

    In float32 the losses are those of one device, to 1e-5."""
    losses = []
    for keys, accumulation, mesh in (
        ((), 1, {}),
        (("dtype=bfloat16",), 1, {}),
        (
            ("dtype=bfloat16", "remat_policy=minimal"),
            4,
            {"fsdp": 2, "context": 2, "tensor": 2},
        ),
    ):
        tied = (
            "optimizer=sgd",
            "learning_rate=0.5",
            "logits_via_embedding=true",
            "num_vocab_tiling=2",
            RING,
        )
        it = setup(*tied, *keys, **mesh)
        batch = it.batch(rows, accumulation, ROWS // accumulation)
        losses.append([m["loss"] for m in it.run(it.compile_step(batch), batch, 5)[1]])
    wide, *narrow = losses
    assert wide[-1] < wide[0] - 0.01
    for each in narrow:
        np.testing.assert_allclose(each, wide, rtol=5e-3)
        assert not np.allclose(each, wide, rtol=1e-5, atol=0)


def test_tensor_parallelism_splits_what_stands_between_blocks(setup):
    """Gathered before a projection, reduced after: no all-to-all, no weight gathered, and less is held."""
    sizes = {}
    keys = (
        "optimizer=sgd",
        "base_emb_dim=64",
        "base_mlp_dim=64",
        "remat_policy=full",
        "base_num_decoder_layers=16",
    )
    for length in (128, 127):  # 127 tokens cannot be shared out
        it = setup(*keys, f"max_target_length={length}", tensor=2)
        compiled = it.compile_step(it.abstract_batch(1, 8, length))
        sizes[length] = compiled.memory_analysis().temp_size_in_bytes
        if length == 127:
            continue
        found = [c for c in collectives(compiled.as_text()) if c.in_loop]
        assert {c.kind for c in found} <= {"all-gather", "all-reduce", "reduce-scatter"}
        for c in found:
            if c.kind == "all-gather":
                assert f"f32[1,8,{length},64]" in c.line, c.line
    layer_inputs = 16 * 8 * 128 * 64 * 4
    assert sizes[127] - sizes[128] > 0.4 * layer_inputs


@pytest.mark.parametrize("policy", ["none", "save_qkv_proj", "full"])
def test_the_plan_estimates_what_the_compiler_allocates(policy, setup):
    """The plan's memory other than the state is within a tenth of the step's temporaries."""
    keys = [
        "base_num_decoder_layers=8",
        "base_emb_dim=64",
        "base_num_query_heads=4",
        "base_num_kv_heads=2",
        "head_dim=16",
        "base_mlp_dim=192",
        "max_target_length=128",
        "per_device_batch_size=8",
        "steps=20",
        f"remat_policy={policy}",
    ]
    it = setup(*keys)
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
    jax.tree.map(np.testing.assert_array_equal, it.run(there, batch, 3), want)
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


def test_a_sharded_optimizer_state_is_a_share_of_the_bytes(setup):
    """Every leaf has a dim that 4 divides, but the norms' of 16, which are small."""
    whole, shared = (
        setup("optimizer=adamw", *keys, data=4).state().opt_state
        for keys in ((), (ZERO,))
    )

    def size(state):
        return sum(
            leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state)
        )

    counts = 3 * 4  # mini_step, gradient_step and Adam's own
    assert size(shared) - counts == (size(whole) - counts) / 4


def test_a_sharded_optimizer_state_costs_one_reduction_and_one_gathering(
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
        it = setup("optimizer=adamw", ZERO, data=4, fsdp=2)
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
        if in_place:
            sent_once(
                across,
                sum(leaf.size for leaf in jax.tree.leaves(it.decoder.abstract_params)),
            )
    jax.tree.map(np.testing.assert_array_equal, *ends)


def sent_once(across, parameters):
    """A device's half of each parameter (fsdp); a CPU writes a reduce-scatter as an all-reduce and a slice."""
    sent = {}
    for kind in ("all-reduce", "reduce-scatter", "all-gather"):
        lines = [c.line.split(f" {kind}")[0] for c in across if c.kind == kind]
        found = [
            sizes.split(",")
            for line in lines
            for sizes in re.findall(r"f32\[([\d,]+)\]", line)
        ]
        sent[kind] = sum(int(np.prod([int(size) for size in sizes])) for sizes in found)
    assert (
        parameters / 2
        <= sent["all-reduce"] + 4 * sent["reduce-scatter"]
        <= parameters / 2 + 300
    )
    assert parameters / 2 - 100 <= sent["all-gather"] <= parameters / 2 + 300


def test_bfloat16_parameters_have_float32_masters_and_the_same_however_the_optimizer_is_split(
    setup, rows
):
    """To the bit with SGD; the norm of the gradient, which would clip it, adds its squares up in another order."""
    ends = []
    for zero in ((), (ZERO,)):
        keys = (
            "optimizer=sgd",
            "sgd_momentum=0.9",
            "weight_dtype=bfloat16",
            "gradient_clipping_threshold=0",
        )
        it = setup(*keys, *zero, data=8)
        batch = it.batch(rows, 1, 16)
        state, metrics = it.run(it.compile_step(batch), batch, 3)
        masters = jax.tree.leaves(master_of(state.opt_state))
        assert {leaf.dtype for leaf in masters} == {np.dtype(np.float32)}
        for master, param in zip(masters, jax.tree.leaves(state.params), strict=True):
            np.testing.assert_array_equal(np.asarray(master, jnp.bfloat16), param)
        assert metrics[-1]["loss"] < metrics[0]["loss"]
        ends.append((state.params, state.opt_state))
    jax.tree.map(np.testing.assert_array_equal, *ends)


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
        assert (
            bool(metrics["skipped"]),
            int(state.skipped_in_a_row),
            int(state.step),
        ) == (
            is_skipped,
            in_a_row,
            number,
        )
        assert is_skipped == all(
            map(np.array_equal, jax.tree.leaves(before), jax.tree.leaves(after))
        )


@pytest.mark.parametrize("weights", [(1, 3), (0.1, 0.3), (1e-6, 3e-6)])
def test_the_loss_of_replicas_is_their_weighted_mean_however_small_the_weights(weights):
    parts = SimpleNamespace(
        objective=SimpleNamespace(divisor="loss_weight"), mesh=ONE_DEVICE
    )
    metrics = {"loss": jnp.array([2.0, 4.0]), "loss_weight": jnp.array(weights)}
    found = jax.device_get(make_summarise(parts)(metrics))
    assert found["loss"] == pytest.approx(3.5)
    assert found["loss_weight"] == pytest.approx(sum(weights))
    nothing = make_summarise(parts)(metrics | {"loss_weight": jnp.zeros(2)})
    assert nothing["loss"] == 0


def _batches(rows, size):
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        yield DeviceBatch(
            {"rows": np.asarray(part, np.float32)},
            np.arange(len(part)),
            len(part),
            num_micro_batches=1,
            data_seconds=0.0,
        )


def evaluate(eval_step, params, batches):
    return NEXT_TOKEN.evaluation(list(scores_of(eval_step, params, batches)))


def _of_rows(params, arrays):
    return params * arrays["rows"][:, 0], arrays["rows"][:, 1].astype(np.int32)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.fast
def test_mean_over_tokens_not_over_batches(size):
    rows = [(6.0, 1), (8.0, 4), (0.0, 0), (9.0, 3), (2.0, 2)]  # nll sum, tokens
    assert evaluate(_of_rows, 2.0, _batches(rows, size)) == {
        "eval_loss": 2 * 25 / 10,
        "eval_target_tokens": 10,
    }


def test_nothing_held_out_counts_nothing():
    assert evaluate(_of_rows, 1.0, iter(())) == {
        "eval_loss": 0.0,
        "eval_target_tokens": 0,
    }


def test_the_next_batch_is_under_way_while_the_scores_of_one_are_read():
    begun = []

    def eval_step(params, arrays):
        begun.append(float(arrays["rows"][0, 0]))
        return _of_rows(params, arrays)

    scores = scores_of(eval_step, 1.0, _batches([(6.0, 1), (8.0, 4), (9.0, 3)], 1))
    seen = [(float(nll[0]), list(begun)) for nll, _ in scores]
    assert seen == [(6.0, [6.0, 8.0]), (8.0, [6.0, 8.0, 9.0]), (9.0, [6.0, 8.0, 9.0])]


def test_what_another_host_could_not_read_is_raised_after_the_last_batch(monkeypatch):
    monkeypatch.setattr(
        failures, "exchange", lambda mine: [mine, "record 7 is damaged"]
    )
    scores = scores_of(_of_rows, 1.0, _batches([(6.0, 1), (8.0, 4)], 1))
    assert [float(nll[0]) for nll, _ in (next(scores), next(scores))] == [6.0, 8.0]
    with pytest.raises(UnreadError, match="record 7 is damaged"):
        next(scores)
