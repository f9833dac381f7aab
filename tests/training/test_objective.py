"""The losses of SFT and of pairs are those of transformers and of the published formula.

Their steps, however split: tests/invariance/test_matrix.py.
"""

import functools

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from maxtext_lite.data import open_sources
from maxtext_lite.hf.model_directory import hf_config
from maxtext_lite.hf.weights import load_hf_parameters
from maxtext_lite.parallel import sharding
from maxtext_lite.post_training.dpo import pair_losses, pairs_of, segment_sums
from maxtext_lite.training.evaluation import EVAL_BATCH_AXES, make_eval_step
from maxtext_lite.training.gradients import step_gradients
from maxtext_lite.training.objective import objective_of
from maxtext_lite.training.optimizer import make_optimizer
from maxtext_lite.training.state import StepContext, make_decoder
from tests import hf_models
from tests.gpu import unordered_sums
from tests.meshes import abstract_parameters, mesh_of
from tests.run_directories import write_lines
from tests.training.conftest import LENGTH, pairs_of_answers

torch = pytest.importorskip("torch")

ANSWERS = {"!$": "AB", "*": "C#D", "!+!": "E", "##$%": "FGHIJ", "!": "K", "+*!": "BAD"}
"""Prompts and completions of bytes below 96, which the tiny models of transformers know."""


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

    lines = [{"prompt": prompt, "completion": each} for prompt, each in ANSWERS.items()]
    path = write_lines(tmp_path / "lines.jsonl", lines)
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
    mesh = mesh_of()
    decoder = make_decoder(config, "cpu")
    batch = {
        name: np.stack([source[row][name] for row in range(len(source))])[None]
        for name in source.fields
    }
    abstract = abstract_parameters(decoder, mesh)
    params = load_hf_parameters(directory, abstract, "HF_DIR")
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        parts = StepContext(decoder, make_optimizer(config, decoder.axes), mesh, config)
        step = jax.jit(functools.partial(step_gradients, parts))
        found = jax.device_get(step(params, batch))
    assert found.counts["target_tokens"] == count == 21
    assert found.losses.loss == pytest.approx(total.item() / count, rel=1e-5)
    gradient = found.gradients["embedding"]["table"]
    assert np.abs(gradient - want).max() <= 1e-4 * np.abs(want).max()


# ---- DPO ---------------------------------------------------------------------------------------


def published(margin, label_smoothing):
    """The sigmoid loss as TRL publishes it, of beta times the margin, in double precision."""
    right, wrong = np.logaddexp(0, -margin), np.logaddexp(0, margin)
    return right * (1 - label_smoothing) + wrong * label_smoothing


@pytest.mark.fast
def test_the_loss_of_pairs_is_the_published_one():
    margin = np.concatenate([[0], np.random.default_rng(0).normal(0, 40, 50)])
    got = pair_losses(margin, beta=0.1, label_smoothing=0.2)
    assert_allclose(got, published(0.1 * margin, 0.2), rtol=2e-6)


def test_sums_over_segments_are_those_by_hand_and_have_an_order_on_gpus():
    sums = jax.jit(segment_sums)
    values, segments = (
        np.array([[1.0, 2.0, 4.0, 8.0]], np.float32),
        np.array([[2, 1, 2, 0]], np.int32),
    )
    assert_array_equal(sums(values, segments), [[8, 2, 5, 0, 0]])
    traced = sums.trace(np.zeros((2, 300), np.float32), np.zeros((2, 300), np.int32))
    assert unordered_sums(traced.lower(lowering_platforms=("cuda",)).as_text()) == []


def test_scores_and_their_evaluation_are_those_of_the_formula(setup):
    rows = pairs_of_answers(4)
    it = setup(
        "dataset_type=dpo", "dpo_beta=0.3", "dpo_label_smoothing=0.1", data=2, fsdp=2
    )
    flat = {name: x.reshape(8, LENGTH) for name, x in rows.items()}
    where = sharding(it.mesh, EVAL_BATCH_AXES)
    batch = {name: jax.device_put(x, where) for name, x in rows.items()}
    params = it.initial.params
    with jax.default_matmul_precision("highest"):
        x = it.decoder.hidden(
            params, flat["tokens"], flat["segments"], flat["positions"]
        )
        log_probability = jax.nn.log_softmax(x @ it.decoder.head(params))
        with jax.set_mesh(it.mesh):
            scores = make_eval_step(it.parts)(it.state().params, batch)
    of_target = np.take_along_axis(
        np.asarray(log_probability), flat["targets"][..., None], -1
    )
    above = (of_target[..., 0] * flat["weights"] - flat["reference"]).reshape(
        4, 2, LENGTH
    )
    segments = rows["segments"].reshape(4, 2, LENGTH)
    ratios = []
    for above_of_example, segment in zip(above, segments, strict=True):
        for pair in range(1, segment.max() + 1):
            ratios.append((above_of_example * (segment == pair)).sum(axis=1))
    scores = jax.device_get(scores)
    assert_allclose(pairs_of(scores), ratios, rtol=1e-4, atol=1e-5)
    margin = 0.3 * np.subtract(*np.transpose(ratios))
    found = objective_of(it.config).evaluation([scores, scores])
    assert found.pop("eval_loss") == pytest.approx(
        published(margin, 0.1).mean(), rel=1e-5
    )
    assert found.pop("eval_reward_margin") == pytest.approx(margin.mean(), rel=1e-4)
    assert found == {
        "eval_target_tokens": 2 * np.count_nonzero(rows["weights"]),
        "eval_pairs": 2 * len(ratios),
        "eval_reward_accuracy": (margin > 0).mean(),
    }
