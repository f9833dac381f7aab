"""Checkpoints are restored to the bit on any mesh; those of another run are refused; damaged ones are passed over."""

import dataclasses
import functools
import itertools
import json
import math
import os
import shutil
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from maxtext_lite.config import UserError, load_config
from maxtext_lite.parallel import sharding
from maxtext_lite.parallel.pipeline import Pipeline
from maxtext_lite.training import saving
from maxtext_lite.training.checkpoint import (
    Checkpointer,
    CheckpointReader,
    fingerprint,
)
from maxtext_lite.training.parameter_files import (
    load_parameters,
    save_parameters,
    whole_checkpoint,
)
from maxtext_lite.training.parameter_layout import StageLayout, layer_dims_of
from tests.meshes import mesh_of
from tests.prepared import flipped
from tests.training.conftest import COUNTS, TINY

NEXT = dataclasses.replace(COUNTS, step=10)


def config_of(*overrides):
    return load_config(None, [*TINY, "optimizer=adamw", *overrides])


def opened(directory, *overrides, **more):
    config = config_of(*overrides)
    return Checkpointer(directory, config, fingerprint(config, "text", None), **more)


def same(found, want):
    jax.tree.map(assert_array_equal, jax.device_get(found), want)


def names_in(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.fixture
def copy(saved, tmp_path):
    """A copy of the saved run directory, to change."""
    return shutil.copytree(saved[0], tmp_path / "run")


def doubled(it):
    """The parameters of step 6."""
    return jax.tree.map(lambda x: x * 2, it.initial.params)


@pytest.mark.fast
def test_restores_to_the_bit_on_any_mesh(saved, setup):
    directory, it = saved
    other = setup("optimizer=adamw", fsdp=8)
    checkpointer = opened(directory)
    state, counts = checkpointer.restore(other.abstract)
    checkpointer.close()
    assert counts == COUNTS
    assert int(state.step) == 7
    same((state.params, state.opt_state), (it.initial.params, it.initial.opt_state))
    assert state.params["head"]["projection"].sharding.mesh == other.mesh
    assert names_in(directory) == ["6", "7"]  # two are kept


def test_a_checkpoint_from_before_a_model_key_existed_has_its_default(saved, tmp_path):
    about = fingerprint(config_of(), "text", None)
    older = {key: value for key, value in about.items() if key != "load_balance_over"}
    checkpointer = Checkpointer(tmp_path, config_of(), older)
    checkpointer.save(saved[1].initial, COUNTS)
    checkpointer.close()
    assert restored_as(tmp_path, saved[1], about)[1] == COUNTS
    with pytest.raises(UserError, match="which has load_balance_over=example"):
        restored_as(tmp_path, saved[1], {**about, "load_balance_over": "batch"})


@pytest.mark.skipif(sys.platform != "linux", reason="/proc names open files")
def test_all_of_a_checkpoint_is_on_the_disk_before_it_counts(
    tmp_path, saved, monkeypatch
):
    synced = []
    monkeypatch.setattr(
        os,
        "fsync",
        lambda opened: synced.append(Path(f"/proc/self/fd/{opened}").readlink()),
    )
    checkpointer = opened(tmp_path)
    checkpointer.save(saved[1].initial, COUNTS)
    checkpointer.close()
    folder = tmp_path / "checkpoints"
    before = {path.relative_to(folder / "unfinished-7") for path in synced[:-1]}
    assert synced[-1] == folder
    written = {path.relative_to(folder / "7") for path in (folder / "7").rglob("*")}
    checksums = {path for path in written if path.name.startswith("sha256")}
    assert written - checksums <= before


def test_replicas_and_what_they_share_come_back_in_a_pipeline_of_other_rounds(
    tmp_path, setup
):
    keys = (
        "weight_dtype=bfloat16",
        "enable_diloco=true",
        "base_num_decoder_layers=4",
    )
    it = setup(*keys, replicas=2, data=2, fsdp=2)
    config = load_config(None, [*TINY, *keys])
    about = fingerprint(config, "text", 2)
    rng = np.random.default_rng(0)
    state = jax.tree.map(
        lambda x: jax.device_put(rng.normal(size=x.shape).astype(x.dtype), x.sharding),
        it.state(),
    )
    assert {"outer_momentum", "outer_master"} < state.update_state.keys()
    checkpointer = Checkpointer(tmp_path, config, about)
    checkpointer.save(state, COUNTS)
    checkpointer.close()
    there = setup(*keys, replicas=2, data=2, pipeline=Pipeline(2, 2, 2))
    reader = CheckpointReader(tmp_path, about).find_before(8, print)
    found, _ = reader.restore(there.abstract)
    for got, saved in (
        (found.model_params, state.model_params),
        (found.update_state, state.update_state),
    ):
        jax.tree.map(
            lambda x, y: assert_array_equal(x, np.reshape(y, x.shape)),
            got,
            saved,
        )


def rehash(checkpoint):
    """Writes the checksums of a checkpoint whose files a test has changed."""
    (checkpoint / "sha256.0-of-1").unlink()
    saving.write_checksums(checkpoint, 0, 1)


def test_a_checkpoint_of_another_format_is_refused_and_its_parameters_load(saved, copy):
    about = copy / "checkpoints" / "7" / "about" / "metadata"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"format": 4}))
    rehash(copy / "checkpoints" / "7")
    with pytest.raises(UserError, match=r"format 4.* load_parameters_path"):
        restored_as(copy, saved[1], fingerprint(config_of(), "text", None))
    same(
        load_parameters(copy, saved[1].abstract.params, "key"), saved[1].initial.params
    )


