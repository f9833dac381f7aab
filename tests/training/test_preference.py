"""DPO's loss, rewards and gradients follow the formula, however a batch is split."""

import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.models import DecoderShape
from maxtext_lite.parallel import Pipeline, sharding
from maxtext_lite.training.objective import objective_of
from maxtext_lite.training.outputs import WHOLE, Outputs, TokenSplit
from maxtext_lite.training.preference import Preference, pair_losses, pairs_of, segment_sums
from maxtext_lite.training.step import EVAL_BATCH_AXES, make_eval_step, make_summarise
from tests.gpu import unordered_sums
from tests.training.conftest import LENGTH

torch = pytest.importorskip("torch")

EXAMPLES, MOST_PAIRS = 8, 3
DPO = ("dataset_type=dpo", "dpo_beta=0.3", "dpo_label_smoothing=0.1", "optimizer=sgd", "gradient_clipping_threshold=0")


def published(policy_chosen, policy_rejected, reference_chosen, reference_rejected, beta, label_smoothing):
    """The sigmoid loss as TRL publishes it, in torch's double precision."""
    logits = (policy_chosen - policy_rejected) - (reference_chosen - reference_rejected)
    right = torch.nn.functional.logsigmoid(beta * logits)
    wrong = torch.nn.functional.logsigmoid(-beta * logits)
    return -right * (1 - label_smoothing) - wrong * label_smoothing


