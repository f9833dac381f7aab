"""Experts do not notice how a batch is split: losses, gradients, expert counts, metrics and updates."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.config import load_config
from maxtext_lite.models import BALANCE, DROPPED, EXPERT_COUNTS, ROUTER_Z
from maxtext_lite.parallel import Pipeline
from maxtext_lite.training import train
from maxtext_lite.training.gradients import GradientLoop
from maxtext_lite.training.objective import NEXT_TOKEN
from maxtext_lite.training.outputs import forward
from maxtext_lite.training.step import make_summarise
from maxtext_lite.xla.hlo import collectives
from tests.invariance.conftest import MODEL

# Weights large enough for each auxiliary loss to be a good part of the gradient; sgd without clipping shows it.
EXPERTS = (
    "optimizer=sgd", "gradient_clipping_threshold=0", "num_experts=4", "num_experts_per_tok=2", "base_moe_mlp_dim=8",
    "routed_bias=true", "load_balance_loss_weight=0.5", "router_z_loss_multiplier=0.05",
    "initializer_range=0.2",
)  # fmt: skip
CAPACITY = "capacity_factor=0.75"

WITH_FSDP = "A=2 on data 2 fsdp 2 expert 2"
# (accumulation, row slots of a micro-batch, mesh); 16 rows in all, so that some leave slots empty
SPLITS = {
    "A=4, empty slots, on data 4 expert 2": (4, 8, {"data": 4, "expert": 2}),
    "A=8 on data 2": (8, 2, {"data": 2}),
    "A=1 on expert 4 tensor 2": (1, 16, {"expert": 4, "tensor": 2}),
    "A=2 on a pipeline, 1f1b, data 2 expert 2": (2, 8, {"data": 2, "expert": 2, "stage": 2}),
    "A=2 on context 2 expert 2": (2, 8, {"context": 2, "expert": 2}),
    WITH_FSDP: (2, 8, {"data": 2, "fsdp": 2, "expert": 2}),
}  # fmt: skip


class Gradients:
    """`GradientLoop.of_step`, compiled once for a batch's shape and a loss scale."""

    def __init__(self, it, batch):
        self.it, self.batch = it, batch
        with jax.set_mesh(it.mesh), jax.default_matmul_precision("highest"):
            function = GradientLoop(it.parts).of_step
            self.compiled = jax.jit(function).lower(it.abstract.params, batch, None, jnp.float32(1)).compile()

    def __call__(self, params, loss_scale=1.0):
        placed = jax.tree.map(lambda p, like: jax.device_put(p, like.sharding), params, self.it.abstract.params)
        with jax.set_mesh(self.it.mesh):
            return jax.device_get(self.compiled(placed, self.batch, None, np.float32(loss_scale)))


def _by_hand(it, params, rows):
    """The objective of all rows at once from its definition, without our losses; its parts and the expert counts."""
    x, aux = it.decoder.hidden_and_aux(params, rows["tokens"], rows["segments"], rows["positions"])
    log_probability = jax.nn.log_softmax(jnp.einsum("BTD,DV->BTV", x, it.decoder.head(params)))
    nll = -jnp.take_along_axis(log_probability, rows["targets"][..., None], -1)[..., 0]
    tokens_B = jnp.sum(rows["weights"] > 0, axis=1)
    mean = lambda total: total / tokens_B.sum()  # noqa: E731
    layers = it.config.base_num_decoder_layers
    parts = {name: mean(jnp.sum(tokens_B * aux[name])) / layers for name in (BALANCE, DROPPED) if name in aux}
    parts[ROUTER_Z] = mean(jnp.sum(rows["weights"] * aux[ROUTER_Z])) / layers
    loss = mean(jnp.sum(rows["weights"] * nll))
    return loss + 0.5 * parts[BALANCE] + 0.05 * parts[ROUTER_Z], (loss, parts, jnp.sum(aux[EXPERT_COUNTS], axis=0))


CASES = [
    *(("dropless", split) for split in SPLITS if split != WITH_FSDP),
    ("capacity", WITH_FSDP),
    ("capacity", "A=2 on context 2 expert 2"),  # whose tokens stand in another order
]


