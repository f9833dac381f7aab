"""A run before its first step: plan, data, mesh, decoder, optimizer, directory and checkpoints."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

import jax
import numpy as np
import optax

from maxtext_lite.batching import BatchPlan, flops_of_documents, format_plan, resumed, scaled_optimizer
from maxtext_lite.batching.devices import peak_tflops
from maxtext_lite.config import Config, UserError, describe, write_resolved
from maxtext_lite.config.bucket import is_bucket
from maxtext_lite.config.errors import WriteError, value_text, writing
from maxtext_lite.config.optional import load_asked
from maxtext_lite.config.registry import load_installed
from maxtext_lite.config.whole_file import steps_in
from maxtext_lite.data import ExampleSource, MixtureSource
from maxtext_lite.data.excluded import ExcludedRow, excluded_ids, left_out
from maxtext_lite.data.mixture import early_stop_note, mixture_sentences, mixture_table, steps_left, with_history
from maxtext_lite.data.sources_on_hosts import excluded_rows_on_hosts, listed_rows_on_hosts, source_tokens_of_run
from maxtext_lite.models import Decoder
from maxtext_lite.parallel import on_first_host, tree_shardings
from maxtext_lite.training.arrays import Device, Rows, num_elements
from maxtext_lite.training.checkpoint import (
    CONFIGURED_OBJECTIVE,
    OWN,
    Checkpointer,
    CheckpointReader,
    TrainProgress,
    append_restart,
    fingerprint,
    moved_batch,
    schedule_change_note,
)
from maxtext_lite.training.metrics import Speed, Terminal
from maxtext_lite.training.noise import why_unknown
from maxtext_lite.training.objective import CustomLoss
from maxtext_lite.training.optimizer import UNKNOWN_RATE, Schedule, schedule_of_run
from maxtext_lite.training.parameter_files import check_start, load_parameters, reader_of
from maxtext_lite.training.run_files import (
    RunFiles,
    environment,
    has_checkpoints,
    run_directory,
    try_to_write,
    write_json,
)
from maxtext_lite.training.starting_over import check_removable, remove_run
from maxtext_lite.training.state import (
    CONFIGURED,
    Overrides,
    TrainState,
    abstract_state,
    init_state,
    make_parts,
    state_from,
    with_total_steps,
)

EXCLUDED = "excluded_rows.jsonl"
"""In the run directory: the rows that the run has excluded itself."""


class _HasNotes(Protocol):
    @property
    def notes(self) -> Sequence[str]: ...


class Source(_HasNotes, Protocol):
    """A run's training data, examples or prompts, by number."""

    @property
    def fingerprint(self) -> str:
        """See `data.ExampleSource`."""
        ...

    @property
    def ends(self) -> tuple[int, ...]:
        """See `data.ExampleSource`."""
        ...

    def describe(self) -> list[dict[str, Any]]:
        """See `data.ExampleSource`."""
        ...

    def __len__(self) -> int: ...


Log = TypeVar("Log", bound=_HasNotes)
Data = TypeVar("Data", bound=Source)


