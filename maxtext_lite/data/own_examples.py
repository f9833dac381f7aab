"""Examples made by the user's own program, as a source."""

from __future__ import annotations

import dataclasses

import numpy as np

from maxtext_lite.config import UserError
from maxtext_lite.data.rows import FIELDS, field_dtype
from maxtext_lite.data.source import Examples, ExampleSource


@dataclasses.dataclass(frozen=True)
class OwnExamples(ExampleSource):
    """A user's examples as a source.

    Attributes:
      num_tokens: required length of each example.
      vocab_size: upper bound for its tokens.
    """

    examples: Examples
    key: str
    num_tokens: int
    vocab_size: int
    fields: tuple[str, ...]

    is_of_dataset_path = False

    @property
    def fingerprint(self) -> str:
        """The user's fingerprint, marked as such."""
        return f"own:{self.examples.fingerprint}"

    @property
    def num_target_tokens(self) -> int:
        """Target tokens of all examples, which must all be read."""
        return self.count_targets(np.arange(len(self)))

    def count_targets(self, example_ids: np.ndarray) -> int:
        """Target tokens of these examples, which must be read."""
        return sum(int(np.count_nonzero(self[int(number)]["weights"] > 0)) for number in example_ids)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, example_id: int) -> dict[str, np.ndarray]:
        """The example with all fields. Raises UserError if it violates `Examples`."""
        where = f"{self.key}[{example_id}]"
        given = {name: np.asarray(x) for name, x in self.examples[example_id].items()}
        row = {"segments": np.ones(self.num_tokens, np.int32), "positions": np.arange(self.num_tokens)} | given
        row.setdefault("weights", row["segments"] != 0)
        if set(row) != set(self.fields):
            raise UserError(f"{where} has the fields {', '.join(sorted(row))}, not {', '.join(sorted(self.fields))}.")
        for name, x in row.items():
            if x.shape != (self.num_tokens,):
                raise UserError(
                    f"{where}: {name} has the shape {x.shape}, not (max_target_length,) = ({self.num_tokens},)."
                )
        fields = {name: self._checked(where, name, row[name]) for name in self.fields}
        wrong = np.flatnonzero((fields["weights"] > 0) & (fields["segments"] == 0))
        if wrong.size:
            raise UserError(
                f"{where}: weights are above 0 in padding (segments=0), first at {wrong[0]}. "
                "Nearest that work: weights of 0."
            )
        return fields

    def _checked(
        self,
        where: str,
        name: str,
        given: np.ndarray,
    ) -> np.ndarray:
        """A field in its dtype; refuses values that this would change, and those that no field of this name has."""
        dtype = field_dtype(name)
        is_float = dtype is np.float32 and (given.dtype.kind == "f" or given.dtype.name == "bfloat16")
        if given.dtype.kind not in "biu" and not is_float:
            raise UserError(f"{where}: {name} have the type {given.dtype}, which does not become {dtype.__name__}.")
        least = given.min()
        most = given.max()
        if dtype is np.int32:
            limit = self.vocab_size if name in ("tokens", "targets") else 2**31
            if not 0 <= least <= most < limit:
                raise UserError(f"{where}: {name} are {least} to {most}, not 0 to {limit - 1}.")
        elif name == "weights" and not 0 <= least <= most < np.inf:
            raise UserError(f"{where}: weights are {least} to {most}, not finite numbers of at least 0.")
        with np.errstate(over="ignore", under="ignore"):
            cast = given.astype(dtype)
        is_kept = np.isfinite(cast) == np.isfinite(given)
        if given.dtype.kind in "iu":
            is_kept &= cast.astype(np.float64) == given.astype(np.float64)
        if name == "weights":
            is_kept &= np.greater(cast, 0) == np.greater(given, 0)
        if dtype is np.float32 and not is_kept.all():
            raise UserError(f"{where}: {name} have the value {given[~is_kept][0]}, which float32 cannot represent.")
        return cast


def own_examples(
    examples: Examples,
    *,
    key: str,
    num_tokens: int,
    vocab_size: int,
) -> OwnExamples:
    """The source of a user's examples. Reads the first one to check it.

    Args:
      key: what messages call the examples.
    Raises:
      UserError: there are no examples, or the first violates `Examples`.
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