@pytest.fixture(scope="module")
def wanted(request, setup, rows):
    """Keys, and of all rows at once on one device: parameters, loss, parts and gradients."""
    keys = (*EXPERTS, CAPACITY) if request.param == "capacity" else EXPERTS
    it = setup(*keys)
    params = jax.tree.map(np.array, it.initial.params)
    params["layers"]["mlp"]["router_bias"] += np.array([[0.1, 0, -0.1, 0], [0, 0.05, 0, 0]], np.float32)
    even = jax.tree.map(np.array, params)  # a router that knows no difference: all tokens go to experts 0 and 1
    even["layers"]["mlp"]["router"][:], even["layers"]["mlp"]["router_bias"][:] = 0, 0
    with jax.default_matmul_precision("highest"):
        function = jax.jit(jax.value_and_grad(lambda p: _by_hand(it, p, rows), has_aux=True))
        results = [jax.device_get(function(p)) for p in (params, even)]
        nll_B, _ = jax.jit(lambda p: NEXT_TOKEN.scores(forward(it.decoder, p, rows, it.config), rows))(params)
    loss, parts, _ = results[0][0][1]
    assert nll_B.sum() / np.count_nonzero(rows["weights"]) == pytest.approx(loss, rel=1e-5)  # evaluation: the nll alone
    assert (DROPPED in parts) == (request.param == "capacity")
    assert parts.get(DROPPED, 1) > 0.05
    counts_of_even = results[1][0][1][2]
    np.testing.assert_array_equal(counts_of_even, np.count_nonzero(rows["segments"]) * np.array([[1, 1, 0, 0]] * 2))
    return keys, list(zip((params, even), results, strict=True))


def _apart(tree):
    """The routers' biases of a tree like the parameters, and the tree without them."""
    mlp = dict(tree["layers"]["mlp"])
    return np.asarray(mlp.pop("router_bias")), tree | {"layers": tree["layers"] | {"mlp": mlp}}


def _same(got, result, agrees):
    (_, (loss, parts, counts)), gradients = result
    np.testing.assert_array_equal(got.expert_counts, counts)  # whole numbers, whatever the split and the loss scale
    bias_gradient, got_gradients = _apart(got.gradients)
    np.testing.assert_array_equal(bias_gradient, 0)
    agrees(got_gradients, _apart(gradients)[1])
    assert got.loss == pytest.approx(loss, rel=1e-5)
    assert got.aux.keys() == parts.keys()
    for name, part in parts.items():
        assert got.aux[name] == pytest.approx(part, rel=1e-5)


@pytest.mark.parametrize(("wanted", "split"), CASES, indirect=["wanted"])
def test_gradients_equal_those_of_all_rows_at_once(split, wanted, setup, rows, agrees):
    """Also of a router that sends everything to the same experts, under a loss scale that is no power of two."""
    accumulation, slots, mesh = SPLITS[split]
    keys, cases = wanted
    schedule = "1f1b" if "1f1b" in split else "gpipe"
    it = setup(*keys, pipeline=Pipeline(2, 2, 1, schedule) if "stage" in mesh else None, **mesh)
    gradients = Gradients(it, it.batch(rows, accumulation, slots))
    for (params, result), loss_scale in zip(cases, (3.0, 1.0), strict=True):
        _same(gradients(params, loss_scale), result, agrees)
    text = gradients.compiled.as_text()
    assert text is not None
    found = collectives(text)
    if "expert" in mesh:
        # Two choices a token, in float32: all tokens of four devices would be more bytes than their choices.
        _only_tokens_cross(it, found, exchanged=CAPACITY in keys or mesh["expert"] == 4)


