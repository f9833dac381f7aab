"""Suggestions of values that work: changes near the requested config, tried until no rule is broken."""

import functools
import heapq
import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice
from typing import Annotated, Self, cast, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError

from maxtext_lite.config.errors import Refusal, decimal_text, number_text, setting_text
from maxtext_lite.config.rules import rule_violations
from maxtext_lite.config.schema import Config
from maxtext_lite.config.sections import ModelConfig
from maxtext_lite.config.violation import Change, Violation

_MOST_TRIED, _MOST_OF_ONE = 2000, 150  # changes tried for a request, and for one violation
_MOST_OF_SIDE, _MOST_SECOND, _MOST_REPAIRED, _MOST_PASSES = 4, 16, 2, 2
_LONGEST_CLAUSE = 600


@dataclass(frozen=True)
class ConfigRequest:
    """A requested config, for any machine.

    Attributes:
      defaults: the config of base.yml (and post_train/rl.yml).
    """

    config: Config
    defaults: Config

    def changed(self, change: Change) -> Self:
        """The request with new values of some keys."""
        return replace(self, config=self.config.model_copy(update=change))

    def value(self, key: str) -> object:
        """The value of a key."""
        return getattr(self.config, key)

    def violations(self) -> Iterable[Violation]:
        """Every broken rule."""
        return rule_violations(self.config, self.defaults)

    def allows(self, change: Change) -> bool:
        """Whether the new values of keys are of the keys' types."""
        try:
            for key in change.keys() & type(self.config).model_fields.keys():
                value = change[key]
                if isinstance(value, Fraction) and "/" in (text := number_text(value)):
                    if decimal_text(value):
                        return False  # more digits than a float has
                    value = text  # with no more digits than a config may have
                _type_of(type(self.config), key).validate_python(value)
        except ValidationError:
            return False
        return True

    def sides(self, violation: Violation) -> list[Iterable[Change]]:
        """What the rule itself allows, nearest first; the first one of each iterable that works is suggested."""
        found: list[Iterable[Change]] = []
        for near in violation.nearest:
            if callable(near):
                found += cast("tuple[Iterable[Change], Iterable[Change]]", near())
            else:
                found.append([cast("Change", near) if isinstance(near, Mapping) else {violation.key: near}])
        return found

    def moves(self, violation: Violation) -> Iterator[Change]:
        """Other changes of the keys in the violation's message, in no order."""
        named = self.named(violation)
        usual = {key: getattr(self.defaults, key) for key in named}
        yield usual
        for key in named:
            yield {key: usual[key]}
            yield from ({key: choice} for choice in get_args(type(self.config).model_fields[key].annotation))

    def resorts(self) -> Iterator[Change]:
        """Larger and larger changes for any violation; the last one suits every config."""
        yield {key: usual for key, usual in self.defaults if usual != self.value(key)}

    def named(self, violation: Violation) -> list[str]:
        """The keys in the violation's message."""
        known = type(self.config).model_fields
        return [key for key in dict.fromkeys(re.findall(r"\w+", violation.message)) if key in known]

    def present(self, key: str) -> object:
        """The value of a key from which the distance of a change is measured."""
        return self.value(key)

    def distance(self, change: Change) -> tuple[bool, float]:
        """The size of a change: whether it changes the model, then the number of keys and the distance of each."""
        keys = [key for key, value in change.items() if value != self.value(key)]
        return any(key in ModelConfig.model_fields for key in keys), sum(
            _apart(self.present(key), change[key]) for key in keys
        )


@functools.cache
def _type_of(kind: type[Config], key: str) -> TypeAdapter[object]:
    field = kind.model_fields[key]
    of_type = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    return TypeAdapter(cast("type[object]", of_type), config=ConfigDict(strict=True))


_ONE_KEY, _ANOTHER_TYPE = 4.0, 16.0


def _apart(old: object, new: object) -> float:
    """The distance of two values: the doublings between positive numbers, plus a constant; a larger one otherwise."""
    if all(isinstance(value, int | float | Fraction) and value > 0 and value is not True for value in (old, new)):
        return _ONE_KEY + 6 * abs(math.log2(cast("float", old)) - math.log2(cast("float", new)))
    return _ANOTHER_TYPE


@dataclass
class _Line:
    """A refusal under construction: the suggested changes, of which the first is applied."""

    key: str
    message: str
    changes: list[Change]


def suggest(request: ConfigRequest, wrong: Sequence[Refusal]) -> list[Refusal]:
    """One refusal for each wrong value and each violation.

    The first suggestions of all refusals, applied together, break no rule; nor does any other suggestion in place of
    the first of its refusal.

    Args:
      wrong: values that are not of their keys' types, with similar legal ones; the request has the defaults in their
        place, one of which is suggested where the legal values break more rules than it does.
    """
    lines: list[_Line] = []
    for each in wrong:
        usual: Change = {each.key: request.value(each.key)}
        num_broken = functools.partial(_num_broken, request)
        near = sorted(({each.key: value} for value in each.nearest), key=num_broken)
        works = near and num_broken(near[0]) <= num_broken(usual)
        lines.append(_Line(each.key, each.message, [*near] if works else [usual]))
        request = request.changed(lines[-1].changes[0])
    start, tries = request, iter(range(_MOST_TRIED))
    solved: dict[str, Change] = {}
    for violation in start.violations():
        if violation.name in solved:
            changes = [solved[violation.name]]
        elif changes := _changes(request, violation, tries):
            changed = request.changed(changes[0])
            solved |= dict.fromkeys(_broken(request) - _broken(changed), changes[0])
            request = changed
        lines.append(_Line(violation.key, violation.message, changes))
    # A later change may have changed the same key again: suggest its final value.
    for line in lines:
        line.changes[:1] = [{key: request.value(key) for key in change} for change in line.changes[:1]]
    for line in lines[len(wrong) :]:
        line.changes[:1] = [_with_later(change, lines, start) for change in line.changes[:1]]
    for line in lines:
        line.changes[1:] = _alternatives(line, lines, start)
    return [Refusal(line.key, line.message, tuple(_named(line))) for line in lines]


