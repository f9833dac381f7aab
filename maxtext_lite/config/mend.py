"""Which values would work: each problem's candidate changes, tried on what is wrong until nothing is."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from maxtext_lite.config.errors import Refusal, setting_text
from maxtext_lite.config.problem import Edit, Problem

_MOST_TRIED = 600  # of what the problems name; larger changes are few
_MOST_COMBINED = 8
_LONGEST_CLAUSE = 600


class Subject(Protocol):
    """What is wrong: a config, or a config on a machine. Immutable."""

    def edited(self, edit: Edit) -> Self:
        """The same with new values of some keys."""
        ...

    def value(self, key: str) -> object:
        """The value of a key."""
        ...

    def problems(self) -> Iterable[Problem]:
        """Every rule that is broken."""
        ...


S = TypeVar("S", bound=Subject)


@dataclass(frozen=True)
class WrongValue:
    """A value that is not of its key's kind, of which the subject has the default.

    Attributes:
      values: legal ones that are near it; where they break more rules than the default does, that is named.
    """

    key: str
    message: str
    values: tuple[object, ...]


@dataclass
class _Line:
    """A refusal in the making: the changes that are named, of which the first is made."""

    key: str
    message: str
    edits: list[Edit]


def mend(subject: S, wrong: Sequence[WrongValue], resorts: Sequence[Edit] = ()) -> tuple[list[Refusal], S]:
    """One refusal for each wrong value and each problem, and the subject with the first change of each made.

    The first changes of all refusals, taken together, leave no problem, unless one was found no change for; each other
    change that is named leaves none in place of the first of its refusal.

    Args:
      resorts: larger changes, for a problem that none of its own mends.
    """
    trials = _Trials()
    lines = [_Line(each.key, each.message, [{each.key: value} for value in each.values]) for each in wrong]
    for line in lines:
        usual: Edit = {line.key: subject.value(line.key)}
        tried = {id(edit): len(_broken(subject.edited(edit))) for edit in (*line.edits, usual)}
        if not line.edits or min(tried[id(edit)] for edit in line.edits) > tried[id(usual)]:
            line.edits = [usual]
        line.edits.sort(key=lambda edit: tried[id(edit)])
        subject = subject.edited(line.edits[0])
    start = subject
    mended_by: dict[str, Edit] = {}
    for problem in subject.problems():
        if problem.identity in mended_by:
            lines.append(_Line(problem.key, problem.message, [mended_by[problem.identity]]))
            continue
        edits = _working(problem, subject, resorts, trials)
        if edits:
            edited = subject.edited(edits[0])
            mended_by |= dict.fromkeys(_broken(subject) - _broken(edited), edits[0])
            subject = edited
        lines.append(_Line(problem.key, problem.message, edits))
    # A later change may have given a key of an earlier one another value: that is the one to name.
    for line in lines:
        line.edits[:1] = [{key: subject.value(key) for key in edit} for edit in line.edits[:1]]
    for line in lines:
        line.edits[1:] = _alternatives(line, lines, start)
    return [Refusal(line.key, line.message, tuple(_named(line))) for line in lines], subject


class _Trials:
    """Changes that are tried, up to a bound on the work."""

    def __init__(self) -> None:
        self._left = _MOST_TRIED

    def first(self, subject: Subject, edits: Iterable[Edit], allowed: Collection[str]) -> Edit | None:
        """The first of the changes that changes something and leaves nothing else than `allowed` broken, if any."""
        for edit in edits:
            self._left -= 1
            if self._left < 0:
                return None
            if _works(edit, subject, allowed):
                return edit
        return None


def _broken(subject: Subject) -> frozenset[str]:
    return frozenset(problem.identity for problem in subject.problems())


def _works(edit: Edit, subject: Subject, allowed: Collection[str]) -> bool:
    edited = subject.edited(edit)
    return edited != subject and all(problem.identity in allowed for problem in edited.problems())


def _working(problem: Problem, subject: Subject, resorts: Sequence[Edit], trials: _Trials) -> list[Edit]:
    """Up to one change below, one above, or else one of any other kind, that mend the problem and break nothing."""
    allowed = _broken(subject) - {problem.identity}
    near = [trials.first(subject, group, allowed) for group in (problem.below, problem.above)]
    found = [edit for edit in near if edit is not None]
    if found:
        return found
    edit = trials.first(subject, problem.otherwise, allowed)
    if edit is None:
        nothing: Edit = {}
        single = (*problem.below[:1], *problem.above[:1], *problem.otherwise[:_MOST_COMBINED], nothing)
        larger: Iterator[Edit] = ({**edit, **resort} for resort in resorts for edit in single)
        edit = next((edit for edit in larger if _works(edit, subject, allowed)), None)
    return [] if edit is None else [{key: value for key, value in edit.items() if subject.value(key) != value}]


def _alternatives(line: _Line, lines: Sequence[_Line], start: Subject) -> list[Edit]:
    """The further changes of a line that leave no problem beside the first changes of the other lines."""
    rest: dict[str, object] = {}
    for other in lines:
        if other is not line:
            for edit in other.edits[:1]:
                rest |= edit
    return [
        edit
        for edit in line.edits[1:]
        if rest.keys().isdisjoint(edit)
        and rest.keys().isdisjoint(line.edits[0])
        and not _broken(start.edited({**rest, **edit}))
    ]


def _named(line: _Line) -> Iterator[str]:
    """The changes as the message names them; bare values are those of the key that it begins with."""
    bare = line.message.startswith(f"{line.key}=") and all(list(edit) == [line.key] for edit in line.edits)
    for edit in line.edits:
        text = " ".join(setting_text(value) if bare else f"{key}={setting_text(value)}" for key, value in edit.items())
        if len(text) <= _LONGEST_CLAUSE:
            yield text or f"{line.key}="
