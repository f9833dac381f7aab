"""Schedules across resumes; optimizers against formulas in float64; what weight decay touches."""

import jax
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from maxtext_lite.batching import make_plan
from maxtext_lite.config import load_config
from maxtext_lite.training.optimizer import (
    Progress,
    make_optimizer,
    schedule_of_run,
)
from maxtext_lite.training.state import make_decoder


def test_progress_counts_beyond_32_bits():
    progress = Progress.start()
    for _ in range(5):
        progress = progress.plus(np.array(2**31 - 1, np.int32), np.array(3, np.int32))
    assert [int(high) * 2**32 + int(low) for high, low in progress] == [
        5 * (2**31 - 1),
        15,
    ]


class Full:
    """Examples of 8 target tokens each."""

    tokens_per_row = 8

    def __len__(self):
        return 64


def schedule_after(unit, step, examples_seen, *overrides):
    """The schedule of a run of 64 examples, or of stated steps, that has come this far; and its plan."""
    keys = "learning_rate=1 warmup_steps=0 learning_rate_schedule=linear learning_rate_final_fraction=0"
    batch = f"schedule_unit={unit}", "global_batch_size=4", "per_device_batch_size=-1"
    config = load_config(None, [*keys.split(), *batch, *overrides])
    plan = make_plan(config, num_devices=1, num_examples=64)
    return schedule_of_run(
        config, plan, Full(), seed=0, step=step, examples_seen=examples_seen
    ), plan


def progress_of(examples):
    return Progress(
        np.array([0, examples], np.uint32), np.array([0, 8 * examples], np.uint32)
    )


@pytest.mark.parametrize("unit", ["steps", "examples"])
def test_a_restart_in_a_ramp_leaves_the_schedule_as_it_is(unit):
    """1, 2, 3, then 4 examples per step, the last step short; 3 skipped updates are not counted by either."""
    keys = """
    enable_rampup_batch_size=true per_device_batch_size=4 global_batch_size=0 per_device_batch_size_start=1
    per_device_batch_size_increment=1 global_rampup_samples=15 num_epochs=1 last_batch=train
    """
    ramp = keys.split()
    schedule, plan = schedule_after(unit, 0, 0, *ramp)
    seen = 0
    for step in range(1, plan.steps + 1):
        restarted, _ = schedule_after(unit, step - 1, seen, *ramp)
        seen += plan.length.step_examples(seen)
        for updates in (step, max(step - 3, 1)):
            assert float(schedule(updates, progress_of(seen))) == float(
                restarted(updates, progress_of(seen))
            )
        assert restarted.units_per_step == schedule.units_per_step
    assert (seen, float(schedule(step, progress_of(seen)))) == (64, 0)
    assert plan.schedule_end("examples", 0, 0) == 64 / 4


# ---- Optimizers --------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
AXES = {
    "embedding": {"table": ("vocab", "embed")},
    "head": {"projection": ("embed", "vocab")},
    "layers": {
        "norm": {"scale": ("layers", "norm")},
        "mlp": {"up": ("layers", "embed", "mlp")},
        "attention": {
            "query": ("layers", "embed", "heads", "head_dim"),
            "out": ("layers", "heads", "head_dim", "embed"),
        },
    },
}
SHAPES = {
    "vocab": 6,
    "embed": 4,
    "layers": 3,
    "norm": 4,
    "mlp": 5,
    "heads": 2,
    "head_dim": 2,
}


def is_axes(node):
    return isinstance(node, tuple)


def drawn():
    """A tree like the parameters, in float32."""

    def draw(axes):
        return RNG.normal(size=[SHAPES[axis] for axis in axes]).astype(np.float32)

    return jax.tree.map(draw, AXES, is_leaf=is_axes)


PARAMS = drawn()
GRADIENTS = [drawn() for _ in range(3)]


def optimizer_of(*overrides, axes=AXES):
    return make_optimizer(
        load_config(
            None, ["weight_decay=0", "gradient_clipping_threshold=0", *overrides]
        ),
        axes,
    )


def after_steps(optimizer, gradients, rate, params=PARAMS):
    """The parameters after the steps, step k with k times the rate."""
    params, state, finish = (
        params,
        jax.jit(optimizer.init)(params),
        jax.jit(optimizer.finish),
    )
    for number, gradient in enumerate(gradients, start=1):
        params, state = finish(gradient, state, params, number * rate)
    return jax.device_get(params)


