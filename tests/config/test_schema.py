import itertools
import pickle
from fractions import Fraction

import pytest
import yaml
from pydantic import ValidationError

from maxtext_lite.config import KEYS, RL_KEYS, BatchConfig, Config, load_config, packaged_directory
from maxtext_lite.config.schema import PolicyConfig, RewardConfig, RLConfig, RolloutConfig, TaskConfig


def test_a_config_does_not_change():
    config = load_config()
    with pytest.raises(ValidationError):
        config.steps = 5


def test_configs_are_equal_when_their_values_are():
    plain, named = load_config(), load_config(None, ["steps=250"])
    assert plain.origins != named.origins
    assert plain == named
    assert hash(plain) == hash(named)
    assert plain != load_config(None, ["steps=401"])
    assert plain != 3


def test_a_config_pickles_with_its_origins():
    config = load_config(None, ["steps=7", "per_device_batch_size=1/3"])
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert again.origins == config.origins


def test_a_config_is_each_of_its_sections():
    config = load_config()
    assert isinstance(config, BatchConfig)
    assert set(KEYS) == set(Config.model_fields)
    assert len(KEYS) == len(set(KEYS))


@pytest.mark.parametrize("text", ["0.29", "16", "1/3", "0.000244140625", "1/4096"])
@pytest.mark.parametrize("mode", ["python", "json"])
def test_a_dump_validates_to_the_same_config(text, mode):
    config = load_config(None, [f"per_device_batch_size={text}"])
    assert config.per_device_batch_size == Fraction(text)
    assert Config.model_validate(config.model_dump(mode=mode)) == config
    assert Config.model_validate_json(config.model_dump_json()) == config


SECTIONS = (RLConfig, TaskConfig, RewardConfig, PolicyConfig, RolloutConfig)


def test_the_sections_hold_what_rl_yml_adds_to_base_yml_in_its_order():
    written = yaml.safe_load((packaged_directory("configs") / "post_train" / "rl.yml").read_text(encoding="utf-8"))
    added = [key for key in written if key not in (*KEYS, "base")]
    assert [key for section in SECTIONS for key in section.model_fields] == added == list(RL_KEYS)


def test_no_key_stands_in_two_sections():
    for one, other in itertools.combinations(SECTIONS, 2):
        assert not one.model_fields.keys() & other.model_fields.keys()
