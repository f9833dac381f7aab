"""A run before its first step: plan, data, mesh, decoder, optimizer, directory and checkpoints."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from maxtext_lite.batching import BatchPlan, flops_of_documents, resumed, scaled_optimizer
from maxtext_lite.batching.devices import peak_tflops
from maxtext_lite.config import Config, UserError
from maxtext_lite.config.bucket import is_bucket
from maxtext_lite.config.errors import WriteError, value_text, writing
from maxtext_lite.config.load import load_asked
from maxtext_lite.config.whole_file import steps_in
from maxtext_lite.data import ExampleSource
from maxtext_lite.data.excluded import ExcludedRow, excluded_ids, left_out
from maxtext_lite.data.history import steps_left
from maxtext_lite.data.sources import with_history
from maxtext_lite.data.sources_on_hosts import excluded_rows_on_hosts, listed_rows_on_hosts
from maxtext_lite.models import Decoder
from maxtext_lite.parallel import on_first_host, tree_shardings
from maxtext_lite.training.arrays import Device, Rows
from maxtext_lite.training.checkpoint import (
    CONFIGURED_OBJECTIVE,
    OWN,
    Checkpointer,
    CheckpointReader,
    RestartHistory,
    TrainProgress,
    append_restart,
    fingerprint,
)
from maxtext_lite.training.optimizer import UNKNOWN_RATE, Schedule, schedule_of_run
from maxtext_lite.training.run_files import (
    RunFiles,
    has_checkpoints,
    run_directory,
    try_to_write,
    write_json,
)
from maxtext_lite.training.state import (
    CONFIGURED,
    Overrides,
    TrainState,
    abstract_state,
    init_state,
    make_parts,
    optimizer_of_run,
    state_from,
    with_moments_converted,
)

EXCLUDED = "excluded_rows.jsonl"
"""In the run directory: the rows that the run has excluded itself."""


class TrainingRun:
    """One process's part in a run: everything that is made once, before the first step.

    Attributes:
      config: the user's; only the optimizer's parts have the settings that the plan scaled.
      source: the training examples, or prompts in reinforcement learning; `eval_source`: the held-out ones, or None.
      directory: the run directory.
      files: those that the first host writes there, other than checkpoints.
      parts: the parts of a step; its mesh and its decoder are the run's.
      is_first: this process writes the run directory.
      recorded: rows that the run has excluded itself; known once it is restored.
      excluded: ids of those and of the config's excluded rows, with the position in the run from which each is
        excluded.
      checkpointer: None where enable_checkpointing is false, and before `opened`.
      is_read_only: nothing is written into the run directory.
    Args:
      own: the parts of a step that the caller supplies.
      stated: the user's `batch_settings`, where the config keeps other batches; None: those of the config.
      devices: those that train; None: all.
      examples_of_entry: how often an entry of the source counts as an example in one epoch.
    Raises:
      UserError: the config contradicts the run directory or the devices.
    """

    def __init__(
        self,
        config: Config,
        plan: BatchPlan,
        *,
        source: ExampleSource,
        eval_source: ExampleSource | None,
        own: Overrides = CONFIGURED,
        stated: Mapping[str, str] | None = None,
        devices: Sequence[Device] | None = None,
        examples_of_entry: int = 1,
    ):
        self.config = config
        self.plan = plan
        self.source = source
        self.eval_source = eval_source
        self._own = own
        self._stated = stated
        self.parts = make_parts(config, plan, devices, own)
        self.mesh = self.parts.mesh
        self.decoder = self.parts.decoder
        self.examples_per_epoch = len(source) * examples_of_entry
        self.is_first = jax.process_index() == 0
        self.directory = run_directory(config)
        self.files = RunFiles(self.directory)
        if config.starts_over:
            from maxtext_lite.training.starting_over import check_removable

            check_removable(config, self.directory)
        self.resumes = has_checkpoints(self.directory) and not config.starts_over
        if self.resumes and not config.enable_checkpointing:
            raise UserError(
                f"enable_checkpointing=false would start {self.directory} over, which holds checkpoints. "
                "Nearest that work: enable_checkpointing=true, overwrite=true, or another run_name."
            )
        self.recorded: list[ExcludedRow] = []
        self.excluded: Mapping[int, int] = {}
        self.checkpointer: Checkpointer | None = None
        self._saved: CheckpointReader | None = None
        self._lock: Any = None  # on the first host, if locks are installed
        self._is_writable = False
        self.is_read_only = False

    @contextlib.contextmanager
    def opened(self, say: Callable[[str], None]) -> Generator[None]:
        """Creates and locks the run directory and opens its checkpoints; a context manager.

        Args:
          say: takes messages about checkpoints, some from a background thread.
        Raises:
          UserError: another run holds the directory, it cannot be written, or all of its checkpoints are damaged. An
            error of writing also names the newest checkpoint.
        """
        try:
            with contextlib.ExitStack() as stack:
                self._open(stack, say)
                yield
                if self.is_first:
                    with writing(self.directory):
                        self.files.upload()
        except WriteError as error:
            raise UserError(f"{error} {self._what_is_safe()}") from None

    def _open(self, stack: contextlib.ExitStack, say: Callable[[str], None]) -> None:
        if self.is_first:
            try:
                self.files.make()
            except OSError as error:
                raise UserError(
                    f"base_output_directory={value_text(self.config.base_output_directory)} with "
                    f"run_name={value_text(self.config.run_name)} cannot be made a directory: {error.strerror}."
                ) from None
        hold = load_asked(self.config, "lock", "lease")
        if hold is not None:
            self._lock = hold(self.directory, say)
        if self._lock:
            stack.callback(self._lock.release)
        self._is_writable = self.is_first
        if self.is_first:
            stack.callback(self._close_files)
        if self.config.starts_over:
            from maxtext_lite.training.starting_over import remove_run

            on_first_host(self.directory, lambda: remove_run(self.directory, say))
        elif self.config.overwrite and self.resumes:
            say("overwrite=true: SLURM has queued this job again, so the run resumes instead of starting over")
        self.config = self.config.model_copy(update={"overwrite": False})  # as a start from config.yml resumes
        with writing(self.directory):
            if self.is_first:
                self.files.fetch()
            if self.config.enable_checkpointing and is_bucket(self.directory):
                try_to_write(self.directory, jax.process_index())
        if self.config.enable_checkpointing:
            self.checkpointer = Checkpointer(self.directory, self.config, self._fingerprint, say, self._before_commit)
            stack.callback(self.checkpointer.close)
            self._saved = self.checkpointer

    def _before_commit(self) -> None:
        """Makes a checkpoint that is about to count the newest state of a directory that is still this run's."""
        if self._lock:
            self._lock.check()
        self.files.upload()

    def _close_files(self) -> None:
        """Closes the files of the directory; after an error they are uploaded as far as that works."""
        with contextlib.suppress(OSError, UserError):
            if self._lock:
                self._lock.check()
            self.files.close()

    def _what_is_safe(self) -> str:
        saved: list[int] = []
        with contextlib.suppress(UserError):
            saved = steps_in(self.directory / "checkpoints")
        if not saved:
            return "No checkpoint has been saved yet."
        return f"The checkpoint of step {saved[-1]} is safe; run the same command to resume from it."

    def open_read_only(self, step: int, say: Callable[[str], None]) -> None:
        """Opens the run read-only, in place of `opened`; its newest checkpoint is the newest before this step."""
        self.is_read_only = True
        self._saved = CheckpointReader(self.directory, self._fingerprint).find_before(step, say)

    def save(self, state: TrainState, counts: TrainProgress, unfinished: Rows | None = None) -> None:
        """Saves a checkpoint if enable_checkpointing is true and the directory is ours; see `Checkpointer.save`."""
        if self._lock:
            self._lock.check()
        if self.checkpointer:
            self.checkpointer.save(state, counts, unfinished)

    def check(self) -> None:
        """Raises an error that a thread in the background has met: the lock is lost, or a save failed."""
        for part in (self._lock, self.checkpointer):
            if part is not None and part.error is not None:
                raise part.error

    def restore_unfinished(self, abstract: Any) -> Rows:
        """The batch during which the restored checkpoint was saved; see `CheckpointReader.restore_unfinished`."""
        assert self._saved is not None, "a run that resumes has checkpoints"
        return self._saved.restore_unfinished(abstract)

    @property
    def mixtures(self) -> list[dict[str, Any]]:
        """The history of the run's mixtures as JSON; [] without checkpoints."""
        return self._saved.mixtures if self._saved else []

    @property
    def _fingerprint(self) -> dict[str, Any]:
        own = {}
        if self._own.optimizer is not None:
            own["optimizer"] = OWN
        if self._own.model is not Decoder:
            own["model"] = OWN
        is_passed = self._own.objective is not None and self.plan.rl is None
        own["objective"] = OWN if is_passed else CONFIGURED_OBJECTIVE
        return fingerprint(self.config, self.source.fingerprint, self.plan.diloco_num_replicas) | own

    @property
    def abstract_state(self) -> TrainState:
        """Shapes and shardings of the state."""
        return abstract_state(self.parts)

    def schedule(self, counts: TrainProgress) -> Schedule:
        """The learning rate over the whole run, given its progress `counts`. All hosts call it."""
        if self.has_own_schedule:
            return UNKNOWN_RATE
        return schedule_of_run(
            scaled_optimizer(self.config, self.plan),
            self.plan,
            self.source,
            seed=self.config.data_shuffle_seed,
            step=counts.step,
            examples_seen=counts.examples_seen,
        )

    def restore_or_init(self) -> tuple[TrainState, TrainProgress]:
        """The state and counts of the newest checkpoint, or a new run's; also restores the source's history.

        Raises:
          UserError: the checkpoint is of another run, or a source has changed or would exceed its max_epochs.
        """
        if self._saved and self._saved.latest_step() is not None:
            return self._restore(self._saved)
        self._mix(TrainProgress())
        if self._saved:
            self._saved.starts = append_restart([], self.config, self.plan, 0, 0, self._stated)
        if self.config.load_parameters_path:
            return self._load_parameters(self.config.load_parameters_path), TrainProgress()
        return init_state(self.parts, self.config.seed), TrainProgress()

    def _restore(self, saved: CheckpointReader) -> tuple[TrainState, TrainProgress]:
        abstract = self.abstract_state
        here = self.parts.optimizer
        then = here.with_state_dtype(saved.state_dtype())
        state, counts = saved.restore(abstract_state(dataclasses.replace(self.parts, optimizer=then)))
        if then.state_dtype != here.state_dtype:
            state = with_moments_converted(self.parts, state, then)
        self._mix(counts)
        step = counts.step
        examples_seen = counts.examples_seen
        last, _ = self.plan.length.end_after(step, examples_seen)
        optimizer = optimizer_of_run(self.config, self.plan, self.decoder, self._own, last=last)
        self.parts = dataclasses.replace(self.parts, optimizer=optimizer)
        before = saved.starts[-1].get("split") if saved.starts else None
        saved.starts = append_restart(saved.starts, self.config, self.plan, step, examples_seen, self._stated)
        self.plan = resumed(self.config, self.plan, step=step, examples_seen=examples_seen, before=before)
        if self.parts.optimizer.has_ended(counts.skipped_in_a_row):  # if the limit has been lowered
            none = jax.device_put(jax.numpy.int32(0), abstract.skipped_in_a_row.sharding)
            state = dataclasses.replace(state, skipped_in_a_row=none)
        return state, counts

    def _load_parameters(self, path: str) -> TrainState:
        """A new state with the parameters of a run or a Hugging Face directory."""
        from maxtext_lite.training.parameter_files import load_parameters, reader_of

        wanted = self.abstract_state.plain_params
        adapters = None
        reader = reader_of(path)
        if reader is None:
            params = load_parameters(path, wanted, "load_parameters_path")
        else:
            params = reader.load(wanted, "load_parameters_path")
            if reader.lora is not None:
                where = tree_shardings(self.mesh, self.decoder.trained(self.decoder.axes))
                adapters = reader.load_adapters(params, where)
        return state_from(self.parts, params, self.config.seed, adapters)

    def _mix(self, counts: TrainProgress) -> None:
        seen = counts.examples_seen, counts.tokens_seen
        self.source, mixtures = with_history(self.config, self.source, self.mixtures, seen)
        if self._saved:
            self._saved.mixtures = mixtures
        listed = listed_rows_on_hosts(self.config, self.source)
        self.recorded = excluded_rows_on_hosts(self.directory / EXCLUDED)
        self.excluded = excluded_ids(self.source, [*listed, *self.recorded])

    def steps_left(self, counts: TrainProgress) -> int:
        """The number of steps after `counts`, limited by the data.

        Raises:
          UserError: a source would exceed its max_epochs.
        """
        return steps_left(self.config, self.plan, self.source, step=counts.step, examples_seen=counts.examples_seen)

    @property
    def starts(self) -> RestartHistory:
        """The starts that changed the run, this one included; [] without checkpoints."""
        return self._saved.starts if self._saved else []

    @property
    def has_own_schedule(self) -> bool:
        """Whether the learning rate is the caller's optimizer's own."""
        return isinstance(self._own.optimizer, optax.GradientTransformation)

    def note_environment(self, **found: Any) -> None:
        """Adds entries to environment.json, unless the run is only read."""
        if self._is_writable:
            path = self.files.directory / "environment.json"
            with writing(path):
                write_json(path, json.loads(path.read_text(encoding="utf-8")) | found)

    def flops_of(self, example_ids: np.ndarray, num_examples: int, examples_seen: int) -> float:
        """Model FLOPs of a step on these examples, without those that the run excludes after so many examples.

        Each document counts alone where this host knows its length, and otherwise whole rows count: in reinforcement
        learning, with the caller's own examples, and on hosts that read nothing.
        """
        if self.plan.rl:  # the ids number prompts
            return num_examples * self.plan.flops_per_example
        left = example_ids[~left_out(example_ids, examples_seen, self.excluded)]
        if not left.size:
            return 0.0
        documents = self.source.documents(left)
        if documents is None:
            return len(left) * self.plan.flops_per_example
        return float(np.sum(flops_of_documents(self.config, documents.lengths[~documents.padding])))

    @property
    def peak_tflops(self) -> float | None:
        """TFLOP/s of one device; None where unknown."""
        return peak_tflops(jax.devices()[0].device_kind, self.config.dtype)