def restored_as(run, it, fingerprint):
    return CheckpointReader(run, fingerprint).find_before(8, print).restore(it.abstract)


NARROW = "weight_dtype=bfloat16"


@pytest.mark.parametrize(
    ("began", "overrides", "said"),
    [
        (
            {},
            ["base_mlp_dim=48"],
            "base_mlp_dim=48 contradicts the checkpoint of step 7",
        ),
        ({}, ["data_shuffle_seed=3"], "data_shuffle_seed"),
        ({"dataset_path": "another"}, ["packing=false"], "Use packing=true"),
        (
            {"enable_diloco": True, "diloco_num_replicas": 4},
            [],
            "Use enable_diloco=true",
        ),
        (
            {"weight_dtype": "bfloat16", "master_weights": False},
            [NARROW],
            "Use master_weights=false",
        ),
    ],
    ids=str,
)
def test_another_run_is_refused_by_the_one_key_that_says_so(
    began, overrides, said, saved, copy
):
    about = copy / "checkpoints" / "7" / "about" / "metadata"
    words = json.loads(about.read_text())
    words["fingerprint"] |= began
    about.write_text(json.dumps(words))
    rehash(copy / "checkpoints" / "7")
    with pytest.raises(UserError, match=said) as refusal:
        restored_as(copy, saved[1], fingerprint(config_of(*overrides), "text", None))
    assert "another run_name" in str(refusal.value)
    assert len(refusal.value.problems) == 1


