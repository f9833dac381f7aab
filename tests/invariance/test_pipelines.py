"""The schedule gpipe, with every number of stages, rounds and microbatches, is no pipeline: the updates agree."""

import json
import shutil

import jax
import numpy as np
import pytest

from maxtext_lite.config import load_config
from maxtext_lite.parallel import Pipeline, sharding
from maxtext_lite.training import train
from maxtext_lite.training.step import EVAL_BATCH_AXES, make_eval_step
from maxtext_lite.xla.hlo import collectives
from tests.invariance.conftest import CUSTOM
from tests.training.conftest import TINY, agrees, rows, setup  # noqa: F401

FOUR_LAYERS = ("optimizer=sgd", "base_num_decoder_layers=4", "learning_rate=0.5")
# (stages, microbatches, rounds), (accumulation, row slots of a micro-batch), other axes
PIPELINES = [
    ((2, 2, 1), (1, 16), {}),
    ((2, 4, 1), (4, 4), {}),
    ((2, 8, 1), (2, 8), {"tensor": 2}),
    ((2, 2, 2), (2, 8), {"data": 2, "fsdp": 2}),
    ((2, 4, 2), (1, 16), {"fsdp": 2, "tensor": 2}),
    ((2, 8, 2), (1, 16), {"data": 2}),
    ((4, 4, 1), (3, 8), {"fsdp": 2}),
    ((4, 8, 1), (1, 16), {"tensor": 2}),
    ((4, 16, 1), (1, 16), {}),
]


@pytest.fixture(scope="module")
def plain(setup, rows):  # noqa: F811
    it = setup(*FOUR_LAYERS)
    batch = it.batch(rows, 1, 16)
    return it, it.gradients(it.initial.params, batch), it.run(it.compile_step(batch), batch, 5)


@pytest.fixture(scope="module")
def of_custom_loss(setup, rows):  # noqa: F811
    it = setup(*FOUR_LAYERS, objective=CUSTOM)
    return it.gradients(it.initial.params, it.batch(rows, 1, 16))


def flat(tree, like):
    """Parameters of several rounds, [repeats, L / repeats, ...], as [L, ...]."""
    return jax.tree.map(lambda x, y: np.reshape(x, y.shape), tree, like)


@pytest.mark.parametrize(("pipeline", "batch", "mesh"), PIPELINES, ids=str)
def test_gradients_agree(pipeline, batch, mesh, setup, rows, plain, agrees):  # noqa: F811
    _, want, _ = plain
    it = setup(*FOUR_LAYERS, **mesh, pipeline=Pipeline(*pipeline))
    got = it.gradients(it.state().params, it.batch(rows, *batch))
    agrees(flat(got.gradients, want.gradients), want.gradients)
    assert got.loss == pytest.approx(want.loss, rel=1e-6)
    assert got.target_tokens == want.target_tokens


@pytest.mark.parametrize(("pipeline", "batch", "mesh"), PIPELINES[1::2], ids=str)
def test_gradients_of_a_custom_loss_agree(pipeline, batch, mesh, setup, rows, of_custom_loss, agrees):  # noqa: F811
    want = of_custom_loss
    it = setup(*FOUR_LAYERS, **mesh, pipeline=Pipeline(*pipeline), objective=CUSTOM)
    got = it.gradients(it.state().params, it.batch(rows, *batch))
    agrees(flat(got.gradients, want.gradients), want.gradients)
    assert got.loss == pytest.approx(want.loss, rel=1e-5)
    assert got.num_counted == want.num_counted


def test_gradients_of_four_stages_with_two_rounds_of_eight_layers_agree(setup, rows, agrees):  # noqa: F811
    """One layer at a time on each device, which a piece visits twice; with as many pieces as stages, and with more."""
    keys = ("optimizer=sgd", "base_num_decoder_layers=8", "base_emb_dim=8", "base_mlp_dim=8")
    one = setup(*keys)
    want = one.gradients(one.initial.params, one.batch(rows, 1, 16))
    for microbatches, batch, mesh in ((4, (2, 8), {}), (8, (1, 16), {"fsdp": 2})):
        it = setup(*keys, **mesh, pipeline=Pipeline(4, microbatches, 2))
        got = it.gradients(it.state().params, it.batch(rows, *batch))
        agrees(flat(got.gradients, want.gradients), want.gradients)
        assert got.loss == pytest.approx(want.loss, rel=1e-6)
        assert got.target_tokens == want.target_tokens