def _with_later(change: Change, lines: Sequence[_Line], start: ConfigRequest) -> Change:
    """A change, or where a later one has undone it, that one."""

    def is_change(change: Change) -> bool:
        return any(value != start.value(key) for key, value in change.items())

    firsts = [each for line in lines for each in line.changes[:1]]
    later = (each for each in firsts if is_change(each) and each.keys() & change.keys())
    return change if is_change(change) else next(later, change)


def _changes(request: ConfigRequest, violation: Violation, tries: Iterator[int]) -> list[Change]:
    """Up to two changes that the rule allows and that break no other; otherwise the nearest change of any kind."""
    allowed = _broken(request) - {violation.name}
    sides = request.sides(violation)
    if found := [change for side in sides[:2] for change in islice(_working(request, side, allowed, tries), 1)]:
        return found
    change = _nearest(request, violation, allowed, islice(tries, _MOST_OF_ONE))
    if change is None:
        first: list[Change] = [*(change for side in sides for change in islice(side, 1)), {}]
        larger = ({**change, **resort} for resort in request.resorts() for change in first)
        change = next(_working(request, larger, allowed, itertools.repeat(0)), None)
    return [] if change is None else [_fewest(request, change, allowed)]


def _working(
    request: ConfigRequest, changes: Iterable[Change], allowed: Collection[str], tries: Iterable[int]
) -> Iterator[Change]:
    return (change for change, _ in zip(changes, tries, strict=False) if _breaks(request, change, allowed) == [])


def _nearest(
    request: ConfigRequest, violation: Violation, allowed: Collection[str], tries: Iterator[int]
) -> Change | None:
    """The nearest change that works, alone or with a second one that repairs what the first breaks."""
    waiting: list[tuple[tuple[bool, float], int, Change, bool]] = []
    order, seen = itertools.count(), set[str]()

    def add(changes: Iterable[Change], *, is_second: bool) -> None:
        for change in changes:
            name = repr(sorted(change.items(), key=lambda item: item[0]))
            if name in seen:
                continue
            seen.add(name)
            heapq.heappush(waiting, (request.distance(change), next(order), change, is_second))

    add(_candidates(request, violation), is_second=False)
    while waiting and next(tries, None) is not None:
        _, _, change, is_second = heapq.heappop(waiting)
        broken = _breaks(request, change, allowed, 1 if is_second else _MOST_REPAIRED + 1)
        if broken == []:
            return change
        if broken and not is_second and len(broken) <= _MOST_REPAIRED:
            changed = request.changed(change)
            more = heapq.nsmallest(_MOST_SECOND, _candidates(changed, broken[0]), key=changed.distance)
            add(({**change, **each} for each in more), is_second=True)
    return None


def _candidates(request: ConfigRequest, violation: Violation) -> Iterator[Change]:
    for side in request.sides(violation):
        yield from islice(side, _MOST_OF_SIDE)
    yield from request.moves(violation)


def _num_broken(request: ConfigRequest, change: Change) -> int:
    return len(_broken(request.changed(change)))


def _broken(request: ConfigRequest) -> frozenset[str]:
    return frozenset(violation.name for violation in request.violations())


def _breaks(request: ConfigRequest, change: Change, allowed: Collection[str], most: int = 1) -> list[Violation] | None:
    """Up to `most` violations that a change leaves; None where it changes nothing, or sets a value of a wrong type."""
    changed = request.changed(change)
    if changed == request or not request.allows(change):
        return None
    return list(islice((broken for broken in changed.violations() if broken.name not in allowed), most))


def _fewest(request: ConfigRequest, change: Change, allowed: Collection[str]) -> Change:
    """The part of a change that is needed."""
    changed = request.changed(change)
    kept = {key: value for key in change if (value := changed.value(key)) != request.value(key)}
    for _ in range(_MOST_PASSES):
        for key in reversed(tuple(kept)):
            rest = {other: value for other, value in kept.items() if other != key}
            if rest and _breaks(request, rest, allowed) == []:
                kept = rest
    return kept


def _alternatives(line: _Line, lines: Sequence[_Line], start: ConfigRequest) -> list[Change]:
    """The further changes of a line that break no rule together with the first changes of the other lines."""
    rest: dict[str, object] = {}
    for other in lines:
        if other is not line:
            for change in other.changes[:1]:
                rest |= change
    return [
        change
        for change in line.changes[1:]
        if rest.keys().isdisjoint({**change, **line.changes[0]}) and not _broken(start.changed({**rest, **change}))
    ]


def _named(line: _Line) -> Iterator[str]:
    """The suggestions as text: bare values where all are of the key that the message begins with."""
    bare = line.message.startswith(f"{line.key}=") and all(list(change) == [line.key] for change in line.changes)
    for change in line.changes:
        texts = [setting_text(value) if bare else f"{key}={setting_text(value)}" for key, value in change.items()]
        text = " ".join(texts)
        if len(text) <= _LONGEST_CLAUSE:
            yield text or f"{line.key}="