class TrainingRun(Generic[Data]):
    """One process's part in a run: everything that is made once, before the first step.

    Attributes:
      config: the user's; only the optimizer's parts have the settings that the plan scaled.
      source: the training examples; `eval_source` the held-out ones, or None.
      directory: the run directory.
      files: those that the first host writes there, other than checkpoints.
      parts: the parts of a step; its mesh and its decoder are the run's.
      is_first: this process writes the run directory.
      recorded: rows that the run has excluded itself; known once it is restored.
      excluded: ids of those and of the config's excluded rows, with the position in the run from which each is left
        out.
      checkpointer: None where enable_checkpointing is false, and before `opened`.
    Args:
      own: the parts of a step that the caller supplies.
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
        source: Data,
        eval_source: Data | None,
        own: Overrides = CONFIGURED,
        devices: Sequence[Device] | None = None,
        examples_of_entry: int = 1,
    ):
        self.config, self.plan, self.source, self.eval_source, self._own = config, plan, source, eval_source, own
        self.parts = make_parts(config, plan, devices, own)
        self.mesh, self.decoder = self.parts.mesh, self.parts.decoder
        self.examples_per_epoch = len(source) * examples_of_entry
        self.is_first = jax.process_index() == 0
        self.directory = run_directory(config)
        self.files = RunFiles(self.directory)
        if config.starts_over:
            check_removable(config, self.directory)
        self.resumes = has_checkpoints(self.directory) and not config.starts_over
        check_start(config, resumes=self.resumes)
        if self.resumes and not config.enable_checkpointing:
            raise UserError(
                f"enable_checkpointing=false would start {self.directory} over, which holds checkpoints. "
                "Nearest that work: enable_checkpointing=true, overwrite=true, or another run_name."
            )
        self.recorded, self.excluded = list[ExcludedRow](), dict[int, int]()
        self.checkpointer: Checkpointer | None = None
        self._saved: CheckpointReader | None = None
        self._source_tokens: tuple[int, dict[str, int]] | None = None
        self._lock: Any = None  # on the first host, if locks are installed
        self._is_writable = False

    @contextlib.contextmanager
    def opened(self, say: Callable[[str], None]) -> Generator[None]:
        """A block with the run directory made and locked, so that no other run writes there, and checkpoints open.

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

    @property
    def mixtures(self) -> list[dict[str, Any]]:
        """The history of the run's mixtures as JSON; [] without checkpoints."""
        return self._saved.mixtures if self._saved else []

    def open_log(self, open_it: Callable[[], Log], say: Callable[[str], None]) -> Log | None:
        """A log in the run directory, on the first host, with messages on its existing lines; None on the others.

        Raises:
          WriteError: it cannot be read or written.
        """
        if not self.is_first:
            return None
        with writing(self.directory):
            log = open_it()
        for note in log.notes:
            say(note)
        return log

    @property
    def _fingerprint(self) -> dict[str, Any]:
        own = {}
        if self._own.optimizer is not None:
            own["optimizer"] = OWN
        if self._own.model is not Decoder:
            own["model"] = OWN
        own["objective"] = OWN if isinstance(self._own.objective, CustomLoss) else CONFIGURED_OBJECTIVE
        return fingerprint(self.config, self.source.fingerprint, self.plan.diloco_num_replicas) | own

    @property
    def abstract_state(self) -> TrainState:
        """Shapes and shardings of the state."""
        return abstract_state(self.parts)

    def schedule(self, counts: TrainProgress) -> Schedule:
        """The learning rate over the whole run, which has come to `counts`. All hosts call it."""
        if isinstance(self._own.optimizer, optax.GradientTransformation):
            return UNKNOWN_RATE
        return schedule_of_run(
            scaled_optimizer(self.config, self.plan),
            self.plan,
            cast(ExampleSource, self.source),
            seed=self.config.data_shuffle_seed,
            step=counts.step,
            examples_seen=counts.examples_seen,
        )

    def restore_or_init(self) -> tuple[TrainState, TrainProgress]:
        """The state and counts of the newest checkpoint, or those of a new run; also restores the source's history.

        Raises:
          UserError: the checkpoint is of another run, or a source has changed or would exceed its max_epochs.
        """
        abstract = self.abstract_state
        if self._saved and self._saved.latest_step() is not None:
            state, counts = self._saved.restore(abstract)
            self._mix(counts)
            done = counts.step, counts.examples_seen
            self.parts = with_total_steps(
                self.parts, self.config, self.plan, self._own, last=self.plan.length.end_after(*done)[0]
            )
            self._saved.starts = append_restart(self._saved.starts, self.config, self.plan, *done)
            self.plan = resumed(self.config, self.plan, step=done[0], examples_seen=done[1])
            if self.parts.optimizer.has_ended(counts.skipped_in_a_row):  # if the limit has been lowered
                none = jax.device_put(jax.numpy.int32(0), abstract.skipped_in_a_row.sharding)
                state = dataclasses.replace(state, skipped_in_a_row=none)
            return state, counts
        self._mix(TrainProgress())
        if self._saved:
            self._saved.starts = append_restart([], self.config, self.plan, 0, 0)
        path = self.config.load_parameters_path
        if path:  # before any compilation, as it may be missing or not fit
            reader, adapters = reader_of(path), None
            if reader is None:
                params = load_parameters(path, abstract.plain_params, "load_parameters_path")
            else:
                params = reader.load(abstract.plain_params, "load_parameters_path")
                if reader.lora is not None:
                    where = tree_shardings(self.mesh, self.decoder.trained(self.decoder.axes))
                    adapters = reader.load_adapters(params, where)
            return state_from(self.parts, params, self.config.seed, adapters), TrainProgress()
        return init_state(self.parts, self.config.seed), TrainProgress()

    def _mix(self, counts: TrainProgress) -> None:
        seen = counts.examples_seen, counts.tokens_seen
        self.source, mixtures = with_history(self.config, self.source, self.mixtures, seen)
        if self._saved:
            self._saved.mixtures = mixtures
        source = cast(ExampleSource, self.source)
        listed = listed_rows_on_hosts(self.config, source)
        self.recorded = excluded_rows_on_hosts(self.directory / EXCLUDED)
        self.excluded = excluded_ids(source, [*listed, *self.recorded])

    def steps_left(self, counts: TrainProgress) -> int:
        """The number of steps after those of `counts`, limited by the data.

        Raises:
          UserError: a source would exceed its max_epochs.
        """
        return steps_left(self.config, self.plan, self.source, step=counts.step, examples_seen=counts.examples_seen)

    def token_shares(self, counts: TrainProgress) -> dict[str, dict[str, float]]:
        """Each source's share of the target tokens since the mixture last changed; {} without a mixture.

        All hosts call it, with counts that never decrease.
        """
        source = self.source
        if not isinstance(source, MixtureSource) or source.stream is None:
            return {}
        first, tokens = self._source_tokens or (source.stream.last.examples_seen, {})
        seed, hosts = self.config.data_shuffle_seed, self.plan.loading_hosts
        more = source_tokens_of_run(source, first, counts.examples_seen, seed=seed, loading_hosts=hosts)
        tokens = {name: tokens.get(name, 0) + n for name, n in more.items()}
        self._source_tokens = counts.examples_seen, tokens
        return {"source_token_shares": {name: n / max(sum(tokens.values()), 1) for name, n in tokens.items()}}

    def log_startup(self, terminal: Terminal, counts: TrainProgress) -> None:
        """Prints the config and the plan, and writes them into the run directory. All hosts call it.

        Raises:
          WriteError: they cannot be written.
        """
        left = self.steps_left(counts)
        end = self.plan.length.examples_after(left, counts.examples_seen)
        if not self.is_first:
            return
        with writing(self.directory):
            ends = self._write_about(end)
        terminal.say(f"{describe(self.config)}\n\n{format_plan(self.plan)}\n")
        parameters = num_elements(self.decoder.abstract_params)
        trained = num_elements(self.decoder.trained(self.decoder.abstract_params))
        of_them = "" if trained == parameters else f", {trained:,} of them in adapters, which alone are trained,"
        peak = self.speed.peak
        mfu = "no MFU, as their peak is not known" if peak is None else f"MFU is taken against {peak:g} TFLOP/s each"
        where = f"{self.mesh.size} x {jax.devices()[0].device_kind}"
        terminal.say(f"{parameters:,} parameters{of_them} on {where}; {mfu}")
        noun = "prompts" if self.plan.rl else "examples"
        held_out = "nothing" if self.eval_source is None else f"{len(self.eval_source):,} {noun}"
        terminal.say(f"{len(self.source):,} training {noun}, {held_out} held out")
        notes_held_out = [] if self.eval_source is None else self.eval_source.notes
        for note in self.source.notes:  # one of a file from which rows are held out is about all of its rows
            terminal.say(f"{'training and held-out' if note in notes_held_out else 'training'} data: {note}")
        for note in notes_held_out:
            if note not in self.source.notes:
                terminal.say(f"held-out data: {note}")
        if ends:
            names = ", ".join(map(value_text, ends))
            terminal.say(f"answers end with {names}: from now on this ends the model's texts too")
        for sentence in mixture_sentences(self.config, self.source, counts.examples_seen, end):
            terminal.say(sentence)
        starts = self._saved.starts if self._saved else []
        for sentence in moved_batch(self.plan, starts, counts.step):
            terminal.say(sentence)
        if not isinstance(self._own.optimizer, optax.GradientTransformation):  # it has a schedule of its own
            done = (counts.step, counts.examples_seen)
            last = counts.step + left
            for sentence in (
                *schedule_change_note(self.config, self.plan, starts, *done),
                *early_stop_note(self.config, self.plan, steps=last, examples_seen=end),
            ):
                terminal.say(sentence)
        unknown = why_unknown(
            num_replicas=self.plan.mesh["data"],
            accumulation=self.plan.gradient_accumulation_steps,
            local_updates=self.parts.local is not None,
            interleaved=self.plan.pipeline_schedule == "1f1b",
        )
        if unknown:
            terminal.say(f"gradient_noise_scale: null, as {unknown}")
        if counts.step:
            terminal.say(f"resuming {self.directory} after step {counts.step}")

    def _write_about(self, end: int) -> list[str]:
        """Writes the config, the plan, the environment, and the files that export and generation need besides.

        Args:
          end: examples that the run will have seen at its end.
        Returns:
          The tokens at which the model's texts end only from this run on.
        """
        with writing((files := self.files.directory) / "config.yml"):
            write_resolved(self.config, files / "config.yml")
        ends = self._store_model_files(files / "hf")
        self.files.remove_gone()  # what an earlier start stored
        data = {"mixture": mixture_table(self.source, 0, end), "data": self.source.describe()}
        write_json(files / "plan.json", self.plan.to_json() | {name: each for name, each in data.items() if each})
        write_json(files / "environment.json", environment())
        self.files.upload()
        return ends

    def _store_model_files(self, directory: Path) -> list[str]:
        """Stores the files about the model's tokens, if there are any; returns the tokens at which texts newly end."""
        config, learned = self.config, self.source.ends
        is_stated = config.load_parameters_path or config.tokenizer_path or config.chat_template
        ends: list[str] = []
        if is_stated or learned or directory.is_dir():
            for store in load_installed("model_files"):
                ends += store(config, directory, learned)
        return ends

    def note_environment(self, **found: Any) -> None:
        """Adds entries to environment.json, unless the run is only read."""
        if self._is_writable:
            path = self.files.directory / "environment.json"
            with writing(path):
                write_json(path, json.loads(path.read_text(encoding="utf-8")) | found)

    def flops_of(self, example_ids: np.ndarray, examples_seen: int) -> float:
        """Model FLOPs of a step on these examples, of which the run leaves some out, after so many examples.

        They are those of the documents, each alone, where this host knows their lengths, and otherwise of whole rows:
        with the caller's own examples, and on hosts that read nothing.
        """
        left = example_ids[~left_out(example_ids, examples_seen, self.excluded)]
        if not left.size:
            return 0.0
        documents = cast(ExampleSource, self.source).documents(left)
        if documents is None:
            return len(left) * self.plan.flops_per_example
        return float(np.sum(flops_of_documents(self.config, documents.lengths[~documents.padding])))

    @property
    def speed(self) -> Speed:
        """The figures that turn a step's time into throughput."""
        return Speed(
            num_devices=self.mesh.size,
            peak=peak_tflops(jax.devices()[0].device_kind, self.config.dtype),
        )
