"""Checkpoints are restored to the bit on any mesh; those of another run are refused, with the differences."""

import dataclasses
import itertools
import re
import resource
import shutil
import threading

import jax
import numpy as np
import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.parallel import Pipeline
from maxtext_lite.training import manifest, saving
from maxtext_lite.training.checkpoint import OWN, Checkpointer, CheckpointReader, fingerprint
from maxtext_lite.training.optimizer import make_optimizer
from maxtext_lite.training.parameter_files import load_adapters, load_parameters, save_parameters
from maxtext_lite.training.state import abstract_state
from tests.training.conftest import COUNTS, TINY


def _open(directory, *overrides, data="text", **more):
    config = _config(*overrides)
    return Checkpointer(directory, config, fingerprint(config, data, None), **more)


def _config(*overrides):
    return load_config(None, [*TINY, "optimizer=adamw", *overrides])


@pytest.mark.parametrize("mesh", [{}, {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 8}], ids=str)
def test_restores_to_the_bit_on_any_mesh(mesh, saved, setup):
    directory, it = saved
    other = setup("optimizer=adamw", **mesh)
    checkpointer = _open(directory)
    state, counts = checkpointer.restore(abstract_state(other.parts))
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
    (["dtype=float16"], "text", r"dtype=float16 contradicts .* has another\. Use another dtype, or another run_name"),
    (["optimizer=lion"], "text", "optimizer=lion contradicts"),
    (["optimizer=sgd"], "text", "optimizer=sgd contradicts .* Use optimizer=adamw, or"),
        (["packing=false"], "other text", "packing=false contradicts .* Use packing=true, or"),
        (["eval_fraction=0.5"], "other text", "eval_fraction=0.5 contradicts"),
    ([], "other text", "dataset_path: its content or its tokenizer is not that of the checkpoint of step 7"),
])  # fmt: skip
def test_refuses_another_run(overrides, data, differs, saved):
    directory, it = saved
    checkpointer = _open(directory, *overrides, data=data)
    with pytest.raises(UserError, match=differs) as refusal:
        checkpointer.restore(abstract_state(it.parts))
    checkpointer.close()
    assert "or another run_name" in str(refusal.value)
    assert len(refusal.value.problems) == 1


def test_what_python_passed_is_no_key_to_set(saved, tmp_path):
    directory, it = saved
    began = fingerprint(_config(), "text", None)
    with pytest.raises(UserError, match=r"step 7 .* began without model=\.\.\. passed from Python. Leave it out, or"):
        CheckpointReader(directory, began | {"model": OWN}).find_before(8, print).restore(abstract_state(it.parts))
    run = _copy(saved, tmp_path)
    reader = Checkpointer(run, _config(), began | {"optimizer": OWN})
    reader.save(it.initial, dataclasses.replace(COUNTS, step=8))
    reader.close()
    with pytest.raises(UserError, match=r"step 8 .* began with optimizer=\.\.\. passed from Python. Pass it again, or"):
        _open(run).restore(abstract_state(it.parts))


@pytest.mark.parametrize("override", ["steps=99", "learning_rate=1e-5", "checkpoint_period=3",
                                      "gradient_accumulation_steps=2",
                                      "attention=dot_product",
        "weight_decay=0",
        "gradient_clipping_threshold=0", "run_name=elsewhere", "seed=5"])  # fmt: skip
def test_what_does_not_change_the_model_may_change(override, saved, setup):
    directory, it = saved
    checkpointer = _open(directory, override)
    optimizer = make_optimizer(_config(override), it.decoder.axes)
    assert checkpointer.restore(abstract_state(dataclasses.replace(it.parts, optimizer=optimizer)))[1] == COUNTS
    checkpointer.close()


def _copy(saved, tmp_path):
    return shutil.copytree(saved[0] / "checkpoints", tmp_path / "run" / "checkpoints").parent


def test_what_a_killed_process_left_is_not_seen_and_goes(saved, tmp_path):
    run = _copy(saved, tmp_path)
    for name in ("9.orbax-checkpoint-tmp", "unfinished-9", "unfinished-9.orbax-checkpoint-tmp", "deleted-4"):
        (run / "checkpoints" / name / "params").mkdir(parents=True)
    checkpointer = _open(run)
    assert checkpointer.latest_step() == 7
    checkpointer.close()
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["6", "7"]


