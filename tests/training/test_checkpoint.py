"""Checkpoints come back to the bit on any mesh; another run's are refused with what differs."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.parallel import Pipeline
from maxtext_lite.training.checkpoint import (
    Checkpointer,
    Counts,
    checkpoint_directory,
    fingerprint,
    load_adapters,
    load_parameters,
)
from maxtext_lite.training.noise import NoiseScale
from maxtext_lite.training.optimizer import make_optimizer
from maxtext_lite.training.state import abstract_state
from tests.training.conftest import TINY

NOISE = NoiseScale().after(group_squares=1.5, groups=2, grad_norm=1.0, examples=4)
COUNTS = Counts(step=7, examples_seen=112, tokens_seen=3_000_000_000, skipped_in_a_row=1, noise=NOISE)


def _config(*overrides):
    return load_config(None, [*TINY, "optimizer=adamw", *overrides])


@pytest.fixture(scope="module")
def saved(tmp_path_factory, setup):
    """A run directory with checkpoints of steps 5, 6 and 7, of which two are kept."""
    directory = tmp_path_factory.mktemp("run")
    it = setup("optimizer=adamw", data=2, fsdp=2, tensor=2)
    checkpointer = Checkpointer(
        directory, _config("max_num_checkpoints_to_keep=2"), fingerprint(_config(), "text", None)
    )
    assert checkpointer.latest_step() is None
    for step in (5, 6, 7):
        checkpointer.save(it.state(), dataclasses.replace(COUNTS, step=step))
    checkpointer.close()
    return directory, it


def _open(directory, *overrides, data="text"):
    config = _config(*overrides)
    return Checkpointer(directory, config, fingerprint(config, data, None))


@pytest.mark.parametrize("mesh", [{}, {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 8}], ids=str)
def test_restores_to_the_bit_on_any_mesh(mesh, saved, setup):
    directory, it = saved
    other = setup("optimizer=adamw", **mesh)
    checkpointer = _open(directory)
    state, counts = checkpointer.restore(abstract_state(other.decoder, other.optimizer, other.mesh))
    checkpointer.close()
    assert counts == COUNTS
    assert int(state.step) == 7
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.device_get((state.params, state.opt_state)),
        (it.initial.params, it.initial.opt_state),
    )
    assert state.params["head"]["projection"].sharding.mesh == other.mesh


def test_keeps_the_newest(saved):
    assert sorted(path.name for path in (saved[0] / "checkpoints").iterdir()) == ["6", "7"]


@pytest.mark.parametrize(("overrides", "data", "differs"), [
    (["base_mlp_dim=48"], "text", "base_mlp_dim=48 contradicts the checkpoint of step 7"),
    (["data_shuffle_seed=3"], "text", "data_shuffle_seed=3 contradicts"),
    (["dtype=float16"], "text", "dtype is float16=True contradicts"),
    (["optimizer=lion"], "text", "optimizer=lion contradicts"),
        (["packing=false"], "other text", "packing=False contradicts"),
        (["eval_fraction=0.5"], "other text", "eval_fraction=0.5 contradicts"),
    ([], "other text", "dataset_path: its content or its tokenizer is not that of the checkpoint of step 7"),
])  # fmt: skip
def test_refuses_another_run(overrides, data, differs, saved):
    directory, it = saved
    checkpointer = _open(directory, *overrides, data=data)
    with pytest.raises(UserError, match=differs) as refusal:
        checkpointer.restore(abstract_state(it.decoder, it.optimizer, it.mesh))
    checkpointer.close()
    assert "or another run_name" in str(refusal.value)
    assert len(refusal.value.problems) == 1


@pytest.mark.parametrize("override", ["steps=99", "learning_rate=1e-5", "checkpoint_period=3",
                                      "gradient_accumulation_steps=2",
                                      "attention=dot_product",
        "weight_decay=0",
        "gradient_clipping_threshold=0", "run_name=elsewhere", "seed=5"])  # fmt: skip
def test_what_does_not_change_the_model_may_change(override, saved, setup):
    directory, it = saved
    checkpointer = _open(directory, override)
    optimizer = make_optimizer(_config(override), it.decoder.axes)
    assert checkpointer.restore(abstract_state(it.decoder, optimizer, it.mesh))[1] == COUNTS
    checkpointer.close()


def test_parameters_load_into_a_new_run(saved, setup):
    directory, it = saved
    wanted = abstract_state(it.decoder, it.optimizer, it.mesh).params
    renamed = shutil.copytree(directory / "checkpoints" / "6", directory / "copy")
    for path in (directory, directory / "checkpoints" / "6", renamed):
        jax.tree.map(
            np.testing.assert_array_equal, jax.device_get(load_parameters(path, wanted, "key")), it.initial.params
        )


def test_parameters_of_another_shape_are_refused_by_name(saved, setup):
    other = setup("optimizer=adamw", "base_mlp_dim=48")
    with pytest.raises(
        UserError,
        match=r"load_parameters_path=.*\['layers'\]\['mlp'\]\['up'\] is \(2, 16, 24\) there and "
        r"\(2, 16, 48\) here",
    ):
        load_parameters(
            saved[0], abstract_state(other.decoder, other.optimizer, other.mesh).params, "load_parameters_path"
        )


def test_no_checkpoint_is_refused_by_key(tmp_path):
    with pytest.raises(UserError, match=r"load_parameters_path=.* is neither a run directory with a checkpoint nor"):
        checkpoint_directory(tmp_path, "load_parameters_path")


def test_a_half_written_checkpoint_is_not_seen(saved):
    directory, _ = saved
    (directory / "checkpoints" / "9.orbax-checkpoint-tmp").mkdir()
    checkpointer = _open(directory)
    assert checkpointer.latest_step() == 7
    checkpointer.close()


def test_replicas_and_their_outer_state_come_back_to_the_bit(tmp_path, setup):
    """Mid-period the replicas differ from what they share; the parameters to load are what they share."""
    it = setup("optimizer=adamw", data=2, replicas=4)
    state = it.state()
    apart = jax.tree.map(
        lambda p: p * np.arange(1.0, 5.0, dtype=np.float32).reshape(-1, *[1] * (p.ndim - 1)), state.params
    )
    state = dataclasses.replace(state, params=jax.device_put(apart, jax.tree.map(lambda p: p.sharding, state.params)))
    want = jax.device_get(state)
    checkpointer = Checkpointer(tmp_path, _config(), fingerprint(_config(), "text", 4))
    checkpointer.save(state, COUNTS)
    got, _ = checkpointer.restore(it.abstract)
    checkpointer.close()
    for part in ("params", "opt_state", "progress", "outer"):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(getattr(got, part)), getattr(want, part))
    plain = setup("optimizer=adamw")
    loaded = load_parameters(tmp_path, plain.abstract.params, "key")
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(loaded), want.outer.params)
    with pytest.raises(UserError, match=r"diloco_num_replicas=None contradicts .* which has diloco_num_replicas=4"):
        _open(tmp_path).restore(plain.abstract)


LORA = ("optimizer=adamw", "lora_rank=2", "lora_alpha=6", "lora_targets=query,down")


def test_frozen_parameters_are_saved_once_and_adapters_come_back_beside_them(tmp_path, setup):
    it = setup(*LORA, data=2)
    rng = np.random.default_rng(0)
    state = it.state()
    adapters = jax.tree.map(
        lambda p: jax.device_put(rng.standard_normal(p.shape, np.float32), p.sharding), state.params
    )
    state = dataclasses.replace(state, params=adapters)
    want = jax.device_get(state)
    checkpointer = Checkpointer(tmp_path, _config(*LORA), fingerprint(_config(*LORA), "text", None))
    checkpointer.save(state, COUNTS)
    written = (tmp_path / "frozen").stat().st_mtime_ns
    checkpointer.save(state, dataclasses.replace(COUNTS, step=8))
    assert (tmp_path / "frozen").stat().st_mtime_ns == written
    dealt = setup(*LORA, pipeline=Pipeline(2, 2))
    for other in (it, dealt):
        got, _ = checkpointer.restore(other.abstract)
        for part in ("params", "opt_state", "progress", "frozen"):
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(getattr(got, part)), getattr(want, part))
    checkpointer.close()

    plain = setup("optimizer=adamw", fsdp=2)
    loaded = jax.device_get(load_parameters(tmp_path, plain.abstract.params, "key"))
    query, pair = want.frozen["layers"]["attention"]["query"], want.params["layers"]["attention"]["query"]
    added = 3 * np.einsum("LDr,LrNH->LDNH", *(pair[name].astype(np.float64) for name in "ab"))
    np.testing.assert_allclose(loaded["layers"]["attention"]["query"], query + added, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(loaded["layers"]["mlp"]["up"], want.frozen["layers"]["mlp"]["up"])
    lora, alone = load_adapters(tmp_path / "checkpoints" / "8", plain.mesh)
    assert lora == it.decoder.shape.lora
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(alone), want.params)
    for keys, said in ((LORA[:1], "lora_rank=0"), ((*LORA, "lora_alpha=7"), "lora_alpha=7.0")):
        with pytest.raises(UserError, match=rf"{said} contradicts the checkpoint of step 8"):
            _open(tmp_path, *keys).restore(it.abstract)
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "alone" / "checkpoints")
    with pytest.raises(UserError, match=r"key=.*alone holds the adapters of a run with lora_rank=2, without .*/frozen"):
        load_parameters(tmp_path / "alone", plain.abstract.params, "key")


def test_a_checkpoint_of_another_format_is_refused(saved, tmp_path):
    shutil.copytree(saved[0] / "checkpoints" / "7", tmp_path / "checkpoints" / "7")
    about = tmp_path / "checkpoints" / "7" / "about" / "metadata"
    about.write_text(about.read_text().replace('"format": 2', '"format": 1'))
    checkpointer = _open(tmp_path)
    with pytest.raises(UserError, match="has format 1; this version reads 2"):
        checkpointer.restore(saved[1].abstract)
    checkpointer.close()
