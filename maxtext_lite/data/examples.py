"""What all sources of examples or prompts have in common."""

import fractions
from typing import Any

from maxtext_lite.config import UserError


class Source:
    """The base of sources: what is the same for most; see `sources.ExampleSource`."""

    ends: tuple[int, ...] = ()

    @property
    def num_sequences(self) -> int:
        """The number of examples."""
        return len(self)

    def __len__(self) -> int:
        raise NotImplementedError

    def describe(self) -> list[dict[str, Any]]:
        """No entries."""
        return []


def num_held_out(eval_fraction: float, count: int, what: str, *, more: str = "data, a smaller") -> int:
    """Examples to hold out: floor(eval_fraction x count), but at least one; 0 if the fraction is 0.

    Args:
      what: what is counted, for messages.
      more: what there should be more of or fewer of, for messages.
    Raises:
      UserError: nothing is left to train on.
    """
    if eval_fraction == 0:
        return 0
    # In decimal, as it was written: 0.29 of 100 is 29, where binary floating point gives 28.
    held_out = max(1, int(fractions.Fraction(repr(float(eval_fraction))) * count))
    if held_out >= count:
        raise UserError(
            f"eval_fraction={eval_fraction} holds out {held_out} of {count} {what} and leaves none to train on. "
            f"Use more {more} eval_fraction, or eval_fraction=0 for no evaluation."
        )
    return held_out


def check_id(number: int, count: int, what: str = "example") -> None:
    """Raises IndexError outside [0, count)."""
    if not 0 <= number < count:
        raise IndexError(f"{what} {number} of {count}")