def step_of(name, m, v, g, t):
    """The direction and the new moments of a tensor at step t, as the optimizer's paper has them."""
    match name:
        case "adamw":
            m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g**2
            return m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-3), m, v
        case "sgd":
            return 0.9 * m + g, 0.9 * m + g, v
        case "lion":
            return np.sign(0.8 * m + 0.2 * g), 0.95 * m + 0.05 * g, v


@pytest.mark.fast
@pytest.mark.parametrize(
    ("name", "clipping", "decays_all"),
    [("adamw", 0.5, False), ("sgd", 3.0, True), ("lion", 0, False)],
)
def test_three_steps_are_those_of_the_formula(name, clipping, decays_all):
    """Clipped by the norm of all gradients together; norms and embeddings are decayed only where it is asked for."""
    optimizer = optimizer_of(
        f"optimizer={name}",
        "adam_b1=0.8",
        "adam_b2=0.95",
        "adam_eps=1e-3",
        "sgd_momentum=0.9",
        "weight_decay=0.5",
        f"gradient_clipping_threshold={clipping}",
        f"weight_decay_on_norms_and_embeddings={str(decays_all).lower()}",
    )
    found = after_steps(optimizer, GRADIENTS, 0.01)
    norms = [
        np.sqrt(sum(np.sum(np.float64(g) ** 2) for g in jax.tree.leaves(tree)))
        for tree in GRADIENTS
    ]
    leaves = jax.tree_util.tree_leaves_with_path(PARAMS)
    for (path, p), got, *gradients in zip(
        leaves, jax.tree.leaves(found), *map(jax.tree.leaves, GRADIENTS), strict=True
    ):
        decay = 0.5 if decays_all or path[-1].key not in ("table", "scale") else 0
        want, m, v = np.float64(p), 0.0, 0.0
        for t, (g, norm) in enumerate(zip(gradients, norms, strict=True), start=1):
            g = np.float64(g) * (min(1, clipping / norm) if clipping else 1)
            direction, m, v = step_of(name, m, v, g, t)
            want = want - t * 0.01 * (direction + decay * want)
        assert_allclose(got, want, rtol=1e-5, atol=1e-6, err_msg=str(path))


def singular_values(matrices):
    """Of updates, in units of what Muon scales an orthogonal matrix with."""
    return np.linalg.svd(matrices, compute_uv=False) / (
        0.2 * np.sqrt(max(matrices.shape[-2:]))
    )


def test_muon_orthogonalises_each_layer_and_leaves_ends_to_adam():
    gradients = GRADIENTS[0]
    found = after_steps(optimizer_of("optimizer=muon"), [gradients], 0.1)
    updates = jax.tree.map(lambda new, old: (new - old) / 0.1, found, PARAMS)
    layers = updates["layers"]
    for stack in (
        layers["mlp"]["up"],
        *(layers["attention"][name].reshape(3, 4, 4) for name in ("query", "out")),
    ):
        values = singular_values(stack)
        assert values.min() > 0.6  # Newton-Schulz brings them near 1, not to it
        assert values.max() < 1.3
    # Nesterov's momentum: after the first gradient g, 0.9 x 0.1 g / (1 - 0.9^2) + g, over its root mean square |g|.
    for name, part in (("embedding", "table"), ("head", "projection")):
        step = -(0.09 / 0.19 + 1) * np.sign(gradients[name][part])
        assert_allclose(updates[name][part], step, rtol=1e-4)


STACKED = {  # axes, shape, and how many dims are stacked
    "up": (("layers", "embed", "mlp"), (3, 6, 8), 1),
    "gate": (
        ("repeats", "layers", "experts", "expert_embed", "mlp"),
        (2, 1, 2, 128, 129),
        3,
    ),
    "gate_bias": (("layers", "experts", "mlp"), (2, 130, 140), 2),
    "table": (("vocab", "embed"), (130, 128), 0),
}