def _without_experts(it):
    """Shapes of weights that are not experts', one layer's where they are stacked, as they are used."""
    found, over_tensor = set(), ("heads", "kv_heads", "vocab")
    for array, axes in zip(
        jax.tree.leaves(it.decoder.abstract_params),
        jax.tree.leaves(it.decoder.axes, is_leaf=lambda node: isinstance(node, tuple)),
        strict=True,
    ):
        if "experts" not in axes:
            parts = [it.mesh.shape["tensor"] if axis in over_tensor else 1 for axis in axes]
            sizes = [size // part for size, part in zip(array.shape, parts, strict=True)]
            found.add(",".join(map(str, sizes[1:] if axes[0] == "layers" else sizes)))
    return found


def _only_tokens_cross(it, found, *, exchanged):
    """Of experts no weight is gathered over their axis, and of tokens only where they are few.

    The other weights are, where they are used: they lie over that axis as over fsdp.
    """
    crossing = [c for c in found if "expert" in c.axes(it.mesh)]
    assert any(c.kind == "all-to-all" for c in crossing)
    assert not any(c.kind == "reduce-scatter" for c in crossing)
    matrices = {f"{a},{b}" for d in (16, 8) for f in (8, 4) for a, b in ((d, f), (f, d))}  # D x F, whole or split
    looked_up = r"/vmap\([^/]*\)/sharding_constraint"  # on the way to the table of tokens and back
    gathers = [c.line for c in crossing if c.kind == "all-gather" and not re.search(looked_up, c.line)]
    gathered = [line.split(" all-gather")[0] for line in gathers]
    shapes = [shape for line in gathered for shape in re.findall(r"f32\[([\d,]+)\]", line)]
    others = _without_experts(it)
    shapes = [shape for shape in shapes if re.sub(r"^(1,)+", "", shape) not in others]
    assert bool(shapes) != exchanged
    scores = {"32,4"}  # of tokens' choices among 4 experts: each device makes its own
    assert not [shape for shape in shapes if ",".join(shape.split(",")[-2:]) in matrices | scores]


@pytest.fixture(scope="module")
def plain_steps(setup, rows):
    it = setup(*EXPERTS, "learning_rate=0.1", "routed_bias_update_rate=0.01")
    batch = it.batch(rows, 1, 16)
    return it.run(it.compile_step(batch), batch, 4)


def test_steps_agree_however_they_are_split(plain_steps, setup, rows, agrees):
    """Also where layers are computed again in the backward pass, and the optimizer's state is shared (ZeRO-1)."""
    other = ("remat_policy=full", "shard_optimizer_over_data=true")
    it = setup(*EXPERTS, "learning_rate=0.1", "routed_bias_update_rate=0.01", *other, data=2, fsdp=2, expert=2)
    batch = it.batch(rows, 2, 8)
    state, metrics = it.run(it.compile_step(batch), batch, 4)
    want_state, want = plain_steps
    agrees(state.params, want_state.params)
    bias, want_bias = (s.params["layers"]["mlp"]["router_bias"] for s in (state, want_state))
    np.testing.assert_array_equal(bias, want_bias)
    assert np.abs(bias).max() == pytest.approx(0.04)  # some expert had too few, or too many, each time
    for name in ("loss", "grad_norm", "param_norm", "moe_balance", "moe_balance_loss", "router_z_loss"):
        np.testing.assert_allclose([m[name] for m in metrics], [m[name] for m in want], rtol=1e-5)
    assert want[0]["moe_balance_loss"] == pytest.approx(0.5 * want[0]["moe_balance"])
    assert want[-1]["moe_balance"] < want[0]["moe_balance"]


def test_replicas_that_train_apart_have_experts_and_metrics_of_their_own(setup, rows):
    """Two replicas on one part of the data axis: each set of experts is mapped, and summaries weigh target tokens."""
    it = setup(*EXPERTS, "weight_decay=0", "learning_rate=0.1", "routed_bias_update_rate=0.01", replicas=2, expert=2)
    batch = it.batch(rows, 1, 16)
    state, (metrics,) = it.run(it.compile_step(batch), batch, 1)
    params = jax.tree.map(lambda leaf: leaf[0], it.initial.params)
    with jax.default_matmul_precision("highest"):
        function = jax.jit(jax.value_and_grad(lambda p, own: _by_hand(it, p, own), has_aux=True))
        halves = [{name: array[part] for name, array in rows.items()} for part in (slice(0, 8), slice(8, 16))]
        own = [function(params, half) for half in halves]
    tokens = np.count_nonzero(rows["weights"].reshape(2, -1), axis=1)
    for r, ((_, (loss, parts, count)), gradients) in enumerate(own):
        assert metrics["loss"][r] == pytest.approx(float(loss), rel=1e-5)
        assert metrics[BALANCE][r] == pytest.approx(float(parts[BALANCE]), rel=1e-5)
        assert metrics["router_z_loss"][r] == pytest.approx(0.05 * float(parts[ROUTER_Z]), rel=1e-5)
        bias, got = _apart(jax.tree.map(lambda leaf, r=r: leaf[r], state.params))
        np.testing.assert_allclose(bias, 0.01 * np.sign(np.mean(count, -1, keepdims=True) - count), rtol=1e-6)
        rest = _apart(params)[1], _apart(gradients)[1]
        want = jax.tree.map(lambda p, g: p - metrics["learning_rate"][0] * g, *rest)
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=2e-6), got, want)
    with jax.set_mesh(it.mesh):
        whole = make_summarise(it.parts)(metrics)
    for name in (BALANCE, "router_z_loss"):
        assert float(whole[name]) == pytest.approx(np.average(metrics[name], weights=tokens), rel=1e-5)


def test_a_whole_run(tmp_path, documents):
    """Four experts on data 2 x fsdp 2 x expert 2, in bfloat16, resumed after half of its steps."""
    keys = [*MODEL, *EXPERTS, "optimizer=adamw", "dtype=bfloat16", "ici_data_parallelism=2",
            "ici_expert_parallelism=2", "per_device_batch_size=1", "eval_interval=-1", f"dataset_path={documents}/0",
            f"base_output_directory={tmp_path}", "warmup_steps=1", "learning_rate_schedule=constant",
            "load_balance_loss_weight=0.01", "initializer_range=0.02"]  # fmt: skip
    train(load_config(None, [*keys, "steps=3"]))
    result = train(load_config(None, [*keys, "steps=6"]))
    records = [json.loads(line) for line in (result.run_directory / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 7))
    assert records[-1]["loss"] < records[0]["loss"] - 0.02
    assert all(0.9 < record["moe_balance"] < 2 for record in records)
    assert {"moe_balance_loss", "router_z_loss"} <= records[0].keys()
    bias = jax.device_get(result.state.params["layers"]["mlp"]["router_bias"])
    assert 0 < np.abs(bias).max() <= 6 * 0.001 + 1e-6
