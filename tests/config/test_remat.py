"""The tensors that each policy keeps."""

import pytest

from maxtext_lite.config import Remat, load_config, remat_of
from maxtext_lite.config.remat import PROJECTIONS, QKV, REMAT_POLICIES, REMAT_TENSORS, listed


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
