"""Schedules at their corners; optimizers against formulas; what weight decay touches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxtext_lite.batching import make_plan
from maxtext_lite.config import UserError, load_config
from maxtext_lite.parallel import MESH_AXES, make_mesh, sharding
from maxtext_lite.training.optimizer import (
    Progress,
    learning_rate_schedule,
    make_optimizer,
    own_optimizer,
    schedule_of_run,
)
from maxtext_lite.training.state import make_decoder
from maxtext_lite.xla.hlo import collectives


def _rates(*overrides):
    config = load_config(None, ["learning_rate=1e-3", "steps=100", "warmup_steps=10", *overrides])
    schedule = learning_rate_schedule(config, last=config.steps)
    return lambda step: float(schedule.rate(step)) / 1e-3  # of step number `step`, the first being 1


@pytest.mark.parametrize(("name", "expected"), [
    ("cosine", {1: 0.1, 5: 0.5, 10: 1.0, 55: 0.55, 100: 0.1}),  # half-way between 10 and 100: the mean of 1 and 0.1
    ("linear", {1: 0.1, 10: 1.0, 55: 0.55, 100: 0.1}),
    ("wsd", {1: 0.1, 10: 1.0, 80: 1.0, 90: 0.55, 100: 0.1}),  # the last fifth decays
    ("constant", {1: 0.1, 10: 1.0, 100: 1.0}),
])  # fmt: skip
def test_schedule_at_its_corners(name, expected):
    rates = _rates(f"learning_rate_schedule={name}", "learning_rate_final_fraction=0.1", "wsd_decay_steps_fraction=0.2")
    assert {step: round(rates(step), 6) for step in expected} == expected


def test_a_schedule_may_be_longer_than_32_bits_count():
    config = load_config(None, ["dataset_type=synthetic", "learning_rate_final_fraction=0"])
    rate = jax.jit(learning_rate_schedule(config, last=10**12).rate)
    assert float(rate(5e11)) == pytest.approx(config.learning_rate / 2)
    assert float(rate(10.0)) == pytest.approx(config.learning_rate / 2)  # of 20 steps of warm-up


def test_no_warm_up_starts_at_the_peak_and_one_longer_than_the_run_never_reaches_it():
    assert _rates("warmup_steps=0", "learning_rate_schedule=constant")(1) == pytest.approx(1)
    short = load_config(None, ["steps=5", "learning_rate=1e-3"])  # base.yml's warm-up is longer
    rates = [float(learning_rate_schedule(short, last=5).rate(step)) for step in range(1, 6)]
    np.testing.assert_allclose(rates, [1e-3 * step / short.warmup_steps for step in range(1, 6)], rtol=1e-6)


class Full:
    """Examples of 8 target tokens each."""

    tokens_per_row = 8

    def __len__(self):
        return 64


def _schedule(unit, step, examples_seen, *overrides):
    """The schedule of a run of 64 examples, or of 16 steps, that has come this far."""
    words = ["learning_rate=1", "warmup_steps=0", "learning_rate_schedule=linear", "learning_rate_final_fraction=0",
             f"schedule_unit={unit}", "global_batch_size=4", "per_device_batch_size=-1", *overrides]  # fmt: skip
    config = load_config(None, words)
    plan = make_plan(config, num_devices=1, num_examples=64)
    return schedule_of_run(config, plan, Full(), seed=0, step=step, examples_seen=examples_seen), plan


@pytest.mark.parametrize("unit", ["steps", "examples"])
@pytest.mark.parametrize(("length", "batch", "end"), [
    ("num_epochs=1", 8, (12, 64)), ("num_epochs=1", 2, (24, 64)), ("num_epochs=1", 5, (14, 62)),
    ("steps=16", 8, (16, 96)), ("steps=16", 2, (16, 48)), ("steps=20", 4, (20, 80)),
])  # fmt: skip
def test_a_run_that_continues_with_another_batch_has_a_schedule_that_ends_with_it(unit, length, batch, end):
    """8 steps of 4 examples, then others, down to 0 at the last; from each of them on, the schedule is the same."""
    length_before = "steps=16" if length.startswith("steps") else length
    before, _ = _schedule(unit, 0, 0, length_before)
    words = [length, f"global_batch_size={batch}"]
    schedule, plan = _schedule(unit, 8, 32, *words)
    assert plan.length.end_after(8, 32) == end
    for left in range(end[0] - 8):
        step, seen = 9 + left, 32 + batch * (1 + left)
        restarted, _ = _schedule(unit, step - 1, seen - batch, *words)
        progress = Progress.start().plus(jnp.int32(seen), jnp.int32(8 * seen))
        done = step / end[0] if unit == "steps" else seen / end[1]
        assert float(schedule(step, progress)) == float(restarted(step, progress)) == pytest.approx(1 - done, abs=1e-6)
    at_resume = Progress.start().plus(jnp.int32(32), jnp.int32(0))
    assert float(before(8, at_resume)) == 0.5


@pytest.mark.parametrize("unit", ["steps", "examples"])
def test_a_restart_in_a_ramp_leaves_the_schedule_as_it_is(unit):
    """1, 2, 3, then 4 examples per step, the last step short; 3 skipped updates are not counted by either."""
    ramp = ["enable_rampup_batch_size=true", "per_device_batch_size=4", "global_batch_size=0",
            "per_device_batch_size_start=1", "per_device_batch_size_increment=1", "global_rampup_samples=15",
            "num_epochs=1", "last_batch=train"]  # fmt: skip
    schedule, plan = _schedule(unit, 0, 0, *ramp)
    seen = 0
    for step in range(1, plan.steps + 1):
        restarted, _ = _schedule(unit, step - 1, seen, *ramp)
        seen += plan.length.step_examples(seen)
        progress = Progress.start().plus(jnp.int32(seen), jnp.int32(seen))
        for done in (step, max(step - 3, 1)):
            assert float(schedule(done, progress)) == float(restarted(done, progress))
        assert restarted.units_per_step == schedule.units_per_step
    assert (seen, float(schedule(step, progress))) == (64, 0)


AXES = {
    "embedding": {"table": ("vocab", "embed")},
    "head": {"projection": ("embed", "vocab")},
    "layers": {"norm": {"scale": ("layers", "norm")}, "mlp": {"up": ("layers", "embed", "mlp")}},
}
RNG = np.random.default_rng(0)
PARAMS = {
    "embedding": {"table": jnp.asarray(RNG.normal(size=(6, 4)), jnp.float32)},
    "head": {"projection": jnp.asarray(RNG.normal(size=(4, 6)), jnp.float32)},
    "layers": {
        "norm": {"scale": jnp.ones((3, 4))},
        "mlp": {"up": jnp.asarray(RNG.normal(size=(3, 4, 5)), jnp.float32)},
    },
}


def _updates(*overrides, gradients=None):
    config = load_config(
        None,
        [
            "steps=10",
            "warmup_steps=0",
            "gradient_clipping_threshold=0",
            *overrides,
        ],
    )
    optimizer = make_optimizer(config, AXES)
    gradients = jax.tree.map(jnp.ones_like, PARAMS) if gradients is None else gradients
    params = optimizer.finish(gradients, optimizer.init(PARAMS), PARAMS, 0.1)[0]
    return jax.tree.map(lambda new, old: new - old, params, PARAMS)


def test_decay_leaves_norms_and_embeddings_alone_by_default():
    zero = jax.tree.map(jnp.zeros_like, PARAMS)
    updates = _updates("optimizer=adamw", "weight_decay=0.5", gradients=zero)
    np.testing.assert_array_equal(updates["embedding"]["table"], 0)
    np.testing.assert_array_equal(updates["layers"]["norm"]["scale"], 0)
    np.testing.assert_allclose(updates["head"]["projection"], -0.05 * PARAMS["head"]["projection"], rtol=1e-6)
    updates = _updates(
        "optimizer=adamw", "weight_decay=0.5", "weight_decay_on_norms_and_embeddings=true", gradients=zero
    )
    np.testing.assert_allclose(updates["embedding"]["table"], -0.05 * PARAMS["embedding"]["table"], rtol=1e-6)


def test_sgd_is_the_gradient_times_the_rate():
    np.testing.assert_allclose(_updates("optimizer=sgd", "weight_decay=0")["head"]["projection"], -0.1, rtol=1e-6)


def test_first_adamw_and_lion_steps_are_signs():
    for optimizer in ("adamw", "lion"):
        updates = _updates(f"optimizer={optimizer}", "weight_decay=0", gradients=jax.tree.map(lambda p: p * 7, PARAMS))
        np.testing.assert_allclose(
            updates["head"]["projection"], -0.1 * np.sign(PARAMS["head"]["projection"]), rtol=1e-4
        )


def test_clipping_bounds_the_global_norm():
    updates = _updates("optimizer=sgd", "weight_decay=0", "gradient_clipping_threshold=0.5")
    assert float(optax.tree.norm(updates)) == pytest.approx(0.1 * 0.5, rel=1e-5)


def test_muon_orthogonalises_each_layer_and_leaves_ends_to_adam():
    gradients = jax.tree.map(lambda p: jnp.asarray(RNG.normal(size=p.shape), jnp.float32), PARAMS)
    updates = _updates("optimizer=muon", "weight_decay=0", gradients=gradients)
    for layer in np.asarray(updates["layers"]["mlp"]["up"]):
        singular = np.linalg.svd(layer, compute_uv=False)
        assert singular.min() > 0.6 * singular.max()  # Newton-Schulz brings them near each other, not together
    adam = _updates("optimizer=adamw", "weight_decay=0", gradients=gradients)
    np.testing.assert_array_equal(np.sign(updates["head"]["projection"]), np.sign(adam["head"]["projection"]))
    # Nesterov's momentum: after the first gradient g, 0.9 x 0.1 g / (1 - 0.9^2) + g, over its root mean square |g|.
    for name, part in (("embedding", "table"), ("head", "projection")):
        step = -0.1 * (0.09 / 0.19 + 1) * np.sign(gradients[name][part])
        np.testing.assert_allclose(updates[name][part], step, rtol=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor", "muon", "lion"])
def test_every_optimizer_goes_downhill(optimizer):
    config = load_config(None, ["steps=50", "warmup_steps=0", "learning_rate=0.02", f"optimizer={optimizer}"])
    chosen = make_optimizer(config, AXES)
    loss = lambda p: sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(p))  # noqa: E731

    def step(carry, _):
        params, state = carry
        return chosen.finish(jax.grad(loss)(params), state, params, 0.02), loss(params)

    _, losses = jax.lax.scan(step, (PARAMS, chosen.init(PARAMS)), length=50)
    assert losses[-1] < 0.95 * losses[0]


STACKED = {
    "layers": {
        "up": (("layers", "embed", "mlp"), (3, 6, 8)),
        "query": (("layers", "embed", "heads", "head_dim"), (2, 130, 2, 128)),
        "scale": (("layers", "norm"), (2, 5)),
        "gate": (("repeats", "layers", "experts", "expert_embed", "mlp"), (2, 1, 2, 128, 129)),
        "gate_bias": (("layers", "experts", "mlp"), (2, 130, 140)),
    },
    "embedding": {"table": (("vocab", "embed"), (130, 128))},
}


def test_adafactor_is_optaxs_own_of_each_layer_and_expert():
    """Three steps of every tensor, as if there were no stacks: of whichever dims are 128 wide, a bias of 130 experts
    not by its experts; one layer a hundred times as large as the next."""
    leaf = lambda node: isinstance(node, tuple)  # noqa: E731
    axes, shapes = (jax.tree.map(lambda pair, at=at: pair[at], STACKED, is_leaf=leaf) for at in (0, 1))
    params = jax.tree.map(lambda shape: 0.02 * RNG.normal(size=shape).astype(np.float32), shapes, is_leaf=leaf)
    params["layers"] = {name: p * (100.0 ** np.arange(len(p))).reshape(-1, *[1] * (p.ndim - 1)).astype(np.float32)
                        for name, p in params["layers"].items()}  # fmt: skip
    steps = [jax.tree.map(lambda p: RNG.normal(size=p.shape).astype(np.float32), params) for _ in range(3)]
    keys = ["optimizer=adafactor", "weight_decay=0", "gradient_clipping_threshold=0"]
    chosen = make_optimizer(load_config(None, keys), axes)
    got, state, finish = params, chosen.init(params), jax.jit(chosen.finish)
    for gradients in steps:
        got, state = finish(gradients, state, got, 0.1)
    plain = optax.adafactor(0.1)
    update_plain = jax.jit(plain.update)
    num_stacked = {"up": 1, "query": 1, "scale": 1, "gate": 3, "gate_bias": 2, "table": 0}
    for name, count in num_stacked.items():
        part = "embedding" if name == "table" else "layers"
        stack = params[part][name].shape[:count]
        for at in np.ndindex(stack):
            p = params[part][name][at]
            plain_state = plain.init(p)
            for gradients in steps:
                update, plain_state = update_plain(gradients[part][name][at], plain_state, p)
                p = optax.apply_updates(p, update)
            np.testing.assert_allclose(got[part][name][at], p, rtol=1e-6, atol=1e-6 * float(np.abs(p).max()))


EXPERTS = ["num_experts=4", "num_experts_per_tok=2", "routed_bias=true", "routed_bias_update_rate=0.25",
           "base_emb_dim=8", "base_num_query_heads=2", "base_num_kv_heads=1", "head_dim=4", "base_mlp_dim=6",
           "base_num_decoder_layers=2", "vocab_size=257", "learning_rate=1"]  # fmt: skip


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor", "muon", "lion"])
def test_routers_biases_follow_the_expert_counts_and_nothing_else(optimizer):
    """By 0.25 towards the mean of a layer, 0 at it; no clipping, decay, learning rate or state; the rest as without."""
    config = load_config(None, [*EXPERTS, f"optimizer={optimizer}", "weight_decay_on_norms_and_embeddings=true"])
    decoder = make_decoder(config, "cpu")
    chosen = make_optimizer(config, decoder.axes)
    params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.5), decoder.abstract_params)
    params["layers"]["mlp"]["gate"] = jnp.asarray(RNG.normal(size=(2, 4, 8, 6)), jnp.float32)
    gradients = jax.tree.map(lambda leaf: 1e-3 * (leaf + 1), params)
    counts = jnp.array([[5_000_000, 0, 3, 1], [2, 2, 1, 3]])
    state = chosen.init(params)
    assert not [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (2, 4)]
    got, _ = jax.jit(chosen.finish)(gradients, state, params, 1e-2, counts)
    want = [[0.25, 0.75, 0.75, 0.75], [0.5, 0.5, 0.75, 0.25]]
    np.testing.assert_array_equal(got["layers"]["mlp"]["router_bias"], want)

    def without(tree):
        mlp = {name: leaf for name, leaf in tree["layers"]["mlp"].items() if name != "router_bias"}
        return tree | {"layers": tree["layers"] | {"mlp": mlp}}

    plain = make_optimizer(config, without(decoder.axes))
    rest, _ = jax.jit(plain.finish)(without(gradients), plain.init(without(params)), without(params), 1e-2)
    jax.tree.map(np.testing.assert_array_equal, without(got), rest)


def test_muon_orthogonalises_each_expert():
    config = load_config(None, [*EXPERTS, "optimizer=muon", "weight_decay=0", "gradient_clipping_threshold=0"])
    decoder = make_decoder(config, "cpu")
    chosen = make_optimizer(config, decoder.axes)
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), decoder.abstract_params)
    gradients = jax.tree.map(lambda leaf: jnp.asarray(RNG.normal(size=leaf.shape), jnp.float32), params)
    got, _ = chosen.finish(gradients, chosen.init(params), params, 1.0, jnp.zeros((2, 4), jnp.int32))
    for name in ("gate", "down"):
        for expert in np.asarray(got["layers"]["mlp"][name]).reshape(8, *params["layers"]["mlp"][name].shape[2:]):
            singular = np.linalg.svd(expert, compute_uv=False)
            assert singular.min() > 0.6 * singular.max()


def test_muon_orthogonalises_experts_and_layers_of_stages_where_they_lie():
    """On the devices of a pipeline of two repeats nothing is sent, and the step is that of one device."""
    axes = {"gate": ("repeats", "layers", "experts", "expert_embed", "mlp")}
    config = load_config(None, ["optimizer=muon", "weight_decay=0", "gradient_clipping_threshold=0"])
    chosen = make_optimizer(config, axes)
    params = {"gate": jnp.asarray(RNG.normal(size=(2, 2, 4, 6, 8)), jnp.float32)}
    state, finish = chosen.init(params), jax.jit(chosen.finish)
    want, _ = finish(params, state, params, 1.0)
    mesh = make_mesh(dict.fromkeys(MESH_AXES, 1) | {"stage": 2, "expert": 4}, dict.fromkeys(MESH_AXES, 1))
    split, whole = sharding(mesh, axes["gate"]), sharding(mesh)
    params, state = jax.tree.map(lambda x: jax.device_put(x, split if x.ndim == 5 else whole), (params, state))
    compiled = finish.lower(params, state, params, 1.0).compile()
    assert not collectives(compiled.as_text())
    np.testing.assert_allclose(compiled(params, state, params, 1.0)[0]["gate"], want["gate"], rtol=0, atol=1e-6)


def test_an_optimizer_of_ones_own_updates_as_it_says_and_a_factory_by_the_config_s_schedule():
    """Three steps of Adam, clipped and decayed: as optax has it with the schedule, and as the config says it."""
    words = ["warmup_steps=2", "learning_rate=0.1", "weight_decay=0.1", "weight_decay_on_norms_and_embeddings=true"]
    config = load_config(None, words)
    axes = {"w": ("embed", "mlp")}
    schedule = learning_rate_schedule(config, last=10)

    def factory(rate, tree):
        assert tree is axes
        adamw = optax.adamw(rate, config.adam_b1, config.adam_b2, config.adam_eps, weight_decay=0.1)
        return optax.chain(optax.clip_by_global_norm(config.gradient_clipping_threshold), adamw)

    of_config, of_factory = make_optimizer(config, axes), own_optimizer(factory, config, axes, last=10)
    own = make_optimizer(config, axes, of_factory)
    found = []
    for optimizer in (of_config, own):
        params = {"w": jnp.ones((2, 3))}
        state = optimizer.init(params)
        for step in (1, 2, 3):
            gradients = {"w": step * jnp.arange(6.0).reshape(2, 3)}
            params, state = optimizer.finish(gradients, state, params, schedule.rate(step))
        found.append(params["w"])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)
    sgd = optax.sgd(0.5)
    assert own_optimizer(sgd, config, axes, last=10) is sgd
    plain = make_optimizer(config, axes, sgd)
    params = {"w": jnp.ones((2, 3))}
    after, _ = plain.finish({"w": jnp.full((2, 3), 0.5)}, plain.init(params), params, jnp.nan)
    assert after["w"].tolist() == [[0.75] * 3] * 2


def test_a_factory_is_refused_where_the_schedule_counts_something_else_than_steps():
    config = load_config(None, ["schedule_unit=tokens"])
    with pytest.raises(UserError, match=r"schedule_unit=tokens counts .* Nearest that works: schedule_unit=steps"):
        own_optimizer(lambda schedule, axes: optax.sgd(schedule), config, {}, last=10)
