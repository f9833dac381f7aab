"""An adapter's directory decides the LoRA keys; what they cannot express is refused by its field."""

import json
import math

import numpy as np
import pytest
import safetensors.numpy

from maxtext_lite.config import UserError, load_config, write_resolved
from maxtext_lite.config.hf.adapter import adapter_of, missing_base
from maxtext_lite.config.hf.directory import has_hf_weights, hf_directory
from maxtext_lite.config.hf.model_directory import config_of_run
from tests.config.hf.test_config import LLAMA3_8B

# As peft 0.21 saves it, but for fields that are null, false or empty.
FIELDS = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "../its-base", "r": 4, "lora_alpha": 6,
    "target_modules": ["v_proj", "q_proj"], "lora_dropout": 0.05, "bias": "none", "inference_mode": True,
    "init_lora_weights": True, "use_dora": False, "modules_to_save": None, "rank_pattern": {}, "peft_version": "0.21.2",
    "qalora_group_size": 16, "megatron_core": "megatron.core", "auto_mapping": None, "layers_to_transform": None,
}  # fmt: skip
NAMES = ("self_attn.q_proj", "self_attn.v_proj")


def directory(path, modules=NAMES, **fields):
    (path / "its-base").mkdir(parents=True)
    (path / "its-base" / "config.json").write_text(json.dumps(LLAMA3_8B))
    (path / "its-base" / "model.safetensors").write_bytes(b"")
    (path / "adapter").mkdir()
    (path / "adapter" / "adapter_config.json").write_text(json.dumps(FIELDS | fields))
    names = [f"base_model.model.model.layers.0.{module}.lora_{which}.weight" for module in modules for which in "AB"]
    stored = {name: np.zeros((1, 1), np.float32) for name in names}
    safetensors.numpy.save_file(stored, path / "adapter" / "adapter_model.safetensors")
    return path / "adapter"


@pytest.mark.parametrize(("fields", "rank", "alpha"), [
    ({}, 4, 6),
    ({"use_rslora": True}, 4, 12),  # alpha / sqrt(r) = 3 = 12 / 4
    ({"target_modules": r".*self_attn\.[qv]_proj"}, 4, 6),
    ({"target_modules": "all-linear"}, 4, 6),
    ({"target_modules": ["self_attn.q_proj", "v_proj", "nothing"]}, 4, 6),
    ({"rank_pattern": {"q_proj": 8}}, 8, 12),  # the others' alpha / r = 1.5 = 12 / 8
    ({"rank_pattern": {r"layers\.[01]\..*": 2}}, 2, 3),
    ({"exclude_modules": ["k_proj"], "layers_to_transform": [0]}, 4, 6),
])  # fmt: skip
def test_an_adapter_decides_the_lora_keys_and_its_base_the_rest(fields, rank, alpha, tmp_path):
    path = directory(tmp_path, **fields)
    found = adapter_of(path)
    assert found is not None
    assert found.keys == {"lora_rank": rank, "lora_alpha": alpha, "lora_targets": "query,value"}
    assert has_hf_weights(path)
    base = hf_directory(path)
    assert base is not None
    assert base.resolve() == tmp_path / "its-base"
    config = load_config(None, [f"load_parameters_path={path}", "tokenizer_type=byte", "lora_targets=value, query"])
    assert (config.lora_rank, config.lora_alpha, config.base_emb_dim) == (rank, alpha, 4096)


def test_a_run_says_what_its_model_is_where_the_base_of_its_adapter_is_gone(tmp_path):
    path, run = directory(tmp_path), tmp_path / "run"
    run.mkdir()
    words = [f"load_parameters_path={path}", "tokenizer_type=byte"]
    config = load_config(None, words)
    write_resolved(config, run / "config.yml")
    assert missing_base(path) is None
    (tmp_path / "its-base").rename(tmp_path / "gone")
    assert missing_base(path) == "../its-base"
    assert hf_directory(path) is None
    found = config_of_run(run)
    assert (found.lora_rank, found.lora_targets, found.base_emb_dim) == (4, "query,value", 4096)
    refused = f"{path / 'adapter_config.json'}: base_model_name_or_path=../its-base is not a directory here."
    for more in ([], ["base_emb_dim=4096"]):
        with pytest.raises(UserError) as refusal:
            load_config(None, [*words, *more])
        assert [problem[: len(refused)] for problem in refusal.value.problems] == [refused]
    with pytest.raises(UserError, match="base_model_name_or_path"):
        has_hf_weights(path)


def test_a_stated_lora_key_may_not_contradict_it(tmp_path):
    path = directory(tmp_path)
    for stated in ("lora_rank=8", "lora_rank=0", "lora_targets=all", "lora_alpha=3"):
        with pytest.raises(UserError) as refusal:
            load_config(None, [f"load_parameters_path={path}", "tokenizer_type=byte", stated])
        assert any(
            problem.startswith(f"{stated} (command line) contradicts {path / 'adapter_config.json'}, by which it is")
            and f"convert import {path} OUT" in problem
            for problem in refusal.value.problems
        ), refusal.value.problems


