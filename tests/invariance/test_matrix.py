"""The one proof that a split changes nothing: every way to split a step has the gradients of all rows on one device.

What they are compared with is each objective written out, in one piece, without our losses and loops. Whole runs that
are split over processes, stopped and resumed: test_hosts.py and test_resume.py.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from maxtext_lite.analysis.hlo import collectives
from maxtext_lite.models import (
    BALANCE,
    DROPPED,
    EXPERT_COUNTS,
    ROUTER_Z,
    Decoder,
    Stream,
)
from maxtext_lite.models.experts import FURTHER_ROUNDS
from maxtext_lite.models.lora import merged
from maxtext_lite.parallel.pipeline import Pipeline
from maxtext_lite.post_training.rollout_steps import ChunkedStep
from maxtext_lite.training.custom_loss import CustomLoss
from maxtext_lite.training.gradients import step_gradients
from maxtext_lite.training.objective import Predictions
from maxtext_lite.training.optimizer import learning_rate_schedule
from maxtext_lite.training.synchronise import make_summarise
from tests import responses
from tests.invariance.conftest import TABLE
from tests.training.conftest import LENGTH, make_setup, pairs_of_answers

MODELS = TABLE["models"]
COMMON = (
    "optimizer=sgd",
    "gradient_clipping_threshold=0",
    "base_num_query_heads=8",
    "base_num_kv_heads=4",
    "base_num_decoder_layers=4",
)


def keys_of(model):
    """The keys of a model of the table."""
    about = MODELS[model]
    others = keys_of(about["like"]) if "like" in about else COMMON
    return (*others, *about["keys"])


def neighbours(predictions, rows):
    """A custom loss that depends on the order of tokens: each target's nll times that of the one before, and terms of
    the hidden states and the logits; weighed in part."""
    weights, nll = rows["weights"], predictions.nll()
    pairs = jnp.sum(weights[:, 1:] * weights[:, :-1] * nll[:, 1:] * nll[:, :-1])
    squares = sum(
        jnp.mean(jnp.square(x), axis=-1)
        for x in (predictions.hidden(), predictions.logits())
    )
    return pairs + 0.1 * jnp.sum(weights * squares) + jnp.sum(weights * nll), jnp.sum(
        weights
    )


OBJECTIVES = {"custom loss": CustomLoss(neighbours, 264, 16)}


def drawn(abstract, seed, *, size=0.2, norm=1):
    """Parameters at random, so that every one of them matters; the scales of norms and layers are near `norm`."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        noise = np.float32(size) * rng.standard_normal(leaf.shape, np.float32)
        return noise + np.float32(norm if "scal" in jax.tree_util.keystr(path) else 0)

    return jax.tree_util.tree_map_with_path(draw, abstract)


