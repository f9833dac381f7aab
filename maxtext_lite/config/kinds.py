"""What the config and the plan know of a `dataset_type` and of an `objective`, without data and without jax."""

from dataclasses import dataclass
from functools import cache
from typing import Literal

from maxtext_lite.config.registry import NotInstalled, load, names

Data = Literal["text", "answers", "pairs", "prompts"]
"""What examples are: text to continue, answers to learn, pairs of answers, or prompts to be answered."""


@dataclass(frozen=True)
class SourceKind:
    """A value of `dataset_type`.

    Attributes:
      opens: `module:function` that opens the data, an `Open` of data/sources.py; "": prompts, which no feed reads.
      data: what its examples are, which decides the objective.
      run_kind: the kind of run that trains on it.
      reads_files: needs a dataset_path.
      reads_buckets: its files may be in a bucket.
      is_mixable: may be a source of a mixture.
      has_turns: its examples are conversations, which a chat template renders.
      fields: arrays of an example besides those that every example has.
    """

    opens: str
    data: Data = "text"
    run_kind: str = "train"
    reads_files: bool = True
    reads_buckets: bool = False
    is_mixable: bool = False
    has_turns: bool = False
    fields: tuple[str, ...] = ()


@dataclass(frozen=True)
class ObjectiveKind:
    """A value of `objective`.

    Attributes:
      makes: `module:function` from a config to an `Objective` of training/objective.py; "": the run makes it.
      data: what it trains on.
      rows_per_example: rows of max_target_length tokens in an example.
      starts: `module:function` called with (run, state, counts, terminal) before the first step; "": nothing.
      against: `module:function` from a model's scores and those of the model that the run began with to those to
        evaluate; "": the model's own.
    """

    makes: str
    data: Data
    rows_per_example: int = 1
    starts: str = ""
    against: str = ""


TEXT = SourceKind("maxtext_lite.data.sources:open_text", is_mixable=True)
PREPARED = SourceKind("maxtext_lite.data.sources:open_prepared_rows", is_mixable=True, reads_buckets=True)
SYNTHETIC = SourceKind("maxtext_lite.data.sources:open_synthetic", reads_files=False)
PRETRAIN = ObjectiveKind("maxtext_lite.training.objective:next_token", "text")


@cache
def source_kind(dataset_type: str) -> SourceKind:
    """What a value of `dataset_type` stands for.

    Raises:
      NotInstalled: it is in a part of the library that is absent.
    """
    return load("source", dataset_type)


def source_names(run_kind: str) -> list[str]:
    """The values of `dataset_type` that a kind of run can train on, as far as they are installed."""
    found: list[str] = []
    for name in names("source"):
        try:
            if source_kind(name).run_kind == run_kind:
                found.append(name)
        except NotInstalled:
            continue
    return found


@cache
def objective_name(objective: str, dataset_type: str) -> str:
    """The objective, or for `auto` the first one for the data."""
    if objective != "auto":
        return objective
    data = source_kind(dataset_type).data
    return next(name for name in names("objective") if objective_kind(name).data == data)


@cache
def objective_kind(name: str) -> ObjectiveKind:
    """What a value of `objective` other than auto stands for. Raises NotInstalled as `source_kind` does."""
    return load("objective", name)
