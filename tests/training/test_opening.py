"""An opened run is planned for the attached devices and for the given memory."""

from maxtext_lite.batching import make_plan
from maxtext_lite.config import load_config
from maxtext_lite.training.opening import open_data, open_run, plan_on_devices
from tests.training.conftest import TINY


def test_the_plan_is_that_of_the_devices_the_data_and_the_memory(tmp_path):
    config = load_config(None, [*TINY, "dataset_type=synthetic", f"base_output_directory={tmp_path}", "run_name=here"])
    plan, (source, _) = open_data(config, device_memory_gb=2.5)
    assert plan == make_plan(config, num_devices=8, platform="cpu", num_examples=len(source), device_memory_gb=2.5)
    assert open_run(config, device_memory_gb=2.5).plan == plan
    assert plan_on_devices(plan)(config) == plan
    assert not list(tmp_path.iterdir())
