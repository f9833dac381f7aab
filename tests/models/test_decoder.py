"""Packed documents are those that stand alone; remat changes no gradient and keeps what it names; bfloat16."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.config.keys import PROJECTIONS, QKV, REMAT_TENSORS, Remat
from maxtext_lite.models import Decoder, DecoderShape, ExpertShape

SHAPE = DecoderShape(
    vocab_size=97,
    emb_dim=32,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=12,
    mlp_dim=48,
    num_layers=3,
)
TOKENS = np.random.default_rng(1).integers(0, 97, (2, 20))
ONES, POSITIONS = np.ones_like(TOKENS), np.broadcast_to(np.arange(20), TOKENS.shape)


def decoder_with(remat, **changed):
    saved, offloaded = (None, ()) if remat is None else remat
    return Decoder(
        dataclasses.replace(SHAPE, saved=saved, offloaded=offloaded, **changed)
    )


@pytest.fixture(scope="module")
def params():
    """Random ones: norms are not 1, so that every parameter matters."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: rng.normal(size=x.shape).astype(np.float32) / 10,
        Decoder(SHAPE).abstract_params,
    )


@pytest.mark.fast
def test_packed_documents_do_not_see_each_other(params):
    """Rows of the same width: three documents and padding in one, and each of them alone."""
    hidden = jax.jit(Decoder(SHAPE).hidden)
    segment, position = np.zeros((2, 2, 20), int)
    segment[0], position[0] = (
        np.repeat([1, 2, 3, 0], [4, 9, 5, 2]),
        np.r_[:4, :9, :5, :2],
    )
    together = hidden(params, TOKENS, segment, position)[0]
    for first, end in ((0, 4), (4, 13), (13, 18)):
        alone = np.roll(TOKENS, -first, axis=1)
        apart = hidden(params, alone, (end - first > POSITIONS).astype(int), POSITIONS)[
            0, : end - first
        ]
        np.testing.assert_allclose(together[first:end], apart, rtol=2e-5, atol=2e-5)


def loss(decoder, params):
    logits = decoder.logits(params, decoder.hidden(params, TOKENS, ONES, POSITIONS))
    return jnp.mean(jax.nn.logsumexp(logits, -1) + jnp.square(logits).mean(-1))


def loss_and_gradients(decoder, params):
    return jax.jit(jax.value_and_grad(lambda params: loss(decoder, params)))(params)


OFFLOADED = Remat(("context", "mlpwo"), ("decoder_layer_input", "mlpwi_0"))


def test_remat_changes_no_gradient_and_rounds_to_the_same_eight_bits(params):
    want = jax.device_get(
        loss_and_gradients(decoder_with(None, quantization="int8"), params)
    )
    found = loss_and_gradients(decoder_with(OFFLOADED, quantization="int8"), params)
    for got, right in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, right, rtol=0, atol=1e-4 * np.abs(right).max())


def kept_of(remat):
    """Shapes of what the forward pass of three layers keeps of each layer, and in which memory."""
    decoder = decoder_with(remat)
    forward = jax.make_jaxpr(lambda p: jax.vjp(lambda p: loss(decoder, p), p)[1])(
        decoder.abstract_params
    )
    return sorted(
        (aval.shape[3:], "Host" in str(aval.memory_space))
        for aval in forward.out_avals
        if aval.shape[:3] == (3, 2, 20)
    )


@pytest.mark.parametrize(
    ("tensors", "shapes"),
    [
        ((), []),
        (QKV, [(2, 12), (2, 12), (4, 12)]),
        (PROJECTIONS, [(2, 12), (2, 12), (4, 12), (32,), (48,), (48,)]),
    ],
    ids=str,
)
def test_what_is_named_is_kept_and_nothing_else(tensors, shapes):
    """Three layers of two rows of 20 tokens: D 32, N 4, K 2, H 12, F 48; beside them, the input of each layer.

    The mlp's result is not kept though it is named: the next layer's input holds it already.
    """
    own = ((32,), False)
    assert kept_of(Remat(tensors)) == sorted(
        [own, *((shape, False) for shape in shapes)]
    )
    assert kept_of(Remat((), tensors)) == sorted(
        [own, *((shape, True) for shape in shapes)]
    )
    assert kept_of(Remat((), ("decoder_layer_input",))) == [((32,), True)]


def test_every_name_of_a_tensor_is_one_that_the_model_gives():
    """A name that no tensor has would be a key that does nothing."""
    decoder = decoder_with(None, experts=ExpertShape(4, 2, 8))
    text = str(jax.make_jaxpr(lambda p: loss(decoder, p))(decoder.abstract_params))
    assert set(re.findall(r"name\[name=(\w+)", text)) == set(REMAT_TENSORS)


def test_bfloat16_is_close_to_float32_and_its_gradients_run(params):
    narrow, wide = (
        Decoder(dataclasses.replace(SHAPE, tied=True, dtype=dtype))
        for dtype in (jnp.bfloat16, np.float32)
    )
    params = {name: params[name] for name in wide.abstract_params}
    cast = jax.eval_shape(narrow.cast, params)
    assert cast["layers"]["mlp"]["up"].dtype == jnp.bfloat16
    assert (
        cast["layers"]["mlp_norm"]["scale"].dtype
        == cast["embedding"]["table"].dtype
        == np.float32
    )
    cast = jax.tree.map(lambda x, like: x.astype(like.dtype), params, cast)
    got, gradients = jax.device_get(loss_and_gradients(narrow, cast))
    want, want_gradients = jax.device_get(loss_and_gradients(wide, params))
    assert got == pytest.approx(want, rel=1e-3)
    for a, b in zip(
        jax.tree.leaves(gradients), jax.tree.leaves(want_gradients), strict=True
    ):
        assert np.linalg.norm(np.float32(a) - b) < 0.05 * np.linalg.norm(b)
