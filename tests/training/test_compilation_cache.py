"""A start finds what an earlier one compiled for the same program, and trains to the same bits."""

import contextlib
import os
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from maxtext_lite.config import load_config
from maxtext_lite.training import train
from maxtext_lite.training.compilation_cache import DIRECTORY, keep_compiled, num_found, reading_compiled
from tests.training.conftest import TINY

KEYS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
X = np.arange(3.0)


@pytest.fixture(autouse=True)
def _settings():
    """Keeps every program, however short its compilation, and restores jax's settings afterwards."""
    before = {key: getattr(jax.config, key) for key in KEYS}
    reset_cache()
    jax.config.update(KEYS[0], None)
    jax.config.update(KEYS[1], 0)
    yield
    for key, value in before.items():
        jax.config.update(key, value)
    reset_cache()


def config(tmp_path, name="run"):
    words = [*TINY, "dataset_type=synthetic", "eval_interval=-1", "steps=2", "enable_checkpointing=false"]
    return load_config(None, [*words, f"base_output_directory={tmp_path}", f"run_name={name}"])


def test_the_second_start_finds_the_train_step(tmp_path, capsys):
    results = []
    for name in ("first", "second"):
        keep_compiled(config(tmp_path, name))
        jax.clear_caches()
        results.append(train(config(tmp_path, name)))
        said = capsys.readouterr().out
        assert ("with what an earlier start had compiled" in said) == (name == "second")
    jax.tree.map(np.testing.assert_array_equal, *(result.state.params for result in results))
    (kept,) = (tmp_path / DIRECTORY).iterdir()
    assert list(kept.glob("jit_train_step-*"))


def test_programs_are_read_without_keeping_others(tmp_path):
    """As a replay does, so that the next replay finds the run's own programs, or again none."""
    square, cube = jax.jit(lambda x: x**2), jax.jit(lambda x: x**3)
    with reading_compiled(config(tmp_path)):
        square(X)
    assert not list(tmp_path.iterdir())
    keep_compiled(config(tmp_path))
    jax.clear_caches()
    square(X)
    (kept,) = (tmp_path / DIRECTORY).iterdir()
    entries = sorted(kept.iterdir())
    jax.clear_caches()
    found = num_found()
    with reading_compiled(config(tmp_path)):
        square(X)
        cube(X)
    assert num_found() > found
    assert sorted(kept.iterdir()) == entries
    jax.clear_caches()
    cube(X)
    assert len(list(kept.iterdir())) > len(entries)


def test_a_directory_that_the_user_named_stays_and_a_bucket_has_none(tmp_path):
    keep_compiled(load_config(None, ["base_output_directory=gs://there/runs", "run_name=a"]))
    assert jax.config.jax_compilation_cache_dir is None
    jax.config.update(KEYS[0], str(tmp_path / "mine"))
    keep_compiled(config(tmp_path))
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")


def test_an_entry_counts_once_it_is_whole(tmp_path, monkeypatch):
    def cut_short(path, value, write=Path.write_bytes):
        write(path, value[: len(value) // 2])
        raise OSError("killed")

    keep_compiled(config(tmp_path))
    for killed in (True, False):
        with monkeypatch.context() as patched, contextlib.ExitStack() as warned:
            if killed:
                patched.setattr(Path, "write_bytes", cut_short)
                warned.enter_context(pytest.warns(UserWarning, match="killed"))
            jax.clear_caches()
            jax.jit(lambda x: x * 5 + 1)(X)
        assert bool([*tmp_path.rglob("jit__lambda*-cache")]) != killed
    assert not [*tmp_path.rglob("*-cache.*")]  # nor does a full disk keep the part


def test_a_start_removes_the_parts_that_killed_ones_left(tmp_path):
    keep_compiled(config(tmp_path))
    kept = Path(jax.config.jax_compilation_cache_dir)
    kept.mkdir(parents=True)
    for name, age in (("old-cache", 1e9), ("old-cache.7", 4000), ("old-cache.7-ab.partial", 4000), ("new-cache.8", 0)):
        (kept / name).write_bytes(b"x")
        os.utime(kept / name, (time.time() - age,) * 2)
    jax.config.update(KEYS[0], None)
    keep_compiled(config(tmp_path))
    assert {path.name for path in kept.iterdir()} == {"old-cache", "new-cache.8"}
