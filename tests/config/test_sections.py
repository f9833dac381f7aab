import itertools

import pytest

from maxtext_lite.config import Remat, load_config, remat_of
from maxtext_lite.config.schema import SECTIONS
from maxtext_lite.config.sections import PROJECTIONS, QKV, REMAT_POLICIES, REMAT_TENSORS, listed

MLA = "{q_lora_rank: 0, kv_lora_rank: 16, qk_nope_head_dim: 12, qk_rope_head_dim: 4, v_head_dim: 8}"


def test_no_key_stands_in_two_sections():
    for (_, one), (_, other) in itertools.combinations(SECTIONS, 2):
        assert not one.model_fields.keys() & other.model_fields.keys()


@pytest.mark.parametrize(
    ("overrides", "rotary", "values"),
    [
        (["head_dim=32"], 32, 32),
        (["head_dim=32", "partial_rotary_factor=0.25"], 8, 32),
        ([f"mla={MLA}", "head_dim=16", "base_num_kv_heads=4", "base_num_query_heads=4"], 4, 8),
    ],
)
def test_what_a_head_rotates_and_how_wide_its_values_are(overrides, rotary, values):
    config = load_config(None, overrides)
    assert (config.rotary_dim, config.value_dim) == (rotary, values)


def test_a_preference_is_two_rows():
    assert load_config().rows_per_example == 1
    assert load_config("post_train/dpo.yml").rows_per_example == 2


# ---- Rematerialization: the tensors that each policy keeps ---------------------------------------------------------


def of(*overrides):
    return remat_of(load_config(None, overrides))


def test_policies():
    assert of("remat_policy=none") is None
    assert of("remat_policy=full") == Remat(())
    assert of("remat_policy=save_qkv_proj") == Remat(QKV)
    assert of("remat_policy=minimal_offloaded") == Remat((), PROJECTIONS)
    assert of("remat_policy=custom", "remat_save=context, query_proj", "remat_offload=mlpwo") == Remat(
        ("context", "query_proj"), ("mlpwo",)
    )


@pytest.mark.parametrize("policy", REMAT_POLICIES)
def test_every_policy_can_be_set_and_names_known_tensors(policy):
    saved, offloaded = of(f"remat_policy={policy}")
    assert set(saved) | set(offloaded) <= set(REMAT_TENSORS)
    assert not set(saved) & set(offloaded)


def test_lists():
    assert listed("") == ()
    assert listed(" a, b ,,c") == ("a", "b", "c")
