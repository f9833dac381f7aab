"""Dropless experts on every kind of mesh against sums over all experts in float64, with derivatives by hand; what the
compiled programs exchange; what remat keeps."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.config.sections import PROJECTIONS, Remat
from maxtext_lite.models import Decoder, DecoderShape
from maxtext_lite.models.dropless import FURTHER_ROUNDS, dropless
from maxtext_lite.models.moe import ExpertShape, ExpertWeights
from maxtext_lite.parallel import MESH_AXES, make_mesh, over_replicas, over_stages, sharding
from maxtext_lite.xla.hlo import collectives

B, T, D, F, E, J = 8, 16, 16, 8, 8, 2
SHAPE = ExpertShape(num_experts=E, num_per_token=J, mlp_dim=F)
RNG = np.random.default_rng(0)
X, G = (RNG.normal(size=(B, T, D)).astype(np.float32) for _ in range(2))
SHARE = RNG.uniform(size=(B, T, J)).astype(np.float32)
WEIGHTS = ExpertWeights(*(RNG.normal(size=sizes).astype(np.float32) for sizes in ((E, D, F), (E, D, F), (E, F, D))))
EVEN = np.stack([RNG.permutation(E)[:J] for _ in range(B * T)]).reshape(B, T, J).astype(np.int32)
UNEVEN = np.broadcast_to(np.array([0, 1], np.int32), (B, T, J)).copy()  # all of them to one or two devices
for chosen in (EVEN, UNEVEN):
    chosen[0, :3] = E  # padding


def _by_hand(expert, weights=WEIGHTS, x=X, share=SHARE, g=G):
    """y, and the derivatives of <y, g> with respect to x, share and the weights; every expert on every token."""
    x, share, g, *weights = (np.float64(array) for array in (x, share, g, *weights.arrays()))
    y, dx, dshare, dweights = np.zeros_like(x), np.zeros_like(x), np.zeros_like(share), []
    for e, (gate, up, down) in enumerate(zip(*weights, strict=True)):
        is_chosen = expert == e
        s = (share * is_chosen).sum(-1)[..., None]
        a, b = x @ gate, x @ up
        sigmoid = 1 / (1 + np.exp(-a))
        hidden = a * sigmoid * b
        y += s * (hidden @ down)
        dshare += is_chosen * ((hidden @ down) * g).sum(-1)[..., None]
        dhidden = s * (g @ down.T)
        da, db = dhidden * b * sigmoid * (1 + a * (1 - sigmoid)), dhidden * a * sigmoid
        dx += da @ gate.T + db @ up.T
        pairs = ((x, da), (x, db), (hidden, s * g))
        dweights.append([np.einsum("BTi,BTo->io", left, right) for left, right in pairs])
    return y, dx, dshare, *(np.stack(dw) for dw in zip(*dweights, strict=True))


def _close(got, want, tolerance=1e-5):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max())


def _mesh(**sizes):
    sizes = dict.fromkeys(MESH_AXES, 1) | sizes
    return make_mesh(sizes, dict.fromkeys(MESH_AXES, 1), jax.devices()[: int(np.prod(list(sizes.values())))])


def _with_gradients(x, share, weights, g, expert, shape=SHAPE):
    y, back = jax.vjp(lambda x, share, weights: dropless(x, expert, share, weights, shape), x, share, weights)
    dx, dshare, dweights = back(g)
    return y, dx, dshare, *dweights.arrays()


def _compiled(mesh, function=_with_gradients):
    """The program, and its arguments but the last, the experts of each token."""
    rows = sharding(mesh, ("global_batch", "length", None))
    pairs = zip(WEIGHTS.arrays(), WEIGHTS.axes(), strict=True)
    weights = [jax.device_put(w, sharding(mesh, axes)) for w, axes in pairs]
    x, g, share = (jax.device_put(array, rows) for array in (X, G, SHARE))
    arguments = (x, share, ExpertWeights(*weights), g)
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        compiled = jax.jit(function).lower(*arguments, jax.device_put(EVEN, rows)).compile()
    return compiled, lambda expert: compiled(*arguments, jax.device_put(expert, rows))


EXCHANGES = ({"expert": 8}, {"fsdp": 2, "expert": 4}, {"expert": 4, "tensor": 2}, {"expert": 4, "context": 2})
GATHERS = ({"expert": 2, "tensor": 2, "context": 2}, {"fsdp": 4, "expert": 2})


@pytest.mark.parametrize("sizes", EXCHANGES + GATHERS, ids=str)
def test_values_and_gradients_do_not_depend_on_the_mesh_or_on_how_even_choices_are(sizes):
    """Also where one device is chosen by all and an exchange takes as many rounds as there can be."""
    mesh = _mesh(**sizes)
    compiled, run = _compiled(mesh)
    for expert in (EVEN, UNEVEN):
        _close(jax.device_get(run(expert)), _by_hand(expert))
    crossing = [c for c in collectives(compiled.as_text()) if "expert" in c.axes(mesh)]
    further = [c for c in crossing if FURTHER_ROUNDS in c.line]
    assert further == [c for c in crossing if c.times is None]
    assert bool(further) == (sizes in EXCHANGES)
    gathered = [c for c in crossing if c.kind == "all-gather"]
    assert bool(gathered) == (sizes in GATHERS)
    assert any(c.kind == "all-to-all" for c in crossing)
    # Rows for this device's experts: a round's; or whatever may come.
    tokens = B * T // (8 // sizes.get("tensor", 1))
    rounds = {8: 8 * 5, 4: 4 * 10} if "tensor" not in sizes else {4: 4 * 20}  # 5/4 x 2 x tokens / n of each device
    rows = rounds[sizes["expert"]] if sizes in EXCHANGES else 2 * J * tokens
    inner = {int(n) for n in re.findall(rf"f32\[(\d+),{F // sizes.get('tensor', 1)}\]", compiled.as_text())}
    assert rows in inner
    assert not [n for n in inner if n > rows]


def test_shares_of_the_input_have_their_derivatives_on_a_mesh_with_an_exchange_of_many_rounds():
    shape = dataclasses.replace(SHAPE, on_input=True)
    _, run = _compiled(_mesh(fsdp=2, expert=4), lambda *arguments: _with_gradients(*arguments, shape))
    for expert in (EVEN, UNEVEN):
        want = []
        for choice in range(J):  # an expert of share x x
            share, one = SHARE[..., choice : choice + 1], np.ones((B, T, 1), np.float32)
            y, dx, _, *dweights = _by_hand(expert[..., choice : choice + 1], x=share * X, share=one)
            want.append((y, share * dx, (X * dx).sum(-1), *dweights))
        y, dx, dshare, *dweights = zip(*want, strict=True)
        expected = sum(y), sum(dx), np.stack(dshare, -1), *(sum(dw) for dw in dweights)
        _close(jax.device_get(run(expert)), expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_weight_gradients_cross_fsdp_in_their_dtype_as_an_all_to_all(dtype):
    shape = dataclasses.replace(SHAPE, grad_dtype=dtype)
    mesh = _mesh(fsdp=8)
    compiled, run = _compiled(mesh, lambda *arguments: _with_gradients(*arguments, shape))
    _close(jax.device_get(run(EVEN))[3:], _by_hand(EVEN)[3:], 1e-5 if dtype == jnp.float32 else 0.01)
    found = collectives(compiled.as_text())
    assert {c.kind for c in found} == {"all-gather", "all-to-all"}
    whole = E * D * F * jnp.dtype(dtype).itemsize
    if dtype == jnp.float32:  # on CPUs XLA widens what is narrower before it sends it
        assert sum(c.payload_bytes for c in found if c.kind == "all-to-all") == 3 * whole


def _replicas(x, share, weights, g, expert):
    return over_replicas(_with_gradients, 2, rows=(0, 1, 3, 4))(x, share, weights, g, expert)


def test_replicas_keep_their_gradients_apart():
    """Two replicas on a data axis, whose experts are the same: nothing crosses `data`."""
    mesh = _mesh(data=2, expert=4)
    compiled, run = _compiled(mesh, _replicas)
    assert not [c for c in collectives(compiled.as_text()) if "data" in c.axes(mesh)]
    for expert in (EVEN, UNEVEN):
        got = jax.device_get(run(expert))
        for r, part in enumerate((slice(0, 4), slice(4, 8))):
            _close([array[r] for array in got], _by_hand(expert[part], WEIGHTS, X[part], SHARE[part], G[part]))


def test_pipeline_stages_have_experts_of_their_own():
    """Stage by stage other weights and other tokens, of which one stage's choices are uneven."""
    mesh, stages = _mesh(stage=2, expert=4), 2
    turned = ExpertWeights(*(w[::-1] for w in WEIGHTS.arrays()))
    both = ExpertWeights(*map(np.stack, zip(WEIGHTS.arrays(), turned.arrays(), strict=True)))
    arguments = (*(np.stack([a] * stages) for a in (X, SHARE)), both, np.stack([G] * stages), np.stack([EVEN, UNEVEN]))
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        got = jax.device_get(jax.jit(over_stages(_with_gradients))(*arguments))
    _close([array[0] for array in got], _by_hand(EVEN))
    _close([array[1] for array in got], _by_hand(UNEVEN, turned))


