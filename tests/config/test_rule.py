from maxtext_lite.config import Refusal, load_config
from maxtext_lite.config.rule import Rule


def test_a_rule_is_asked_where_all_of_its_keys_are_known():
    refusal = Refusal("steps", "steps=250 is odd.", (251,))
    rule = Rule(("steps", "run_name"), lambda config: refusal if config.steps == 250 else None)
    config = load_config()
    assert rule.refusal(config, ("steps", "run_name", "dtype")) is refusal
    assert rule.refusal(config, ("steps",)) is None
    assert rule.refusal(load_config(None, ["steps=251"]), ("steps", "run_name")) is None