DAMAGES = {
    "a flipped bit": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 4]) + path.read_bytes()[1:]),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "gone": lambda path: path.unlink(),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
}


def test_whichever_file_of_the_newest_is_damaged_it_is_named_and_the_one_before_is_taken(saved, tmp_path):
    files = [path.relative_to(saved[0]) for path in sorted((saved[0] / "checkpoints" / "7").rglob("*"))
             if path.is_file()]  # fmt: skip
    assert len(files) > 20
    for number, (file, (how, damage)) in enumerate(zip(files, itertools.cycle(DAMAGES.items()), strict=False)):
        run = _copy(saved, tmp_path / str(number))
        damage(run / file)
        said = []
        checkpointer = _open(run, say=said.append)
        assert checkpointer.latest_step() == 6, (file, how)
        checkpointer.close()
        name = str(file.relative_to("checkpoints/7"))
        assert f"the checkpoint of step 7 is damaged: {name}" in said[0] or (how, name) == ("gone", "sha256.0-of-1")
        assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["6", "damaged-7"]
        shutil.rmtree(run)


def test_after_a_damaged_checkpoint_the_one_before_comes_back_to_the_bit(saved, tmp_path):
    run, it = _copy(saved, tmp_path), saved[1]
    data = max((run / "checkpoints" / "7" / "params").rglob("d/*"), key=lambda path: path.stat().st_size)
    DAMAGES["a flipped bit"](data)
    checkpointer = _open(run, "max_num_checkpoints_to_keep=1")
    state, counts = checkpointer.restore(it.abstract)
    assert counts.step == 6
    doubled = jax.tree.map(lambda x: x * 2, it.initial.params)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), doubled)
    checkpointer.save(state, dataclasses.replace(counts, step=7))  # the name is free
    checkpointer.close()
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["7", "damaged-7"]


def test_going_back_deletes_what_follows_the_newest_whole_one_that_is_old_enough(saved, tmp_path):
    directory = shutil.copytree(saved[0], tmp_path / "run")
    shutil.copytree(directory / "checkpoints" / "7", directory / "checkpoints" / "9")
    checkpointer = _open(directory)
    seen = []

    def suits(counts, mixtures):
        seen.append((counts, mixtures))
        return len(seen) > 1

    checkpointer.go_back(6, suits)  # there is none before it
    assert not seen
    checkpointer.go_back(9, suits)
    assert seen == [(checkpointer.restore(saved[1].abstract)[1], checkpointer.mixtures)]
    assert checkpointer.latest_step() == 9
    checkpointer.go_back(9, suits)
    assert checkpointer.latest_step() == 7
    assert sorted(path.name for path in (directory / "checkpoints").iterdir()) == ["6", "7"]
    (directory / "checkpoints" / "7" / "sha256.0-of-1").unlink()
    checkpointer.go_back(8, suits)
    assert checkpointer.latest_step() == 6
    assert [path.name for path in (directory / "checkpoints").iterdir()] == ["6"]
    checkpointer.close()


def test_where_all_are_damaged_nothing_is_renamed_and_the_run_does_not_start_over(saved, tmp_path):
    run = _copy(saved, tmp_path)
    for step in ("6", "7"):
        DAMAGES["cut short"](run / "checkpoints" / step / "about" / "metadata")
    with pytest.raises(UserError, match=r"no checkpoint in .* is whole: about/metadata .* step 7; about/metadata"):
        _open(run)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["6", "7"]


def test_the_older_checkpoint_stays_until_the_newer_one_has_its_checksums(saved, tmp_path, monkeypatch):
    run, it = _copy(saved, tmp_path), saved[1]
    hashes, may_hash = threading.Event(), threading.Event()

    def write_part(*arguments):
        hashes.set()
        assert may_hash.wait(60)
        return manifest.write_part(*arguments)

    monkeypatch.setattr(saving, "write_part", write_part)
    checkpointer = _open(run, "max_num_checkpoints_to_keep=1")
    checkpointer.save(it.state(), dataclasses.replace(COUNTS, step=8))
    assert hashes.wait(60)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["6", "7", "unfinished-8"]
    may_hash.set()
    checkpointer.close()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["8"]