@pytest.mark.parametrize(("fields", "message"), [
    ({"peft_type": "IA3"}, "peft_type=IA3 is not read: it must be LORA."),
    ({"use_dora": True}, "use_dora=true cannot be expressed. Nearest that works: merge_and_unload of peft"),
    ({"bias": "all"}, "bias=all cannot be expressed"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save=[lm_head] cannot be expressed"),
    ({"r": 0}, "r=0 is not an integer of at least 1."),
    ({"lora_alpha": "x"}, "lora_alpha=x is not a number above 0."),
    ({"lora_alpha": 10**400}, "lora_alpha=1.000000e+400 is not a number above 0."),
    ({"alpha_pattern": {"q_proj": 10**400}}, "alpha_pattern={q_proj: 1.000000e+400} is not an object of numbers above"),
    ({"alpha_pattern": {"q_proj": math.inf}}, "alpha_pattern={q_proj: inf} is not an object of numbers above 0"),
    ({"rank_pattern": {"q_proj": 2**31}}, "rank_pattern={q_proj: 2147483648} is not an object of integers of at"),
    ({"use_rslora": "yes"}, "use_rslora=yes is not true or false."),
    ({"rank_pattern": {"q_proj": 0}}, "rank_pattern={q_proj: 0} is not an object of integers of at least 1 by module."),
    ({"rank_pattern": [8]}, "rank_pattern=[8] is not an object of integers of at least 1 by module."),
    ({"rank_pattern": {"(": 8}}, "rank_pattern={(: 8} is not an object of integers of at least 1 by module."),
    ({"alpha_pattern": {"q_proj": True}}, "alpha_pattern={q_proj: true} is not an object of numbers above 0"),
    ({"exclude_modules": 3}, "exclude_modules=3 is not a list of names or a pattern."),
    ({"exclude_modules": "("}, "exclude_modules=( is not a list of names or a pattern."),
    ({"exclude_modules": ["v_proj"]}, "exclude_modules=[v_proj] leaves out model.layers.0.self_attn.v_proj, which"),
    ({"layers_to_transform": ["1"]}, "layers_to_transform=[1] is not a list of layers' numbers."),
    ({"layers_to_transform": 1}, "layers_to_transform=1 leaves out model.layers.0.self_attn.q_proj, which"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights=pissa_niter_4 changes the model: it must be true,"),
    ({"base_model_name_or_path": "meta-llama/Llama-3.1-8B"},
     "base_model_name_or_path=meta-llama/Llama-3.1-8B is not a directory here. Set it in that file to"),
    ({"base_model_name_or_path": "."}, "base_model_name_or_path=. is an adapter itself. Merge that one."),
    ({"target_modules": ["q_proj"]}, "target_modules=[q_proj] does not name model.layers.0.self_attn.v_proj, which"),
    ({"target_modules": "("}, "target_modules=( does not name"),
    ({"modules": ["self_attn.q_proj", "input_layernorm"]}, "has model.layers.0.input_layernorm, which is no weight"),
])  # fmt: skip
def test_what_cannot_be_expressed_is_refused_with_its_field(fields, message, tmp_path):
    path = directory(tmp_path, **fields)
    if fields.get("base_model_name_or_path") == ".":
        fields["base_model_name_or_path"] = str(path)
        message = message.replace("=.", f"={path}")
        (path / "adapter_config.json").write_text(json.dumps(FIELDS | fields))
    with pytest.raises(UserError) as refusal:
        adapter_of(path)
    assert str(refusal.value).startswith(f"{path / 'adapter_config.json'}: ")
    assert message in str(refusal.value)


def test_other_files_are_refused(tmp_path):
    path = directory(tmp_path)
    assert adapter_of(tmp_path / "its-base") is None
    weights = path / "adapter_model.safetensors"
    weights.write_bytes(b"\x00\x01")
    with pytest.raises(UserError, match="is not a safetensors file, or is damaged"):
        adapter_of(path)
    for header in (b"5", b"null", b"[1]"):
        weights.write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(UserError, match=r"or is damaged or cut off .its header is no object"):
            adapter_of(path)
    safetensors.numpy.save_file({"base_model.model.lm_head.weight": np.zeros(1, np.float32)}, weights)
    with pytest.raises(UserError, match=r"has base_model\.model\.lm_head\.weight, where lora_A and lora_B are read"):
        adapter_of(path)
    weights.rename(path / "adapter_model.bin")
    with pytest.raises(UserError, match=r"without adapter_model\.safetensors\. adapter_model\.bin is pickled"):
        adapter_of(path)
