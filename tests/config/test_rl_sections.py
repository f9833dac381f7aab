import itertools

import yaml

from maxtext_lite.config import KEYS, RL_KEYS, packaged_directory
from maxtext_lite.config.rl_sections import PolicyConfig, RewardConfig, RLConfig, RolloutConfig, TaskConfig

SECTIONS = (RLConfig, TaskConfig, RewardConfig, PolicyConfig, RolloutConfig)


def test_the_sections_hold_what_rl_yml_adds_to_base_yml_in_its_order():
    written = yaml.safe_load((packaged_directory("configs") / "post_train" / "rl.yml").read_text(encoding="utf-8"))
    added = [key for key in written if key not in (*KEYS, "base")]
    assert [key for section in SECTIONS for key in section.model_fields] == added == list(RL_KEYS)


def test_no_key_stands_in_two_sections():
    for one, other in itertools.combinations(SECTIONS, 2):
        assert not one.model_fields.keys() & other.model_fields.keys()