class Reference:
    """A model's parameters, and the mean loss of rows with its gradients on one device, by the objective's formula.

    With adapters, the model is one that has none, and its weights are the sums in one piece.
    """

    def __init__(self, model, rows):
        self.name, self.keys, self.objective = (
            model,
            keys_of(model),
            OBJECTIVES.get(model),
        )
        self.expert_layers = MODELS[model].get("expert_layers", 0)
        self.rows = pairs_of_answers(len(rows["tokens"])) if model == "DPO" else rows
        self.it = make_setup(*self.keys)
        self.decoder = Decoder(dataclasses.replace(self.it.decoder.shape, lora=None))
        abstract = self.it.abstract
        norm = 0 if "plus_one" in self.it.config.normalization else 1
        self.frozen = drawn(abstract.frozen, 4, norm=norm)
        params = drawn(
            abstract.params, 5, norm=norm, size=0.2 if self.frozen is None else 0.05
        )
        self.params = [params]
        if model in ("experts", "capacity"):
            even = jax.tree.map(
                np.copy, params
            )  # a router that knows no difference: all go to experts 0 and 1
            even["layers"]["mlp"]["router"][:] = 0
            even["layers"]["mlp"]["router_bias"][:] = 0
            self.params.append(even)
        formula = {"DPO": self._of_pairs, "custom loss": self._custom}.get(
            model, self._next_token
        )
        self._compiled = jax.jit(jax.value_and_grad(formula, has_aux=True))
        self._found: dict[Any, Any] = {}

    def at(self, params, rows):
        """(loss, z-loss, auxiliary values, expert counts) and gradients of rows."""
        with jax.default_matmul_precision("highest"):
            (_, about), gradients = jax.device_get(self._compiled(params, rows))
        return about, gradients

    def __call__(self, number):
        """The same of all rows, by the parameters of this number."""
        if number not in self._found:
            self._found[number] = self.at(self.params[number], self.rows)
        return self._found[number]

    def counted(self, rows):
        """What divides the loss of rows."""
        if self.name == "custom loss":
            return rows["weights"].sum()
        if self.name == "DPO":
            return rows["segments"].reshape(-1, 2, LENGTH)[:, 0].max(axis=1).sum()
        return np.count_nonzero(rows["weights"])

    def _forward(self, params, rows):
        whole = (
            params
            if self.frozen is None
            else merged(self.it.decoder.joined(params, self.frozen))
        )
        x, aux = self.decoder.hidden_and_aux(
            whole, rows["tokens"], rows["segments"], rows["positions"]
        )
        logits = self.decoder.logits(whole, x)
        log_partition = jax.nn.logsumexp(logits, axis=-1)
        nll = (
            log_partition
            - jnp.take_along_axis(logits, rows["targets"][..., None], -1)[..., 0]
        )
        return x, aux, logits, log_partition, nll

    def _with_aux(self, loss, z_loss, aux, weight_BT, weight_B, ahead={}):  # noqa: B006 it is read only
        config, parts = self.it.config, {}
        for name in (BALANCE, ROUTER_Z, DROPPED):
            if name in aux:
                weights = weight_BT if aux[name].ndim == 2 else weight_B
                parts[name] = jnp.sum(weights * aux[name]) / self.expert_layers
        total = loss + config.z_loss_multiplier * z_loss
        if parts:
            total += config.load_balance_loss_weight * parts[BALANCE]
            total += config.router_z_loss_multiplier * parts.get(ROUTER_Z, 0)
        if ahead:
            total += config.mtp_loss_scaling_factor * ahead["mtp_loss"]
        counts = jnp.sum(aux[EXPERT_COUNTS], axis=0) if EXPERT_COUNTS in aux else None
        return total, (loss, z_loss, parts | ahead, counts)

    def _next_token(self, params, rows):
        x, aux, _, log_partition, nll = self._forward(params, rows)
        ahead, aux = self._ahead(params, rows, x, aux)
        tokens_B = jnp.sum(rows["weights"] > 0, axis=1)
        weights = rows["weights"] / tokens_B.sum()
        z_loss = jnp.sum(weights * jnp.square(log_partition))
        return self._with_aux(
            jnp.sum(weights * nll),
            z_loss,
            aux,
            weights,
            tokens_B / tokens_B.sum(),
            ahead,
        )

    def _ahead(self, params, rows, x, aux):
        """The losses of multi-token prediction by name, and `aux` with what its layers add."""
        layers, losses = self.it.config.mtp_num_layers, []
        if not layers:
            return {}, aux
        found = []
        for number in range(1, layers + 1):
            place = np.minimum(np.arange(LENGTH) + number, LENGTH - 1)
            there = {name: x[:, place] for name, x in rows.items()}
            is_inside = (there["segments"] == rows["segments"]) & (rows["segments"] > 0)
            is_inside &= np.arange(LENGTH) + number < LENGTH
            there["segments"] = rows["segments"] * is_inside
            there["weights"] *= is_inside
            found.append(there)
        stream = Stream(x, rows["segments"], rows["positions"], aux)
        inputs = [(there["tokens"], there["segments"]) for there in found]
        hidden, aux = self.decoder.predict_ahead(params, stream, inputs)
        for x_BTD, there in zip(hidden, found, strict=True):
            log_p = jax.nn.log_softmax(self.decoder.logits(params, x_BTD), axis=-1)
            nll = -jnp.take_along_axis(log_p, there["targets"][..., None], -1)[..., 0]
            count = jnp.sum(there["weights"] > 0)
            losses.append(jnp.sum(there["weights"] * nll) / count)
        return {"mtp_loss": sum(losses) / layers}, aux

    def _custom(self, params, rows):
        x, aux, logits, _, nll = self._forward(params, rows)
        total, weight = neighbours(
            Predictions(lambda: nll, lambda: logits, lambda: x), rows
        )
        is_target = rows["weights"] > 0
        weight_B = jnp.sum(rows["weights"], axis=1) / weight
        weight_BT = (
            is_target * (weight_B / jnp.maximum(is_target.sum(axis=1), 1))[:, None]
        )
        return self._with_aux(total / weight, 0.0, aux, weight_BT, weight_B)

    def _of_pairs(self, params, examples):
        rows = {name: x.reshape(-1, LENGTH) for name, x in examples.items()}
        *_, nll = self._forward(params, rows)
        is_of_pair = rows["segments"][..., None] == jnp.arange(
            1, 4
        )  # [row, token, pair]
        ratio = jnp.einsum(
            "rt,rtp->rp",
            -nll * rows["weights"] - rows["reference"],
            is_of_pair.astype(jnp.float32),
        )
        reward = 0.3 * ratio
        margin = reward[::2] - reward[1::2]
        is_pair = jnp.any(is_of_pair[::2], axis=1)
        mean = lambda x: jnp.sum(x * is_pair) / jnp.sum(is_pair)  # noqa: E731
        loss = mean(
            0.9 * jnp.log1p(jnp.exp(-margin)) + 0.1 * jnp.log1p(jnp.exp(margin))
        )
        rewards = {
            "reward_chosen": mean(reward[::2]),
            "reward_rejected": mean(reward[1::2]),
        }
        return loss, (loss, 0.0, rewards | {"reward_accuracy": mean(margin > 0)}, None)


