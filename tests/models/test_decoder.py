"""The decoder against transformers' Llama with the same weights, packed documents against separate ones, remat."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.config.sections import PROJECTIONS, QKV, REMAT_POLICIES, REMAT_TENSORS, Remat
from maxtext_lite.models import Decoder, DecoderShape, ExpertShape

SHAPE = DecoderShape(
    vocab_size=97, emb_dim=32, num_query_heads=4, num_kv_heads=2, head_dim=12, mlp_dim=48, num_layers=3
)


def _llama(shape, params):
    """transformers' Llama holding `params`."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.emb_dim,
            intermediate_size=shape.mlp_dim,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_query_heads,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            rms_norm_eps=shape.norm_epsilon,
            rope_theta=shape.rope_max_timescale,
            tie_word_embeddings=shape.tied,
            attn_implementation="eager",
        )
    ).eval()
    D, weights = shape.emb_dim, {}

    def put(name, array):
        weights[name] = torch.tensor(np.array(array))

    put("model.embed_tokens.weight", params["embedding"]["table"])
    put("model.norm.weight", params["final_norm"]["scale"])
    put("lm_head.weight", params["embedding"]["table"] if shape.tied else params["head"]["projection"].T)
    for i in range(shape.num_layers):
        layer = jax.tree.map(lambda x: x[i], params["layers"])  # noqa: B023
        for theirs, ours in (("q", "query"), ("k", "key"), ("v", "value")):
            put(f"model.layers.{i}.self_attn.{theirs}_proj.weight", layer["attention"][ours].reshape(D, -1).T)
        put(f"model.layers.{i}.self_attn.o_proj.weight", layer["attention"]["out"].reshape(-1, D).T)
        for name in ("gate", "up", "down"):
            put(f"model.layers.{i}.mlp.{name}_proj.weight", layer["mlp"][name].T)
        put(f"model.layers.{i}.input_layernorm.weight", layer["attention_norm"]["scale"])
        put(f"model.layers.{i}.post_attention_layernorm.weight", layer["mlp_norm"]["scale"])
    model.load_state_dict(weights)
    return model


def _random_params(decoder):
    """Larger than initial weights, norms not 1: every parameter must matter."""
    params = jax.jit(decoder.init)(jax.random.key(0))
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    return tree.unflatten([3 * leaf + 0.1 * rng.normal(size=leaf.shape).astype(np.float32) for leaf in leaves])


def _whole(tokens):
    """Segments and positions of rows that are one document each."""
    return jnp.ones_like(tokens), jnp.tile(jnp.arange(tokens.shape[1]), (tokens.shape[0], 1))


@pytest.mark.parametrize("shape", [
    SHAPE,
    dataclasses.replace(SHAPE, tied=True, num_kv_heads=1, rope_max_timescale=500_000.0, norm_epsilon=1e-6),
    dataclasses.replace(SHAPE, num_kv_heads=4, num_layers=1, head_dim=8),
], ids=["grouped", "tied, one kv head", "one layer, full heads"])  # fmt: skip
def test_logits_equal_transformers_llama(shape):
    decoder = Decoder(shape)
    params = _random_params(decoder)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, shape.vocab_size, (2, 150)))
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        want = _llama(shape, params).double()(torch.tensor(np.array(tokens))).logits.numpy()
    with jax.default_matmul_precision("highest"):
        got = jax.jit(lambda p: decoder.logits(p, decoder.hidden(p, tokens, *_whole(tokens))))(params)
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_packed_documents_do_not_see_each_other():
    decoder = Decoder(SHAPE)
    params = _random_params(decoder)
    rng = np.random.default_rng(2)
    documents = [jnp.asarray(rng.integers(0, 97, (1, length))) for length in (5, 20, 7)]
    packed = jnp.concatenate(documents, axis=1)
    segment = jnp.concatenate([jnp.full_like(d, i + 1) for i, d in enumerate(documents)], axis=1)
    position = jnp.concatenate([jnp.arange(d.shape[1])[None] for d in documents], axis=1)
    hidden = jax.jit(decoder.hidden)
    together = hidden(params, packed, segment, position)
    alone = jnp.concatenate([hidden(params, d, *_whole(d)) for d in documents], axis=1)
    np.testing.assert_allclose(together, alone, rtol=2e-5, atol=2e-5)


