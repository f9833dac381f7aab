"""One tiny trained run for every command that reads one."""

import pytest

from maxtext_lite.config import load_config
from maxtext_lite.training import train
from tests.conftest import use_one_device
from tests.training.conftest import TINY


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A run with one checkpoint, of texts as bytes."""
    keys = [
        "steps=2",
        "eval_interval=-1",
        "per_device_batch_size=1",
        "initializer_range=0.3",
    ]
    keys.append(f"base_output_directory={tmp_path_factory.mktemp('runs')}")
    with pytest.MonkeyPatch.context() as patch:
        use_one_device(patch)
        return train(load_config(None, [*TINY, *keys]))


@pytest.fixture(scope="session")
def directory(run):
    return run.run_directory