@pytest.fixture(scope="module")
def reference(rows):
    return functools.cache(lambda model: Reference(model, rows))


@dataclasses.dataclass
class Point:
    """A row of the table."""

    model: str
    batch: Sequence[int]
    mesh: dict[str, int] = dataclasses.field(default_factory=dict)
    pipeline: Any = None
    keys: Sequence[str] = ()
    used: Sequence[int] = ()

    def __post_init__(self):
        self.pipeline = Pipeline(*self.pipeline) if self.pipeline else None

    @property
    def is_interleaved(self):
        return self.pipeline is not None and self.pipeline.schedule == "1f1b"


POINTS = {name: Point(**point) for name, point in TABLE["points"].items()}


def placed(tree, like):
    """Arrays of the shapes of `like`, which have a dim of rounds in some pipelines, where those are."""
    return jax.tree.map(
        lambda x, leaf: jax.device_put(np.reshape(x, leaf.shape), leaf.sharding),
        tree,
        like,
    )


def dealt(it, rows, used, batch):
    """The rows in the first `used` micro-batches; what stands in the others weighs nothing."""
    num_batches, slots = batch
    found = it.batch(rows, used, slots)
    if used == num_batches:
        return found
    others = (num_batches - used, slots, found["tokens"].shape[2])
    return {
        name: jax.device_put(
            np.concatenate(
                [np.asarray(x), np.full(others, 7 if name == "tokens" else 0, x.dtype)]
            ),
            x.sharding,
        )
        for name, x in found.items()
    }


def groups_by_hand(one, number, point, used, replicas):
    """How many groups count something, each replica's part of each micro-batch, and the sum of their
    w/W |mean gradient|^2. The micro-batches of 1f1b have no gradients of their own."""
    row, groups, total = np.arange(16), 0, 0.0
    replica_of = row // used * replicas // point.batch[1]
    micro_of = row * 0 if point.is_interleaved else row % used
    for micro, replica in itertools.product(range(used), range(replicas)):
        own = (micro_of == micro) & (replica_of == replica)
        part = one.rows | {"weights": np.float32(one.rows["weights"] * own[:, None])}
        counted = one.counted(part)
        if counted == 0:  # such a group counts for nothing
            continue
        _, mean = one.at(one.params[number], part)
        total += counted / one.counted(one.rows) * squared_norm(mean)
        groups += 1
    return groups, total


