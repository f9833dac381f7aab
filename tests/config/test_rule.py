from maxtext_lite.config import Refusal, load_config
from maxtext_lite.config.rule import Rule, RuleOfDefaults

CONFIG = load_config(None, ["steps=30", "log_period=7"])
DEFAULTS = load_config()


def test_what_breaks_a_rule_has_what_the_refusal_names_and_the_defaults_as_changes():
    refusal = Refusal("steps", "steps=30 is even.", (29, 31, {"log_period": 30}))
    rule = Rule(("steps", "log_period", "batch_size"), lambda config: refusal if config.steps == 30 else None)
    problem = rule.problem(CONFIG, DEFAULTS)
    assert (problem.key, problem.message) == ("steps", "steps=30 is even.")
    assert (problem.below, problem.above) == ([{"steps": 29}], [{"steps": 31}])
    assert problem.otherwise == ({"log_period": 30}, {"steps": 250, "log_period": 10})
    assert rule.problem(DEFAULTS, DEFAULTS) is None


def test_a_rule_of_defaults_is_told_them():
    rule = RuleOfDefaults(("steps",), lambda config, defaults: Refusal("steps", f"{config.steps} {defaults.steps}"))
    assert rule.problem(CONFIG, DEFAULTS).message == "30 250"
    assert rule.problem(CONFIG, DEFAULTS).below == []
