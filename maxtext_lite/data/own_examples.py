"""Examples that the user's own program makes, as a source."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from maxtext_lite.config import UserError
from maxtext_lite.data.packing import FIELDS, field_dtype


class Examples(Protocol):
    """Data of one's own: a sequence that is asked for any example at any time, from several threads.

    With `grain_worker_count` above 0 it is pickled to the processes that read. Which example is read when is not its
    business: an epoch is a permutation of all of them, which follows from `data_shuffle_seed`.
    """

    @property
    def fingerprint(self) -> str:
        """Says what the examples are: a run goes on from its checkpoints only with the same."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, example_id: int) -> Mapping[str, np.ndarray]:
        """Arrays [max_target_length]: `tokens` and `targets`, the token that is to be predicted at each place.

        There may also be `weights`, of targets, 0 where there is none (without: 1); `segments`, the number of each
        token's document, from 1, 0 for padding (without: 1); `positions` in it (without: from 0 on); and fields of any
        other name, float32, for an objective of one's own.
        """
        ...


@dataclasses.dataclass(frozen=True)
class OwnExamples:
    """A user's examples as a source; see `sources.ExampleSource`.

    Attributes:
      num_tokens: that each example must have.
      vocab_size: that its tokens must be below.
    """

    examples: Examples
    key: str
    num_tokens: int
    vocab_size: int
    fields: tuple[str, ...]

    notes = ()

    @property
    def fingerprint(self) -> str:
        """The user's."""
        return f"own:{self.examples.fingerprint}"

    @property
    def num_target_tokens(self) -> int:
        """Target tokens of all examples, all of which are read."""
        return self.count_targets(np.arange(len(self)))

    def count_targets(self, example_ids: np.ndarray) -> int:
        """Target tokens of these examples, which are read."""
        return sum(int(np.count_nonzero(self[int(number)]["weights"] > 0)) for number in example_ids)

    def documents(self, example_ids: np.ndarray) -> None:
        """None: they would have to be read."""

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, example_id: int) -> dict[str, np.ndarray]:
        """The example with all of its fields. Raises UserError where it is not what `Examples` says."""
        given = self.examples[example_id]
        where = f"{self.key}[{example_id}]"
        ones = np.ones(self.num_tokens, np.int32)
        row = {"weights": ones, "segments": ones, "positions": np.arange(self.num_tokens), **given}
        if set(row) != set(self.fields):
            raise UserError(f"{where} has the fields {', '.join(sorted(row))}, not {', '.join(sorted(self.fields))}.")
        for name, x in row.items():
            if np.shape(x) != (self.num_tokens,):
                raise UserError(
                    f"{where}: {name} has the shape {np.shape(x)}, not (max_target_length,) = ({self.num_tokens},)."
                )
        for name in ("tokens", "targets"):
            least, most = int(np.min(row[name])), int(np.max(row[name]))
            if not 0 <= least <= most < self.vocab_size:
                raise UserError(
                    f"{where}: {name} are {least} to {most}, not 0 to vocab_size - 1 = {self.vocab_size - 1}."
                )
        return {name: np.asarray(row[name], field_dtype(name)) for name in self.fields}


def own_examples(examples: Examples, *, key: str, num_tokens: int, vocab_size: int) -> OwnExamples:
    """The source of a user's examples, of which the first one is read.

    Args:
      key: how a message names them.
    Raises:
      UserError: there is none, or it is not what `Examples` says.
    """
    if len(examples) == 0:
        raise UserError(f"{key} has no examples.")
    given = examples[0]
    if missing := sorted({"tokens", "targets"} - set(given)):
        raise UserError(f"{key}[0] has no {' and no '.join(missing)}.")
    own = sorted(set(given) - set(FIELDS))
    source = OwnExamples(examples, key, num_tokens, vocab_size, (*FIELDS, *own))
    source[0]
    return source
