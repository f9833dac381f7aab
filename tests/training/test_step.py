"""The update does not depend on how a batch is split; the compiled program has the promised collectives and memory."""

import functools
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
from maxtext_lite.training.step import EVAL_BATCH_AXES, TRAIN_BATCH_AXES, make_eval_step, make_summarise, scores_of
from maxtext_lite.xla.hlo import collectives
from tests.training.conftest import LENGTH, ONE_DEVICE, ROWS

# (accumulation, row slots of a micro-batch, mesh); 16 rows in all, so that the last two leave slots empty
SPLITS = {
    "A=1 on 1": (1, 16, {}),
    "A=16 on 1": (16, 1, {}),
    "A=4, empty slots, on data 8": (4, 8, {"data": 8}),
    "A=1 on data 2 fsdp 2 tensor 2": (1, 16, {"data": 2, "fsdp": 2, "tensor": 2}),
    "A=8 on fsdp 2 tensor 2": (8, 2, {"fsdp": 2, "tensor": 2}),
    "A=2 on data 2 fsdp 4": (2, 8, {"data": 2, "fsdp": 4}),
    "A=3, empty slots, on fsdp 4 tensor 2": (3, 8, {"fsdp": 4, "tensor": 2}),
}  # fmt: skip


@pytest.fixture(scope="module")
def by_hand(setup, rows, mean_loss):
    """Loss and gradients of all rows at once, without accumulation, replicas or our loss."""
    one = setup("optimizer=sgd")
    params = one.initial.params
    with jax.default_matmul_precision("highest"):
        loss, gradients = jax.jit(jax.value_and_grad(lambda p: mean_loss(one.decoder, p, rows)))(params)
    return params, float(loss), jax.device_get(gradients)


@pytest.fixture(scope="module")
def of_split(setup, rows):
    """The step's gradients of all rows, by keys beside plain SGD and however they are split."""

    @functools.cache
    def gradients(accumulation, slots, *overrides, **mesh):
        it = setup("optimizer=sgd", *overrides, **mesh)
        return it.gradients(it.state().params, it.batch(rows, accumulation, slots))

    return gradients


