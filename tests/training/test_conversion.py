"""The summary of a conversion; and a model keeps its numbers there and back."""

import json

import numpy as np
import safetensors.numpy

from maxtext_lite.config import load_config
from maxtext_lite.training import train
from maxtext_lite.training.conversion import export_directory, import_directory
from tests.training.conftest import TINY

WITHOUT_TEXT = ("dataset_type=synthetic", "eval_interval=-1", "per_device_batch_size=1", "steps=2")


def test_a_run_goes_out_comes_in_and_goes_out_with_the_same_numbers(tmp_path):
    run = train(load_config(None, [*TINY, *WITHOUT_TEXT, f"base_output_directory={tmp_path / 'runs'}"])).run_directory
    said = export_directory(run, tmp_path / "hf", [], merge_lora=None)
    count = sum(x.size for x in safetensors.numpy.load_file(tmp_path / "hf" / "model.safetensors").values())
    assert said == f"{count:,} parameters in {tmp_path / 'hf'}, as llama in float32"
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == 256
    in_half = import_directory(tmp_path / "hf", tmp_path / "in", ["weight_dtype=bfloat16"])
    assert in_half == f"{count:,} parameters in {tmp_path / 'in'}, in bfloat16"
    import_directory(tmp_path / "hf", tmp_path / "whole", ["ici_tensor_parallelism=2"])
    export_directory(tmp_path / "whole", tmp_path / "again", [], merge_lora=None)
    one, other = (safetensors.numpy.load_file(tmp_path / name / "model.safetensors") for name in ("hf", "again"))
    assert one.keys() == other.keys()
    for name, x in one.items():
        np.testing.assert_array_equal(x, other[name], err_msg=name)
