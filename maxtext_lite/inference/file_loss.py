"""The loss of a file under a model's own objective: of texts, of the answers in conversations, or of pairs."""

from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np

from maxtext_lite.config import Config, UserError
from maxtext_lite.config.bucket import local_copy
from maxtext_lite.config.json_file import is_there, user_path
from maxtext_lite.config.keys import source_kind
from maxtext_lite.config.registry import resolve
from maxtext_lite.console import complain
from maxtext_lite.data import ExampleSource
from maxtext_lite.data.prepared import MANIFEST_FILE
from maxtext_lite.data.sources import open_path
from maxtext_lite.data.text_files import PLAIN_SUFFIXES, find_files, is_kind, json_lines
from maxtext_lite.inference.requests import EvaluateConfig
from maxtext_lite.inference.sampler import cast_once, check_finite, load_on_mesh, mesh_problems
from maxtext_lite.models import Decoder
from maxtext_lite.parallel import Params, Tree, start_devices
from maxtext_lite.training.evaluation import EVAL_BATCH_AXES
from maxtext_lite.training.loss import forward
from maxtext_lite.training.objective import ScoredObjective, objective_of


def file_loss(directory: Path, config: Config, asked: EvaluateConfig) -> dict[str, float | int]:
    """The loss of a file, its target tokens and its examples, which are conversations, pairs, or rows of texts.

    The file is read as a run reads its held-out data, and the loss is the run's `eval_loss`: a mean over target tokens,
    or over pairs.

    Args:
      config: of the directory, from `directory_config`.
    Raises:
      UserError: the file cannot be read or has another format, or the model or the reference of its pairs is missing.
    """
    is_run = is_there(directory / "config.yml")
    changes: dict[str, object] = {"dataset_type": _dataset_type(config, asked.data, is_run=is_run)}
    if not is_run or "max_length" in asked.model_fields_set:
        changes["max_target_length"] = asked.max_length
    config = config.model_copy(update=changes)
    if problems := mesh_problems(config, len(start_devices()), asked.mesh):
        raise UserError(problems)
    source = open_path(config, key="data", path=asked.data, vocab_size=config.vocab_size)
    for note in source.notes:
        complain(f"data={asked.data}: {note}")
    objective = objective_of(config)

    def scores(load: Callable[[], tuple[Decoder, Params, jax.sharding.Mesh]]) -> list[Tree]:
        with jax.default_matmul_precision(config.matmul_precision):
            return list(_scores(config, objective, source, *load(), rows_at_once=asked.rows_at_once))

    found = scores(lambda: load_on_mesh(directory, config, asked.mesh, asked.parameters))
    if against := config.objective_kind.against:
        of_reference = scores(lambda: _reference(config, asked))
        found = [resolve(against)(own, other) for own, other in zip(found, of_reference, strict=True)]
    record = objective.evaluation(found)
    check_finite(record["eval_loss"], f"data={asked.data}", config.dtype)
    return {
        "loss": record["eval_loss"],
        "target_tokens": record["eval_target_tokens"],
        "examples": source.num_sequences,
    }


def _dataset_type(config: Config, path: str, *, is_run: bool) -> str:
    """How to read the file: as the run reads its data, except that a text need not be prepared."""
    kind = config.dataset_type
    if config.run_kind == "rl":
        raise UserError(
            "data: a run of reinforcement learning has rewards, and no loss of a file. Nearest that work: text, "
            "choices or cloze."
        )
    if source_kind(kind).data != "text":
        return kind
    if is_there(user_path(path) / MANIFEST_FILE):
        return "array_record"
    if kind == "megatron" and is_there(user_path(f"{path}.idx")):
        return "megatron"
    return "text" if is_run or _holds_texts(path) else "sft"


_CONVERSATIONS = {"messages", "conversations", "completion", "output"}
"""A line of conversations has one of these fields, and may have a `text` beside it."""


def _holds_texts(path: str) -> bool:
    """Whether a file's first line shows a document rather than a conversation."""
    name, file = find_files("data", path)[0]
    if is_kind(name, PLAIN_SUFFIXES):
        return True
    first = next(json_lines(name, file, wanted='"text"'), None)
    return first is None or (isinstance(first[1].get("text"), str) and not _CONVERSATIONS & first[1].keys())


def _reference(config: Config, asked: EvaluateConfig) -> tuple[Decoder, Params, jax.sharding.Mesh]:
    """The model that a DPO run began with."""
    if path := config.load_parameters_path:
        return load_on_mesh(local_copy(path, "load_parameters_path"), config, asked.mesh)
    raise UserError(
        "data: the run has no load_parameters_path, so the reference of its pairs is not stored. Nearest that works: "
        "its config with eval_dataset_path."
    )


def _scores(
    config: Config,
    objective: ScoredObjective,
    source: ExampleSource,
    decoder: Decoder,
    params: Params,
    mesh: jax.sharding.Mesh,
    *,
    rows_at_once: int,
) -> Iterator[Tree]:
    """The objective's scores of all examples, batch by batch."""

    def scores_of(params: Params, batch: dict[str, jax.Array]) -> Tree:
        rows = objective.rows(batch, EVAL_BATCH_AXES)
        return objective.scores(forward(decoder, params, rows, config), rows)

    score = jax.jit(scores_of)
    params = cast_once(decoder, params)
    shards = mesh.shape["fsdp"]
    examples_at_once = -(-rows_at_once // (objective.rows_per_example * shards)) * shards
    with jax.set_mesh(mesh):
        for first in range(0, len(source), examples_at_once):
            examples = [source[number] for number in range(first, min(first + examples_at_once, len(source)))]
            batch = {name: np.stack([each[name] for each in examples]) for name in source.fields}
            missing = [(0, examples_at_once - len(examples)), (0, 0)]  # empty rows, without targets
            yield jax.device_get(score(params, {name: np.pad(x, missing) for name, x in batch.items()}))
