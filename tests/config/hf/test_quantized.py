"""The formats of quantized weights are read by name; what could change them, or is not one of them, is refused."""

import json

import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.config.hf.config import config_json, model_keys, stored_dtype
from maxtext_lite.config.hf.quantized import FIELD, quantization_of
from tests.config.hf.test_config import LLAMA3_8B

INT4 = {
    "num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32, "block_structure": None,
    "dynamic": False, "actorder": "weight", "observer": "minmax", "observer_kwargs": {},
}  # fmt: skip
GROUPS = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"], "kv_cache_scheme": None,
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4, "input_activations": None}},
    "quantization_status": "compressed", "sparsity_config": {}, "transform_config": {}, "version": "0.12.2",
}  # fmt: skip
# As published: gpt-oss, DeepSeek-V3.1, Llama 3.1 405B, RedHat's int4 models, unsloth's nf4 ones.
READ = [
    {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "ue8m0",
     "weight_block_size": [128, 128]},
    {"quant_method": "fp8", "activation_scheme": "static", "dequantize": False, "weight_block_size": None},
    {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
    GROUPS,
    GROUPS | {"sparsity_config": {"format": "dense", "global_sparsity": 0.13, "targets": ["Linear"]}},
    {"quant_method": "bitsandbytes", "_load_in_4bit": True, "_load_in_8bit": False, "load_in_4bit": True,
     "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "llm_int8_threshold": 6.0},
    {"load_in_8bit": True, "llm_int8_threshold": 6.0},
]  # fmt: skip


def keys(quantization):
    return model_keys(LLAMA3_8B | {FIELD: quantization}, "config.json")


@pytest.mark.parametrize("quantization", READ)
def test_published_formats_are_read_and_leave_the_architecture_alone(quantization):
    fields = LLAMA3_8B | {FIELD: quantization}
    assert keys(quantization) == model_keys(LLAMA3_8B, "config.json")
    assert quantization_of(fields)["quant_method"] == quantization.get("quant_method", "bitsandbytes")


def test_a_quantized_model_without_a_number_format_is_in_bfloat16():
    fields = {name: value for name, value in LLAMA3_8B.items() if name not in ("dtype", "torch_dtype")}
    assert stored_dtype(fields) == "float32"
    assert stored_dtype(fields | {FIELD: READ[0]}) == "bfloat16"
    assert stored_dtype(fields | {FIELD: {}}) == "float32"
    assert stored_dtype(fields | {FIELD: READ[0], "torch_dtype": "float16"}) == "float16"


def test_what_is_exported_is_no_longer_called_quantized():
    config = load_config(None, [f"{key}={json.dumps(value)}" for key, value in keys(GROUPS).items()])
    written = config_json(config, max_position_embeddings=8, dtype="bfloat16", original=LLAMA3_8B | {FIELD: GROUPS})
    assert FIELD not in written
    assert written["model_type"] == "llama"


@pytest.mark.parametrize(("quantization", "message"), [
    ({"quant_method": "gptq", "bits": 4}, "quantization_config: quant_method=gptq is not a format that is read: it "
     "must be mxfp4, fp8, fbgemm_fp8, compressed-tensors or bitsandbytes. Nearest that work: compressed-tensors, or "
     "the model in bfloat16 without quantization_config."),
    ({"quant_method": "nvfp4"}, "quant_method=nvfp4 is not a format that is read: it must be mxfp4, fp8, fbgemm_fp8, "
     "compressed-tensors or bitsandbytes. Nearest that work: mxfp4,"),
    ({"quant_method": ["fp8"]}, "quantization_config: quant_method=[fp8] is not a format that is read"),
    ({"bits": 4}, "quantization_config: quant_method=null is not a format"),
    ("fp8", "quantization_config: fp8 is not a format that is read"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "(fp8): weight_block_size=[128] is not two integers"),
    ({"quant_method": "fp8", "modules_to_convert": ["x"]}, "(fp8): modules_to_convert=[x] is not known"),
    (GROUPS | {"format": "marlin-24"}, "(compressed-tensors): format=marlin-24 is not read: it must be int-quantized"),
    (GROUPS | {"transform_config": {"rotate": 1}}, "(compressed-tensors): transform_config={rotate: 1} is not known"),
    (GROUPS | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "is not read: its format must be dense."),
    (GROUPS | {"quantization_status": "frozen"}, "quantization_status=frozen is not read: it must be compressed."),
    (GROUPS | {"config_groups": {"W4A16": ["Linear"]}}, "has no group with weights."),
    (GROUPS | {"config_groups": {"a": {"weights": INT4 | {"type": "float"}}}}, "num_bits=4 of weights is not read."),
    (GROUPS | {"config_groups": {"a": {"weights": INT4 | {"strategy": "tensor_group"}}}}, "strategy=tensor_group of"),
    (GROUPS | {"config_groups": {"a": {"weights": INT4 | {"strategy": "block"}}}}, "block_structure=null is not two"),
])  # fmt: skip
def test_what_is_not_read_is_refused_with_its_field(quantization, message):
    with pytest.raises(UserError) as refusal:
        keys(quantization)
    assert any(message in problem for problem in refusal.value.problems), refusal.value.problems
    assert all(problem.startswith("config.json: quantization_config") for problem in refusal.value.problems)
