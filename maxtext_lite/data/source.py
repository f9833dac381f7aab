"""The interface of an example source: a picklable sequence with random access, read in an order that it does not
choose."""

from __future__ import annotations

import fractions
import sys
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from maxtext_lite.config import UserError
from maxtext_lite.data.order import example_ids
from maxtext_lite.data.rows import Documents

_MOST_COUNTED = 2**20  # ids at a time


class Examples(Protocol):
    """User-provided data: a sequence from which any example may be requested at any time, by several threads.

    With `grain_worker_count` above 0 it is pickled to the reading processes. It does not decide which example is read
    when: an epoch is a permutation of all examples, determined by `data_shuffle_seed`.
    """

    @property
    def fingerprint(self) -> str:
        """Identifies the examples: a run continues from its checkpoints only with the same fingerprint."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, example_id: int) -> Mapping[str, np.ndarray]:
        """Arrays [max_target_length]: `tokens`, and `targets`, the token to predict at each position.

        Optional are `segments`, the number of each token's document from 1, 0 for padding (default: 1); `positions`
        within it (default: from 0); `weights` of targets, at least 0, and 0 where there is none, as in padding
        (default: 1, in padding 0); and float32 fields of any other name for a custom objective. Weights multiply
        losses, whose sum is divided by the number of weights above 0, whatever they are.
        """
        ...


class ExampleSource:
    """A picklable sequence of examples, each as `Rows.build` describes it; the base of all sources.

    Attributes:
      fingerprint: equal for sources with the same examples in the same order, wherever their files are; a string.
      fields: names of an example's arrays; `rows.field_dtype` gives their dtypes.
      num_tokens: tokens of an example: the length of its arrays.
      num_target_tokens: target tokens of all examples.
      notes: sentences on what the files contain and the examples do not.
      is_of_dataset_path: whether the config's dataset_path names its files.
      ends: the special tokens with which its answers end, if it has answers; the most frequent first.
      parts: of a mixture, the part of each source; () for any other source.
      counted: the examples of a run, and their target tokens, before the source was mixed as it is now.
      end: the position in a run from which the source has no row left.
    """

    # Attributes of some sources and properties of others.
    fingerprint: Any
    fields: Any
    num_tokens: Any
    num_target_tokens: Any
    notes: Any = ()
    is_of_dataset_path: Any = True
    ends: Any = ()
    parts: Any = ()
    counted: Any = (0, 0)
    end: Any = sys.maxsize

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, example_id: int) -> dict[str, np.ndarray]:
        """One example. Raises IndexError outside [0, len)."""
        raise NotImplementedError

    def count_targets(self, example_ids: np.ndarray) -> int:
        """Target tokens of these examples; repeated ids count repeatedly."""
        raise NotImplementedError

    def documents(self, example_ids: np.ndarray) -> Documents | None:
        """The documents in these examples; None if they are unknown, or each example is one document."""
        return None

    @property
    def num_sequences(self) -> int:
        """Conversations or pairs, which are never divided; elsewhere examples."""
        return len(self)

    @property
    def packed_text(self) -> str:
        """What shares its rows, a clause for the user such as ` (rows of ...)`; "" where nothing does."""
        return ""

    def describe(self) -> list[dict[str, Any]]:
        """The entries of plan.json about its files, for a run's report, each with the `name` of its source."""
        return []

    # ---- In a run ---------------------------------------------------------------------------------------------------

    def named(self) -> dict[str, ExampleSource]:
        """The sources of a mixture by name; any other source under an empty name."""
        return {"": self}

    def ids_of_run(
        self,
        first: int,
        count: int,
        seed: int,
    ) -> np.ndarray:
        """The examples at positions `first` to `first + count - 1` of a run; int64."""
        return example_ids(first, count, num_examples=len(self), seed=seed)

    def row_ids(self, ids: np.ndarray) -> list[Any]:
        """The ids; in a mixture, for each the name of its source and its number there."""
        return ids.tolist()

    def hashed(self, ids: np.ndarray) -> np.ndarray:
        """Values for `order.examples_hash`: the ids, unless they change with the list of a mixture's sources."""
        return ids

    def epochs(self, examples_seen: int) -> dict[str, float]:
        """How often each source has been read up to a position of a run, by name."""
        return {"": examples_seen / len(self)}

    def exhausted(self, end: int) -> dict[str, int]:
        """The sources that reach their limit before a run's end: names, and the positions of their next turns."""
        del end
        return {}

    def shares(
        self,
        first: int,
        end: int,
    ) -> list[dict[str, Any]]:
        """What a run consumes from each source of a mixture between two positions, as JSON."""
        del first, end
        return []

    def tokens_by_source(
        self,
        first: int,
        stop: int,
        seed: int,
    ) -> dict[str, int]:
        """Exact target tokens that each source gives between two positions of a run, by name."""
        return {"": self.target_tokens(first, stop, seed)}

    def target_tokens(self, first: int, stop: int, seed: int) -> int:
        """Exact target tokens of the examples at positions `first` to `stop - 1` of a run."""
        if self.num_target_tokens == len(self) * self.num_tokens:  # every row is full
            return (stop - first) * self.num_tokens
        tokens = 0
        while first < stop:
            left_of_epoch = len(self) - first % len(self)
            if left_of_epoch == len(self) <= stop - first:
                epochs = (stop - first) // len(self)
                tokens += epochs * self.num_target_tokens
                first += epochs * len(self)
            else:
                count = min(stop - first, left_of_epoch, _MOST_COUNTED)
                tokens += self.count_targets(example_ids(first, count, num_examples=len(self), seed=seed))
                first += count
        return tokens


def num_held_out(
    eval_fraction: float,
    count: int,
    what: str,
    *,
    more: str = "data, a smaller",
) -> int:
    """Examples to hold out: floor(eval_fraction x count), but at least one; 0 if the fraction is 0.

    Args:
      what: what is counted, for messages.
      more: what there should be more of or fewer of, for messages.
    Raises:
      UserError: nothing is left to train on.
    """
    if eval_fraction == 0 or count == 0:  # the caller refuses a source without examples
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