def test_five_steps_and_the_evaluation_of_another_batch_agree(setup, rows, plain, agrees):  # noqa: F811
    one, _, (want, want_metrics) = plain
    it = setup(*FOUR_LAYERS, data=2, fsdp=2, pipeline=Pipeline(2, 2, 2))
    batch = it.batch(rows, 1, 16)
    got, metrics = it.run(it.compile_step(batch), batch, 5)
    agrees(flat(got.params, want.params), want.params)
    for name in ("loss", "grad_norm", "param_norm"):
        np.testing.assert_allclose([m[name] for m in metrics], [m[name] for m in want_metrics], rtol=1e-5)
    results = []
    for each, state in ((one, want), (it, got)):
        eight = {name: jax.device_put(x[:8], sharding(each.mesh, EVAL_BATCH_AXES)) for name, x in rows.items()}
        with jax.set_mesh(each.mesh), jax.default_matmul_precision("highest"):
            results.append(jax.device_get(make_eval_step(each.parts)(state.params, eight)))
    np.testing.assert_allclose(results[1][0], results[0][0], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(results[1][1], results[0][1])


def test_stages_hand_over_by_permutes_and_keep_their_parameters(setup, rows):  # noqa: F811
    it = setup(*FOUR_LAYERS, pipeline=Pipeline(2, 4, 2))
    found = [c for c in collectives(it.compile_step(it.batch(rows, 2, 8)).as_text()) if "stage" in c.axes(it.mesh)]
    assert [c for c in found if c.kind == "collective-permute" and c.in_loop]
    for c in found:
        if c.kind == "all-gather":  # what the embedding gives to the first stage, and its gradient: [.., T, D]
            shape = c.line.split(" all-gather")[0].split("[")[1].split("]")[0]
            assert tuple(map(int, shape.split(",")))[-2:] == (32, 16), c.line


RUN = [*TINY, "base_num_decoder_layers=4", "dataset_type=synthetic", "steps=8", "warmup_steps=1", "eval_interval=4",
       "eval_steps=2", "eval_per_device_batch_size=0.75", "checkpoint_period=4", "enable_rampup_batch_size=true",
       "per_device_batch_size=1", "per_device_batch_size_start=0.5", "per_device_batch_size_increment=0.5",
       "global_rampup_samples=16"]  # fmt: skip
RUNS = {
    "none": ["ici_data_parallelism=2"],
    "circular": ["ici_pipeline_parallelism=2", "ici_data_parallelism=2", "num_pipeline_microbatches=2"],
    "1f1b": ["ici_pipeline_parallelism=4", "pipeline_schedule=1f1b", "rampup_mode=gradient_accumulation_steps",
             "per_device_batch_size=0.5", "gradient_accumulation_steps=2", "per_device_batch_size_start=0.25",
             "per_device_batch_size_increment=0.25"],
}  # fmt: skip


def lines_of(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_ramped_runs_agree_and_resume_from_each_others_checkpoints(tmp_path):
    """Whole runs of two stages of batch sizes, evaluated at a third; then one pipeline goes on where another was."""

    def config(name, keys):
        return load_config(None, [*RUN, *keys, f"base_output_directory={tmp_path}", f"run_name={name}"])

    for name, keys in RUNS.items():
        train(config(name, keys))
    want = lines_of(tmp_path / "none")
    assert [line["global_batch_to_train"] for line in want if "loss" in line] == [4] * 4 + [8] * 4
    for other in ("circular", "1f1b"):
        shutil.copytree(tmp_path / "none", tmp_path / f"from none to {other}")
        shutil.rmtree(tmp_path / f"from none to {other}" / "checkpoints" / "8")
        train(config(f"from none to {other}", RUNS[other]))
    shutil.copytree(tmp_path / "circular", tmp_path / "from circular to 1f1b")
    shutil.rmtree(tmp_path / "from circular to 1f1b" / "checkpoints" / "8")
    train(config("from circular to 1f1b", RUNS["1f1b"]))
    for directory in tmp_path.iterdir():
        got = lines_of(directory)
        for name in ("examples_hash", "target_tokens", "global_batch_to_train", "eval_target_tokens", "step"):
            assert [line.get(name) for line in got] == [line.get(name) for line in want], directory.name
        for name in ("loss", "grad_norm", "eval_loss"):
            values = [[line[name] for line in lines if name in line] for lines in (got, want)]
            np.testing.assert_allclose(*values, rtol=2e-5, err_msg=directory.name)