def squared_norm(tree):
    return sum(
        np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(tree)
    )


FAST = ("any accumulation", "1f1b, any accumulation", "experts, empty slots")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.fast if name in FAST else ())
        for name in POINTS
    ],
)
def test_a_split_step_is_that_of_all_rows_on_one_device(name, reference, agrees):
    """Also, with experts, of a router that sends everything to the same ones; under a loss scale, no power of two."""
    point = POINTS[name]
    one = reference(point.model)
    it = make_setup(
        *one.keys,
        *point.keys,
        **point.mesh,
        pipeline=point.pipeline,
        objective=one.objective,
    )
    scale = np.float32(3) if one.expert_layers else None
    num_batches, _ = point.batch
    replicas = it.mesh.shape["data"]
    number = np.int32(0) if point.used else None
    with jax.set_mesh(it.mesh), jax.default_matmul_precision("highest"):
        step = jax.jit(functools.partial(step_gradients, it.parts))
        batch = it.batch(one.rows, *point.batch)
        step = step.lower(
            it.abstract.params, batch, number, scale, it.abstract.frozen
        ).compile()
    frozen = placed(one.frozen, it.abstract.frozen)
    for number, used in itertools.product(
        range(len(one.params)), point.used or (num_batches,)
    ):
        (loss, z_loss, aux, counts), gradients = one(number)
        params, batch = (
            placed(one.params[number], it.abstract.params),
            dealt(it, one.rows, used, point.batch),
        )
        with jax.set_mesh(it.mesh):
            got = jax.device_get(
                step(
                    params, batch, np.int32(used) if point.used else None, scale, frozen
                )
            )
        agrees(
            jax.tree.map(
                lambda g, like: np.reshape(g, like.shape), got.gradients, gradients
            ),
            gradients,
        )
        assert_allclose(got.losses[:2], [loss, z_loss], rtol=2e-6)
        assert got.losses.aux.keys() == aux.keys()
        for part, value in aux.items():
            assert_allclose(got.losses.aux[part], value, rtol=1e-5, err_msg=part)
        assert aux.get(DROPPED, 1) > 0.05
        assert_array_equal(
            got.expert_counts, counts
        )  # whole numbers, whatever the split
        assert got.counts[it.parts.objective.divisor] == one.counted(one.rows)
        assert got.counts["target_tokens"] == np.count_nonzero(one.rows["weights"])
        assert got.counts["examples"] == np.count_nonzero(
            one.rows["segments"].any(axis=1)
        )
        if replicas * (1 if point.is_interleaved else num_batches) == 1:
            assert (
                got.groups == got.group_squares == 0
            )  # one group tells nothing, and costs nothing
        elif one.name not in ("DPO", "MTP"):  # whose parts alone count other targets
            groups, total = groups_by_hand(one, number, point, used, replicas)
            assert got.groups == groups
            assert got.group_squares == pytest.approx(total, rel=1e-5)
    for path, gradient in jax.tree_util.tree_leaves_with_path(
        one(0)[1]
    ):  # each has one to compare
        leaf = jax.tree_util.keystr(path)
        is_constant = "router_bias" in leaf or "router_load" in leaf
        assert (np.abs(gradient).max() == 0) == is_constant, leaf
    if one.name in ("experts", "capacity") and "expert" in point.mesh:
        # Two choices a token, in float32: all tokens of four devices would be more bytes than their choices.
        is_exchanged = one.name == "capacity" or point.mesh["expert"] == 4
        only_tokens_cross(
            it,
            step,
            is_exchanged=is_exchanged,
            has_rounds=is_exchanged and one.name == "experts",
        )


