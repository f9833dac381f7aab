"""Adapters are trained and nothing else is; whole runs hand their sums on. However a step is split: test_matrix.py."""

import json
import shutil

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from maxtext_lite.config import load_config
from maxtext_lite.generate import main as generate
from maxtext_lite.models import Decoder
from maxtext_lite.models.lora import merged
from maxtext_lite.operations.nonfinite import origin_of_nonfinite
from maxtext_lite.training import train
from maxtext_lite.training.state import decoder_shape
from tests.conftest import use_one_device
from tests.run_directories import lines_of
from tests.training.conftest import TINY

LORA = ("optimizer=sgd", "gradient_clipping_threshold=0", "lora_rank=3", "lora_alpha=6")


def test_a_step_that_is_not_finite_changes_nothing_and_its_cause_is_found(setup, rows):
    it = setup(*LORA, "skip_nonfinite_updates=true")
    weights = rows["weights"].copy()
    weights[5, 3] = np.inf
    batch = it.batch({**rows, "weights": weights}, 2, 8)
    state, (metrics,) = it.run(it.compile_step(batch), batch, 1)
    assert metrics["skipped"]
    for got, want in (
        (state.params, it.initial.params),
        (state.frozen, it.initial.frozen),
    ):
        jax.tree.map(assert_array_equal, got, want)
    with jax.set_mesh(it.mesh):
        found = origin_of_nonfinite(
            it.parts, it.state(), batch, np.arange(100, 116), micro_batches=2
        )
    assert found.startswith(
        "micro-batch 1, example ids 105, first parameter whose gradient is not finite: layers.attention."
    )


BIG = (
    "vocab_size=1024",
    "base_emb_dim=64",
    "head_dim=16",
    "base_mlp_dim=512",
    "base_num_decoder_layers=8",
    "max_target_length=8",
    "optimizer=adamw",
    "remat_policy=full",
    "num_vocab_tiling=4",
)


def test_nothing_as_large_as_the_weights_is_made_beside_them(setup):
    """By XLA's account of a step of 16 tokens, all else, gradients and Adam's moments included, is less than half
    of the weights, which are there once. Trained themselves, they ask for three times as much, and their gradients.
    """

    def memory(*keys):
        it = setup(*BIG, *keys)
        analysis = it.compile_step(it.abstract_batch(2, 1, 8)).memory_analysis()
        size = lambda tree: sum(4 * leaf.size for leaf in jax.tree.leaves(tree))  # noqa: E731
        trained = it.decoder.trained(it.decoder.abstract_params)
        return analysis, size(it.decoder.abstract_params), size(trained)

    analysis, everything, adapters = memory("lora_rank=2")
    assert analysis.argument_size_in_bytes == pytest.approx(
        everything + 2 * adapters, rel=0.01
    )
    assert analysis.alias_size_in_bytes > 0.99 * (everything + 2 * adapters)
    whole, weights, _ = memory()
    assert whole.argument_size_in_bytes == pytest.approx(3 * weights, rel=0.01)
    assert 2 * adapters + analysis.temp_size_in_bytes < weights / 2
    assert whole.temp_size_in_bytes > weights


RUN = [
    *TINY,
    "dataset_type=synthetic",
    "steps=4",
    "warmup_steps=1",
    "eval_interval=2",
    "eval_steps=1",
    "checkpoint_period=2",
    "per_device_batch_size=1",
    "learning_rate=0.05",
    "base_num_kv_heads=4",
]
ADAPTED = ["lora_rank=2", "lora_alpha=8"]


def test_whole_runs_agree_in_a_pipeline_and_hand_their_sums_on(
    tmp_path, capsys, monkeypatch
):
    """Evaluated, from another run's parameters; then generated from and begun with."""

    def run(name, *keys):
        return train(
            load_config(
                None,
                [*RUN, *keys, f"base_output_directory={tmp_path}", f"run_name={name}"],
            )
        )

    with monkeypatch.context() as patch:
        use_one_device(patch)
        base = run("base", "steps=1", "eval_interval=-1")
    start = f"load_parameters_path={tmp_path / 'base'}"
    mesh = (
        "ici_data_parallelism=2",
        "ici_tensor_parallelism=2",
        "ici_fsdp_parallelism=2",
    )
    straight = run("straight", *ADAPTED, start, *mesh)
    frozen = jax.device_get(straight.state.frozen)
    jax.tree.map(assert_array_equal, frozen, jax.device_get(base.state.params))
    # The other half of it, in a pipeline of two stages.
    shutil.copytree(tmp_path / "straight", tmp_path / "piped")
    shutil.rmtree(tmp_path / "piped" / "checkpoints" / "4")
    run(
        "piped", *ADAPTED, start, "ici_pipeline_parallelism=2", "ici_data_parallelism=4"
    )
    for name in ("loss", "eval_loss"):
        got, want = (
            [line[name] for line in lines_of(tmp_path / run) if name in line]
            for run in ("piped", "straight")
        )
        assert_allclose(got, want, rtol=1e-5)

    decoder = Decoder(decoder_shape(load_config(None, [*RUN, *ADAPTED])))
    params = jax.device_get(straight.state.params)
    sums = jax.device_get(merged(decoder.joined(params, frozen)))
    start = f"load_parameters_path={tmp_path / 'straight'}"
    use_one_device(monkeypatch)
    follower = run("follower", "steps=1", "eval_interval=-1", "learning_rate=0", start)
    got = jax.device_get(follower.state.params)
    jax.tree.map(lambda x, y: assert_allclose(x, y, rtol=1e-6, atol=1e-7), got, sums)

    capsys.readouterr()
    asked = ["prompt_ids=[[5,6,7]]", "max_new_tokens=4", "temperature=0", "--json"]
    assert generate([str(tmp_path / "straight"), *asked]) == 0
    (new,) = json.loads(capsys.readouterr().out.splitlines()[0])
    tokens = np.array([[5, 6, 7, *new["tokens"][:-1]]])
    with jax.default_matmul_precision("highest"):
        whole = decoder.joined(params, frozen)
        x = decoder.hidden(
            whole, tokens, np.ones_like(tokens), np.arange(tokens.shape[1])[None]
        )
        likeliest = jax.nn.log_softmax(decoder.logits(whole, x))[0, 2:]
    assert_allclose(new["log_probabilities"], np.max(likeliest, axis=-1), rtol=1e-4)
