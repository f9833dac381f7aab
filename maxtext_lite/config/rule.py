"""What a rule between keys is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from maxtext_lite.config.errors import Refusal
from maxtext_lite.config.problem import Edit, Problem
from maxtext_lite.config.schema import Config


@dataclass(frozen=True)
class Rule:
    """A rule, the keys that it reads, and a function from a config to the refusal, or None."""

    keys: tuple[str, ...]
    check: Callable[..., Refusal | None]

    def refusal(self, config: Config, defaults: Config) -> Refusal | None:
        """What breaks the rule, or None."""
        del defaults
        return self.check(config)

    def problem(self, config: Config, defaults: Config) -> Problem | None:
        """What breaks the rule, with changes to try: to what the refusal names, or of all keys to the defaults."""
        refusal = self.refusal(config, defaults)
        if refusal is None:
            return None
        edits = [_edit(refusal.key, near) for near in refusal.nearest]
        usual = {key: getattr(defaults, key) for key in self.keys if key in type(defaults).model_fields}
        name = f"{self.check.__qualname__}: {refusal.key}"
        return Problem(refusal.key, refusal.message, edits[:1], edits[1:2], (*edits[2:], usual), rule=name)


@dataclass(frozen=True)
class RuleOfDefaults(Rule):
    """A rule whose function takes a config and that of the defaults, some of which suit whatever else is set."""

    def refusal(self, config: Config, defaults: Config) -> Refusal | None:
        """See Rule."""
        return self.check(config, defaults)


def _edit(key: str, near: Any) -> Edit:
    """What a refusal names: new values of keys, or one of its own key."""
    return cast("Edit", near) if isinstance(near, Mapping) else {key: near}