def without_experts(it):
    """Shapes of weights that are not experts', one layer's where they are stacked, as they are used."""
    found, over_tensor = set(), ("heads", "kv_heads", "vocab")
    is_axes = lambda node: isinstance(node, tuple)  # noqa: E731
    leaves = (
        jax.tree.leaves(it.decoder.abstract_params),
        jax.tree.leaves(it.decoder.axes, is_leaf=is_axes),
    )
    for array, axes in zip(*leaves, strict=True):
        if "experts" not in axes:
            parts = [
                it.mesh.shape["tensor"] if axis in over_tensor else 1 for axis in axes
            ]
            sizes = [
                size // part for size, part in zip(array.shape, parts, strict=True)
            ]
            found.add(",".join(map(str, sizes[1:] if axes[0] == "layers" else sizes)))
    return found


def only_tokens_cross(it, compiled, *, is_exchanged, has_rounds):
    """Of experts no weight is gathered over their axis, and of tokens only where they are few.

    The other weights are, where they are used: they lie over that axis as over fsdp.
    """
    crossing = [
        c for c in collectives(compiled.as_text()) if "expert" in c.axes(it.mesh)
    ]
    assert any(c.kind == "all-to-all" for c in crossing)
    assert not any(c.kind == "reduce-scatter" for c in crossing)
    further = [c for c in crossing if FURTHER_ROUNDS in c.line]
    assert further == [c for c in crossing if math.isnan(c.times)]
    assert bool(further) == has_rounds
    looked_up = r"/vmap\([^/]*\)/sharding_constraint"  # on the way to the table of tokens and back
    gathers = [
        c.line
        for c in crossing
        if c.kind == "all-gather" and not re.search(looked_up, c.line)
    ]
    gathered = [line.split(" all-gather")[0] for line in gathers]
    shapes = [
        shape for line in gathered for shape in re.findall(r"f32\[([\d,]+)\]", line)
    ]
    others = without_experts(it)
    shapes = [shape for shape in shapes if re.sub(r"^(1,)+", "", shape) not in others]
    assert bool(shapes) != is_exchanged
    matrices = {
        f"{a},{b}" for d in (16, 8) for f in (8, 4) for a, b in ((d, f), (f, d))
    }  # D x F, whole or split
    scores = {"32,4"}  # of tokens' choices among 4 experts: each device makes its own
    assert not [
        shape
        for shape in shapes
        if ",".join(shape.split(",")[-2:]) in matrices | scores
    ]


def test_splits_leave_a_step_in_eight_bits_alone(reference, rows):
    """To far less than eight bits themselves do to the gradients, which scales of a device's own would do again.

    Not to next to nothing: a matmul of fewer rows, or of a part, has other last bits of float32 on some CPUs (of rows
    alone, on one without AVX-512), which put a few numbers on the other side of a border of rounding, and what follows
    from them. That a projection's scales are the same however it is split: tests/models.
    """

    def apart(gradients, others):
        difference = jax.tree.map(
            lambda a, b: np.reshape(a, b.shape) - b, gradients, others
        )
        return math.sqrt(squared_norm(difference) / squared_norm(others))

    def of(batch, mesh):
        it = make_setup(*one.keys, "quantization=int8", **mesh)
        return it.gradients(it.state().params, it.batch(rows, *batch))

    one = reference("dense")
    want = of((1, 16), {})
    rounding = apart(want.gradients, one.at(one.it.initial.params, rows)[1])
    assert 0.004 < rounding < 0.02  # 1 / 127 is 0.008
    got = of((4, 4), {"tensor": 2, "context": 2})
    assert apart(got.gradients, want.gradients) < rounding / 5
    assert_allclose(got.losses.loss, want.losses.loss, rtol=1e-5)
    assert got.counts["target_tokens"] == want.counts["target_tokens"]