DAMAGES = {
    "a flipped bit": lambda path: path.write_bytes(flipped(path.read_bytes(), 0)),
    "cut short": lambda path: path.write_bytes(
        path.read_bytes()[: path.stat().st_size // 2]
    ),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "gone": lambda path: path.unlink(),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.fast
def test_whichever_file_of_the_newest_is_damaged_it_is_named_and_the_one_before_is_taken(
    saved, tmp_path
):
    newest = saved[0] / "checkpoints" / "7"
    files = [
        path.relative_to(newest) for path in sorted(newest.rglob("*")) if path.is_file()
    ]
    assert len(files) > 20
    for number, (file, (how, damage)) in enumerate(
        zip(files, itertools.cycle(DAMAGES.items()), strict=False)
    ):
        run = shutil.copytree(saved[0], tmp_path / str(number))
        damage(run / "checkpoints" / "7" / file)
        said = []
        checkpointer = opened(run, say=said.append)
        assert checkpointer.latest_step() == 6, (file, how)
        checkpointer.close()
        assert f"step 7 is damaged: {file}" in said[0] or (how, str(file)) == (
            "gone",
            "sha256.0-of-1",
        )
        assert names_in(run) == ["6", "damaged-7"]
    for step in ("6", "damaged-7"):  # all: the run does not start over
        DAMAGES["cut short"](run / "checkpoints" / step / "about" / "metadata")
    (run / "checkpoints" / "damaged-7").rename(run / "checkpoints" / "7")
    with pytest.raises(UserError, match="about/metadata"):
        opened(run)
    assert names_in(run) == ["6", "7"]


def test_the_older_checkpoint_stays_until_the_newer_one_has_its_checksums(
    saved, copy, monkeypatch
):
    """What a killed process left is not seen, and goes."""
    for name in ("9.orbax-checkpoint-tmp", "unfinished-9", "deleted-4"):
        (copy / "checkpoints" / name / "params").mkdir(parents=True)
    hashes, may_hash = threading.Event(), threading.Event()
    hash_part = saving.write_checksums

    def write_part(*arguments):
        hashes.set()
        assert may_hash.wait(60)
        return hash_part(*arguments)

    monkeypatch.setattr(saving, "write_checksums", write_part)
    checkpointer = opened(copy, "max_num_checkpoints_to_keep=1")
    assert checkpointer.latest_step() == 7
    checkpointer.save(saved[1].state(), NEXT)
    assert hashes.wait(60)
    assert names_in(copy) == ["6", "7", "unfinished-10"]
    may_hash.set()
    checkpointer.close()
    assert names_in(copy) == ["10"]


LORA = ("optimizer=adamw", "lora_rank=2", "lora_alpha=6", "lora_targets=query,down")


def test_frozen_parameters_are_saved_once_and_adapters_come_back_beside_them(
    tmp_path, setup
):
    it = setup(*LORA, data=2)
    rng = np.random.default_rng(0)
    state = it.state()
    adapters = jax.tree.map(
        lambda p: jax.device_put(rng.standard_normal(p.shape, np.float32), p.sharding),
        state.params,
    )
    state = dataclasses.replace(state, params=adapters)
    want = jax.device_get(state)
    checkpointer = Checkpointer(
        tmp_path, config_of(*LORA), fingerprint(config_of(*LORA), "text", None)
    )
    checkpointer.save(state, COUNTS)
    written = (tmp_path / "frozen").stat().st_mtime_ns
    checkpointer.save(state, NEXT)
    assert (tmp_path / "frozen").stat().st_mtime_ns == written
    found, _ = checkpointer.restore(setup(*LORA, pipeline=Pipeline(2, 2)).abstract)
    checkpointer.close()
    for part in ("params", "opt_state", "progress", "frozen"):
        same(getattr(found, part), getattr(want, part))

    plain = setup("optimizer=adamw", fsdp=2)
    loaded = jax.device_get(load_parameters(tmp_path, plain.abstract.params, "key"))
    query, pair = (
        want.frozen["layers"]["attention"]["query"],
        want.params["layers"]["attention"]["query"],
    )
    added = 3 * np.einsum(
        "LDr,LrNH->LDNH", *(pair[name].astype(np.float64) for name in "ab")
    )
    assert_allclose(
        loaded["layers"]["attention"]["query"], query + added, rtol=1e-6, atol=1e-6
    )
    same(loaded["layers"]["mlp"]["up"], want.frozen["layers"]["mlp"]["up"])
    keys = (*LORA, "lora_alpha=7")
    with pytest.raises(UserError, match="lora_alpha=7 contradicts"):
        restored_as(tmp_path, it, fingerprint(config_of(*keys), "text", None))


# ---- Parameters alone --------------------------------------------------------------------------


def test_parameters_load_from_any_intact_checkpoint_and_a_damaged_one_is_passed_over_with_a_note(
    saved, copy, capsys
):
    params = saved[1].abstract.params
    same(load_parameters(copy, params, "key"), saved[1].initial.params)
    for path in (copy / "checkpoints" / "7" / "update_state").rglob("d/*"):
        path.write_bytes(b"x")  # which no reader of parameters looks at
    same(load_parameters(copy, params, "key"), saved[1].initial.params)
    assert whole_checkpoint(copy, "key", ("params",)).name == "7"
    assert whole_checkpoint(copy, "key").name == "6"
    capsys.readouterr()
    DAMAGES["zeros"](copy / "checkpoints" / "7" / "params" / "_METADATA")
    same(load_parameters(copy, params, "key"), doubled(saved[1]))
    assert "checkpoints/7 is damaged: params/_METADATA" in capsys.readouterr().err
    assert names_in(copy) == ["6", "7"]
    with pytest.raises(UserError, match=r"key=.*params/_METADATA"):
        load_parameters(
            copy / "checkpoints" / "7", params, "key"
        )  # asked for by name: no other is taken


@pytest.mark.parametrize(
    ("saved_over", "over"), [("batch", "example"), ("example", "batch")]
)
def test_the_load_of_experts_is_no_reason_to_refuse_parameters(
    saved_over, over, tmp_path, setup
):
    """Where it lacks it is even; where it is not needed it is dropped; in pipelines too."""
    experts = ("num_experts=4", "num_experts_per_tok=2", "base_num_decoder_layers=4")
    there = setup(*experts, f"load_balance_over={saved_over}", pipeline=Pipeline(2, 2))
    here = setup(*experts, f"load_balance_over={over}", fsdp=2)
    params = jax.tree.map(jnp.ones_like, there.state().params)
    save_parameters(tmp_path, params)
    found = load_parameters(tmp_path, here.abstract.params, "key")
    want = jax.tree.map(
        lambda leaf: np.ones(leaf.shape, leaf.dtype), here.abstract.params
    )
    if over == "batch":
        want["layers"]["mlp"]["router_load"] = np.zeros((4, 4), np.float32)
    same(found, want)


def test_parameters_alone_are_written_over_and_begun_from_but_not_continued(
    saved, tmp_path
):
    """As of `convert import`, whose config.yml names the directory itself as the run's."""
    it = saved[1]
    for params in (doubled(it), it.initial.params):
        save_parameters(
            tmp_path,
            jax.device_put(
                params, jax.tree.map(lambda p: p.sharding, it.abstract.params)
            ),
        )
    assert names_in(tmp_path) == ["0"]
    same(load_parameters(tmp_path, it.abstract.params, "key"), it.initial.params)
    checkpointer = opened(tmp_path)
    with pytest.raises(UserError, match="load_parameters_path"):
        checkpointer.restore(it.abstract)
    checkpointer.close()


def test_stacks_of_two_kinds_of_layers_are_dealt_each_by_its_own_length():
    """Two of three layers have experts: to a circular pipeline of two rounds, and back to one stack of layers."""
    where = sharding(mesh_of())

    def stacks(*dims):
        def leaf(num_layers, *rest):
            shape = (*dims, num_layers // math.prod(dims), *rest)
            return jax.ShapeDtypeStruct(shape, np.float32, sharding=where)

        dense, moe = (
            {"norm": leaf(2, 5), "up": leaf(2, 5, 7)},
            {"norm": leaf(4, 5), "up": leaf(4, 3, 5, 2)},
        )
        return {"layers": {"dense": dense, "moe": moe}}

    one, rounds = stacks(), stacks(2)
    assert (layer_dims_of(one), layer_dims_of(rounds)) == ((6,), (2, 3))
    shapes = functools.partial(jax.tree.map, lambda leaf: leaf.shape)
    assert shapes(StageLayout.of(one, (2, 3)).as_saved(one)) == shapes(rounds)
    assert shapes(StageLayout.of(rounds, (6,)).as_saved(rounds)) == shapes(one)