@pytest.fixture(scope="module")
def groups_by_hand(setup, rows, mean_loss, by_hand):
    """How many groups count something, each replica's part of each micro-batch, and the sum of their
    w/W |mean gradient|^2, by plain derivatives."""
    one, whole = setup("optimizer=sgd"), np.count_nonzero(rows["weights"])
    gradient = jax.jit(jax.grad(lambda p, part: mean_loss(one.decoder, p, part)))
    row = np.arange(ROWS)

    def of(accumulation, slots, replicas):
        groups, total = 0, 0.0
        for micro in range(accumulation):
            for replica in range(replicas):
                own = (row % accumulation == micro) & (row // accumulation * replicas // slots == replica)
                part = rows | {"weights": rows["weights"] * own[:, None]}
                counted = np.count_nonzero(part["weights"])
                if counted == 0:  # such a group counts for nothing
                    continue
                with jax.default_matmul_precision("highest"):
                    mean = jax.device_get(gradient(by_hand[0], part))
                total += counted / whole * sum(np.sum(np.square(g, dtype=np.float64)) for g in jax.tree.leaves(mean))
                groups += 1
        return groups, total

    return of


@pytest.mark.parametrize("split", SPLITS)
def test_accumulated_gradients_equal_those_of_all_rows_at_once(split, rows, of_split, by_hand, agrees):
    accumulation, slots, mesh = SPLITS[split]
    _, loss, gradients = by_hand
    got = of_split(accumulation, slots, **mesh)
    agrees(got.gradients, gradients)
    assert got.loss == pytest.approx(loss, rel=1e-6)
    assert got.target_tokens == np.count_nonzero(rows["weights"])
    assert got.examples == ROWS


@pytest.mark.parametrize("split", SPLITS)
def test_group_squares_are_those_of_the_groups(split, of_split, groups_by_hand):
    accumulation, slots, mesh = SPLITS[split]
    got, replicas = of_split(accumulation, slots, **mesh), mesh.get("data", 1)
    if accumulation * replicas == 1:
        assert got.groups == got.group_squares == 0  # one group tells nothing, and costs nothing
    else:
        groups, total = groups_by_hand(accumulation, slots, replicas)
        assert got.groups == groups
        assert got.group_squares == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("mesh", [{"data": 2, "fsdp": 4}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_initial_values_do_not_depend_on_the_mesh(mesh, setup, by_hand, agrees):
    agrees(jax.device_get(setup("optimizer=sgd", **mesh).created().params), by_hand[0])


RING, GATHER = "context_parallel_strategy=ring", "context_parallel_strategy=all_gather"
# (accumulation, row slots, mesh, further keys)
CONTEXTS = {
    "ring of 8, A=4": (4, 4, {"context": 8}, (RING, "remat_policy=full")),
    "gathered over 4 on data 2, A=2": (2, 8, {"data": 2, "context": 4}, (GATHER, "remat_policy=save_dot_products")),
    "gathered over 2 on fsdp 2 tensor 2": (1, 16, {"fsdp": 2, "context": 2, "tensor": 2}, (GATHER,)),
    "ring of 2 on data 2 tensor 2, A=3, empty slots": (
        3, 8, {"data": 2, "context": 2, "tensor": 2}, (RING, "remat_policy=minimal", "num_vocab_tiling=4")),
}  # fmt: skip


@pytest.mark.parametrize("split", CONTEXTS)
def test_gradients_of_tokens_split_over_devices_equal_those_of_whole_examples(split, rows, of_split, by_hand, agrees):
    """Documents cross every cut: each shard has two chunks of 8, 4 or 2 tokens of the 32."""
    accumulation, slots, mesh, overrides = CONTEXTS[split]
    _, loss, gradients = by_hand
    got = of_split(accumulation, slots, *overrides, **mesh)
    agrees(got.gradients, gradients)
    assert got.loss == pytest.approx(loss, rel=1e-6)
    assert (got.target_tokens, got.examples) == (np.count_nonzero(rows["weights"]), ROWS)


def test_gradients_of_4096_tokens_in_a_ring_of_8(setup, agrees):
    """One row, of documents of some 600 tokens, on a decoder of one layer."""
    rng = np.random.default_rng(0)
    starts = rng.random((1, 4096)) < 1 / 600
    segments = (np.cumsum(starts, axis=1) + 1).astype(np.int32)
    since = np.maximum.accumulate(np.where(starts, np.arange(4096), 0), axis=1)
    whole = {
        "tokens": rng.integers(0, 264, (1, 4096)).astype(np.int32),
        "targets": rng.integers(0, 264, (1, 4096)).astype(np.int32),
        "segments": segments,
        "positions": (np.arange(4096) - since).astype(np.int32),
        "weights": rng.choice([0.0, 1.0], (1, 4096)).astype(np.float32),
    }
    keys = ("optimizer=sgd", "max_target_length=4096", "base_num_decoder_layers=1", "base_num_query_heads=2",
            "base_num_kv_heads=1", "num_vocab_tiling=8", RING)  # fmt: skip
    results = []
    for mesh in ({}, {"context": 8}):
        it = setup(*keys, **mesh)
        results.append(it.gradients(it.state().params, it.batch(whole, 1, 1)))
    one, eight = results
    agrees(eight.gradients, one.gradients)
    assert eight.loss == pytest.approx(one.loss, rel=1e-6)


HOST = "optimizer_memory_host_offload=true"
ZERO = "shard_optimizer_over_data=true"
DECAY_ALL = "weight_decay_on_norms_and_embeddings=true"


@pytest.fixture(scope="module")
def five_steps(setup, rows):
    """The step by an optimizer, and state and metrics of five, however they are split, in a ring where there is one."""

    @functools.cache
    def steps(optimizer, accumulation, slots, *overrides, **mesh):
        rate = {"sgd": 0.5, "adamw": 0.01}[optimizer]
        keys = (f"optimizer={optimizer}", f"learning_rate={rate}", "num_vocab_tiling=2", "z_loss_multiplier=1e-3", RING)
        it = setup(*keys, *overrides, **mesh)
        batch = it.batch(rows, accumulation, slots)
        compiled = it.compile_step(batch)
        return compiled, *it.run(compiled, batch, 5)

    return steps


@pytest.mark.parametrize(
    ("optimizer", "splits"),
    [
        ("sgd", ((4, 8, {"data": 8}), (1, 16, {"data": 2, "fsdp": 2, "tensor": 2}), (2, 8, {"data": 2, "context": 4}))),
        ("adamw", ((2, 8, {"data": 8}, ZERO), (2, 8, {"data": 2, "fsdp": 2, "tensor": 2}, ZERO))),
    ],
    ids=["sgd", "adamw"],
)
def test_five_steps_agree_however_they_and_the_optimizer_are_split(optimizer, splits, five_steps, agrees):
    _, state, metrics = five_steps(optimizer, 1, 16)
    losses = [m["loss"] for m in metrics]
    assert losses[-1] < losses[0] - 0.01
    assert state.step == state.opt_state.gradient_step == 5
    for accumulation, slots, mesh, *overrides in splits:
        _, other_state, other_metrics = five_steps(optimizer, accumulation, slots, *overrides, **mesh)
        for name in ("loss", "grad_norm", "z_loss", "param_norm", "learning_rate"):
            np.testing.assert_allclose([m[name] for m in other_metrics], [m[name] for m in metrics], rtol=1e-5)
        if optimizer == "sgd":
            agrees(other_state.params, state.params)


PLAIN = ("optimizer=sgd", "learning_rate=0.5", "gradient_clipping_threshold=0", "weight_decay=0", "warmup_steps=4")


@pytest.fixture(scope="module")
def plain(setup, rows):
    """Two micro-batches on one device, and the step of them."""
    it = setup(*PLAIN)
    batch = it.batch(rows, 2, 8)
    return it, batch, it.compile_step(batch)


def test_metrics_are_those_of_the_update(plain, by_hand):
    it, batch, compiled = plain
    state, (metrics,) = it.run(compiled, batch, 1)
    params, _, gradients = by_hand
    norm = lambda tree: np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(tree)))  # noqa: E731
    assert metrics["learning_rate"] == pytest.approx(0.5 / 4)  # the first of four steps of warm-up
    assert metrics["grad_norm"] == pytest.approx(norm(gradients), rel=1e-5)
    expected = jax.tree.map(lambda p, g: p - 0.5 / 4 * g, params, gradients)
    assert metrics["param_norm"] == pytest.approx(norm(expected), rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state.params, expected)


@pytest.mark.parametrize("mesh", [{}, {"data": 2, "fsdp": 2}], ids=str)
def test_one_executable_serves_any_accumulation(mesh, setup, rows, agrees, plain, groups_by_hand):
    """The first n of 4 micro-batches, n being an argument of the compiled step, equal a step without that argument."""
    want, want_metrics = plain[0].run(plain[2], plain[1], 3)
    it = setup(*PLAIN, **mesh)
    padded = {name: np.concatenate([array, np.zeros((48, LENGTH), array.dtype)]) for name, array in rows.items()}
    whole = it.batch(padded, 4, 16)
    compiled = it.compile_step(whole, np.int32(0))
    for number in (1, 2, 4):
        dealt = {name: np.zeros((4, 16, LENGTH), array.dtype) for name, array in rows.items()}
        for name, array in rows.items():
            for j, row in enumerate(array):
                dealt[name][j % number, j // number] = row
        # Micro-batches beyond the number weigh nothing, whatever stands there.
        dealt["tokens"][number:] = 7
        batch = {name: jax.device_put(array, whole[name].sharding) for name, array in dealt.items()}
        got, got_metrics = it.run(compiled, batch, 3, np.int32(number))
        agrees(got.params, want.params)
        for name in ("loss", "grad_norm", "target_tokens", "learning_rate"):
            np.testing.assert_allclose([m[name] for m in got_metrics], [m[name] for m in want_metrics], rtol=1e-5)
        groups, total = groups_by_hand(number, 16, mesh.get("data", 1))
        assert [m["groups"] for m in got_metrics] == [groups] * 3
        assert got_metrics[0]["group_squares"] == pytest.approx(total, rel=1e-5)
        assert got.progress.examples.tolist() == [0, 3 * ROWS]
        assert got.progress.tokens.tolist() == [0, 3 * int(want_metrics[0]["target_tokens"])]


def test_gradients_cross_in_grad_dtype(of_split):
    """The sum over all micro-batches, once."""
    exact, rounded = (of_split(16, 1, *keys).gradients for keys in ((), ("grad_dtype=bfloat16",)))
    jax.tree.map(
        lambda g, r: np.testing.assert_array_equal(r, np.asarray(jnp.asarray(g).astype(jnp.bfloat16), np.float32)),
        exact,
        rounded,
    )
    summed = of_split(4, 4, "grad_dtype=bfloat16", data=4).gradients
    assert {leaf.dtype for leaf in jax.tree.leaves(summed)} == {np.dtype(np.float32)}
    norm = lambda tree: np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(tree)))  # noqa: E731
    assert 0 < norm(jax.tree.map(lambda a, b: a - b, exact, summed)) < 1e-2 * norm(exact)