def test_gradients_cross_in_grad_dtype(reference, rows):
    """The sum over all micro-batches, once."""
    one = reference("dense")
    results = []
    for keys, batch, mesh in (
        ((), (16, 1), {}),
        (("grad_dtype=bfloat16",), (16, 1), {}),
        (("grad_dtype=bfloat16",), (4, 4), {"data": 4}),
    ):
        it = make_setup(*one.keys, *keys, **mesh)
        results.append(
            it.gradients(
                placed(one.params[0], it.abstract.params), it.batch(rows, *batch)
            ).gradients
        )
    exact, rounded, summed = results
    for x, y in zip(jax.tree.leaves(exact), jax.tree.leaves(rounded), strict=True):
        assert_array_equal(y, x.astype(jnp.bfloat16).astype(np.float32))
    assert {leaf.dtype for leaf in jax.tree.leaves(summed)} == {np.dtype(np.float32)}
    assert (
        0
        < squared_norm(jax.tree.map(np.subtract, exact, summed))
        < 1e-4 * squared_norm(exact)
    )


def test_the_sum_over_replicas_is_made_in_grad_dtype(rows):
    """Of the program before it is partitioned: what a replica adds is what crosses the network."""
    it = make_setup("grad_dtype=bfloat16", data=4)
    function = functools.partial(step_gradients, it.parts)
    with jax.set_mesh(it.mesh):
        text = (
            jax.jit(function).lower(it.abstract.params, it.batch(rows, 4, 4)).as_text()
        )
    for leaf in jax.tree.leaves(it.abstract.params):
        shape = "x".join(map(str, leaf.shape))
        for dtype, is_there in (("bf16", True), ("f32", False)):
            summed = f"(tensor<4x{shape}x{dtype}>, tensor<{dtype}>) -> tensor<{shape}x{dtype}>"
            assert (summed in text) == is_there, summed