def test_a_checkpoint_that_cannot_be_written_is_one_sentence_with_what_is_safe(saved, tmp_path, capfd):
    """A limit on file sizes stands in for a full disk: Orbax's own threads hit it."""
    run, it = _copy(saved, tmp_path), saved[1]
    checkpointer = _open(run)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, before[1]))
        checkpointer.save(it.state(), dataclasses.replace(COUNTS, step=8))
        with pytest.raises(UserError) as refusal:
            checkpointer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    checkpointer.close()
    (problem,) = refusal.value.problems
    what, safe = problem.split(" What is safe: ")
    assert re.search(r"unfinished-8\S* cannot be written: File too large\.$", what)
    assert safe.startswith("the checkpoint of step 7,")
    assert "Traceback" not in capfd.readouterr().err
    assert {path.name for path in (run / "checkpoints").iterdir() if path.name.isdigit()} == {"6", "7"}


def test_checkpoints_of_earlier_versions_are_read_with_a_note(saved, tmp_path):
    run, it = _copy(saved, tmp_path), saved[1]
    older = run / "checkpoints" / "7"
    (older / "sha256.0-of-1").unlink()
    about = older / "about" / "metadata"
    about.write_text(about.read_text().replace('"format": 3', '"format": 2'))
    said = []
    checkpointer = _open(run, say=said.append)
    assert said == ["checkpoint of step 7: no checksums, as an earlier version wrote it; it is taken as it is"]
    state, counts = checkpointer.restore(it.abstract)
    assert counts == COUNTS
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), it.initial.params)
    checkpointer.close()
    DAMAGES["zeros"](older / "params" / "_METADATA")
    checkpointer = _open(run)
    with pytest.raises(UserError, match=r"7 cannot be read .* It has no checksums"):
        checkpointer.restore(it.abstract)
    checkpointer.close()


def test_replicas_and_their_outer_state_come_back_to_the_bit(tmp_path, setup):
    """Mid-period the replicas differ from the shared parameters, which are the ones to load."""
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
    with pytest.raises(UserError, match=r"enable_diloco=false contradicts .* Use enable_diloco=true, or") as error:
        _open(tmp_path).restore(plain.abstract)
    assert len(error.value.problems) == 1


def test_a_resume_of_sgd_names_its_keys(tmp_path, setup):
    it, config = setup("optimizer=sgd", "sgd_momentum=0.9"), _config("optimizer=sgd", "sgd_momentum=0.9")
    checkpointer = Checkpointer(tmp_path, config, fingerprint(config, "text", None))
    checkpointer.save(it.state(), COUNTS)
    checkpointer.close()
    with pytest.raises(UserError, match=r"^sgd_momentum=0 contradicts .* Use another sgd_momentum, or another"):
        _open(tmp_path, "optimizer=sgd").restore(it.abstract)
    with pytest.raises(UserError, match=r"^optimizer=adamw contradicts .* Use optimizer=sgd, or another") as error:
        _open(tmp_path).restore(it.abstract)
    assert len(error.value.problems) == 1


NARROW = "weight_dtype=bfloat16"


def test_masters_stay_while_their_placement_changes(tmp_path, setup):
    """Saved with ZeRO-1 in the fingerprint, as by older versions, and restored without it."""
    it, other = (
        setup("optimizer=adamw", NARROW, "shard_optimizer_over_data=true", data=4),
        setup("optimizer=adamw", NARROW),
    )
    older = fingerprint(_config(NARROW), "text", None) | {"shard_optimizer_over_data": True}
    older.pop("master_weights")
    checkpointer = Checkpointer(tmp_path, _config(NARROW), older)
    checkpointer.save(it.state(), COUNTS)
    checkpointer.close()
    checkpointer = _open(tmp_path, NARROW)
    state, _ = checkpointer.restore(other.abstract)
    checkpointer.close()
    for part in ("params", "opt_state"):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(getattr(state, part)), getattr(it.initial, part))
    assert fingerprint(_config(NARROW, "shard_optimizer_over_data=true"), "text", None) == fingerprint(
        _config(NARROW), "text", None
    )