@pytest.fixture(scope="module")
def adamw(setup, rows):
    """Two micro-batches on data 2 x fsdp 2, and the step of them."""
    it = setup("optimizer=adamw", DECAY_ALL, data=2, fsdp=2)
    batch = it.batch(rows, 2, 8)
    return it, batch, it.compile_step(batch)


def test_a_step_without_targets_has_no_gradient_and_changes_nothing(adamw):
    """Not even by weight decay or momentum."""
    it, batch, compiled = adamw
    state, (metrics,) = it.run(compiled, batch | {"weights": jnp.zeros_like(batch["weights"])}, 1)
    assert metrics["skipped"]
    assert metrics["loss"] == metrics["target_tokens"] == metrics["grad_norm"] == 0
    for part in ("params", "opt_state", "progress"):
        jax.tree.map(np.testing.assert_array_equal, getattr(state, part), getattr(it.initial, part))
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
    assert any(c.in_loop and "fsdp" in c.axes(it.mesh) for c in found)  # sharded weights are gathered in the loops
    assert not [c.line for c in found if c.in_loop and "data" in c.axes(it.mesh)]
    parameters = sum(leaf.size for leaf in jax.tree.leaves(it.decoder.abstract_params))
    reduced = sum(
        np.prod([int(n) for n in sizes.split(",")], dtype=int)
        for c in found if c.kind in ("all-reduce", "reduce-scatter") and "data" in c.axes(it.mesh)
        for sizes in re.findall(r"f32\[([\d,]+)\]", c.line.split(c.kind + "(")[0])
    )  # fmt: skip
    assert parameters / 2 <= reduced <= parameters + 100  # each device reduces its fsdp half, once


