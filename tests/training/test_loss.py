"""The tiled cross-entropy and its hand-made gradient against float64 log-softmax."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.models.layers import BiasedHead
from maxtext_lite.parallel import MESH_AXES, make_mesh, sharding
from maxtext_lite.training.loss import HEAD_AXES, Readout, cross_entropy, token_losses
from maxtext_lite.xla.hlo import collectives

B, T, D, V = 3, 12, 8, 20
Z = 0.01


def _inputs():
    rng = np.random.default_rng(0)
    x, head = rng.normal(size=(B, T, D)), rng.normal(size=(D, V))
    return x, head, rng.integers(0, V, (B, T)), rng.choice([0.0, 0.5, 1.0], (B, T))


def _by_hand():
    """Loss, nll and squared log-partition sums, and both gradients, in float64 numpy."""
    x, head, target, weight = _inputs()
    logits = x @ head
    log_partition = np.log(np.exp(logits).sum(-1))
    nll = log_partition - np.take_along_axis(logits, target[..., None], -1)[..., 0]
    probability = np.exp(logits - log_partition[..., None])
    dlogits = weight[..., None] * (probability * (1 + 2 * Z * log_partition[..., None]) - np.eye(V)[target])
    sums = (weight * nll).sum(), (weight * log_partition**2).sum()
    return sums[0] + Z * sums[1], sums, dlogits @ head.T, np.einsum("btd,btv->dv", x, dlogits)


@pytest.mark.parametrize("num_tiles", [1, 3, 12])
def test_loss_and_gradients_equal_a_hand_computation(num_tiles):
    x, head, target, weight = (jnp.asarray(a, jnp.float32 if a.dtype == np.float64 else jnp.int32) for a in _inputs())
    with jax.default_matmul_precision("highest"):
        function = jax.jit(
            jax.value_and_grad(
                lambda x, head: cross_entropy(x, head, target, weight, Readout(num_tiles, z_loss_multiplier=Z)),
                argnums=(0, 1),
                has_aux=True,
            )
        )
        (loss, sums), (dx, dhead) = function(x, head)
        forward_only = cross_entropy(x, head, target, weight, Readout(num_tiles, z_loss_multiplier=Z))
    want_loss, want_sums, want_dx, want_dhead = _by_hand()
    assert float(loss) == pytest.approx(want_loss, rel=1e-6)
    np.testing.assert_allclose(sums[:2], want_sums, rtol=1e-6)
    np.testing.assert_allclose(forward_only[0], loss, rtol=1e-6)
    np.testing.assert_allclose(dx, want_dx, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dhead, want_dhead, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_tiles", [1, 3])
def test_a_bias_and_a_multiplier_act_before_the_soft_cap(num_tiles):
    x, head, target, weight = _inputs()
    bias, multiplier, cap, temperature = np.random.default_rng(1).normal(size=V), 0.3, 2.0, 0.7

    def by_hand(x, head, bias):
        logits = cap * np.tanh(multiplier * (x @ head + bias) / cap) / temperature
        nll = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, target[..., None], -1)[..., 0]
        return (weight * nll).sum()

    def along(at):
        """Central differences along one random direction of each argument."""
        directions = [np.random.default_rng(at).normal(size=a.shape) for a in (x, head, bias)]
        step = [d * 1e-6 if number == at else 0 for number, d in enumerate(directions)]
        ahead, behind = ([a + sign * s for a, s in zip((x, head, bias), step, strict=True)] for sign in (1, -1))
        return directions[at], (by_hand(*ahead) - by_hand(*behind)) / 2e-6

    how = Readout(num_tiles, cap, temperature, multiplier=multiplier)
    arrays = [jnp.asarray(a, jnp.float32) for a in (x, head, bias)]
    with jax.default_matmul_precision("highest"):

        def total(x, head, bias):
            return cross_entropy(x, BiasedHead(head, bias), jnp.asarray(target), jnp.asarray(weight, jnp.float32), how)

        (loss, _), gradients = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(*arrays)
        nll = token_losses(arrays[0], BiasedHead(*arrays[1:]), target, how)
    assert float(loss) == pytest.approx(by_hand(x, head, bias), rel=1e-6)
    assert float(jnp.sum(weight * nll)) == pytest.approx(by_hand(x, head, bias), rel=1e-6)
    for at, gradient in enumerate(gradients):
        direction, want = along(at)
        assert float(jnp.sum(gradient * direction)) == pytest.approx(want, rel=1e-4), at


@pytest.mark.parametrize(
    "axes", [{"fsdp": 4}, {"context": 4}, {"expert": 2, "context": 2, "tensor": 2}, {"stage": 2, "fsdp": 2}]
)
def test_the_heads_gradient_crosses_the_shards_once_for_all_tiles_and_is_the_same(axes):
    """Twelve tokens in as many tiles as a context shard has of them: 12, 3 or 6."""
    x, head, target, weight = (np.concatenate([a] * 4)[:8] if a.ndim > 1 and len(a) == B else a for a in _inputs())
    ones = dict.fromkeys(MESH_AXES, 1)
    mesh = make_mesh(ones | axes, ones, jax.devices()[: math.prod(axes.values())])
    arrays = [jnp.asarray(a, jnp.float32 if a.dtype == np.float64 else jnp.int32) for a in (x, head, target, weight)]
    num_tiles = 12 // axes.get("context", 1)

    def gradients(num_tiles, grad_dtype=jnp.float32):
        loss = lambda x, head: cross_entropy(  # noqa: E731
            x, head, *arrays[2:], Readout(num_tiles, grad_dtype=grad_dtype, z_loss_multiplier=Z))  # fmt: skip
        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))

    with jax.default_matmul_precision("highest"):
        want = gradients(1)(*arrays[:2])
        with jax.set_mesh(mesh):
            where = sharding(mesh, ("end_batch", "length", None)), sharding(mesh, HEAD_AXES)
            split = [jax.device_put(*pair) for pair in zip(arrays[:2], where, strict=True)]
            tiled = gradients(num_tiles).lower(*split).compile()
            got, narrow = tiled(*split), gradients(num_tiles, jnp.bfloat16)(*split)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)
    jax.tree.map(np.testing.assert_array_equal, (got[0], got[1][0]), (narrow[0], narrow[1][0]))
    off = np.linalg.norm(narrow[1][1] - want[1][1]) / np.linalg.norm(want[1][1])
    assert 1e-4 < off < 1e-2
    whole = D * V // axes.get("tensor", 1)
    summed = [c for c in collectives(tiled.as_text()) if "reduce" in c.kind and c.payload_bytes >= 4 * whole]
    print([(c.kind, c.times, c.payload, c.groups) for c in summed])
    assert [c.times for c in summed] == [1]
    assert summed[0].payload_bytes == 4 * whole


@pytest.mark.parametrize("num_tiles", [1, 4])
def test_token_losses_are_in_order(num_tiles):
    x, head, target, _ = _inputs()
    logits = x @ head
    want = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, target[..., None], -1)[..., 0]
    got = token_losses(
        jnp.asarray(x, jnp.float32), jnp.asarray(head, jnp.float32), jnp.asarray(target), Readout(num_tiles)
    )
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize(("num_tiles", "soft_cap"), [(1, 0.0), (3, 0.0), (1, 2.0), (3, 2.0)])
def test_a_temperature_divides_the_logits_after_the_soft_cap(num_tiles, soft_cap):
    """In double precision; the gradient by finite differences in random directions."""
    x, head, target, weight = _inputs()
    rng = np.random.default_rng(1)
    directions = rng.normal(size=x.shape), rng.normal(size=head.shape)

    def losses(x, head):
        logits = x @ head
        logits = (soft_cap * np.tanh(logits / soft_cap) if soft_cap else logits) / 0.6
        log_partition = np.log(np.exp(logits).sum(-1))
        return log_partition - np.take_along_axis(logits, target[..., None], -1)[..., 0], log_partition

    def total(x, head):
        nll, log_partition = losses(x, head)
        return (weight * (nll + Z * log_partition**2)).sum()

    def slope(dx, dhead):
        return (total(x + 1e-5 * dx, head + 1e-5 * dhead) - total(x - 1e-5 * dx, head - 1e-5 * dhead)) / 2e-5

    narrow = [jnp.asarray(a, jnp.float32 if a.dtype == np.float64 else jnp.int32) for a in (x, head, target, weight)]

    @jax.jit
    def everything(x, head, target, weight):
        how = Readout(num_tiles, soft_cap, 0.6, z_loss_multiplier=Z)
        loss = lambda x, head: cross_entropy(x, head, target, weight, how)  # noqa: E731
        found = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, head)
        return *found, loss(x, head)[0], token_losses(x, head, target, how)

    with jax.default_matmul_precision("highest"):
        (loss, _), (dx, dhead), forward_only, nll = everything(*narrow)
    np.testing.assert_allclose([loss, forward_only], total(x, head), rtol=1e-6)
    np.testing.assert_allclose(nll, losses(x, head)[0], rtol=2e-5, atol=1e-5)
    assert np.sum(dx * directions[0]) == pytest.approx(slope(directions[0], 0 * head), rel=1e-5)
    assert np.sum(dhead * directions[1]) == pytest.approx(slope(0 * x, directions[1]), rel=1e-5)


def test_large_logits_neither_overflow_nor_lose_the_target():
    x = jnp.full((1, 1, 1), 1e4)
    head = jnp.asarray([[1.0, 0.5, -1.0]])
    loss, _ = cross_entropy(x, head, jnp.array([[1]]), jnp.ones((1, 1)))
    assert float(loss) == pytest.approx(5e3)


def test_all_logits_never_exist_at_once():
    """At V = 4096 the [B, T, V] float32 logits are 64 MB; in 16 tiles, value and gradient need a few tiles of it."""
    sizes = jax.ShapeDtypeStruct((8, 512, 32), jnp.float32), jax.ShapeDtypeStruct((32, 4096), jnp.float32)
    rows = jax.ShapeDtypeStruct((8, 512), jnp.int32), jax.ShapeDtypeStruct((8, 512), jnp.float32)

    def temporaries(num_tiles):
        loss = lambda x, head, target, weight: cross_entropy(x, head, target, weight, Readout(num_tiles))[0]  # noqa: E731
        return jax.jit(jax.grad(loss, (0, 1))).lower(*sizes, *rows).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(1) >= 8 * 512 * 4096 * 4
    assert temporaries(16) < 8 * 512 * 4096 * 4 / 3


def test_bfloat16_gradients_come_back_in_bfloat16():
    x, head, target, weight = _inputs()
    narrow = jnp.asarray(x, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16)
    others = jnp.asarray(target), jnp.asarray(weight, jnp.float32), Readout(2, z_loss_multiplier=Z)
    loss = lambda x, head: cross_entropy(x, head, *others)[0]  # noqa: E731
    dx, dhead = jax.jit(jax.grad(loss, (0, 1)))(*narrow)
    assert dx.dtype == dhead.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(dx, np.float32), _by_hand()[2], atol=0.05)
