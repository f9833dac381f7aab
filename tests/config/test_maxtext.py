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


@pytest.mark.parametrize(
    ("stated", "num_devices", "rows"),
    [
        ({}, 8, 96),
        ({"per_device_batch_size": 8.0, "gradient_accumulation_steps": 2}, 8, 128),
        ({"per_device_batch_size": 0.5, "gradient_accumulation_steps": 4}, 8, 16),
        ({"per_device_batch_size": 0.3, "gradient_accumulation_steps": 4}, 8, 8),  # 2.4 rows are 2
        ({"per_device_batch_size": 1.3}, 8, 10),
        (
            {"per_device_batch_size": 0.29, "ici_fsdp_parallelism": 1, "ici_data_parallelism": -1},
            100,
            28,
        ),  # 28.999999999999996 in floating point
    ],
)
def test_a_step_trains_on_as_many_rows_as_in_maxtext(stated, num_devices, rows):
    plan = make_plan(config_of(stated, num_devices), num_devices=num_devices)
    assert plan.global_batch_to_train == rows


def test_a_load_has_as_many_rows_as_in_maxtext():
    stated = {"per_device_batch_size": 2, "gradient_accumulation_steps": 4, "expansion_factor_real_data": 2.0}
    plan = make_plan(config_of(stated), num_devices=8, num_hosts=8)
    assert (plan.global_batch_to_train, plan.global_batch_to_load) == (64, 128)


def test_a_ramp_has_maxtext_s_stages():
    stated = {"enable_rampup_batch_size": True, "steps": 100}
    plan = make_plan(config_of(stated), num_devices=8)  # 4 to 12 by 2: four stages of 125 samples
    assert [stage.global_batch_to_train for stage in plan.rampup.stages] == [32, 48, 64, 80]
    assert [stage.num_steps for stage in plan.rampup.stages] == [4, 3, 2, 2]


def test_every_key_of_maxtext_s_base_yml_is_known_and_no_other():
    assert len(BASE_KEYS) == 786
    defaults = maxtext_defaults()
    found = translate({key: defaults.get(key, "") for key in BASE_KEYS})
    assert not found.losses
    assert sum(map(len, found.idle.values())) == len(set(BASE_KEYS) - set(defaults))
    assert found.values.keys() <= Config.model_fields.keys()
    with pytest.raises(UserError, match=r"'per_device_batchsize'. Did you mean 'per_device_batch_size'\?"):
        translate({"per_device_batchsize": 1})


def test_what_maxtext_does_otherwise_by_default_is_stated():
    config = config_of({})
    assert (config.learning_rate, config.warmup_steps, config.steps) == (3e-5, 15000, 150001)
    assert (config.weight_decay, config.weight_decay_on_norms_and_embeddings) == (0.1, True)
    assert (config.dtype, config.remat_policy, config.eval_interval) == ("bfloat16", "full", -1)
    assert (config.base_emb_dim, config.base_num_decoder_layers, config.vocab_size) == (2048, 16, 32000)
    assert (config.dataset_type, config.max_target_length, config.max_num_checkpoints_to_keep) == (
        "synthetic",
        2048,
        17,
    )


@pytest.mark.parametrize(
    ("name", "dims"),  # embedding, layers, query heads, key and value heads, vocabulary: of MaxText's files
    [
        ("llama2-7b", (4096, 32, 32, 32, 32000)),
        ("llama3.1-405b", (16384, 126, 128, 8, 128256)),
        ("llama4-17b-128e", (5120, 48, 40, 8, 202048)),
        ("mistral-7b", (4096, 32, 32, 8, 32000)),
        ("mixtral-8x22b", (6144, 56, 48, 8, 32768)),
        ("deepseek3-671b", (7168, 61, 128, 128, 129280)),
        ("gemma2-9b", (3584, 42, 16, 8, 256128)),
        ("gpt-oss-20b", (2880, 24, 64, 8, 201088)),
        ("qwen3-235b-a22b", (4096, 94, 64, 4, 151936)),
    ],
)
def test_a_named_model_has_the_dimensions_of_maxtext_s(name, dims):
    config = config_of({"model_name": name})
    assert dims == (
        config.base_emb_dim,
        config.base_num_decoder_layers,
        config.base_num_query_heads,
        config.base_num_kv_heads,
        config.vocab_size,
    )


def test_every_named_model_has_a_file():
    assert len(maxtext_models()) == 52
    for ours, besides in maxtext_models().values():
        assert ours == "default" or (REPOSITORY / "configs" / "models" / f"{ours}.yml").is_file()
        assert besides.keys() <= Config.model_fields.keys()