def test_a_run_without_masters_goes_on_without_them(tmp_path, setup):
    """As older versions wrote it without ZeRO-1: the refusal names the key with which it then continues."""
    it = setup("optimizer=adamw", NARROW, "master_weights=false")
    older = fingerprint(_config(NARROW), "text", None) | {"shard_optimizer_over_data": False}
    older.pop("master_weights")
    checkpointer = Checkpointer(tmp_path, _config(NARROW), older)
    checkpointer.save(it.state(), COUNTS)
    checkpointer.close()
    checkpointer = _open(tmp_path, NARROW)
    with pytest.raises(UserError, match=r"has master_weights=false\. Use master_weights=false, or another"):
        checkpointer.restore(setup("optimizer=adamw", NARROW).abstract)
    checkpointer.close()
    checkpointer = _open(tmp_path, NARROW, "master_weights=false")
    assert checkpointer.restore(it.abstract)[1] == COUNTS
    checkpointer.close()


def test_adafactors_state_of_whole_stacks_is_refused(tmp_path, setup):
    it = setup("optimizer=adafactor")
    config = _config("optimizer=adafactor")
    now = fingerprint(config, "text", None)
    older = {key: value for key, value in now.items() if not key.startswith("adafactor")}
    assert older != now
    checkpointer = Checkpointer(tmp_path, config, older)
    checkpointer.save(it.state(), COUNTS)
    checkpointer.close()
    checkpointer = _open(tmp_path, "optimizer=adafactor")
    with pytest.raises(UserError, match=r"of step 7 in .* has adafactor's state of whole stacks") as refusal:
        checkpointer.restore(it.abstract)
    checkpointer.close()
    assert f"with load_parameters_path={tmp_path} for its parameters." in str(refusal.value)


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
    for keys, said in ((LORA[:1], "lora_rank=0"), ((*LORA, "lora_alpha=7"), "lora_alpha=7")):
        with pytest.raises(UserError, match=rf"{said} contradicts the checkpoint of step 8"):
            _open(tmp_path, *keys).restore(it.abstract)
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "alone" / "checkpoints")
    with pytest.raises(UserError, match=r"key=.*alone holds the adapters of a run with lora_rank=2, without .*/frozen"):
        load_parameters(tmp_path / "alone", plain.abstract.params, "key")


def test_a_checkpoint_of_another_format_is_refused(saved, tmp_path):
    run = _copy(saved, tmp_path)
    (run / "checkpoints" / "7" / "sha256.0-of-1").unlink()
    about = run / "checkpoints" / "7" / "about" / "metadata"
    about.write_text(about.read_text().replace('"format": 3', '"format": 1'))
    checkpointer = _open(run)
    with pytest.raises(UserError, match="has format 1; this version reads 2 to 3"):
        checkpointer.restore(saved[1].abstract)
    checkpointer.close()


def test_a_directory_of_parameters_alone_is_not_continued_but_begun_from(saved, tmp_path):
    """As of `convert import`, whose config.yml names the directory itself as the run's."""
    state = saved[1].state()
    save_parameters(tmp_path, state.params)
    checkpointer = _open(tmp_path)
    with pytest.raises(UserError, match=rf"step 0 in .* holds parameters alone.* load_parameters_path={tmp_path} for"):
        checkpointer.restore(saved[1].abstract)
    checkpointer.close()


@pytest.mark.parametrize("make", [lambda path: path.write_text("x"), lambda path: path.symlink_to("nowhere")],
                         ids=["a file", "a dangling link"])  # fmt: skip
def test_checkpoints_of_the_wrong_kind_are_refused_in_a_sentence(make, tmp_path):
    make(tmp_path / "checkpoints")
    with pytest.raises(UserError, match=r"checkpoints cannot be written: File exists") as refusal:
        _open(tmp_path)
    assert len(refusal.value.problems) == 1