@pytest.fixture(scope="module")
def gradients_without_remat():
    return _loss_and_gradients(None)


def _with(remat, **changed):
    saved, offloaded = (None, ()) if remat is None else remat
    return Decoder(dataclasses.replace(SHAPE, saved=saved, offloaded=offloaded, **changed))


def _loss_and_gradients(remat, **changed):
    decoder = _with(remat, **changed)
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, 97, (2, 16)))

    def loss(params):
        return jnp.mean(jnp.square(decoder.logits(params, decoder.hidden(params, tokens, *_whole(tokens)))))

    return jax.jit(jax.value_and_grad(loss))(_random_params(decoder))


@pytest.mark.parametrize("remat", [
    *REMAT_POLICIES.values(), Remat(("context", "mlpwo"), ("decoder_layer_input", "mlpwi_0"))], ids=str)  # fmt: skip
def test_remat_changes_no_gradient(remat, gradients_without_remat):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max()),
        _loss_and_gradients(remat),
        gradients_without_remat,
    )


def test_remat_rounds_to_the_same_eight_bits():
    plain, again = (_loss_and_gradients(remat, quantization="int8") for remat in (None, REMAT_POLICIES["full"]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max()), plain, again)


def _kept(remat):
    """Shapes of what the forward pass of three layers keeps of each layer, and in which memory."""
    decoder = _with(remat)
    tokens = jnp.zeros((2, 20), jnp.int32)
    loss = lambda p: jnp.sum(decoder.hidden(p, tokens, *_whole(tokens)))  # noqa: E731
    residuals = jax.tree.leaves(jax.eval_shape(lambda p: jax.vjp(loss, p)[1], decoder.abstract_params))
    jaxpr = jax.make_jaxpr(lambda p: jax.vjp(loss, p)[1])(decoder.abstract_params)
    assert len(jaxpr.out_avals) == len(residuals)
    return sorted((aval.shape[3:], str(aval.memory_space)) for aval in jaxpr.out_avals if aval.shape[:3] == (3, 2, 20))


@pytest.mark.parametrize(("tensors", "shapes"), [
    (QKV, [(2, 12), (2, 12), (4, 12)]),
    (("context",), [(4, 12)]),
    (("mlpwi_0", "mlpwi_1"), [(48,), (48,)]),
    (PROJECTIONS, [(2, 12), (2, 12), (4, 12), (32,), (48,), (48,)]),
], ids=str)  # fmt: skip
def test_what_is_named_is_kept_and_nothing_else(tensors, shapes):
    """Three layers of two rows of 20 tokens: D 32, N 4, K 2, H 12, F 48; beside them, the input of each layer.

    The mlp's result is not kept though it is named: the next layer's input holds it already.
    """
    device, host = "Device", "Host"
    places = {str(place) for _, place in _kept(Remat(()))}
    assert _kept(Remat(())) == [((32,), places.pop())]
    kept = _kept(Remat(tensors))
    assert [shape for shape, _ in kept] == sorted([(32,), *shapes])
    assert {device in place for _, place in kept} == {True}
    offloaded = _kept(Remat((), tensors))
    assert [shape for shape, place in offloaded if host in place] == sorted(shapes)
    assert [shape for shape, place in offloaded if host not in place] == [(32,)]


def test_a_layers_input_can_be_kept_on_the_host():
    assert [(shape, "Host" in place) for shape, place in _kept(Remat((), ("decoder_layer_input",)))] == [((32,), True)]


