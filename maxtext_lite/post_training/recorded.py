"""Batches of reinforcement learning on file: a step's inputs from outside, and its results.

Prompts, responses, the sampler's log-probabilities and rewards are from outside: `equiv` and `replay` take them from
here and compute everything else again. Advantages and log-probabilities are kept beside them for comparison.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from maxtext_lite.config import UserError
from maxtext_lite.config.errors import value_text, writing
from maxtext_lite.post_training.array_files import read_arrays, write_arrays
from maxtext_lite.post_training.pairs import Chunk, Sampled
from maxtext_lite.post_training.prompts import FilePrompts, Prompt
from maxtext_lite.post_training.rewards import Scores
from maxtext_lite.post_training.rollout import TRAINING, Response

_REWARDS = "rewards/"  # before the names of reward functions


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Groups of judged responses that stand in for sampling and judging.

    Attributes:
      groups: chunks of one prompt each, by the position of the prompt in the run.
      is_whole: there are no other prompts, and these repeat.
    """

    groups: Mapping[int, Chunk]
    is_whole: bool = False

    @property
    def prompts(self) -> FilePrompts:
        """The prompts, in order."""
        return FilePrompts(tuple(group.sampled.prompts[0] for group in self.groups.values()), "recorded")

    def find(self, keys: Sequence[tuple[int, ...]]) -> Chunk | None:
        """The pairs with these keys of requests, up to the first that is not recorded; None if none is.

        A batch that groups of equal rewards have left ends where it was full.
        """
        found: list[Chunk] = []
        for use, position, generation in keys:
            group = self.groups.get(position % len(self.groups) if self.is_whole else position)
            if group is None or use != TRAINING:
                break
            if generation == 0:
                found.append(group)
        return Chunk.joined(found) if found else None


NOTHING = Recorded({})


def path_of(directory: Path, step: int) -> Path:
    """The file of the batch that was sampled before this step."""
    return directory / f"rollouts-{step}.npz"


def recorded_paths(directory: Path) -> list[Path]:
    """The files of batches in a run directory, in the order of steps."""
    paths = [path for path in directory.glob("rollouts-*.npz") if _step_in(path).isdecimal()]
    return sorted(paths, key=lambda path: int(_step_in(path)))


def _step_in(path: Path) -> str:
    return path.stem.partition("-")[2]


def remove_after(directory: Path, step: int) -> None:
    """Removes the batches of later steps, which a resumed run takes again."""
    for path in recorded_paths(directory):
        if int(_step_in(path)) > step:
            with writing(path):
                path.unlink()


def write_batch(path: Path, batch: Chunk, computed: Mapping[str, np.ndarray] = MappingProxyType({})) -> None:
    """Writes the pairs of a batch, and what a step has computed for each of them."""
    prompts, responses, _, keys = batch.sampled
    scores = batch.scores
    arrays: dict[str, np.ndarray] = {
        "position": np.array([position for _, position, _ in keys]),
        "prompt_number": np.array([prompt.number for prompt in prompts]),
        "prompt_ids": np.concatenate([prompt.token_ids for prompt in prompts], dtype=np.int32),
        "prompt_tokens": np.array([len(prompt.token_ids) for prompt in prompts]),
        "response_ids": np.concatenate([response.token_ids for response in responses], dtype=np.int32),
        "response_tokens": np.array([len(response.token_ids) for response in responses]),
        "rollout_log_probabilities": np.concatenate(
            [response.log_probabilities for response in responses], dtype=np.float32
        ),
        "ended": np.array([response.ended for response in responses]),
        "reward": scores.total,
        "reward_failed": scores.has_failed,
        "reward_errors": np.array(scores.errors),
        "num_generations": np.array(batch.num_generations),
        "advantages": batch.advantages,
        **computed,
    }
    arrays |= {_REWARDS + name: values for name, values in scores.by_name.items()}
    write_arrays(path, path, arrays)


def read_batch(path: Path) -> Chunk:
    """The pairs of a file.

    Raises:
      UserError: it is damaged.
    """
    try:
        arrays = read_arrays(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is damaged ({value_text(error)}). Remove it, and its batch is sampled again."
        ) from None
    names = [name.removeprefix(_REWARDS) for name in arrays if name.startswith(_REWARDS)]
    scores = Scores(
        total=arrays["reward"],
        by_name={name: arrays[_REWARDS + name] for name in names},
        has_failed=arrays["reward_failed"],
        errors=int(arrays["reward_errors"]),
        messages=[],
    )

    def split(name: str, lengths: str) -> list[list[Any]]:
        parts = np.split(arrays[name], np.cumsum(arrays[lengths])[:-1])
        return [part.tolist() for part in parts]

    prompts = [
        Prompt(number, "", tuple(token_ids), {})
        for number, token_ids in zip(
            arrays["prompt_number"].tolist(), split("prompt_ids", "prompt_tokens"), strict=True
        )
    ]
    log_probabilities = split("rollout_log_probabilities", "response_tokens")
    responses = map(Response, split("response_ids", "response_tokens"), log_probabilities, arrays["ended"].tolist())
    each = int(arrays["num_generations"])
    keys = [(TRAINING, position, pair % each) for pair, position in enumerate(arrays["position"].tolist())]
    sampled = Sampled(prompts, [*responses], [""] * len(prompts), keys)
    return Chunk(sampled, scores, arrays["advantages"], each)


def recorded_in(directory: Path) -> Recorded:
    """All groups that a run directory holds."""
    groups: dict[int, Chunk] = {}
    for path in recorded_paths(directory):
        for group in read_batch(path).groups():
            groups[group.sampled.keys[0][1]] = group
    return Recorded(groups)
