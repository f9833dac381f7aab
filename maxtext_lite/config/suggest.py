"""Suggestions of values that work, for each broken rule by itself."""

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice
from typing import Annotated, Self, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError

from maxtext_lite.config.errors import Refusal, any_of, decimal_text, number_text, setting_text
from maxtext_lite.config.keys import Config
from maxtext_lite.config.rules import rule_violations
from maxtext_lite.config.violation import Change, Violation

_MOST_TRIED = 64


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


@functools.cache
def _type_of(kind: type[Config], key: str) -> TypeAdapter[object]:
    field = kind.model_fields[key]
    of_type = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    return TypeAdapter(cast("type[object]", of_type), config=ConfigDict(strict=True))


def suggest(request: ConfigRequest, wrong: Sequence[Refusal]) -> list[Refusal]:
    """One refusal for each wrong value and each violation, with up to two changes that the rule allows.

    They break no rule that was kept. If all that the rule allows would, the message says what that is, and the next
    refusal what else is to be changed.

    Args:
      wrong: values that are not of their keys' types, with similar legal ones; the request has the defaults in their
        place.
    """
    violations = list(request.violations())
    broken = {violation.name for violation in violations}
    found = [_replaced(request, each, broken) for each in wrong]
    for violation in violations:
        sides = _sides(request, violation)
        near = tuple(_texts(violation, _nearest(request, sides, broken - {violation.name})))
        allowed = [] if near else [*_texts(violation, [side[0] for side in sides if side][:2])]
        also = f" This rule alone allows {any_of(allowed)}." if allowed else ""
        found.append(Refusal(violation.key, f"{violation.message}{also}", near))
    return found


def _replaced(request: ConfigRequest, wrong: Refusal, broken: Collection[str]) -> Refusal:
    """The refusal of a wrong value, with the similar ones or the default."""
    sides: list[list[Change]] = [[{wrong.key: value}] for value in wrong.nearest]
    near = _nearest(request, [*sides, [{wrong.key: getattr(request.config, wrong.key)}]], broken)
    values = [change[wrong.key] for change in near[: max(len(sides), 1)]]
    return replace(wrong, nearest=tuple(f"{wrong.key}=" if value == "" else value for value in values))


def _sides(request: ConfigRequest, violation: Violation) -> list[list[Change]]:
    """What the rule allows, nearest first, on each side of the present value."""
    found: list[Iterable[Change]] = []
    for near in violation.nearest:
        if callable(near):
            found += cast("Iterable[Iterable[Change]]", near())
        else:
            found.append([cast("Change", near) if isinstance(near, Mapping) else {violation.key: near}])
    return [list(islice(filter(request.allows, side), _MOST_TRIED)) for side in found]


def _nearest(request: ConfigRequest, sides: Sequence[Sequence[Change]], allowed: Collection[str]) -> list[Change]:
    """The first change of each of two sides that breaks no other rule."""

    def works(change: Change) -> bool:
        return all(violation.name in allowed for violation in request.changed(change).violations())

    working = (change for side in sides for change in islice(filter(works, side), 1))
    return list(islice(working, 2))


def _texts(violation: Violation, changes: Sequence[Change]) -> Iterator[str]:
    """The changes as text: bare values where all are of the key that the message begins with."""
    bare = violation.message.startswith(f"{violation.key}=") and all(list(each) == [violation.key] for each in changes)
    for change in changes:
        texts = [setting_text(value) if bare else f"{key}={setting_text(value)}" for key, value in change.items()]
        yield " ".join(texts) or f"{violation.key}="
