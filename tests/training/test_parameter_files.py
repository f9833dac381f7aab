"""Parameters are read from any intact checkpoint; readers rename nothing."""

import functools
import math
import shutil

import jax
import numpy as np
import pytest

from maxtext_lite.config import ModelConfig, UserError, load_config
from maxtext_lite.models import Decoder, DecoderShape
from maxtext_lite.parallel import MESH_AXES, make_mesh, sharding
from maxtext_lite.training.parameter_files import (
    StageLayout,
    check_start,
    checkpoints_in,
    layer_dims_of,
    load_parameters,
    save_parameters,
    whole_checkpoint,
)
from maxtext_lite.training.run_files import run_directory
from maxtext_lite.training.state import abstract_on_mesh, abstract_state
from tests.training.conftest import TINY


def same(got, want):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), want)


def test_parameters_load_into_a_new_run(saved, tmp_path):
    directory, it = saved
    doubled = jax.tree.map(lambda x: x * 2, it.initial.params)
    renamed = shutil.copytree(directory / "checkpoints" / "6", tmp_path / "copy")
    same(load_parameters(directory, it.abstract.params, "key"), it.initial.params)
    for path in (directory / "checkpoints" / "6", renamed):
        same(load_parameters(path, it.abstract.params, "key"), doubled)


def test_parameters_of_another_shape_are_refused_by_name(saved, setup):
    other = setup("optimizer=adamw", "base_mlp_dim=48")
    with pytest.raises(
        UserError,
        match=r"load_parameters_path=.*\['layers'\]\['mlp'\]\['up'\] is \(2, 16, 24\) there and "
        r"\(2, 16, 48\) here",
    ):
        load_parameters(saved[0], abstract_state(other.parts).params, "load_parameters_path")


def test_a_model_of_other_widths_is_one_problem_with_the_keys_to_state(saved, setup):
    other = setup("optimizer=adamw", "base_emb_dim=32")
    stated = " ".join(word for word in TINY if word.partition("=")[0] in ModelConfig.model_fields)
    with pytest.raises(UserError) as refused:
        load_parameters(saved[0], abstract_state(other.parts).params, "key")
    (problem,) = refused.value.problems
    assert sorted(problem.partition(" The model there has ")[2].rstrip(".").split()) == sorted(stated.split())


def test_no_checkpoint_is_refused_by_key(tmp_path):
    with pytest.raises(UserError, match=r"load_parameters_path=.* is neither a run directory with a checkpoint nor"):
        checkpoints_in(tmp_path, "load_parameters_path")


def test_a_run_that_resumes_is_told_that_it_needs_its_origin_no_longer(tmp_path):
    config = load_config(None, [f"load_parameters_path={tmp_path}/gone", "base_emb_dim=128"])
    check_start(config.model_copy(update={"load_parameters_path": ""}), resumes=False)
    missing = "is neither a run directory with a checkpoint nor a checkpoint."
    works = f"train {run_directory(config)}/config.yml load_parameters_path= (empty)"
    with pytest.raises(UserError, match=missing) as refused:
        check_start(config, resumes=False)
    assert works not in str(refused.value)
    with pytest.raises(UserError, match=missing) as refused:
        check_start(config, resumes=True)
    assert works in str(refused.value)
    rl = load_config("post_train/rl.yml", [f"load_parameters_path={tmp_path}/gone", "base_emb_dim=128"])
    with pytest.raises(UserError) as refused:
        check_start(rl, resumes=True)
    assert works not in str(refused.value), "its reference may be there"