@pytest.fixture(scope="module")
def pairs():
    """Examples [8, 2 T] of up to 3 pairs with ragged answers of several stretches; one whose rows are empty."""
    rng = np.random.default_rng(3)
    shape = (EXAMPLES, 2, LENGTH)
    rows = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets", "segments", "positions")}
    rows |= {name: np.zeros(shape, np.float32) for name in ("weights", "reference")}
    counts = [1, 3, 2, 1, 3, 0, 2, 1]
    for example, count in enumerate(counts):
        for side in range(2):
            first = 0
            for segment in range(1, count + 1):
                length = int(rng.integers(2, LENGTH // MOST_PAIRS + 1))
                here = (example, side, slice(first, first + length))
                rows["tokens"][here], rows["targets"][here] = rng.integers(0, 264, (2, length))
                rows["segments"][here], rows["positions"][here] = segment, np.arange(length)
                answer = rng.random(length) < 0.6
                answer[-1] = True
                rows["weights"][here] = answer
                rows["reference"][example, side, first] = -5 * answer.sum() + rng.normal()
                first += length
    return {name: x.reshape(EXAMPLES, 2 * LENGTH) for name, x in rows.items()}, sum(counts)


def in_double(nll, rows, beta, label_smoothing):
    """Mean loss, rewards and d loss / d nll [EXAMPLES, 2, T] by a loop over pairs in torch's double precision."""
    nll = torch.tensor(nll, dtype=torch.float64, requires_grad=True)
    side = {name: x.reshape(EXAMPLES, 2, LENGTH) for name, x in rows.items()}
    losses, ratios = [], []
    for example in range(EXAMPLES):
        for segment in range(1, side["segments"][example].max() + 1):
            policy, reference = [], []
            for which in range(2):
                is_answer = (side["segments"][example, which] == segment) & (side["weights"][example, which] > 0)
                policy.append(-nll[example, which][torch.tensor(is_answer)].sum())
                in_segment = side["segments"][example, which] == segment
                reference.append(torch.tensor(side["reference"][example, which][in_segment].astype(np.float64).sum()))
            losses.append(published(*policy, *reference, beta, label_smoothing))
            ratios.append([(p - r).item() for p, r in zip(policy, reference, strict=True)])
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item(), beta * np.array(ratios), nll.grad.numpy()


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_the_loss_of_pairs_is_the_published_one(label_smoothing):
    rng = np.random.default_rng(0)
    log_probabilities = rng.normal(-30, 20, (4, 50))
    policy, reference = log_probabilities[:2], log_probabilities[2:]
    margin = (policy[0] - reference[0]) - (policy[1] - reference[1])
    want = published(*map(torch.tensor, log_probabilities), 0.1, label_smoothing).numpy()
    got = pair_losses(jnp.asarray(margin), beta=0.1, label_smoothing=label_smoothing)
    np.testing.assert_allclose(got, want, rtol=2e-6)
    assert float(pair_losses(jnp.zeros(()), beta=7.0, label_smoothing=label_smoothing)) == pytest.approx(math.log(2))


def test_sums_over_segments_by_hand():
    sums = segment_sums(jnp.array([[1.0, 2.0, 4.0, 8.0]]), jnp.array([[2, 1, 2, 0]]))
    np.testing.assert_array_equal(sums, [[8, 2, 5, 0, 0]])


def test_sums_over_segments_have_an_order_on_gpus():
    traced = jax.jit(segment_sums).trace(jnp.zeros((2, 300)), jnp.zeros((2, 300), jnp.int32))
    assert unordered_sums(traced.lower(lowering_platforms=("cuda",)).as_text()) == []


@pytest.mark.parametrize("tiles", [1, 4])
def test_loss_and_gradients_of_logits_are_those_in_double_precision(tiles, pairs, setup):
    """Hidden states and output projection at random: the gradients of both, through softmax, by hand."""
    examples, num_pairs = pairs
    objective = Preference(0.3, 0.1)
    rows = {name: jnp.asarray(x.reshape(2 * EXAMPLES, LENGTH)) for name, x in examples.items()}
    rng = np.random.default_rng(1)
    x, head = rng.normal(size=(2 * EXAMPLES, LENGTH, 6)), rng.normal(size=(6, 264))
    logits = x @ head
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    targets = examples["targets"].reshape(2 * EXAMPLES, LENGTH)
    nll = -np.log(np.take_along_axis(probability, targets[..., None], -1)[..., 0])
    want, rewards, slope = in_double(nll.reshape(EXAMPLES, 2, LENGTH), examples, 0.3, 0.1)
    dlogits = slope.reshape(2 * EXAMPLES, LENGTH, 1) * (probability - np.eye(264)[targets])

    decoder = types.SimpleNamespace(head=lambda params: params, shape=DecoderShape(264, 6, 1, 1, 2, 2, 1))
    config = setup(*DPO, f"num_vocab_tiling={tiles}").config
    # The tokens of a row may be shared out: [2, T] as [4, T / 2], and back.
    cut = TokenSplit(lambda a: a.reshape(-1, LENGTH // 2, *a.shape[2:]), lambda a: a.reshape(-1, LENGTH, *a.shape[2:]))
    for tokens in (WHOLE, cut):
        x_BTD = tokens.split(jnp.asarray(x, jnp.float32))

        def loss(head_DV, x_BTD, tokens=tokens):
            outputs = Outputs(decoder, head_DV, x_BTD, {}, config, tokens)
            return objective.loss(outputs, rows, jnp.float32(1 / num_pairs))

        with jax.default_matmul_precision("highest"):
            differentiated = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
            (_, sums), (dhead, dx) = differentiated(jnp.asarray(head, jnp.float32), x_BTD)
        assert float(sums.nll) == pytest.approx(want, rel=1e-5)
        assert [
            float(sums.aux[name]) for name in ("reward_chosen", "reward_rejected", "reward_accuracy")
        ] == pytest.approx([*rewards.mean(0), (rewards[:, 0] > rewards[:, 1]).mean()], rel=1e-4)
        np.testing.assert_allclose(dx.reshape(x.shape), dlogits @ head.T, rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(dhead, np.einsum("BTD,BTV->DV", x, dlogits), rtol=1e-3, atol=1e-5)


@pytest.fixture(scope="module")
def by_hand(pairs, setup):
    """Loss, gradients and log-ratios of a decoder by plain log_softmax and the published formula, without our loss."""
    examples, num_pairs = pairs
    it = setup(*DPO)
    rows = {name: x.reshape(2 * EXAMPLES, LENGTH) for name, x in examples.items()}
    chosen_of_segment = np.eye(MOST_PAIRS + 1)[rows["segments"]][..., 1:]  # [row, token, pair]

    def mean_loss(params):
        x = it.decoder.hidden(params, rows["tokens"], rows["segments"], rows["positions"])
        log_probability = jax.nn.log_softmax(jnp.einsum("BTD,DV->BTV", x, it.decoder.head(params)))
        of_target = jnp.take_along_axis(log_probability, rows["targets"][..., None], -1)[..., 0]
        ratio = jnp.einsum("rt,rtp->rp", of_target * rows["weights"] - rows["reference"], chosen_of_segment)
        margin = 0.3 * (ratio[::2] - ratio[1::2])
        losses = 0.9 * jnp.log1p(jnp.exp(-margin)) + 0.1 * jnp.log1p(jnp.exp(margin))
        is_pair = chosen_of_segment[::2].any(axis=1)
        return jnp.sum(losses * is_pair) / num_pairs, ratio

    with jax.default_matmul_precision("highest"):
        (loss, ratio), gradients = jax.jit(jax.value_and_grad(mean_loss, has_aux=True))(it.initial.params)
    return float(loss), np.asarray(ratio), jax.device_get(gradients)


PIPES = (*DPO, "base_num_decoder_layers=2")
# (accumulation, row slots of a micro-batch, mesh, pipeline, further keys)
SPLITS = {
    "A=1 on 1": (1, 8, {}, None, ()),
    "A=2 on data 2 fsdp 2 tensor 2": (2, 4, {"data": 2, "fsdp": 2, "tensor": 2}, None, ("num_vocab_tiling=2",)),
    "A=4 on data 2, empty slots": (4, 4, {"data": 2}, None, ()),
    "A=1 on data 2 context 4": (1, 8, {"data": 2, "context": 4}, None, ()),
    "A=2 on 2 stages, gpipe": (2, 4, {"fsdp": 2}, Pipeline(2, 2), ()),
    "A=2 on 2 stages, 1f1b, data 2": (2, 4, {"data": 2}, Pipeline(2, 2, schedule="1f1b"), ()),
}  # fmt: skip


@pytest.mark.parametrize("split", SPLITS)
def test_the_step_is_that_of_the_formula_however_it_is_split(split, pairs, setup, by_hand, agrees):
    accumulation, slots, mesh, pipeline, keys = SPLITS[split]
    examples, num_pairs = pairs
    loss, ratio, gradients = by_hand
    it = setup(*DPO, *keys, **mesh, pipeline=pipeline)
    got = it.gradients(it.state().params, it.batch(examples, accumulation, slots))
    agrees(jax.tree.map(lambda g, like: np.reshape(g, like.shape), got.gradients, gradients), gradients)
    assert got.loss == pytest.approx(loss, rel=1e-5)
    assert (got.num_counted, got.examples) == (num_pairs, EXAMPLES - 1)  # one example is empty
    assert got.target_tokens == np.count_nonzero(examples["weights"])
    margin = (ratio[::2] - ratio[1::2])[pairs_in(examples)]
    assert got.aux["reward_accuracy"] == pytest.approx((margin > 0).mean())
    assert got.aux["reward_chosen"] - got.aux["reward_rejected"] == pytest.approx(0.3 * margin.mean(), rel=1e-4)


def pairs_in(examples):
    """Which of MOST_PAIRS segments each example has; bool [EXAMPLES, MOST_PAIRS]."""
    return np.arange(MOST_PAIRS) < examples["segments"].max(axis=1)[:, None]


def test_scores_and_their_evaluation_are_those_of_the_formula(pairs, setup, by_hand):
    examples, num_pairs = pairs
    loss, ratio, _ = by_hand
    for mesh in ({}, {"data": 2, "fsdp": 2}):
        it = setup(*DPO, **mesh)
        objective = objective_of(it.config)
        batch = jax.device_put(examples, sharding(it.mesh, EVAL_BATCH_AXES))
        with jax.set_mesh(it.mesh), jax.default_matmul_precision("highest"):
            step = make_eval_step(it.parts)
            scores = jax.device_get(step(it.state().params, batch))
        want = np.moveaxis(ratio.reshape(EXAMPLES, 2, MOST_PAIRS), 1, 2)[pairs_in(examples)]
        np.testing.assert_allclose(pairs_of(scores), want, rtol=1e-4, atol=1e-5)
        found = objective.evaluation([scores, scores])
        margin = want[:, 0] - want[:, 1]
        assert found.pop("eval_loss") == pytest.approx(loss, rel=1e-5)
        assert found.pop("eval_reward_margin") == pytest.approx(0.3 * margin.mean(), rel=1e-4)
        assert found == {
            "eval_target_tokens": 2 * np.count_nonzero(examples["weights"]),
            "eval_pairs": 2 * num_pairs,
            "eval_reward_accuracy": (margin > 0).mean(),
        }


def test_five_steps_agree_on_one_device_and_on_four_and_local_updates_count_pairs(pairs, setup, agrees):
    examples, num_pairs = pairs
    results = []
    for accumulation, slots, mesh in ((1, 8, {}), (2, 4, {"data": 2, "fsdp": 2})):
        it = setup(*DPO, "learning_rate=0.5", **mesh)
        batch = it.batch(examples, accumulation, slots)
        results.append(it.run(it.compile_step(batch), batch, 5))
    (state, metrics), (other, other_metrics) = results
    agrees(other.params, state.params)
    for name in ("loss", "reward_margin", "reward_chosen", "reward_accuracy", "grad_norm"):
        np.testing.assert_allclose([m[name] for m in other_metrics], [m[name] for m in metrics], rtol=1e-5)
    assert [m["pairs"] for m in metrics] == [num_pairs] * 5
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    # Replicas that have parameters of their own: means over all pairs, whoever has them.
    it = setup(*DPO, "enable_diloco=true", data=2, replicas=2)
    batch = it.batch(examples, 1, 8)
    _, (local,) = it.run(it.compile_step(batch), batch, 1)
    with jax.set_mesh(it.mesh):
        whole = jax.device_get(make_summarise(it.parts)(local))
    assert local["pairs"].tolist() == [7, 6]
    for name in ("loss", "reward_margin", "reward_accuracy"):
        assert whole[name] == pytest.approx(metrics[0][name], rel=1e-5)


def test_auxiliary_losses_of_experts_weigh_pairs_alike(pairs, setup, agrees):
    examples, _ = pairs
    keys = (*DPO, "num_experts=4", "num_experts_per_tok=2", "base_moe_mlp_dim=8", "load_balance_loss_weight=0.5",
            "router_z_loss_multiplier=0.1")  # fmt: skip
    found = []
    for accumulation, slots, mesh in ((1, 8, {}), (4, 2, {"fsdp": 2})):
        it = setup(*keys, **mesh)
        found.append(it.gradients(it.state().params, it.batch(examples, accumulation, slots)))
    agrees(found[1].gradients, found[0].gradients)
    for name, value in found[0].aux.items():
        assert found[1].aux[name] == pytest.approx(value, rel=1e-5)
    # The balance loss is 1 where choices are even, a little more elsewhere: a mean over pairs, not over rows.
    assert 0.9 < found[0].aux["moe_balance"] < 2
