"""MaxText's formulas are those of its own calculate_global_batch_sizes, by hand: int(devices x p) x g rows a step."""

import pytest

from maxtext_lite.batching import make_plan
from maxtext_lite.config import Config, UserError, load_config
from maxtext_lite.config.errors import setting_text
from maxtext_lite.config.maxtext import maxtext_defaults, maxtext_models, translate
from tests.source_tree import REPOSITORY

BASE_KEYS = (REPOSITORY / "tests" / "maxtext_base_keys.txt").read_text(encoding="utf-8").split()  # of MaxText 0.2.5


def config_of(stated, num_devices=None):
    found = translate(stated, num_devices=num_devices)
    return load_config(None, [f"{key}={setting_text(value)}" for key, value in found.values.items()])


@pytest.mark.parametrize(("stated", "num_devices", "rows"), [
    ({}, 8, 96),
    ({"per_device_batch_size": 8.0, "gradient_accumulation_steps": 2}, 8, 128),
    ({"per_device_batch_size": 0.3, "gradient_accumulation_steps": 4}, 8, 8),  # 2.4 rows are 2
    ({"per_device_batch_size": 1.3}, 8, 10),
    # 28.999999999999996 in floating point
    ({"per_device_batch_size": 0.29, "ici_fsdp_parallelism": 1, "ici_data_parallelism": -1}, 100, 28),
])
def test_a_step_trains_on_as_many_rows_as_in_maxtext(stated, num_devices, rows):
    assert make_plan(config_of(stated, num_devices), num_devices=num_devices).global_batch_to_train == rows


def test_loads_and_ramps_are_those_of_maxtext():
    stated = {"per_device_batch_size": 2, "gradient_accumulation_steps": 4, "expansion_factor_real_data": 2.0}
    plan = make_plan(config_of(stated), num_devices=8, num_hosts=8)
    assert (plan.global_batch_to_train, plan.global_batch_to_load) == (64, 128)
    ramp = make_plan(config_of({"enable_rampup_batch_size": True, "steps": 100}), num_devices=8).rampup
    assert [(stage.global_batch_to_train, stage.num_steps) for stage in ramp.stages] == [
        (32, 4), (48, 3), (64, 2), (80, 2),
    ]


def test_every_key_of_maxtext_s_base_yml_is_known_and_no_other():
    assert len(BASE_KEYS) == 786
    defaults = maxtext_defaults()
    found = translate({key: defaults.get(key, "") for key in BASE_KEYS})
    assert not found.losses
    assert sum(map(len, found.idle.values())) == len(set(BASE_KEYS) - set(defaults))
    assert found.values.keys() <= Config.model_fields.keys()


def test_every_named_model_has_a_file():
    assert len(maxtext_models()) == 52
    for ours, besides in maxtext_models().values():
        assert ours == "default" or (REPOSITORY / "configs" / "models" / f"{ours}.yml").is_file()
        assert besides.keys() <= Config.model_fields.keys()


@pytest.mark.parametrize(("name", "dims"), [  # embedding, layers, query heads, kv heads, vocabulary, of MaxText's files
    ("llama2-7b", (4096, 32, 32, 32, 32000)), ("llama3.1-405b", (16384, 126, 128, 8, 128256)),
    ("llama4-17b-128e", (5120, 48, 40, 8, 202048)), ("mistral-7b", (4096, 32, 32, 8, 32000)),
    ("mixtral-8x22b", (6144, 56, 48, 8, 32768)), ("deepseek3-671b", (7168, 61, 128, 128, 129280)),
    ("gemma2-9b", (3584, 42, 16, 8, 256128)), ("gpt-oss-20b", (2880, 24, 64, 8, 201088)),
    ("qwen3-235b-a22b", (4096, 94, 64, 4, 151936)),
])
def test_a_named_model_has_the_dimensions_of_maxtext_s(name, dims):
    config = config_of({"model_name": name})
    layers, heads = config.base_num_decoder_layers, (config.base_num_query_heads, config.base_num_kv_heads)
    assert dims == (config.base_emb_dim, layers, *heads, config.vocab_size)