def test_tokens_cross_fsdp_for_the_embedding_and_the_head_s_gradient_does_once(setup, rows):
    """Not the table, nor its gradient; and of each weight the half that its tensor axis leaves is gathered."""
    it = setup("optimizer=sgd", "base_emb_dim=64", "num_vocab_tiling=4", data=2, fsdp=2, tensor=2)
    found = collectives(it.compile_step(it.batch(rows, 2, 8)).as_text())
    ends = [c for c in found if "fsdp" in c.axes(it.mesh) and "132" in c.line.split("(%")[0]]  # half of 264 tokens
    assert [(c.kind, c.times) for c in ends if "[64,132]" in c.line] == [("all-gather", 2)]
    assert [c.times for c in ends if c.kind == "all-reduce"] == [2]
    assert not [c.line for c in found if "264" in c.line.split("(%")[0] or "[132,64]" in c.line]
    tokens = [c for c in found if c.kind == "all-to-all"]
    assert [(c.axes(it.mesh), c.times) for c in tokens] == [(("fsdp",), 2)] * 2


def test_a_ring_s_keys_are_not_gathered_and_gradients_still_cross_the_data_axis_once(setup, five_steps):
    mesh = {"data": 2, "context": 4}
    it = setup("optimizer=sgd", RING, **mesh)
    found = collectives(five_steps("sgd", 2, 8, **mesh)[0].as_text())
    assert not [c.line for c in found if c.in_loop and "data" in c.axes(it.mesh)]
    along = [c for c in found if "context" in c.axes(it.mesh)]
    # Keys; looked-up tokens; weights where they are used, which lie over context too; their gradients.
    kinds = {"collective-permute", "all-to-all", "all-gather", "all-reduce"}
    assert {c.kind for c in along if c.in_loop} == kinds
    gathers = [c for c in along if c.kind == "all-gather"]
    shapes = [re.findall(r"f32\[([\d,]+)\]", c.line.split("(%")[0]) for c in gathers if c.in_loop]
    sizes = {size for found in shapes for shape in found for size in shape.split(",")}
    assert sizes == {"1", "2", "4", "16", "24", "264"}  # of weights: an example has 32 tokens, a shard 8
    # Tokens, targets, documents, positions and weights, arranged before the loop, are all else that is gathered.
    assert len([c for c in gathers if not c.in_loop]) == 5


