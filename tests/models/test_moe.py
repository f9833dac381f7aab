"""Experts against loops over tokens in float64, and logits against transformers' Mixtral and Qwen3-MoE."""

import dataclasses
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.models import Decoder, DecoderShape
from maxtext_lite.models.capacity import with_capacity
from maxtext_lite.models.dropless import dropless
from maxtext_lite.models.moe import BALANCE, EXPERT_COUNTS, ROUTER_Z, ExpertShape, ExpertWeights, Router, Routing, route

B, T, D, F, E, J = 3, 10, 6, 5, 4, 2
SHAPE = ExpertShape(num_experts=E, num_per_token=J, mlp_dim=F)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(B, T, D)).astype(np.float32)
ROUTER = RNG.normal(size=(D, E)).astype(np.float32)
WEIGHTS = ExpertWeights(*(RNG.normal(size=sizes).astype(np.float32) for sizes in ((E, D, F), (E, D, F), (E, F, D))))
BIASED = ExpertWeights(*WEIGHTS[:3], *(RNG.normal(size=sizes).astype(np.float32) for sizes in ((E, F), (E, F), (E, D))))
WIDE = [np.float64(weight) for weight in WEIGHTS.arrays()]
REAL = np.arange(T)[None] < np.array([T, 7, 0])[:, None]  # a whole example, a ragged one and an empty slot
BIAS = np.array([0.3, -0.4, 0.0, 0.2], np.float32)


def _mlp(x, weights, expert):
    gate, up = x @ weights[0][expert], x @ weights[1][expert]
    return (gate / (1 + np.exp(-gate)) * up) @ weights[2][expert]


def _scores(x, shape):
    logits = np.float64(x) @ np.float64(ROUTER)
    exponential = np.exp(logits)
    return logits, exponential / exponential.sum() if shape.score == "softmax" else 1 / (1 + np.exp(-logits))


def _choices(x, shape, bias=0.0):
    """Experts and their shares of one token, in float64."""
    _, score = _scores(x, shape)
    chosen = np.argsort(-(score + bias), kind="stable")[: shape.num_per_token]
    share = score[chosen] / (score[chosen].sum() if shape.normalised else 1)
    return chosen, shape.scaling * share


def _by_loop(shape, bias=0.0, capacity=lambda tokens: tokens):
    """Output, dropped share and the per-example sums, token by token."""
    y, dropped = np.zeros((B, T, D)), np.zeros(B)
    balance, z, counts = np.zeros(B), np.zeros((B, T)), np.zeros((B, E), int)
    for b in range(B):
        tokens = int(REAL[b].sum())
        taken, judged, probability = np.zeros(E, int), np.zeros(E), np.zeros(E)
        for t in range(tokens):
            logits, score = _scores(X[b, t], shape)
            z[b, t] = np.log(np.exp(logits).sum()) ** 2
            probability += score / score.sum() / tokens
            np.add.at(judged, _choices(X[b, t], shape)[0], 1 / (tokens * shape.num_per_token))
            for expert, share in zip(*_choices(X[b, t], shape, bias), strict=True):
                counts[b, expert] += 1
                if taken[expert] < capacity(tokens):
                    y[b, t] += share * _mlp(np.float64(X[b, t]), WIDE, expert)
                    taken[expert] += 1
                else:
                    dropped[b] += 1 / (tokens * shape.num_per_token)
        balance[b] = E * (judged * probability).sum()
    return y, dropped, balance, z, counts


def _run(x, router, weights, shape, bias):
    routing = route(x, Router(router, bias), jnp.asarray(REAL), shape)
    if shape.capacity_factor is None:
        y = dropless(x, routing.expert_BTJ, routing.share_BTJ, weights, shape)
        return y, jnp.zeros(B), routing
    return *with_capacity(x, routing, weights, shape), routing


VARIANTS = {
    "Mixtral, Qwen3": SHAPE,
    "DeepSeekMoE": dataclasses.replace(SHAPE, normalised=False),
    "DeepSeek-V3": dataclasses.replace(SHAPE, score="sigmoid", scaling=2.5, biased=True),
    "one expert a token": dataclasses.replace(SHAPE, num_per_token=1, normalised=False),
    "every expert": dataclasses.replace(SHAPE, num_per_token=E),
    "capacity 1": dataclasses.replace(SHAPE, capacity_factor=Fraction(1)),
    "capacity 3/5": dataclasses.replace(SHAPE, capacity_factor=Fraction(3, 5), score="sigmoid", biased=True),
    "capacity for all": dataclasses.replace(SHAPE, capacity_factor=Fraction(E)),
}
GPT_OSS = dataclasses.replace(SHAPE, activation="clamped_silu", with_bias=True)