@pytest.mark.fast
@pytest.mark.parametrize(("stated", "keys"), [
    ({}, {"learning_rate": 3e-5, "warmup_steps": 15000, "steps": 150001, "weight_decay": 0.1, "dtype": "bfloat16",
          "weight_decay_on_norms_and_embeddings": True, "remat_policy": "full", "eval_interval": -1,
          "base_emb_dim": 2048, "base_num_decoder_layers": 16, "vocab_size": 32000, "dataset_type": "synthetic",
          "max_target_length": 2048, "max_num_checkpoints_to_keep": 17}),
    ({"decoder_block": "qwen3", "use_qk_norm": True, "mlp_activations": ["gelu", "linear"], "base_emb_dim": 64,
      "logits_via_embedding": True},
     {"qk_norm": "head", "mlp_activation": "gelu_tanh", "gated_mlp": True, "logits_multiplier": 0.125}),  # 1 / root 64
    # Axes that are one here are multiplied.
    ({"ici_fsdp_parallelism": 4, "ici_fsdp_transpose_parallelism": 2, "ici_tensor_sequence_parallelism": 2,
      "dcn_data_parallelism": -1, "num_slices": 4},
     {"ici_fsdp_parallelism": 8, "ici_tensor_parallelism": 2, "dcn_data_parallelism": 4}),
    ({"enable_diloco": True, "dcn_diloco_parallelism": 2, "dcn_data_parallelism": 1},
     {"dcn_data_parallelism": 2, "diloco_num_replicas": 2, "diloco_sync_period": 36}),
    ({"remat_policy": "custom", "qkv_proj": "device", "mlpwo": "offload", "decoder_layer_input": "offload"},
     {"remat_save": "query_proj,key_proj,value_proj", "remat_offload": "decoder_layer_input,mlpwo"}),
    ({"remat_policy": "save_out_proj"}, {"remat_save": "out_proj"}),
    ({"use_sft": True, "sft_train_on_completion_only": True, "dataset_type": "hf", "hf_train_files": "a.jsonl",
      "enable_lora": True, "tokenizer_path": "x", "lora_rank": 8, "lora_alpha": 16.0, "packing": False},
     {"dataset_type": "sft", "dataset_path": "a.jsonl", "packing": False, "lora_rank": 8}),
])
def test_keys_are_translated_and_what_maxtext_does_otherwise_is_stated(stated, keys):
    config = config_of(stated)
    assert {key: getattr(config, key) for key in keys} == keys


@pytest.mark.parametrize("stated", [
    {"dropout_rate": 0.1}, {"quantization": "int4"}, {"learning_rate_schedule_steps": 10}, {"decoder_block": "gemma3"},
    {"sft_train_on_completion_only": False, "use_sft": True, "dataset_type": "hf"}, {"attention_bias": True},
    {"mlp_activations": ["swish"]}, {"rope_type": "yarn"}, {"n_routing_groups": 0.5},
], ids=str)
def test_what_has_no_equivalent_is_listed(stated):
    (loss,) = translate(stated).losses
    assert loss.startswith(f"{next(iter(stated))}=")


@pytest.mark.parametrize("stated", [
    {"gradient_accumulation_steps": 2, "use_dpo": True, "dataset_type": "hf"},
    {"gradient_accumulation_steps": 2, "enable_rampup_batch_size": True}, {"expansion_factor_real_data": 0.5},
    {"per_device_batch_size": 0.3}, {"dataset_type": "tfds"}, {"adamw_mask": ["norm"]}, {"opt_type": "muon"},
], ids=str)
def test_what_differs_is_said(stated):
    assert len(translate(stated).notes) > len(translate({}).notes)


@pytest.mark.parametrize("stated", [
    {"steps": "many"}, {"per_device_batch_size": True}, {"per_device_batch_size": float("inf")},
    {"mlp_activations": "silu"}, {"model_name": "gpt3-175b"}, {"per_device_batchsize": 1}, {"rl": {}},
], ids=str)
def test_what_cannot_be_read_is_refused(stated):
    with pytest.raises(UserError, match=next(iter(stated)) if "rl" not in stated else "reinforcement"):
        translate(stated)