def test_with_a_tensor_axis_too_tokens_are_not_gathered_over_context_for_gradients_of_weights(setup, rows):
    """Keys, values and weights are; of 32 tokens of an example each device keeps 16 throughout."""
    it = setup("optimizer=sgd", data=2, context=2, tensor=2)
    found = [c for c in collectives(it.compile_step(it.batch(rows, 2, 8)).as_text()) if c.in_loop]
    gathers = [c for c in found if c.kind == "all-gather"]
    assert {c.axes(it.mesh) for c in gathers} == {("context",), ("tensor",)}
    shapes = [(c, re.findall(r"f32\[([\d,]+)\]", c.line.split("(%")[0])) for c in gathers]
    whole = [c.line for c, of_result in shapes for shape in of_result if "32" in shape.split(",")]
    assert not whole


def test_memory_is_flat_in_accumulation(compiled):
    """From A = 2 on nothing grows; A = 2 adds one float32 accumulator, and where weights are sharded, XLA keeps
    re-laid copies of this device's parts of the embedding and the head through the loop."""
    it, steps = compiled
    temporaries = {a: step.memory_analysis().temp_size_in_bytes for a, step in steps.items()}
    parameters = it.decoder.abstract_params
    accumulator = 4 * sum(leaf.size for leaf in jax.tree.leaves(parameters)) // 2  # float32, fsdp half
    ends = 4 * (parameters["embedding"]["table"].size + parameters["head"]["projection"].size) // 2
    assert temporaries[2] - temporaries[1] <= accumulator + ends
    assert abs(temporaries[8] - temporaries[2]) <= 0.02 * temporaries[2]


def test_accumulation_adds_at_most_one_accumulator(setup, rows):
    it = setup("optimizer=sgd", data=2)
    temporaries = [
        it.compile_step(it.batch({name: np.tile(array, (a, 1)) for name, array in rows.items()}, a, 16))
        .memory_analysis().temp_size_in_bytes for a in (1, 2)
    ]  # fmt: skip
    accumulator = 4 * sum(leaf.size for leaf in jax.tree.leaves(it.decoder.abstract_params))
    assert temporaries[1] - temporaries[0] <= accumulator


def test_the_inner_optimizer_is_compiled_once(compiled):
    """Adam takes one square root for each parameter: as many outside the loops as parameters, and none inside one."""
    it, steps = compiled
    lowered = steps[8].as_text()
    roots = [line for line in lowered.splitlines() if re.search(r"f32\[[\d,]+\]\S* sqrt\(", line)]
    assert len(roots) == len(jax.tree.leaves(it.decoder.abstract_params))
    assert not [line for line in roots if "while/body" in line]