@pytest.mark.parametrize("shape", VARIANTS.values(), ids=VARIANTS)
def test_outputs_and_statistics_equal_a_loop_over_tokens(shape):
    bias = BIAS if shape.biased else None
    factor = shape.capacity_factor
    capacity = (lambda n: n) if factor is None else lambda n: math.ceil(n * shape.num_per_token * factor / E)
    y, dropped, balance, z, counts = _by_loop(shape, BIAS if shape.biased else 0.0, capacity)
    with jax.default_matmul_precision("highest"):
        got, got_dropped, routing = jax.jit(_run, static_argnums=3)(X, ROUTER, WEIGHTS, shape, bias)
    np.testing.assert_allclose(got, y, atol=1e-5)
    np.testing.assert_allclose(got_dropped, dropped, atol=1e-6)
    np.testing.assert_allclose(routing.aux[BALANCE], balance, rtol=1e-5)
    np.testing.assert_allclose(routing.aux[ROUTER_Z], z, rtol=1e-5)
    assert (EXPERT_COUNTS in routing.aux) == shape.biased
    if shape.biased:
        np.testing.assert_array_equal(routing.aux[EXPERT_COUNTS], counts)
    if factor is not None:
        assert (dropped.max() > 0.05) == (factor < E)  # else the loop would show nothing


@pytest.mark.parametrize("shape", [
    VARIANTS["DeepSeek-V3"], VARIANTS["DeepSeekMoE"], VARIANTS["capacity 1"], GPT_OSS,
    dataclasses.replace(GPT_OSS, capacity_factor=Fraction(1)),
], ids=["DeepSeek-V3", "DeepSeekMoE", "capacity 1", "gpt-oss", "gpt-oss, capacity 1"])  # fmt: skip
def test_values_and_gradients_equal_those_of_every_expert_on_every_token(shape):
    """A dense sum over experts with the loop's shares, differentiated by jax in float64-free plain operations."""
    all_weights = BIASED if shape.with_bias else WEIGHTS
    bias = BIAS if shape.biased else None
    cotangent = RNG.normal(size=X.shape).astype(np.float32)
    factor = shape.capacity_factor
    capacity = T if factor is None else None
    kept = np.zeros((B, T, E))
    for b in range(B):
        taken, tokens = np.zeros(E, int), int(REAL[b].sum())
        limit = capacity if factor is None else math.ceil(tokens * J * factor / E)
        for t in range(tokens):
            for expert in _choices(X[b, t], shape, BIAS if shape.biased else 0.0)[0]:
                kept[b, t, expert] = 1 if taken[expert] < limit else -1  # -1: chosen and dropped
                taken[expert] += 1

    def one_expert(x, gate, up, down, gate_bias=0.0, up_bias=0.0, down_bias=0.0):
        gate, up = x @ gate + gate_bias, x @ up + up_bias
        if shape.activation == "clamped_silu":
            gate, up = jnp.minimum(gate, 7), jnp.clip(up, -7, 7) + 1
            return gate * jax.nn.sigmoid(1.702 * gate) * up @ down + down_bias
        return jax.nn.silu(gate) * up @ down + down_bias

    def by_hand(x, router, weights):
        logits = x @ router
        score = jax.nn.softmax(logits) if shape.score == "softmax" else jax.nn.sigmoid(logits)
        share = jnp.where(kept != 0, score, 0)
        share = share / (share.sum(-1, keepdims=True) + 1e-20) if shape.normalised else share
        every = [one_expert(x, *(weight[e] for weight in weights.arrays())) for e in range(E)]
        y = jnp.einsum("EBTD,BTE->BTD", jnp.stack(every), jnp.where(kept > 0, shape.scaling * share, 0))
        return jnp.sum(y * cotangent)

    def ours(x, router, weights):
        return jnp.sum(_run(x, router, weights, shape, bias)[0] * cotangent)

    with jax.default_matmul_precision("highest"):
        want = jax.jit(jax.value_and_grad(by_hand, (0, 1, 2)))(X, ROUTER, all_weights)
        got = jax.jit(jax.value_and_grad(ours, (0, 1, 2)))(X, ROUTER, all_weights)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.abs(w).max() > 0.1
        np.testing.assert_allclose(g, w, atol=2e-5 * np.abs(w).max())


