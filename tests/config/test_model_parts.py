"""Keys whose value is a mapping: legal values, messages, and round trips through files."""

import pickle

import pytest

from maxtext_lite import load_config
from maxtext_lite.config import Config, Mla, RopeScaling, UserError, write_resolved

LLAMA3 = "{rope_type: llama3, factor: 8, low_freq_factor: 1, high_freq_factor: 4, original_max_position_embeddings: 64}"
MLA = "{q_lora_rank: 0, kv_lora_rank: 16, qk_nope_head_dim: 12, qk_rope_head_dim: 4, v_head_dim: 8}"


def test_entries_are_attributes():
    scaling = load_config(None, [f"rope_scaling={LLAMA3}"]).rope_scaling
    assert scaling == RopeScaling("llama3", 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0)
    config = load_config(None, [f"mla={MLA}", "base_num_kv_heads=8"])
    assert config.mla == Mla(0, 16, 12, 4, 8)
    assert (config.rotary_dim, config.value_dim) == (4, 8)


def test_an_empty_mapping_is_none():
    assert load_config().rope_scaling is load_config(None, ["mla={}"]).mla is None


def test_a_mapping_comes_back_from_a_file_a_pickle_and_json(tmp_path):
    config = load_config(None, [f"rope_scaling={LLAMA3}", f"mla={MLA}", "base_num_kv_heads=8"])
    write_resolved(config, tmp_path / "config.yml")
    assert load_config(tmp_path / "config.yml") == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert Config.model_validate(config.model_dump(mode="json")) == config
    assert hash(config) == hash(load_config(tmp_path / "config.yml"))


@pytest.mark.parametrize(("override", "message"), [
    ("rope_scaling={rope_type: lama3}",
     "rope_scaling={rope_type: lama3} needs a rope_type: linear, ntk, dynamic, llama3, yarn or longrope. Nearest "
     "that works: {}."),
    ("rope_scaling={rope_type: linear}", "={rope_type: linear} lacks factor, which rope_type=linear needs."),
    ("rope_scaling={rope_type: linear, factr: 2}", "has factr, which rope_type=linear does not"),
    ("rope_scaling={rope_type: linear, factor: 0.5}", "has factor=0.5, which must be at least 1."),
    ("rope_scaling={rope_type: linear, factor: .nan}", "which is not a finite number"),
    ("rope_scaling={rope_type: yarn, factor: 2, original_max_position_embeddings: 8, truncate: 1}",
     "has truncate=1, which is not true or false."),
    ("rope_scaling={rope_type: dynamic, factor: 2, original_max_position_embeddings: 1.5}",
     "=1.5, which is not an integer."),
    ("rope_scaling={rope_type: [yarn]}", "needs a rope_type"),
    ("rope_scaling={rope_type: linear, factor: }", "has no value for factor."),
    (f"rope_scaling={LLAMA3.replace('low_freq_factor: 1', 'low_freq_factor: 5')}", "above its high_freq_factor"),
    ("rope_scaling={rope_type: longrope, factor: 2, original_max_position_embeddings: 1, short_factor: [1], "
     "long_factor: [2]}", "lacks attention_factor, which original_max_position_embeddings=1 does not decide. Nearest"),
    ("rope_scaling=2", "rope_scaling=2 is not a mapping, as {name: value}. Nearest that works: {}."),
    ("mla={kv_lora_rank: 16}", "lacks q_lora_rank, which latent attention needs"),
    (f"mla={MLA.replace('rope_head_dim: 4', 'rope_head_dim: 3')}", "has an odd qk_rope_head_dim"),
])  # fmt: skip
def test_what_is_wrong_with_a_mapping_is_said(override, message):
    with pytest.raises(UserError) as error:
        load_config(None, [override])
    assert message in str(error.value)
