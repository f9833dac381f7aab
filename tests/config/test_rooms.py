"""What a config reaches by name: a kind of run, and who knows the directory of load_parameters_path."""

import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.config.errors import Refusal
from maxtext_lite.config.load import Provided

THEIRS = "format.of.theirs"
NAMES = {"base_num_query_heads": "heads", "base_num_kv_heads": "groups"}


def provide(path, stated, max_target_length):
    if not path.startswith(THEIRS):
        return None
    values = {"base_emb_dim": 96, "max_target_length": max_target_length // 2}
    if path.endswith(".odd"):
        values |= {"base_num_query_heads": 6, "base_num_kv_heads": 4}
    contradictions = [Refusal("vocab_size", "vocab_size contradicts theirs.")]
    refusals = contradictions if "vocab_size" in stated else []
    return Provided("theirs.toml", values, refusals, NAMES)


@pytest.fixture
def their_provider(table):
    table(config_provider={"theirs": f"{__name__}:provide"})


def test_a_provider_decides_keys_below_what_the_user_states(their_provider):
    config = load_config(None, [f"load_parameters_path={THEIRS}", "dtype=float32"])
    assert (config.base_emb_dim, config.dtype) == (96, "float32")
    assert config.max_target_length == load_config().max_target_length // 2
    assert config.origins["base_emb_dim"] == "theirs.toml"
    stated = [f"load_parameters_path={THEIRS}", "base_emb_dim=64"]
    assert load_config(None, stated).base_emb_dim == 64


def test_what_a_provider_decides_or_finds_wrong_is_refused_in_its_terms(their_provider):
    with pytest.raises(UserError) as refused:
        load_config(None, [f"load_parameters_path={THEIRS}.odd", "vocab_size=300"])
    contradiction, heads = refused.value.problems
    assert contradiction == "vocab_size contradicts theirs."
    assert heads.startswith("theirs.toml: ")
    assert "groups=4" in heads or "heads=6" in heads
    assert "base_num" not in heads


def test_a_path_that_no_provider_knows_is_a_run_or_nothing(table):
    table(config_provider={"absent": "maxtext_lite.no_room:provide"})
    with pytest.raises(UserError, match="load_parameters_path=nowhere"):
        load_config(None, ["load_parameters_path=nowhere"])


def test_a_kind_of_run_that_is_absent_is_refused_only_where_a_config_selects_it(table):
    table(run={"post_train/rl.yml": "maxtext_lite.no_room:RLRunConfig"})
    assert load_config().steps
    with pytest.raises(UserError, match="not installed"):
        load_config("post_train/rl.yml")
    with pytest.raises(UserError, match="unknown key 'num_generations'"):
        load_config(None, ["num_generations=4"])
