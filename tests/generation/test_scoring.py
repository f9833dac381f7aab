"""Log-likelihoods against a plain log-softmax, whatever the rows beside them; windows that score each token once."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.generation.requests import EvaluateConfig
from maxtext_lite.generation.scoring import Scorer, Span, TextScorer, evaluate, windows
from maxtext_lite.models import Decoder, DecoderShape
from maxtext_lite.parallel import MESH_AXES, make_mesh
from maxtext_lite.training.state import make_plain_decoder

SHAPE = DecoderShape(
    vocab_size=61, emb_dim=16, num_query_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=24, num_layers=2,
    final_soft_cap=3.0, initializer_range=0.3,
)  # fmt: skip


@pytest.fixture(scope="module")
def scorer():
    decoder = Decoder(SHAPE)
    mesh = make_mesh(dict.fromkeys(MESH_AXES, 1) | {"fsdp": 2}, dict.fromkeys(MESH_AXES, 1), jax.devices()[:2])
    params = jax.jit(decoder.init)(jax.random.key(0))
    with jax.default_matmul_precision("highest"):
        yield decoder, params, Scorer(decoder, params, mesh, rows_at_once=3)


def _by_hand(decoder, params, span):
    """One row by itself, unpadded, in float64 after the logits."""
    token = jnp.asarray([span.tokens[:-1]])
    position = jnp.arange(token.shape[1])[None]
    logits = np.float64(decoder.logits(params, decoder.hidden(params, token, jnp.ones_like(token), position)))[0]
    probability = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    at, target = np.arange(span.first - 1, len(span.tokens) - 1), np.array(span.tokens[span.first :])
    return probability[at, target].sum(), (logits[at].argmax(-1) == target).all()


def test_scores_equal_a_log_softmax_of_each_row_by_itself(scorer):
    decoder, params, scorer = scorer
    rng = np.random.default_rng(0)
    spans = [Span([int(t) for t in rng.integers(0, 61, n)], first) for n, first in ((9, 1), (70, 3), (2, 1), (30, 29))]
    token = spans[0].tokens[:3]  # and one whose continuation is the likeliest
    logits = decoder.logits(
        params, decoder.hidden(params, jnp.asarray([token]), jnp.ones((1, 3), int), jnp.arange(3)[None])
    )
    spans.append(Span([*token, int(logits[0, -1].argmax())], 3))
    for span, scored in zip(spans, scorer.score(spans), strict=True):
        likelihood, is_greedy = _by_hand(decoder, params, span)
        assert scored.log_likelihood == pytest.approx(likelihood, rel=1e-5)
        assert scored.is_greedy == is_greedy
        assert scored.num_tokens == len(span.tokens) - span.first
    assert scored.is_greedy


@pytest.mark.parametrize(
    ("count", "length", "stride"), [(2, 8, 7), (8, 8, 7), (9, 8, 7), (40, 8, 3), (41, 16, 1), (5, 2, 1)]
)
def test_windows_score_each_token_once_after_as_much_context_as_they_hold(count, length, stride):
    tokens, scored = list(range(count)), []
    for number, span in enumerate(windows(tokens, length=length, stride=stride)):
        assert 2 <= len(span.tokens) <= length
        assert list(span.tokens) == list(range(span.tokens[0], span.tokens[0] + len(span.tokens)))
        assert span.first == (1 if number == 0 else length - stride)
        scored += span.tokens[span.first :]
    assert scored == tokens[1:]


SIZES = ["base_emb_dim=16", "base_mlp_dim=32", "base_num_decoder_layers=1", "base_num_query_heads=2",
         "base_num_kv_heads=2", "head_dim=8", "max_target_length=32"]  # fmt: skip


@pytest.mark.parametrize(("positions", "works"), [
    (0, "Nearest that works: 42."),
    (41, "Nearest that works: 42."),
    (32, "The model has 32 learned positions, so no max_length works: shorten it."),
])  # fmt: skip
def test_a_continuation_longer_than_max_length_is_refused_before_the_model_is_loaded(positions, works, tmp_path):
    """Its first tokens would have no context, or positions that the model has not learned."""
    config = load_config(None, [*SIZES, f"trainable_position_size={positions}"])
    texts = TextScorer(tmp_path, config, max_length=32, rows_at_once=1, mesh={"tensor": 1, "fsdp": 1})
    said = f"has 40 tokens. max_length=32 has room for 31, after one of the context. {works}"
    with pytest.raises(UserError) as refusal:
        texts.continuations([("Q:" * 40, "a" * 31), ("Q:", "b" * 40), ("", "c" * 41)])
    assert str(refusal.value) == f"continuation 2 ({'b' * 40}) {said}"

    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({"context": "Q: ", "choices": ["yes", "b" * 40], "answer": 0}))
    with pytest.raises(UserError) as refusal:
        evaluate(tmp_path, config, EvaluateConfig(choices=str(path), max_length=32))
    assert str(refusal.value).startswith(
        f"choices={path}, question 1, choice 1 ({'b' * 40}) has 41 tokens"
    )  # and a blank
    path.write_text(json.dumps({"context": "Q:", "target": "b" * 40}))
    with pytest.raises(UserError, match=r"question 1 \( b+\) has 41 tokens"):
        evaluate(tmp_path, config, EvaluateConfig(cloze=str(path), max_length=32))


@pytest.mark.parametrize(("key", "content", "what"), [
    ("text", "abc", "text={path}, window 1 of 1,"),
    ("cloze", '{"context": "a", "target": "b"}', "cloze={path}, question 1 ( b)"),
])  # fmt: skip
def test_a_score_that_is_not_a_number_is_refused(key, content, what, tmp_path, monkeypatch):
    def damaged(directory, config, mesh):
        decoder = make_plain_decoder(config)
        params = jax.tree.map(lambda x: x * math.nan, jax.jit(decoder.init)(jax.random.key(0)))
        return decoder, params, make_mesh(dict.fromkeys(MESH_AXES, 1), dict.fromkeys(MESH_AXES, 1), jax.devices()[:1])

    monkeypatch.setattr("maxtext_lite.generation.scoring.load_on_mesh", damaged)
    path = tmp_path / "a"
    path.write_text(content)
    with pytest.raises(UserError) as refusal:
        evaluate(tmp_path, load_config(None, SIZES), EvaluateConfig(max_length=32, **{key: str(path)}))
    said = "has the log-probability nan in dtype=float32: the activations overflow, or the parameters are not finite."
    assert str(refusal.value) == f"{what.format(path=path)} {said}"
