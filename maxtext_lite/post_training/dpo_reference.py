"""The frozen reference of DPO: the log-probabilities of all answers under the run's first parameters.

They are computed once, in a pass over the data before the first step, and stored in the run directory: two numbers per
pair. A second copy of the parameters, with a forward pass in every step, would give the same numbers; this way needs no
device memory, leaves the step unchanged on every mesh and schedule, and gives the same bits after a restart.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jax.stages import Wrapped

from maxtext_lite.config import UserError
from maxtext_lite.config.errors import value_text
from maxtext_lite.data import ExampleSource
from maxtext_lite.data.feed import evaluation_batches
from maxtext_lite.data.mixture import MixtureSource
from maxtext_lite.parallel import Params, bytes_of_host, exchange, sharding, value_of_host
from maxtext_lite.post_training.answers import PairSource
from maxtext_lite.post_training.array_files import read_arrays, write_arrays
from maxtext_lite.post_training.preference import pairs_of
from maxtext_lite.training.checkpoint import TrainProgress
from maxtext_lite.training.evaluation import EVAL_BATCH_AXES, make_eval_step, scores_of
from maxtext_lite.training.run import TrainingRun
from maxtext_lite.training.state import TrainState

FILE = "reference.npz"
"""In the run directory: log-probabilities float32 [pairs, 2] by the source's fingerprint."""


def add_reference(run: TrainingRun, state: TrainState, counts: TrainProgress, say: Callable[[str], None]) -> None:
    """Adds the reference's log-probabilities to the pairs of a DPO run. It computes them before the first step; later,
    and in a run that is only read, it reads their file.

    Pairs that have it keep it: a run that goes back before a loss spike comes here twice. All hosts call it.

    Raises:
      UserError: a resumed run's pairs have changed, or its file is gone.
    """
    if any(exchange(isinstance(run.source, PairSource) and run.source.reference is not None)):  # on hosts that read
        return
    held_out = [] if run.eval_source is None else run.eval_source.named().values()
    sources = [run.source, *held_out]
    if counts.step or run.is_read_only:
        tables = _read(run, sources)
    else:
        started = time.perf_counter()
        eval_step = make_eval_step(run.parts)
        params = run.decoder.joined(state.model_params, state.frozen)  # new adapters are the identity
        tables = {source.fingerprint: _find(run, eval_step, params, source) for source in sources}
        if run.is_first:
            write_arrays(run.directory / FILE, run.files.directory / FILE, tables)
        say(
            f"log-probabilities of the reference, of {sum(map(len, tables.values())):,} pairs, in "
            f"{time.perf_counter() - started:.1f} s"
        )
    run.source = _with(run.source, tables)
    run.eval_source = None if run.eval_source is None else _with(run.eval_source, tables)


def _with(source: ExampleSource, tables: Mapping[str, np.ndarray]) -> ExampleSource:
    if isinstance(source, MixtureSource):  # held-out sets with names
        return dataclasses.replace(source, sources=tuple(_with(each, tables) for each in source.sources))
    # A host that does not read has no pairs.
    return source.with_reference(tables[source.fingerprint]) if isinstance(source, PairSource) else source


def _find(run: TrainingRun, eval_step: Wrapped, params: Params, source: ExampleSource) -> np.ndarray:
    """Log-probabilities [pairs, 2] by the pair's number; on a host that reads no data, in the order of examples."""
    where = sharding(run.mesh, EVAL_BATCH_AXES)
    with evaluation_batches(source, run.plan, sharding=where, eval_steps=-1) as batches:
        found = np.concatenate([pairs_of(scores) for scores in scores_of(eval_step, params, batches)])
    if isinstance(source, PairSource):
        by_number = np.empty_like(found)
        by_number[source.rows.members] = found
        return by_number
    return found


def _read(run: TrainingRun, sources: Sequence[ExampleSource]) -> dict[str, np.ndarray]:
    """The tables in the first host's file, on every host."""
    path = run.files.directory / FILE
    remedy = (
        f"Use another run_name, with load_parameters_path={run.directory} to continue from its parameters as a new "
        "reference."
    )
    if not value_of_host(0, run.is_first and path.is_file()):
        raise UserError(f"{path} is gone, which holds the reference of the run. {remedy}")
    content = bytes_of_host(0, path.read_bytes() if run.is_first else b"")
    try:
        found = read_arrays(content)
    except ValueError as error:
        raise UserError(f"{path}, the reference of the run, is damaged ({value_text(error)}). {remedy}") from None
    if any(source.fingerprint not in found for source in sources):
        raise UserError(
            f"{path} holds the reference of other pairs than dataset_path and eval_dataset_path have now. Use the "
            "pairs that the run began with, or another run_name."
        )
    return found