def test_gradients_equal_finite_differences_of_the_loop():
    """Of the float64 loop itself, in random directions of tokens and weights; the choices do not change within one."""
    cotangent = RNG.normal(size=X.shape)
    directions = [RNG.normal(size=array.shape) for array in (X, *WEIGHTS.arrays())]
    small = 1e-6

    def loop(step):
        moved = [np.float64(array) + step * way for array, way in zip((X, *WEIGHTS.arrays()), directions, strict=True)]
        total = 0.0
        for b, t in zip(*np.nonzero(REAL), strict=True):
            chosen, share = _choices(moved[0][b, t], SHAPE)
            y = sum(s * _mlp(moved[0][b, t], moved[1:], expert) for expert, s in zip(chosen, share, strict=True))
            total += (cotangent[b, t] * y).sum()
        return total

    def ours(x, weights):
        return jnp.sum(_run(x, ROUTER, weights, SHAPE, None)[0] * cotangent)

    with jax.default_matmul_precision("highest"):
        dx, dweights = jax.jit(jax.grad(ours, (0, 1)))(X, WEIGHTS)
    along = sum(np.sum(np.float64(g) * way) for g, way in zip((dx, *dweights.arrays()), directions, strict=True))
    assert along == pytest.approx((loop(small) - loop(-small)) / (2 * small), rel=1e-5)


@pytest.mark.parametrize("factor", [None, Fraction(5, 4)])
def test_everything_to_one_expert(factor):
    """Nothing is dropped without a capacity; with one, each example keeps its first tokens; nothing is not finite."""
    shape = ExpertShape(E, 1, F, capacity_factor=factor)
    expert = jnp.where(REAL, 2, E)[..., None]
    share = jnp.where(REAL, 0.5, 0.0).astype(jnp.float32)[..., None]

    def run(x, weights):
        if factor is None:
            return dropless(x, expert, share, weights, shape), jnp.zeros(B)
        return with_capacity(x, Routing(expert, share, {}), weights, shape)

    y, dropped = run(X, WEIGHTS)
    capacity = [T, 7, 0] if factor is None else [math.ceil(n * factor / E) for n in (T, 7, 0)]
    for b in range(B):
        want = np.stack([0.5 * _mlp(np.float64(x), WIDE, 2) for x in X[b]])
        want[capacity[b] :] = 0
        np.testing.assert_allclose(y[b], want, atol=1e-5)
    np.testing.assert_allclose(dropped, [1 - capacity[0] / T, 1 - capacity[1] / 7, 0], atol=1e-6)
    gradient = jax.grad(lambda w: jnp.sum(run(X, w)[0]))(WEIGHTS)
    for g in gradient.arrays():
        assert np.isfinite(g).all()
        assert np.abs(g[2]).max() > 0
        np.testing.assert_array_equal(np.delete(g, 2, axis=0), 0)


def test_shares_of_the_input_with_a_capacity_that_drops_nothing_are_those_without():
    shape = dataclasses.replace(SHAPE, on_input=True, score="sigmoid", normalised=False)
    routing = route(X, Router(ROUTER), REAL, shape)

    def total(run):
        def sums(x, share, weights):
            return jnp.sum(jnp.sin(run(x, share, weights)))

        return jax.jit(jax.value_and_grad(sums, (0, 1, 2)))(X, routing.share_BTJ, WEIGHTS)

    ample = dataclasses.replace(shape, capacity_factor=Fraction(4))
    with jax.default_matmul_precision("highest"):
        got = total(lambda x, share, w: with_capacity(x, routing._replace(share_BTJ=share), w, ample)[0])
        want = total(lambda x, share, w: dropless(x, routing.expert_BTJ, share, w, shape))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


def test_sparsemixer_chooses_and_weighs_as_transformers_does_without_sampling():
    torch = pytest.importorskip("torch")
    phimoe = pytest.importorskip("transformers.models.phimoe.modeling_phimoe")
    shape = dataclasses.replace(SHAPE, score="sparsemixer", normalised=False)
    router = ROUTER[:, :1] + 0.02 * ROUTER  # logits so near to each other that more than one is left
    routing = route(X, Router(router), np.ones((B, T), bool), shape)
    logits = torch.tensor(np.float64(X) @ np.float64(router)).reshape(-1, E)
    share, expert = phimoe.sparsemixer(logits, jitter_eps=0.01, training=False)
    np.testing.assert_array_equal(routing.expert_BTJ.reshape(-1, J), expert.numpy())
    np.testing.assert_allclose(routing.share_BTJ.reshape(-1, J), share.numpy(), atol=1e-6)
    assert 0.5 < float(np.mean(routing.share_BTJ)) < 0.99


@pytest.mark.parametrize("factor", [None, Fraction(1)])
def test_an_examples_output_does_not_depend_on_its_neighbours_or_its_future(factor):
    shape = dataclasses.replace(SHAPE, capacity_factor=factor)
    run = jax.jit(_run, static_argnums=3)
    whole = run(X, ROUTER, WEIGHTS, shape, None)[0]
    others = np.array(X)
    others[1:] = RNG.normal(size=others[1:].shape)
    others[0, 6:] = RNG.normal(size=others[0, 6:].shape)
    np.testing.assert_allclose(run(others, ROUTER, WEIGHTS, shape, None)[0][0, :6], whole[0, :6], atol=1e-6)