def test_the_state_holds_no_accumulator(setup):
    it = setup("optimizer=adamw")
    parameters = sum(leaf.size for leaf in jax.tree.leaves(it.decoder.abstract_params))
    assert sum(leaf.size for leaf in jax.tree.leaves(it.initial)) <= 3 * parameters + 12


@pytest.fixture(scope="module")
def row_losses(setup, rows):
    """Scores of all rows by the evaluation step, on any mesh."""

    def scores(*overrides, **mesh):
        it = setup(*overrides, **mesh)
        batch = {name: jax.device_put(array, sharding(it.mesh, EVAL_BATCH_AXES)) for name, array in rows.items()}
        with jax.set_mesh(it.mesh), jax.default_matmul_precision("highest"):
            return jax.device_get(make_eval_step(it.parts)(it.state().params, batch))

    return scores


def test_row_losses_are_exact_for_any_mesh(setup, rows, row_losses):
    one = setup()
    params = one.initial.params
    with jax.default_matmul_precision("highest"):
        x = jax.jit(one.decoder.hidden)(params, rows["tokens"], rows["segments"], rows["positions"])
    logits = np.asarray(x, np.float64) @ np.asarray(one.decoder.head(params), np.float64)
    nll = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, rows["targets"][..., None], -1)[..., 0]
    alone = row_losses()
    np.testing.assert_allclose(alone[0], (nll * rows["weights"]).sum(-1), rtol=1e-5, atol=1e-5)
    for mesh in ({"data": 2, "fsdp": 2, "tensor": 2}, {"data": 2, "context": 4}):
        eight = row_losses("num_vocab_tiling=2", **mesh)
        np.testing.assert_allclose(alone[0], eight[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(eight[1], np.count_nonzero(rows["weights"], axis=1))


TIED = ("logits_via_embedding=true",)


@pytest.mark.parametrize(
    ("accumulation", "mesh", "model", "overrides"),
    [
        (1, {}, (), ()),
        (2, {"data": 2, "fsdp": 2, "tensor": 2}, TIED, ()),
        (4, {"fsdp": 2, "context": 2}, (), ("remat_policy=minimal",)),
    ],
    ids=str,
)
def test_bfloat16_steps_run_and_stay_close_to_float32(accumulation, mesh, model, overrides, five_steps):
    """Compiled and run, as some bfloat16 matmuls compile on a CPU but fail when run (docs/performance.md).

    In float32 the losses are those of one device, to 1e-5."""
    narrow = five_steps("sgd", accumulation, ROWS // accumulation, "dtype=bfloat16", *model, *overrides, **mesh)
    losses = [[m["loss"] for m in metrics] for _, _, metrics in (narrow, five_steps("sgd", 1, 16, *model))]
    np.testing.assert_allclose(losses[0], losses[1], rtol=5e-3)
    assert not np.allclose(losses[0], losses[1], rtol=1e-5, atol=0)


def test_tensor_parallelism_splits_what_stands_between_blocks(setup):
    """Gathered before a projection, reduced after: no all-to-all, no weight gathered, and less is held."""
    sizes = {}
    keys = ("optimizer=sgd", "base_emb_dim=64", "base_mlp_dim=64", "remat_policy=full", "base_num_decoder_layers=16")
    for length in (128, 127):  # 127 tokens cannot be shared out
        it = setup(*keys, f"max_target_length={length}", tensor=2)
        where = sharding(it.mesh, TRAIN_BATCH_AXES)
        batch = {
            name: jax.ShapeDtypeStruct((1, 8, length), "float32" if name == "weights" else "int32", sharding=where)
            for name in ("tokens", "targets", "segments", "positions", "weights")
        }
        compiled = it.compile_step(batch)
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


@pytest.mark.parametrize("policy", ["none", "minimal", "save_qkv_proj", "full"])
def test_the_plan_estimates_what_the_compiler_allocates(policy, setup):
    """The plan's memory other than the state is within a tenth of the step's temporaries."""
    keys = ["base_num_decoder_layers=8", "base_emb_dim=64", "base_num_query_heads=4", "base_num_kv_heads=2",
            "head_dim=16", "base_mlp_dim=192", "max_target_length=128", "per_device_batch_size=8", "steps=20",
            f"remat_policy={policy}"]  # fmt: skip
    it = setup(*keys)
    memory = make_plan(it.config, num_devices=1, platform="cpu").memory
    where = sharding(it.mesh, TRAIN_BATCH_AXES)
    batch = {
        name: jax.ShapeDtypeStruct((1, 8, 128), "float32" if name == "weights" else "int32", sharding=where)
        for name in ("tokens", "targets", "segments", "positions", "weights")
    }
    found = it.compile_step(batch).memory_analysis().temp_size_in_bytes
    assert memory.total - memory.held == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_an_optimizer_state_on_the_host_gives_the_same_update_to_the_bit(optimizer, setup, adamw, rows):
    """AdamW's on four devices, and a momentum on one."""
    if optimizer == "adamw":
        keys, mesh, (_, _, here) = ("optimizer=adamw", DECAY_ALL), {"data": 2, "fsdp": 2}, adamw
    else:
        keys, mesh, here = ("optimizer=sgd", "sgd_momentum=0.9"), {}, None
    results = []
    for it in (setup(*keys, **mesh), there := setup(*keys, HOST, **mesh)):
        batch = it.batch(rows, 2, 8)
        step = here if here and it is not there else it.compile_step(batch)
        results.append(it.run(step, batch, 3))
    jax.tree.map(np.testing.assert_array_equal, *results)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(there.state().opt_state) if leaf.ndim}
    assert kinds == {"pinned_host"}
    _, (state_out, _) = step.input_shardings, step.output_shardings
    assert {where.memory_kind for where in jax.tree.leaves(state_out.opt_state.inner_opt_state)} >= {"pinned_host"}


def test_a_sharded_optimizer_state_is_a_share_of_the_bytes(setup):
    """Every leaf has a dim that 4 divides, but the norms' of 16, which are small."""
    whole, shared = (setup("optimizer=adamw", *keys, data=4).state().opt_state for keys in ((), (ZERO,)))
    size = lambda state: sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))  # noqa: E731
    counts = 3 * 4  # mini_step, gradient_step and Adam's own
    assert size(shared) - counts == (size(whole) - counts) / 4