def test_one_device_does_the_same_with_each_kernel_that_runs_here():
    blocks = dataclasses.replace(SHAPE, matmul="blocks")
    for shape in (SHAPE, blocks):
        with jax.default_matmul_precision("highest"):
            got = jax.jit(_with_gradients, static_argnums=5)(X, SHARE, WEIGHTS, G, UNEVEN, shape)
        _close(got, _by_hand(UNEVEN))


# ---- What remat keeps -----------------------------------------------------------------------------------------------

LAYERS, ROWS, TOKENS = 3, 2, 20
DECODER = DecoderShape(
    vocab_size=31, emb_dim=D, num_query_heads=2, num_kv_heads=1, head_dim=4, mlp_dim=0, num_layers=LAYERS, experts=SHAPE
)


def _gradient(remat):
    decoder = Decoder(dataclasses.replace(DECODER, saved=remat.saved, offloaded=remat.offloaded))
    tokens = jnp.zeros((ROWS, TOKENS), jnp.int32)
    ones = jnp.ones_like(tokens)
    loss = lambda p: jnp.sum(decoder.hidden(p, tokens, ones, ones))  # noqa: E731
    return decoder.abstract_params, loss


def _count(jaxpr, name):
    """Equations of a primitive, in all that a jaxpr calls."""
    found = 0
    for equation in jaxpr.eqns:
        found += equation.primitive.name == name
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            found += _count(inner, name) if hasattr(inner, "eqns") else 0
    return found


@pytest.mark.parametrize(("saved", "widths", "matmuls"), [
    ((), [], 3 + 2 + 6),  # forward; the two inner ones again; backward
    (("mlpwi_0",), [F], 3 + 1 + 6),
    (("mlpwi_0", "mlpwi_1"), [F, F], 3 + 6),
    (PROJECTIONS, [F, F], 3 + 6),
    (("expert_rows",), [D], 3 + 2 + 6),
], ids=str)  # fmt: skip
def test_what_is_named_is_kept_and_is_not_made_again(saved, widths, matmuls):
    params, loss = _gradient(Remat(saved))
    kept = jax.tree.leaves(jax.eval_shape(lambda p: jax.vjp(loss, p)[1], params))
    rows = ROWS * TOKENS * J
    assert sorted(a.shape[2] for a in kept if a.shape[:2] == (LAYERS, rows) and a.ndim == 3) == sorted(widths)
    assert _count(jax.make_jaxpr(jax.grad(loss))(params).jaxpr, "ragged_dot_general") == matmuls
