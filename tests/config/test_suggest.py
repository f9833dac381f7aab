"""The engine that finds values that work, on a subject of three numbers."""

from dataclasses import dataclass, replace

from maxtext_lite.config.mend import WrongValue, mend
from maxtext_lite.config.problem import Problem


@dataclass(frozen=True)
class Numbers:
    """Right where b is a multiple of a and c is above b."""

    a: int = 2
    b: int = 4
    c: int = 9

    def edited(self, edit):
        return replace(self, **edit)

    def value(self, key):
        return getattr(self, key)

    def problems(self):
        found = []
        if self.b % self.a:
            near = [self.b // self.a * self.a, self.b // self.a * self.a + self.a]
            found.append(Problem("b", f"b={self.b} is no multiple.", [{"b": near[0]}], [{"b": near[1]}]))
        if self.c <= self.b:
            found.append(Problem("c", f"c={self.c} is not above.", above=[{"c": self.b + 1}], rule="above"))
        return found


def said(subject, wrong=(), resorts=()):
    refusals, mended = mend(subject, wrong, resorts)
    assert not mended.problems()
    return [str(refusal) for refusal in refusals]


def test_what_is_right_has_no_refusal():
    assert said(Numbers()) == []


def test_a_change_that_breaks_another_rule_is_not_named():
    assert said(Numbers(b=5)) == ["b=5 is no multiple. Nearest that work: 4 or 6."]
    assert said(Numbers(b=5, c=6)) == ["b=5 is no multiple. Nearest that works: 4."]


def test_lines_agree_with_each_other():
    # b=8 in place of b=6 would need another c than the one that the second line names.
    assert said(Numbers(b=7, c=7)) == ["b=7 is no multiple. Nearest that works: 6.",
                                       "c=7 is not above. Nearest that works: b=6."]  # fmt: skip
    assert said(Numbers(a=4, b=7, c=1)) == ["b=7 is no multiple. Nearest that works: 4.",
                                            "c=1 is not above. Nearest that works: 8."]  # fmt: skip


def test_a_wrong_value_is_mended_with_the_one_that_breaks_least():
    assert said(Numbers(b=4), [WrongValue("a", "a=x is none.", (3, 4))]) == ["a=x is none. Nearest that works: 4."]
    assert said(Numbers(b=4), [WrongValue("a", "a=x is none.", (3, 5))]) == ["a=x is none. Nearest that works: 2."]
    assert said(Numbers(b=4), [WrongValue("a", "a=x is none.", (1, 4))]) == ["a=x is none. Nearest that work: 1 or 4."]


class Stubborn(Numbers):
    """Numbers whose problems name nothing."""

    def problems(self):
        return [replace(problem, below=(), above=()) for problem in super().problems()]


def test_where_a_problem_names_nothing_larger_changes_are_tried_and_named_as_far_as_they_change_something():
    assert said(Stubborn(b=5), resorts=[{"a": 3, "c": 9}, {"a": 5, "c": 9}]) == [
        "b=5 is no multiple. Nearest that works: a=5."]  # fmt: skip
    refusals, mended = mend(Stubborn(b=5), [])
    assert [str(refusal) for refusal in refusals] == ["b=5 is no multiple."]
    assert mended == Stubborn(b=5)