def test_the_less_is_kept_the_less_memory_is_needed():
    def temporaries(remat):
        decoder = _with(remat, num_layers=16)
        tokens = jnp.zeros((8, 64), jnp.int32)
        loss = lambda p: jnp.sum(decoder.hidden(p, tokens, *_whole(tokens)))  # noqa: E731
        return jax.jit(jax.grad(loss)).lower(decoder.abstract_params).compile().memory_analysis().temp_size_in_bytes

    sizes = [temporaries(remat) for remat in (None, Remat(PROJECTIONS), Remat(QKV), Remat(()))]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 0.6 * sizes[0]
    # Of 16 layers, 8 rows and 64 tokens, float32: queries, keys and values; the others but the mlp's result.
    heads, rest = (4 + 2 + 2) * 12, 32 + 48 + 48
    unit = 16 * 8 * 64 * 4
    assert sizes[2] - sizes[3] == pytest.approx(unit * heads, rel=0.15)
    assert sizes[1] - sizes[2] == pytest.approx(unit * rest, rel=0.15)


def test_every_name_of_a_tensor_is_one_that_the_model_gives():
    """A name that no tensor has would be a key that does nothing."""
    tokens = jnp.zeros((2, 20), jnp.int32)

    def names(decoder):
        gradient = jax.grad(lambda p: jnp.sum(decoder.hidden(p, tokens, *_whole(tokens))))
        return set(re.findall(r"name\[name=(\w+)", str(jax.make_jaxpr(gradient)(decoder.abstract_params))))

    experts = Decoder(dataclasses.replace(SHAPE, experts=ExpertShape(4, 2, 8)))
    assert names(experts) == set(REMAT_TENSORS)
    assert names(_with(None)) == set(REMAT_TENSORS) - {"expert_rows"}


@pytest.mark.parametrize("tied", [False, True])
def test_bfloat16_is_close_to_float32_and_its_gradients_run(tied):
    shape = dataclasses.replace(SHAPE, tied=tied)
    narrow, wide = Decoder(dataclasses.replace(shape, dtype=jnp.bfloat16)), Decoder(shape)
    params = jax.jit(wide.init)(jax.random.key(0))
    tokens = jnp.asarray(np.random.default_rng(4).integers(0, 97, (2, 24)))

    def loss(decoder, params):
        logits = decoder.logits(params, decoder.hidden(params, tokens, *_whole(tokens)))
        return jnp.mean(jax.nn.logsumexp(logits, -1) + jnp.square(logits).mean(-1))

    cast = narrow.cast(params)
    assert cast["layers"]["mlp"]["up"].dtype == jnp.bfloat16
    assert cast["layers"]["mlp_norm"]["scale"].dtype == cast["embedding"]["table"].dtype == jnp.float32
    got, gradients = jax.jit(jax.value_and_grad(lambda p: loss(narrow, p)))(cast)
    want, want_gradients = jax.jit(jax.value_and_grad(lambda p: loss(wide, p)))(params)
    assert float(got) == pytest.approx(float(want), rel=1e-3)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(want_gradients), strict=True):
        assert np.linalg.norm(np.asarray(a, np.float32) - b) < 0.05 * np.linalg.norm(b)


def test_axes_mirror_the_parameters():
    decoder = Decoder(SHAPE)
    params = jax.eval_shape(decoder.init, jax.random.key(0))
    assert jax.tree.map(lambda leaf: leaf.shape, params) == jax.tree.map(
        lambda leaf: leaf.shape, decoder.abstract_params
    )
    for axes, leaf in zip(
        jax.tree.leaves(decoder.axes, is_leaf=lambda node: isinstance(node, tuple)),
        jax.tree.leaves(params),
        strict=True,
    ):
        assert len(axes) == leaf.ndim


def test_layers_start_different_from_each_other():
    weights = jax.jit(Decoder(SHAPE).init)(jax.random.key(0))["layers"]["mlp"]["up"]
    assert not np.allclose(weights[0], weights[1])
