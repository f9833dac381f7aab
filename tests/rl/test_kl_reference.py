"""The frozen reference: a copy that later steps do not change, and that a restart finds again."""

import contextlib

import jax
import numpy as np
import pytest

from maxtext_lite.config import UserError
from maxtext_lite.rl.kl_reference import Reference
from maxtext_lite.rl.rl_run import open_rl_run


def test_a_copy_is_kept_in_the_run_directory_and_found_after_a_restart(tmp_path, config_of):
    config = config_of(tmp_path, "grpo_beta=0.1", "ici_fsdp_parallelism=8")
    with contextlib.closing(open_rl_run(config)) as rl:
        with jax.set_mesh(rl.run.mesh), rl.run.opened(print):
            state, _ = rl.run.restore_or_init()
            Reference(rl.run, config, state, 0)
            begun = Reference(rl.run, config, state, 0)  # again, as where a run is killed before its first checkpoint
            state = state.__class__(**{**vars(state), "params": jax.tree.map(lambda x: x * 2, state.params)})
            resumed = Reference(rl.run, config, state, 5)
            for one, other in zip(jax.tree.leaves(begun._params), jax.tree.leaves(resumed._params), strict=True):
                assert np.array_equal(one, other)
            (tmp_path / "rl" / "reference").rename(tmp_path / "elsewhere")
            with pytest.raises(UserError, match=r"reference is not there.*grpo_beta=0\.1"):
                Reference(rl.run, config, state, 5)