def test_a_sharded_optimizer_state_costs_one_reduction_and_one_gathering(setup, rows):
    """Parameters cross the data axis once on their way back, gradients once on their way; nothing in the loop."""
    it = setup("optimizer=adamw", ZERO, data=4, fsdp=2)
    found = collectives(it.compile_step(it.batch(rows, 2, 8)).as_text())
    parameters = sum(leaf.size for leaf in jax.tree.leaves(it.decoder.abstract_params))
    assert not [c.line for c in found if c.in_loop and "data" in c.axes(it.mesh)]
    sent = {}
    for kind in ("all-reduce", "reduce-scatter", "all-gather"):
        lines = [c.line.split(f" {kind}")[0] for c in found if c.kind == kind and "data" in c.axes(it.mesh)]
        sizes = [
            np.prod([int(n) for n in s.split(",")]) for line in lines for s in re.findall(r"f32\[([\d,]+)\]", line)
        ]
        sent[kind] = int(sum(sizes))
    # A device's half of each parameter (fsdp); a CPU writes a reduce-scatter as an all-reduce and a slice.
    assert parameters / 2 <= sent["all-reduce"] + 4 * sent["reduce-scatter"] <= parameters / 2 + 300
    assert parameters / 2 - 100 <= sent["all-gather"] <= parameters / 2 + 300