@pytest.mark.parametrize(
    ("replicas", "keys", "batch", "mesh"),
    [
        (
            None,
            ("remat_policy=full", "shard_optimizer_over_data=true"),
            (2, 8),
            {"data": 2, "fsdp": 2, "expert": 2},
        ),
        (2, (), (1, 16), {"expert": 2}),
    ],
    ids=["ZeRO-1", "DiLoCo"],
)
def test_an_update_with_experts_is_that_of_all_rows_or_of_each_replicas(
    replicas, keys, batch, mesh, reference, rows
):
    """By hand. Two replicas on one part of the data axis: each set of experts is mapped, and summaries weigh tokens."""
    one = reference("experts")
    rates = (
        "weight_decay=0",
        "learning_rate=0.1",
        "routed_bias_update_rate=0.01",
        "warmup_steps=0",
    )
    it = make_setup(*one.keys, *rates, *keys, replicas=replicas, **mesh)
    laid_out, start = it.batch(rows, *batch), it.state()
    copies = jax.tree.map(
        lambda x: np.stack([x] * replicas) if replicas else x, one.params[0]
    )
    start = dataclasses.replace(start, params=placed(copies, it.abstract.params))
    state, metrics = it.compile_step(laid_out)(start, laid_out, None)
    with jax.set_mesh(it.mesh):
        whole = jax.device_get(
            make_summarise(it.parts)(metrics) if replicas else metrics
        )
    of_replicas = jax.device_get((state.params, metrics))
    found, weights = [], []
    for replica in range(replicas or 1):
        params, metrics = jax.tree.map(
            lambda x, r=replica: x[r] if replicas else x, of_replicas
        )
        own = {name: np.zeros_like(array) for name, array in rows.items()}
        half = slice(8 * replica, 8 * replica + 8) if replicas else slice(16)
        for name, array in rows.items():
            own[name][half] = array[half]
        (loss, _, parts, counts), gradients = one.at(one.params[0], own)
        assert metrics["loss"] == pytest.approx(float(loss), rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(
            math.sqrt(squared_norm(gradients)), rel=1e-5
        )
        found.append((parts[BALANCE], 0.5 * parts[BALANCE], 0.05 * parts[ROUTER_Z]))
        weights.append(np.count_nonzero(own["weights"]))
        assert_allclose([metrics[name] for name in AUXILIARY], found[-1], rtol=1e-5)
        want = jax.tree.map(
            lambda p, g, rate=metrics["learning_rate"]: p - rate * g,
            one.params[0],
            gradients,
        )
        moved = params["layers"]["mlp"].pop("router_bias") - want["layers"]["mlp"].pop(
            "router_bias"
        )
        assert_allclose(
            moved,
            0.01 * np.sign(np.mean(counts, -1, keepdims=True) - counts),
            rtol=1e-5,
        )
        jax.tree.map(lambda g, w: assert_allclose(g, w, atol=2e-6), params, want)
    assert_allclose(
        [whole[name] for name in AUXILIARY], np.average(found, 0, weights), rtol=1e-5
    )


AUXILIARY = (BALANCE, "moe_balance_loss", "router_z_loss")


# Between them KL with and without, and two aggregations.
POLICIES = {
    "seq_mean_token_mean": responses.variant(
        algo="gspo",
        epsilon_low=0.003,
        epsilon_high=0.004,
        compares=True,
        correction_cap=2.0,
    ),
    "token_mean": responses.variant(
        aggregation="token_mean", beta=0.0, compares=True, correction_cap=1.2
    ),
}
UPDATES = 3
"""Of the same batch: from the second on, ratios are those of num_iterations > 1."""
# aggregation, responses of a chunk, row slots of a chunk, mesh; 4 prompts with 2 responses each
CHUNKS = [
    ("token_mean", 2, 4, {"fsdp": 2, "context": 2}, None),
    ("seq_mean_token_mean", 4, 4, {"data": 2}, Pipeline(2, 2, schedule="1f1b")),
]


@pytest.fixture(scope="module")
def unsplit():
    """State and metrics of each aggregation's updates, the batch in one piece, by the step in one piece."""

    @functools.cache
    def updates(aggregation):
        it = make_setup(
            "optimizer=sgd", "learning_rate=0.5", objective=POLICIES[aggregation]
        )
        pairs = responses.PAIRS
        (batch,) = responses.chunks_of(
            responses.rows(), it.mesh, micro=pairs, slots=pairs
        )
        return it.run(it.compile_step(batch), batch, UPDATES)

    return updates


@pytest.mark.parametrize(
    ("aggregation", "micro", "slots", "mesh", "pipeline"), CHUNKS, ids=str
)
def test_updates_of_chunks_of_responses_are_those_of_the_unsplit_batch(
    aggregation, micro, slots, mesh, pipeline, unsplit, agrees
):
    policy = POLICIES[aggregation]
    want, want_metrics = unsplit(aggregation)
    it = make_setup(
        "optimizer=sgd",
        "learning_rate=0.5",
        **mesh,
        pipeline=pipeline,
        objective=policy,
    )
    schedule, expected = (
        learning_rate_schedule(it.config, last=it.config.steps),
        policy.expected(responses.PAIRS),
    )
    with jax.set_mesh(it.mesh), jax.default_matmul_precision("highest"):
        step = ChunkedStep(it.parts, schedule, expected=expected)
        state, metrics = it.state(), []
        for _ in range(UPDATES):
            sums = step.start()
            for chunk in responses.chunks_of(
                responses.rows(), it.mesh, micro=micro, slots=slots
            ):
                sums = jax.block_until_ready(step.add(state, sums, chunk))
            state, found = step.update(state, sums)
            metrics.append(jax.device_get(found))
    assert (
        step.add._cache_size() == step.update._cache_size() == 1
    )  # one executable for all chunks of all batches
    got = jax.device_get(state.params)
    agrees(
        jax.tree.map(lambda x, like: np.reshape(x, like.shape), got, want.params),
        want.params,
    )
    for name in set(want_metrics[0]) - {"groups", "group_squares"}:
        values = [[m[name] for m in each] for each in (metrics, want_metrics)]
        assert_allclose(*values, rtol=1e-5, atol=1e-7, err_msg=name)
    # The policy has moved away from the one that it was: another share of its ratios is clipped.
    shares = [m["clip_fraction_low"] + m["clip_fraction_high"] for m in want_metrics]
    assert len({float(share) for share in shares}) > 1
    assert [m["target_tokens"] for m in metrics] == [41] * UPDATES
