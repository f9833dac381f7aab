"""What a rule between keys is."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from maxtext_lite.config.errors import Refusal
from maxtext_lite.config.schema import Config


@dataclass(frozen=True)
class Rule:
    """A rule, the keys it reads, and a function from a config to the refusal, or None."""

    keys: tuple[str, ...]
    check: Callable[[Config], Refusal | None]

    def refusal(self, config: Config, known: Collection[str]) -> Refusal | None:
        """The refusal; None where the config suits the rule or a key of it is not in `known`."""
        return self.check(config) if all(key in known for key in self.keys) else None