def test_parameters_gathered_beside_the_donated_ones_as_on_a_tpu_are_the_same_to_the_bit(setup, rows, monkeypatch):
    """Also where a step is skipped, and with one gathering still."""
    ends = []
    for in_place in (True, False):
        monkeypatch.setattr("maxtext_lite.training.step._gathers_in_place", lambda mesh, value=in_place: value)
        it = setup("optimizer=adamw", ZERO, data=4, fsdp=2)
        batch = it.batch(rows, 2, 8)
        step = it.compile_step(batch)
        state, metrics = step(it.state(), batch, None)
        metrics = jax.device_get(metrics)  # waits, as `run` does
        state, skipped = step(state, batch | {"weights": batch["weights"] * 0}, None)
        assert skipped["skipped"]
        ends.append(jax.device_get((state, metrics, skipped)))
        gathered = [c for c in collectives(step.as_text()) if c.kind == "all-gather" and "data" in c.axes(it.mesh)]
        assert len(gathered) == len(jax.tree.leaves(it.decoder.abstract_params))
    jax.tree.map(np.testing.assert_array_equal, *ends)


def test_bfloat16_parameters_have_float32_masters_and_the_same_however_the_optimizer_is_split(setup, rows):
    """To the bit with SGD; the norm of the gradient, which would clip it, adds its squares up in another order."""
    ends = []
    for zero in ((), (ZERO,)):
        keys = ("optimizer=sgd", "sgd_momentum=0.9", "weight_dtype=bfloat16", "gradient_clipping_threshold=0")
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
        ((bad, True, 1), (good, False, 0), (bad, True, 1), (bad, True, 2), (good, True, 2), (good, True, 2)), start=1
    ):
        before = jax.device_get((state.params, state.opt_state, state.progress))
        state, metrics = compiled(state, batch, None)
        after = jax.device_get((state.params, state.opt_state, state.progress))
        assert (bool(metrics["skipped"]), int(state.skipped_in_a_row), int(state.step)) == (
            is_skipped,
            in_a_row,
            number,
        )
        assert is_skipped == all(map(np.array_equal, jax.tree.leaves(before), jax.tree.leaves(after)))


@pytest.mark.parametrize("weights", [(1, 3), (0.1, 0.3), (1e-6, 3e-6)])
def test_the_loss_of_replicas_is_their_weighted_mean_however_small_the_weights(weights):
    parts = SimpleNamespace(objective=SimpleNamespace(divisor="loss_weight"), mesh=ONE_DEVICE)
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
def test_mean_over_tokens_not_over_batches(size):
    rows = [(6.0, 1), (8.0, 4), (0.0, 0), (9.0, 3), (2.0, 2)]  # nll sum, tokens
    assert evaluate(_of_rows, 2.0, _batches(rows, size)) == {"eval_loss": 2 * 25 / 10, "eval_target_tokens": 10}


def test_nothing_held_out_counts_nothing():
    assert evaluate(_of_rows, 1.0, iter(())) == {"eval_loss": 0.0, "eval_target_tokens": 0}


def test_the_next_batch_is_under_way_while_the_scores_of_one_are_read():
    begun = []

    def eval_step(params, arrays):
        begun.append(float(arrays["rows"][0, 0]))
        return _of_rows(params, arrays)

    scores = scores_of(eval_step, 1.0, _batches([(6.0, 1), (8.0, 4), (9.0, 3)], 1))
    seen = [(float(nll[0]), list(begun)) for nll, _ in scores]
    assert seen == [(6.0, [6.0, 8.0]), (8.0, [6.0, 8.0, 9.0]), (9.0, [6.0, 8.0, 9.0])]


def test_what_another_host_could_not_read_is_raised_after_the_last_batch(monkeypatch):
    monkeypatch.setattr(failures, "exchange", lambda mine: [mine, "record 7 is damaged"])
    scores = scores_of(_of_rows, 1.0, _batches([(6.0, 1), (8.0, 4)], 1))
    assert [float(nll[0]) for nll, _ in (next(scores), next(scores))] == [6.0, 8.0]
    with pytest.raises(UnreadError, match="record 7 is damaged"):
        next(scores)