def test_a_reader_passes_a_damaged_checkpoint_over_says_so_and_leaves_it(saved, tmp_path, capsys):
    run, it = shutil.copytree(saved[0], tmp_path / "run"), saved[1]
    (run / "checkpoints" / "7" / "params" / "_METADATA").write_text("{}")
    same(load_parameters(run, it.abstract.params, "key"), jax.tree.map(lambda x: x * 2, it.initial.params))
    said = capsys.readouterr().err
    assert said.startswith("note: ")
    assert "checkpoints/7 is damaged: params/_METADATA is not as it was written. The checkpoint before is taken" in said
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["6", "7"]
    with pytest.raises(UserError, match=r"key=.*/7: .* is damaged: params/_METADATA is not as it was written\."):
        load_parameters(run / "checkpoints" / "7", it.abstract.params, "key")  # asked for by name: no other is taken


def test_a_reader_looks_only_through_what_it_reads(saved, tmp_path):
    run, it = shutil.copytree(saved[0], tmp_path / "run"), saved[1]
    (run / "checkpoints" / "7" / "update_state" / "_METADATA").unlink()
    for path in (run / "checkpoints" / "7" / "update_state").rglob("d/*"):
        path.write_bytes(b"x")
    same(load_parameters(run, it.abstract.params, "key"), it.initial.params)
    assert whole_checkpoint(run, "key", ("params",)).name == "7"
    assert whole_checkpoint(run, "key").name == "6"


def test_parameters_alone_are_written_with_checksums_and_written_over(saved, tmp_path):
    it = saved[1]
    for factor in (2, 1):
        save_parameters(tmp_path, jax.tree.map(lambda x, factor=factor: x * factor, it.state().params))
    assert (tmp_path / "checkpoints" / "0" / "sha256.0-of-1").is_file()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["0"]
    same(load_parameters(tmp_path, it.abstract.params, "key"), it.initial.params)
    (tmp_path / "checkpoints" / "0" / "params" / "_METADATA").write_text("{}")
    with pytest.raises(UserError, match=r"params/_METADATA is not as it was written; there is none before it\."):
        load_parameters(tmp_path, it.abstract.params, "key")


def test_parameters_that_a_mesh_does_not_split_evenly_are_refused_by_name():
    decoder = Decoder(
        DecoderShape(vocab_size=64, emb_dim=16, num_query_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=24, num_layers=2)
    )
    ones = dict.fromkeys(MESH_AXES, 1)

    def on_mesh(**sizes):
        return abstract_on_mesh(decoder, make_mesh(ones | sizes, ones), "tensor=4. Nearest that works: 2.")

    with pytest.raises(UserError, match=r"parameter .*key.* cannot be split evenly over tensor=4. Nearest that works"):
        on_mesh(tensor=4, fsdp=2)
    abstract = on_mesh(data=2, fsdp=2, tensor=2)
    assert abstract["embedding"]["table"].sharding.shard_shape((64, 16)) == (32, 8)


def test_stacks_of_two_kinds_of_layers_are_dealt_each_by_its_own_length():
    """Two of three layers have experts: to a circular pipeline of two rounds, and back to one stack of layers."""
    mesh = make_mesh(dict.fromkeys(MESH_AXES, 1), dict.fromkeys(MESH_AXES, 1), jax.devices()[:1])
    where = sharding(mesh)

    def stacks(*dims):
        def leaf(num_layers, *rest):
            lead = (*dims, num_layers // math.prod(dims))
            return jax.ShapeDtypeStruct((*lead, *rest), np.float32, sharding=where)

        layers = {
            "dense": {"norm": leaf(2, 5), "up": leaf(2, 5, 7)},
            "moe": {"norm": leaf(4, 5), "up": leaf(4, 3, 5, 2)},
        }
        return {"layers": layers, "final": jax.ShapeDtypeStruct((5,), np.float32, sharding=where)}

    one, rounds = stacks(), stacks(2)
    assert layer_dims_of(one) == (6,)
    assert layer_dims_of(rounds) == (2, 3)
    shapes = functools.partial(jax.tree.map, lambda leaf: leaf.shape)
    assert shapes(StageLayout.of(one, (2, 3)).as_saved(one)) == shapes(rounds)
    assert shapes(StageLayout.of(rounds, (6,)).as_saved(rounds)) == shapes(one)