def test_adafactor_is_optaxs_own_of_each_layer_and_expert():
    """Three steps of every tensor, as if there were no stacks: of whichever dims are 128 wide, a bias of 130 experts
    not by its experts; one layer a hundred times as large as the next."""
    trees = []
    for _ in range(4):
        trees.append(
            {
                name: RNG.normal(size=shape).astype(np.float32)
                for name, (_, shape, _) in STACKED.items()
            }
        )
    params, *steps = trees
    for name, p in params.items():
        sizes = 100.0 ** np.arange(len(p)) if STACKED[name][2] else np.ones(len(p))
        params[name] = (
            0.02 * p * sizes.reshape(-1, *[1] * (p.ndim - 1)).astype(np.float32)
        )
    axes = {name: axes for name, (axes, _, _) in STACKED.items()}
    optimizer = optimizer_of("optimizer=adafactor", axes=axes)
    finish, state, found = (
        jax.jit(optimizer.finish),
        jax.jit(optimizer.init)(params),
        params,
    )
    for gradients in steps:
        found, state = finish(gradients, state, found, 0.1)
    plain = optax.adafactor(0.1)

    @jax.jit
    def three_steps(p, *gradients):
        state = plain.init(p)
        for gradient in gradients:
            update, state = plain.update(gradient, state, p)
            p = optax.apply_updates(p, update)
        return p

    for name, (_, shape, num_stacked) in STACKED.items():
        for at in np.ndindex(shape[:num_stacked]):
            want = np.asarray(
                three_steps(
                    params[name][at], *(gradients[name][at] for gradients in steps)
                )
            )
            assert_allclose(
                found[name][at], want, rtol=1e-6, atol=1e-6 * float(np.abs(want).max())
            )


EXPERTS = """
num_experts=4 num_experts_per_tok=2 routed_bias=true routed_bias_update_rate=0.25 base_emb_dim=8
base_num_query_heads=2 base_num_kv_heads=1 head_dim=4 base_mlp_dim=6 base_num_decoder_layers=2 vocab_size=257
learning_rate=1 optimizer=muon weight_decay_on_norms_and_embeddings=true
"""


def test_routers_biases_follow_the_expert_counts_and_nothing_else():
    """By 0.25 towards the mean of a layer, 0 at it; no clipping, decay, learning rate or state; the rest as without."""
    config = load_config(None, EXPERTS.split())
    decoder = make_decoder(config, "cpu")
    chosen = make_optimizer(config, decoder.axes)
    params = jax.tree.map(
        lambda leaf: np.full(leaf.shape, 0.5, np.float32), decoder.abstract_params
    )
    params["layers"]["mlp"]["gate"] = RNG.normal(size=(2, 4, 8, 6)).astype(np.float32)
    gradients = jax.tree.map(lambda leaf: 1e-3 * (leaf + 1), params)
    counts = np.array([[5_000_000, 0, 3, 1], [2, 2, 1, 3]])
    state = jax.jit(chosen.init)(params)
    assert not [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (2, 4)]
    got, _ = jax.jit(chosen.finish)(gradients, state, params, 1e-2, counts)
    want = [[0.25, 0.75, 0.75, 0.75], [0.5, 0.5, 0.75, 0.25]]
    assert_array_equal(got["layers"]["mlp"]["router_bias"], want)


def test_routers_loads_are_the_counts_over_their_mean():
    """5 million, 0, 3 and 1 of the layer's mean 1,250,001; a layer without a token is even."""
    words = [*EXPERTS.split(), "routed_bias=false", "load_balance_over=batch"]
    config = load_config(None, [word for word in words if "update_rate" not in word])
    decoder = make_decoder(config, "cpu")
    chosen = make_optimizer(config, decoder.axes)
    params = jax.tree.map(
        lambda leaf: np.full(leaf.shape, 0.5, np.float32), decoder.abstract_params
    )
    counts = np.array([[5_000_000, 0, 3, 1], [0, 0, 0, 0]])
    state = chosen.init(params)
    got, _ = jax.jit(chosen.finish)(params, state, params, 1e-2, counts)
    want = [5_000_000 / 1_250_001 - 1, -1, 3 / 1_250_001 - 1, 1 / 1_250_001 - 1]
    assert_allclose(got["layers"]["mlp"]["router_load"], [want, [0] * 4], rtol=1e-6)


def test_an_optimizer_of_ones_own_updates_as_it_says_and_a_factory_by_the_config_s_schedule():
    words = "warmup_steps=2 learning_rate=0.1 learning_rate_final_fraction=0 learning_rate_schedule=linear"
    config = load_config(None, words.split())
    own = make_optimizer(config, AXES, lambda rate, axes: optax.sgd(rate), last=6)
    found = after_steps(own, GRADIENTS, np.nan)
    table, first, second, third = (
        tree["head"]["projection"] for tree in (PARAMS, *GRADIENTS)
    )
    assert_allclose(
        found["head"]["projection"],
        table - 0.05 * first - 0.1 * second - 0.075 * third,
        rtol=1e-5,
        atol=1e-6,
    )
