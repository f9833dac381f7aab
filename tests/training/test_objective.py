"""The losses of pre-training, SFT and DPO are those of transformers and of the published formula, however split."""

import json
import math

import jax
import numpy as np
import pytest

from maxtext_lite.config import load_config
from maxtext_lite.config.hf.model_directory import hf_config
from maxtext_lite.data import open_sources
from maxtext_lite.hf import load_hf_parameters
from maxtext_lite.parallel import (
    MESH_AXES,
    Pipeline,
    make_mesh,
    sharding,
    tree_shardings,
)
from maxtext_lite.training.gradients import GradientLoop
from maxtext_lite.training.objective import NEXT_TOKEN, objective_of
from maxtext_lite.training.optimizer import make_optimizer
from maxtext_lite.training.preference import (
    Preference,
    pair_losses,
    pairs_of,
    segment_sums,
)
from maxtext_lite.training.state import StepParts, make_decoder
from maxtext_lite.training.step import EVAL_BATCH_AXES, make_eval_step
from tests import hf_models
from tests.gpu import unordered_sums
from tests.training.conftest import LENGTH

torch = pytest.importorskip("torch")

ANSWERS = {"!$": "AB", "*": "C#D", "!+!": "E", "##$%": "FGHIJ", "!": "K", "+*!": "BAD"}
"""Prompts and completions of bytes below 96, which the tiny models of transformers know."""


def test_the_objective_follows_from_the_data():
    assert objective_of(load_config(None, [])) is NEXT_TOKEN
    assert objective_of(load_config(None, ["dataset_type=sft"])) is NEXT_TOKEN
    keys = ["dataset_type=dpo", "dpo_beta=0.25", "dpo_label_smoothing=0.125"]
    assert objective_of(load_config(None, keys)) == Preference(0.25, 0.125)


def test_loss_and_gradient_of_answers_are_those_of_transformers(tmp_path, monkeypatch):
    """One conversation at a time, all that is no answer at -100: the mean over the answers' tokens of all."""
    model = hf_models.model("llama")
    model.zero_grad()
    total, count = 0.0, 0
    for prompt, completion in ANSWERS.items():
        answer = [*completion.encode(), 2]
        ids, labels = [*prompt.encode(), *answer], [-100] * len(prompt) + answer
        total = (
            total
            + len(answer)
            * model(torch.tensor([ids]), labels=torch.tensor([labels])).loss
        )
        count += len(answer)
    (total / count).backward()
    want = model.get_input_embeddings().weight.grad.numpy()

    path = tmp_path / "lines.jsonl"
    lines = [
        json.dumps({"prompt": prompt, "completion": completion})
        for prompt, completion in ANSWERS.items()
    ]
    path.write_text("\n".join(lines))
    directory = hf_models.save("llama", tmp_path / "hf")
    monkeypatch.setattr(
        "maxtext_lite.data.tokenizer.ByteTokenizer.end_of_text_id", 2
    )  # which the model knows
    monkeypatch.setattr("maxtext_lite.data.tokenizer.ByteTokenizer.vocab_size", 96)
    update = {
        "dataset_type": "sft",
        "dataset_path": str(path),
        "packing": True,
        "max_target_length": 16,
        "eval_fraction": 0,
        "tokenizer_type": "byte",
        "tokenizer_path": "",
    }
    config = hf_config(
        directory, ["eval_interval=-1", "optimizer=sgd", "dtype=float32"]
    ).model_copy(update=update)
    source, _ = open_sources(config)
    assert len(source) == 2  # six conversations, packed
    ones = dict.fromkeys(MESH_AXES, 1)
    mesh = make_mesh(ones, ones, jax.devices()[:1])
    decoder = make_decoder(config, "cpu")
    batch = {
        name: np.stack([source[row][name] for row in range(len(source))])[None]
        for name in source.fields
    }
    abstract = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=place
        ),
        decoder.abstract_params,
        tree_shardings(mesh, decoder.axes),
    )
    params = load_hf_parameters(directory, abstract, "HF_DIR")
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        step = GradientLoop(
            StepParts(decoder, make_optimizer(config, decoder.axes), mesh, config)
        ).of_step
        found = jax.device_get(jax.jit(step)(params, batch))
    assert found.target_tokens == found.num_counted == count == 21
    assert found.loss == pytest.approx(total.item() / count, rel=1e-5)
    gradient = found.gradients["embedding"]["table"]
    assert np.abs(gradient - want).max() <= 1e-4 * np.abs(want).max()