@pytest.mark.parametrize("factor", [None, Fraction(1)])
def test_bfloat16_runs_both_ways_and_is_close(factor):
    shape = dataclasses.replace(SHAPE, capacity_factor=factor)
    routing = route(jnp.asarray(X), Router(ROUTER), jnp.asarray(REAL), shape)

    def loss(x, weights):
        if factor is None:
            y = dropless(x, routing.expert_BTJ, routing.share_BTJ, weights, shape)
        else:
            y = with_capacity(x, routing, weights, shape)[0]
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

    narrow = jax.tree.map(lambda array: jnp.asarray(array, jnp.bfloat16), (X, WEIGHTS))
    got = jax.jit(jax.grad(loss, (0, 1)))(*narrow)
    want = jax.jit(jax.grad(loss, (0, 1)))(X, WEIGHTS)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == jnp.bfloat16
        assert np.linalg.norm(np.asarray(g, np.float32) - w) < 0.03 * np.linalg.norm(w)


# ---- Against transformers -------------------------------------------------------------------------------------------


def _transformers_model(family, shape, params):
    """transformers' model of the family, holding `params`."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    experts = shape.experts
    common = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.emb_dim,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_query_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_theta": shape.rope_max_timescale,
        "num_experts_per_tok": experts.num_per_token,
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
    }
    if family == "mixtral":
        config = transformers.MixtralConfig(
            intermediate_size=experts.mlp_dim, num_local_experts=experts.num_experts, sliding_window=None, **common
        )
        model = transformers.MixtralForCausalLM(config)
    else:
        config = transformers.Qwen3MoeConfig(
            moe_intermediate_size=experts.mlp_dim, num_experts=experts.num_experts, intermediate_size=7,
            norm_topk_prob=experts.normalised, decoder_sparse_step=1, mlp_only_layers=[], **common,
        )  # fmt: skip
        model = transformers.Qwen3MoeForCausalLM(config)
        for layer in model.model.layers:  # norms of queries and keys: not what is compared here
            layer.self_attn.q_norm = layer.self_attn.k_norm = torch.nn.Identity()
    config._experts_implementation = "eager"  # the grouped one knows no float64
    model = model.double().eval()

    def put(parameter, array):
        with torch.no_grad():
            assert parameter.shape == array.shape
            parameter.copy_(torch.tensor(np.array(array)))

    D = shape.emb_dim
    put(model.model.embed_tokens.weight, params["embedding"]["table"])
    put(model.model.norm.weight, params["final_norm"]["scale"])
    put(model.lm_head.weight, params["head"]["projection"].T)
    for i, theirs in enumerate(model.model.layers):
        ours = jax.tree.map(lambda x: x[i], params["layers"])  # noqa: B023
        for name in ("query", "key", "value"):
            put(getattr(theirs.self_attn, f"{name[0]}_proj").weight, ours["attention"][name].reshape(D, -1).T)
        put(theirs.self_attn.o_proj.weight, ours["attention"]["out"].reshape(-1, D).T)
        put(theirs.input_layernorm.weight, ours["attention_norm"]["scale"])
        put(theirs.post_attention_layernorm.weight, ours["mlp_norm"]["scale"])
        put(theirs.mlp.gate.weight, ours["mlp"]["router"].T)
        gate_up = np.concatenate([ours["mlp"]["gate"], ours["mlp"]["up"]], axis=2)
        put(theirs.mlp.experts.gate_up_proj, gate_up.swapaxes(1, 2))
        put(theirs.mlp.experts.down_proj, np.swapaxes(ours["mlp"]["down"], 1, 2))
    return model


@pytest.mark.parametrize(("family", "normalised"), [("mixtral", True), ("qwen3", True), ("qwen3", False)])
def test_logits_equal_those_of_transformers(family, normalised):
    shape = DecoderShape(
        vocab_size=61, emb_dim=24, num_query_heads=4, num_kv_heads=2, head_dim=6, mlp_dim=0, num_layers=2,
        initializer_range=0.2, experts=ExpertShape(6, 2, 20, normalised=normalised),
    )  # fmt: skip
    decoder = Decoder(shape)
    params = jax.device_get(jax.jit(decoder.init)(jax.random.key(0)))
    tokens = np.random.default_rng(1).integers(0, 61, (2, 30))
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        want = _transformers_model(family, shape, params)(torch.tensor(tokens)).logits.numpy()
    positions = jnp.tile(jnp.arange(30), (2, 1))
    with jax.default_matmul_precision("highest"):
        got = jax.jit(lambda p: decoder.logits(p, decoder.hidden(p, tokens, jnp.ones_like(positions), positions)))(
            params
        )
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(got, want, atol=1e-4)
