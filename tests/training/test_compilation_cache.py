"""A start finds what an earlier one compiled for the same program, and trains to the same bits."""

from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from maxtext_lite.config import load_config
from maxtext_lite.training import train
from maxtext_lite.training.compile import (
    DIRECTORY,
    keep_compiled,
    num_found,
    reading_compiled,
)
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
    keys = "dataset_type=synthetic eval_interval=-1 steps=2 optimizer=sgd base_num_decoder_layers=1 "
    keys += "enable_checkpointing=false"
    own = f"base_output_directory={tmp_path}", f"run_name={name}"
    return load_config(None, [*TINY, *keys.split(), *own])


def test_the_second_start_finds_the_train_step(tmp_path, capsys, one_device):
    results = []
    for name in ("first", "second"):
        keep_compiled(config(tmp_path, name))
        jax.clear_caches()
        results.append(train(config(tmp_path, name)))
        said = capsys.readouterr().out
        assert ("with what an earlier start had compiled" in said) == (name == "second")
    jax.tree.map(
        np.testing.assert_array_equal, *(result.state.params for result in results)
    )
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


def test_an_entry_that_is_cut_short_has_no_name(tmp_path, monkeypatch):
    """Jax never replaces an entry, so each later start would compile again."""
    keep_compiled(config(tmp_path))

    def cut_short(path, content):
        path.touch()
        raise KeyboardInterrupt

    jax.clear_caches()
    monkeypatch.setattr(Path, "write_bytes", cut_short)
    with pytest.raises(KeyboardInterrupt):
        jax.jit(lambda x: x**5)(X)
    (kept,) = (tmp_path / DIRECTORY).iterdir()
    assert not list(kept.glob("*-cache"))
