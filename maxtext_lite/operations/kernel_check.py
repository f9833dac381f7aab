"""A check of a run's kernels and number formats against plain arithmetic before its first step."""

from collections.abc import Callable

import jax

from maxtext_lite.batching import vocab_tiles
from maxtext_lite.parallel import context_shards, num_shards
from maxtext_lite.training.arrays import Rows
from maxtext_lite.training.checkpoint import TrainProgress
from maxtext_lite.training.gradients import TRAIN_BATCH_AXES
from maxtext_lite.training.hooks import Hook
from maxtext_lite.training.run import TrainingRun
from maxtext_lite.training.state import StepContext, TrainState


class KernelCheckHook(Hook):
    """Checks the kernels of a run with its first batch."""

    def start(self, run: TrainingRun, state: TrainState, counts: TrainProgress, say: Callable[[str], None]) -> None:
        self._run = run
        self._say = say

    def before_first_step(self, rows: Rows) -> None:
        chosen = kernels_of(self._run.parts, rows)
        if chosen:
            from maxtext_lite.operations.kernel_comparison import check_kernels  # a plain run has nothing to compare

            check_kernels(self._run, rows, chosen, self._say)


def kernels_of(parts: StepContext, batch: Rows) -> dict[str, int]:
    """What a run does not compute plainly on batches like this one [A, B, T].

    Returns:
      The names of attention, experts, quantization and num_vocab_tiling, with the number of tiles; of the others, 1.
    """
    shape = parts.decoder.shape
    experts = shape.experts
    chosen: dict[str, int] = {}
    if shape.attention != "dot_product":
        chosen["attention"] = 1
    if experts is not None and experts.capacity_factor is None and experts.matmul != "ragged_dot":
        chosen["experts"] = 1
    if shape.quantization != "none":
        chosen["quantization"] = 1
    _, slots, tokens = jax.eval_shape(lambda: parts.objective.rows(batch, TRAIN_BATCH_AXES))["segments"].shape
    num_tiles = vocab_tiles(
        parts.config.num_vocab_tiling,
        rows=-(-slots // (num_shards("end_batch") * num_shards("replica"))),
        tokens=tokens // context_shards(),
        vocab_size=shape.vocab_size // num_shards("activation_vocab"),
    )
    if num_tiles > 1:
        chosen["num_vocab_tiling"] = num_tiles
    return chosen
