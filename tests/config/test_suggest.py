"""Suggestions of values that work, for a request of three numbers."""

from dataclasses import dataclass, replace
from fractions import Fraction

from maxtext_lite.config import Refusal, load_config
from maxtext_lite.config.load import defaults_of
from maxtext_lite.config.suggest import ConfigRequest, suggest
from maxtext_lite.config.violation import Violation, multiples

BASE = load_config()


@dataclass(frozen=True)
class Numbers:
    """A request that is legal where b is a multiple of a and c is above b."""

    a: int = 2
    b: int = 4
    c: int = 9
    silent: bool = False
    plain: tuple = ()

    def changed(self, change):
        return replace(self, **change)

    def value(self, key):
        return getattr(self, key)

    def allows(self, change):
        return all(0 < value < 100 for value in change.values())

    def violations(self):
        found = []
        if self.b % self.a:
            near = () if self.silent else (multiples("b", self.a, self.b),)
            found.append(Violation("b", f"b={self.b} is no multiple.", near))
        if self.c <= self.b:
            near = () if self.silent else (self.b + 1,)
            found.append(Violation("c", f"c={self.c} is not above.", near, rule="above"))
        return found

    def sides(self, violation):
        return ConfigRequest.sides(self, violation)

    def moves(self, violation):
        return iter(() if self.silent else ({"b": 6}, {"b": 8, "c": 30}, {"c": 20}))

    def resorts(self):
        return iter(self.plain)

    def distance(self, change):
        return False, sum(abs(value - self.value(key)) for key, value in change.items())


def said(request, wrong=()):
    return [str(refusal) for refusal in suggest(request, wrong)]


def test_what_is_right_has_no_refusal():
    assert said(Numbers()) == []


def test_a_change_that_breaks_another_rule_is_not_named():
    assert said(Numbers(b=5)) == ["b=5 is no multiple. Nearest that work: 4 or 6."]
    assert said(Numbers(b=5, c=6)) == ["b=5 is no multiple. Nearest that works: 4."]


def test_lines_agree_with_each_other():
    # b=8 instead of b=6 would need another c than the one in the second line.
    assert said(Numbers(b=7, c=7)) == ["b=7 is no multiple. Nearest that works: 6.",
                                       "c=7 is not above. Nearest that works: b=6."]  # fmt: skip
    assert said(Numbers(a=4, b=7, c=1)) == ["b=7 is no multiple. Nearest that works: 4.",
                                            "c=1 is not above. Nearest that works: 8."]  # fmt: skip


class Server(Numbers):
    """A request in which a=1 needs a c, but cannot be had."""

    def allows(self, change):
        return True

    def violations(self):
        empty = Violation("c", "c is empty.", (5,), rule="empty")
        found = [empty] if self.a and not self.c else []
        return [*found, Violation("a", "a=1 has no place.", ({"a": 0, "c": 0},))] if self.a else found


def test_a_line_whose_change_a_later_one_undoes_names_the_later_one():
    assert said(Server(a=1, c=0)) == ["c is empty. Nearest that works: a=0 c=0.",
                                      "a=1 has no place. Nearest that works: a=0 c=0."]  # fmt: skip
    assert said(Server(a=1, c=5)) == ["a=1 has no place. Nearest that works: a=0 c=0."]


def test_a_wrong_value_is_replaced_with_the_one_that_breaks_least():
    assert said(Numbers(b=4), [Refusal("a", "a=x is none.", (3, 4))]) == ["a=x is none. Nearest that works: 4."]
    assert said(Numbers(b=4), [Refusal("a", "a=x is none.", (3, 5))]) == ["a=x is none. Nearest that works: 2."]
    assert said(Numbers(b=4), [Refusal("a", "a=x is none.", (1, 4))]) == ["a=x is none. Nearest that work: 1 or 4."]


def test_the_nearest_of_other_changes_is_named():
    assert said(Numbers(a=3, b=6, c=6, silent=False)) == ["c=6 is not above. Nearest that works: 7."]


def test_larger_changes_are_named_as_far_as_they_are_needed():
    request = Numbers(b=5, silent=True, plain=({"a": 3, "c": 9}, {"a": 5, "c": 20}))
    assert said(request) == ["b=5 is no multiple. Nearest that works: a=5."]
    assert said(Numbers(b=5, silent=True)) == ["b=5 is no multiple."]


def request(**values):
    return ConfigRequest(BASE.model_copy(update=values), defaults_of(type(BASE)))


def test_a_change_of_the_model_is_farther_than_any_other_and_a_number_nearer_than_a_choice():
    near = [{"steps": 251}, {"steps": 300}, {"steps": 251, "log_period": 11}, {"optimizer": "sgd"}, {"vocab_size": 321}]
    far_first = list(reversed(near))
    assert sorted(far_first, key=request().distance) == near


def test_only_values_of_a_keys_type_are_allowed():
    assert request().allows({"base_num_decoder_layers": 10_000, "optimizer": "sgd"})
    assert not request().allows({"base_num_decoder_layers": 10_001})
    assert not request().allows({"steps": 0})
    assert not request().allows({"optimizer": "adam"})
    assert request().allows({"num_epochs": Fraction(7, 3)})
    assert not request().allows({"num_epochs": Fraction(10**18 + 1, 10**18 + 3)})  # not a ratio that a config may have


def test_the_keys_of_a_rule_are_those_that_its_message_names():
    violation = Violation("steps", "steps=3 is more than num_epochs=2 of nothing.")
    assert request().named(violation) == ["steps", "num_epochs"]
    moves = list(request(steps=3, num_epochs=2).moves(violation))
    assert {"steps": BASE.steps, "num_epochs": BASE.num_epochs} in moves


def test_a_decimal_that_a_config_file_would_round_is_not_named():
    whole = request()
    assert whole.allows({"eval_per_device_batch_size": Fraction("879609302220.7998")})
    assert not whole.allows({"eval_per_device_batch_size": Fraction("879609302220.7998046875")})