def test_dimensions_without_a_name_are_those_of_the_file():
    stated = {"decoder_block": "qwen3", "use_qk_norm": True, "mlp_activations": ["gelu", "linear"], "base_emb_dim": 64}
    config = config_of({**stated, "logits_via_embedding": True})
    assert (config.qk_norm, config.mlp_activation, config.gated_mlp, config.base_emb_dim) == (
        "head", "gelu_tanh", True, 64,
    )  # fmt: skip
    assert config.logits_multiplier == 0.125  # 1 / sqrt(64)


def test_axes_that_are_one_here_are_multiplied():
    stated = {"ici_fsdp_parallelism": 4, "ici_fsdp_transpose_parallelism": 2, "ici_tensor_sequence_parallelism": 2}
    config = config_of({**stated, "dcn_data_parallelism": -1, "num_slices": 4})
    assert (config.ici_fsdp_parallelism, config.ici_tensor_parallelism, config.dcn_data_parallelism) == (8, 2, 4)
    stated = {"enable_diloco": True, "dcn_diloco_parallelism": 2, "dcn_data_parallelism": 1}
    config = config_of(stated)
    assert (config.dcn_data_parallelism, config.diloco_num_replicas, config.diloco_sync_period) == (2, 2, 36)


def test_remat_by_tensor():
    stated = {"remat_policy": "custom", "qkv_proj": "device", "mlpwo": "offload", "decoder_layer_input": "offload"}
    config = config_of(stated)
    assert (config.remat_save, config.remat_offload) == (
        "query_proj,key_proj,value_proj", "decoder_layer_input,mlpwo",
    )  # fmt: skip
    assert config_of({"remat_policy": "save_out_proj"}).remat_save == "out_proj"


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"dropout_rate": 0.1}, "dropout_rate=0.1: dropout"),
        ({"quantization": "int4"}, "quantization=int4: quantization is one of none, int8, fp8, fp8_full"),
        ({"learning_rate_schedule_steps": 10}, "learning_rate_schedule_steps=10: the schedule ends with the last of"),
        ({"decoder_block": "gemma3"}, "decoder_block=gemma3: without model_name only the layers of Llama's kind"),
        ({"use_sft": True, "dataset_type": "hf"}, "sft_train_on_completion_only=false: "),
        ({"attention_bias": True}, "attention_bias=true: with decoder_block=llama2"),
        ({"mlp_activations": ["swish"]}, "mlp_activations=[swish]: "),
        ({"rope_type": "yarn"}, "rope_type=yarn: "),
    ],
)
def test_what_has_no_equivalent_is_listed(stated, message):
    (loss,) = translate(stated).losses
    assert loss.startswith(message)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"gradient_accumulation_steps": 2, "use_dpo": True, "dataset_type": "hf"}, "accumulates 2 loads"),
        (
            {"gradient_accumulation_steps": 2, "enable_rampup_batch_size": True},
            "MaxText's ramp leaves accumulation out",
        ),
        ({"expansion_factor_real_data": 0.5}, "leaves the batch as it is here"),
        ({"per_device_batch_size": 0.3}, "--devices N does the same"),
        ({"dataset_type": "tfds"}, "dataset_path=prepared is to be what `prepare` makes"),
        ({"adamw_mask": ["norm"]}, "here norms and embeddings are not"),
        ({"opt_type": "muon"}, "count for all parameters"),
    ],
)
def test_what_differs_is_said(stated, message):
    assert any(message in note for note in translate(stated).notes)


def test_data_and_lora():
    stated = {"use_sft": True, "sft_train_on_completion_only": True, "dataset_type": "hf", "hf_train_files": "a.jsonl"}
    found = translate({**stated, "enable_lora": True, "lora_rank": 8, "lora_alpha": 16.0, "packing": False})
    assert [found.values[key] for key in ("dataset_type", "dataset_path", "packing", "lora_rank")] == [
        "sft", "a.jsonl", "none", 8,
    ]  # fmt: skip
    assert not found.losses


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"steps": "many"}, "steps=many is not of the kind of MaxText's steps=150001."),
        ({"per_device_batch_size": True}, "per_device_batch_size=true is not of the kind"),
        ({"per_device_batch_size": float("inf")}, "per_device_batch_size=inf is not of the kind"),
        ({"mlp_activations": "silu"}, "mlp_activations=silu is not of the kind"),
        ({"model_name": "gpt3-175b"}, "model_name=gpt3-175b has no equivalent."),
        ({"rl": {}}, "a config of reinforcement learning is not translated"),
    ],
)
def test_what_cannot_be_read_is_refused(stated, message):
    with pytest.raises(UserError) as refused:
        translate(stated)
    assert refused.value.problems[0].startswith(message)


def test_a_number_that_no_key_takes_is_listed():
    (loss,) = translate({"n_routing_groups": 0.5}).losses
    assert loss == "n_routing_groups=0.5: n_routing_groups is one of 1"