# ---- DPO ---------------------------------------------------------------------------------------

EXAMPLES, MOST_PAIRS = 8, 3
DPO = (
    "dataset_type=dpo",
    "dpo_beta=0.3",
    "dpo_label_smoothing=0.1",
    "optimizer=sgd",
    "gradient_clipping_threshold=0",
)


def published(
    policy_chosen,
    policy_rejected,
    reference_chosen,
    reference_rejected,
    beta,
    label_smoothing,
):
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
    rows = {
        name: np.zeros(shape, np.int32)
        for name in ("tokens", "targets", "segments", "positions")
    }
    rows |= {name: np.zeros(shape, np.float32) for name in ("weights", "reference")}
    counts = [1, 3, 2, 1, 3, 0, 2, 1]
    for example, count in enumerate(counts):
        for side in range(2):
            first = 0
            for segment in range(1, count + 1):
                length = int(rng.integers(2, LENGTH // MOST_PAIRS + 1))
                here = (example, side, slice(first, first + length))
                rows["tokens"][here], rows["targets"][here] = rng.integers(
                    0, 264, (2, length)
                )
                rows["segments"][here] = segment
                rows["positions"][here] = np.arange(length)
                answer = rng.random(length) < 0.6
                answer[-1] = True
                rows["weights"][here] = answer
                rows["reference"][example, side, first] = (
                    -5 * answer.sum() + rng.normal()
                )
                first += length
    return {name: x.reshape(EXAMPLES, 2 * LENGTH) for name, x in rows.items()}, sum(
        counts
    )


def in_double(nll, rows, beta, label_smoothing):
    """Mean loss, log-ratios [pairs, 2] and d loss / d nll [EXAMPLES, 2, T] by a loop over pairs in torch's doubles."""
    nll = torch.tensor(nll, dtype=torch.float64, requires_grad=True)
    side = {name: x.reshape(EXAMPLES, 2, LENGTH) for name, x in rows.items()}
    losses, ratios = [], []
    for example in range(EXAMPLES):
        for segment in range(1, side["segments"][example].max() + 1):
            policy, reference = [], []
            for which in range(2):
                in_segment = side["segments"][example, which] == segment
                is_answer = in_segment & (side["weights"][example, which] > 0)
                policy.append(-nll[example, which][torch.tensor(is_answer)].sum())
                reference.append(
                    torch.tensor(
                        side["reference"][example, which][in_segment]
                        .astype(np.float64)
                        .sum()
                    )
                )
            losses.append(published(*policy, *reference, beta, label_smoothing))
            ratios.append(
                [(p - r).item() for p, r in zip(policy, reference, strict=True)]
            )
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item(), np.array(ratios), nll.grad.numpy()


@pytest.mark.fast
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_the_loss_of_pairs_is_the_published_one(label_smoothing):
    log_probabilities = np.random.default_rng(0).normal(-30, 20, (4, 50))
    log_probabilities[:, 0] = 0
    policy, reference = log_probabilities[:2], log_probabilities[2:]
    margin = (policy[0] - reference[0]) - (policy[1] - reference[1])
    want = published(
        *map(torch.tensor, log_probabilities), 0.1, label_smoothing
    ).numpy()
    got = jax.jit(
        lambda margin: pair_losses(margin, beta=0.1, label_smoothing=label_smoothing)
    )(margin)
    np.testing.assert_allclose(got, want, rtol=2e-6)
    assert float(got[0]) == pytest.approx(math.log(2))


def test_sums_over_segments_are_those_by_hand_and_have_an_order_on_gpus():
    sums = jax.jit(segment_sums)
    values, segments = (
        np.array([[1.0, 2.0, 4.0, 8.0]], np.float32),
        np.array([[2, 1, 2, 0]], np.int32),
    )
    np.testing.assert_array_equal(sums(values, segments), [[8, 2, 5, 0, 0]])
    traced = sums.trace(np.zeros((2, 300), np.float32), np.zeros((2, 300), np.int32))
    assert unordered_sums(traced.lower(lowering_platforms=("cuda",)).as_text()) == []


@pytest.fixture(scope="module")
def by_hand(pairs, setup):
    """Loss, log-ratios [pairs, 2] and gradients of a decoder, by plain log_softmax and the published formula."""
    examples, _ = pairs
    it = setup(*DPO)
    rows = {name: x.reshape(2 * EXAMPLES, LENGTH) for name, x in examples.items()}

    def nll_of(params):
        x = it.decoder.hidden(
            params, rows["tokens"], rows["segments"], rows["positions"]
        )
        log_probability = jax.nn.log_softmax(x @ it.decoder.head(params))
        return -jax.numpy.take_along_axis(
            log_probability, rows["targets"][..., None], -1
        )[..., 0]

    @jax.jit
    def forward_and_backward(params, slope):
        nll, backward = jax.vjp(nll_of, params)
        return nll, backward(slope)[0]

    params = it.initial.params
    with jax.default_matmul_precision("highest"):
        nll, _ = forward_and_backward(
            params, np.zeros((2 * EXAMPLES, LENGTH), np.float32)
        )
        loss, ratios, slope = in_double(
            np.asarray(nll).reshape(EXAMPLES, 2, LENGTH), examples, 0.3, 0.1
        )
        _, gradients = forward_and_backward(
            params, slope.reshape(2 * EXAMPLES, LENGTH).astype(np.float32)
        )
    return loss, ratios, jax.device_get(gradients)


@pytest.mark.parametrize(
    ("accumulation", "slots", "mesh", "pipeline", "keys"),
    [
        (
            4,
            4,
            {"data": 2, "context": 2},
            None,
            ("num_vocab_tiling=2",),
        ),  # with empty slots
        (2, 4, {"data": 2}, Pipeline(2, 2, schedule="1f1b"), ()),
    ],
    ids=str,
)
def test_the_step_is_that_of_the_formula_however_it_is_split(
    accumulation, slots, mesh, pipeline, keys, pairs, setup, by_hand, agrees
):
    examples, num_pairs = pairs
    loss, ratios, gradients = by_hand
    it = setup(*DPO, *keys, **mesh, pipeline=pipeline)
    got = it.gradients(it.state().params, it.batch(examples, accumulation, slots))
    agrees(
        jax.tree.map(
            lambda g, like: np.reshape(g, like.shape), got.gradients, gradients
        ),
        gradients,
    )
    assert got.loss == pytest.approx(loss, rel=1e-5)
    assert (got.num_counted, got.examples) == (
        num_pairs,
        EXAMPLES - 1,
    )  # one example is empty
    assert got.target_tokens == np.count_nonzero(examples["weights"])
    margin = ratios[:, 0] - ratios[:, 1]
    assert got.aux["reward_accuracy"] == pytest.approx((margin > 0).mean())
    assert got.aux["reward_chosen"] - got.aux["reward_rejected"] == pytest.approx(
        0.3 * margin.mean(), rel=1e-4
    )


def test_scores_and_their_evaluation_are_those_of_the_formula(pairs, setup, by_hand):
    examples, num_pairs = pairs
    loss, ratios, _ = by_hand
    it = setup(*DPO, data=2, fsdp=2)
    batch = jax.device_put(examples, sharding(it.mesh, EVAL_BATCH_AXES))
    with jax.set_mesh(it.mesh), jax.default_matmul_precision("highest"):
        scores = jax.device_get(make_eval_step(it.parts)(it.state().params, batch))
    np.testing.assert_allclose(pairs_of(scores), ratios, rtol=1e-4, atol=1e-5)
    margin = ratios[:, 0] - ratios[:, 1]
    found = objective_of(it.config).evaluation([scores, scores])
    assert found.pop("eval_loss") == pytest.approx(loss, rel=1e-5)
    assert found.pop("eval_reward_margin") == pytest.approx(
        0.3 * margin.mean(), rel=1e-4
    )
    assert found == {
        "eval_target_tokens": 2 * np.count_nonzero(examples["weights"]),
        "eval_pairs": 2 * num_pairs,
        "eval_reward_accuracy": (margin > 0).mean(),
    }
