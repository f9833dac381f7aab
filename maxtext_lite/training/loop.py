"""The loop: from a config to a trained state, through interruptions."""

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import jax

from maxtext_lite.batching import format_plan, make_plan, not_yet_trainable
from maxtext_lite.config import Config, UserError, describe, write_resolved
from maxtext_lite.data import Batch, ExampleSource, evaluation_batches, examples_hash, open_sources, training_batches
from maxtext_lite.parallel import make_mesh, sharding, start_devices
from maxtext_lite.training.checkpoint import Checkpointer, Counts, checkpoint_directory, fingerprint, load_parameters
from maxtext_lite.training.evaluate import evaluate
from maxtext_lite.training.metrics import MetricsLog, Speed, Terminal, model_flops_per_example, peak_tflops
from maxtext_lite.training.optimizer import learning_rate_schedule, make_optimizer
from maxtext_lite.training.state import TrainState, abstract_state, init_state, make_decoder
from maxtext_lite.training.step import EVAL_BATCH_AXES, TRAIN_BATCH_AXES, make_eval_step, make_train_step

_FIRST_PROFILED_STEP = 3  # of this process: the first two fill caches


class NonFiniteLoss(Exception):
    """The loss or the gradient of a step was infinite or not a number; nothing was saved after it."""


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What a run came to.

    Attributes:
      step: steps done in the whole run.
      loss: training loss of the last step; None if this process did none.
      eval_loss: the last evaluation's, in nats per token; None without one.
      interrupted: a signal ended the run, after saving where checkpoints are on.
      state: the final TrainState, on the devices.
    """

    run_directory: Path
    step: int
    loss: float | None
    eval_loss: float | None
    interrupted: bool
    state: TrainState


@dataclasses.dataclass
class _InFlight:
    """A step that has been dispatched and not yet looked at."""

    step: int
    metrics: dict[str, jax.Array]
    batch: Batch


class _Signals:
    """Turns the first SIGTERM or SIGINT into a request to stop after the step; the second acts as usual."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.received = signal.Signals(number)
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@contextlib.contextmanager
def _watch_signals() -> Iterator[_Signals]:
    signals = _Signals()
    try:
        previous = {number: signal.signal(number, signals) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not the main thread: whoever runs us there handles signals
        previous = {}
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def train(config: Config) -> RunResult:
    """Trains to `config.steps`, from the newest checkpoint of the run directory where there is one.

    Raises:
      UserError: the config cannot be trained on these devices or this data, or contradicts the checkpoint.
      NonFiniteLoss: the loss stopped being a number.
    """
    with jax.default_matmul_precision(config.matmul_precision):
        return _Run(config).run()


class _Run:
    """One process's part in a run: everything that is made once, and the loop."""

    def __init__(self, config: Config):
        self.config = config
        start_devices()
        plan = make_plan(config, num_devices=jax.device_count(), num_hosts=jax.process_count())
        refused = not_yet_trainable(config, plan)
        if refused:
            raise UserError(refused)
        self.source, self.eval_source = open_sources(config, vocab_size=config.vocab_size)
        self.plan = make_plan(
            config, num_devices=jax.device_count(), num_hosts=jax.process_count(), num_examples=len(self.source)
        )
        self.mesh = make_mesh(plan.ici_mesh, plan.dcn_mesh)
        self.decoder = make_decoder(config, jax.default_backend())
        self.optimizer = make_optimizer(config, self.decoder.axes)
        self.is_first = jax.process_index() == 0
        self.directory = Path(config.base_output_directory) / config.run_name
        if config.load_parameters_path:
            checkpoint_directory(config.load_parameters_path, "load_parameters_path")
        if not config.enable_checkpointing and any((self.directory / "checkpoints").glob("*")):
            raise UserError(
                f"enable_checkpointing=false would start {self.directory} over, which holds checkpoints. "
                "Nearest that work: enable_checkpointing=true, or another run_name."
            )
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"base_output_directory={config.base_output_directory} with run_name={config.run_name} cannot be made "
                f"a directory: {error.strerror}."
            ) from None
        self.checkpointer = None
        if config.enable_checkpointing:
            self.checkpointer = Checkpointer(self.directory, config, fingerprint(config, self.source.fingerprint))

    def run(self) -> RunResult:
        """Trains; see `train`."""
        config = self.config
        with jax.set_mesh(self.mesh), _watch_signals() as signals:
            terminal = Terminal(steps=config.steps, log_period=config.log_period, quiet=not self.is_first)
            log = None
            try:
                state, counts = self._restore_or_init()
                if counts.step >= config.steps:
                    terminal.say(f"nothing to do: {self.directory} has {counts.step} of steps={config.steps} already")
                    return RunResult(self.directory, counts.step, None, None, False, state)
                self._introduce(terminal, counts)
                log = MetricsLog(self.directory, counts.step) if self.is_first else None
                terminal.start(counts.step)
                return _Loop(self, terminal, log).train_from(state, counts, signals)
            finally:
                terminal.close()
                if log:
                    log.close()
                if self.checkpointer:
                    self.checkpointer.close()

    def _restore_or_init(self) -> tuple[TrainState, Counts]:
        if self.checkpointer and self.checkpointer.latest_step() is not None:
            return self.checkpointer.restore(abstract_state(self.decoder, self.optimizer, self.mesh))
        params = None
        if self.config.load_parameters_path:  # before anything is compiled: it may not be there, or not fit
            abstract = abstract_state(self.decoder, self.optimizer, self.mesh)
            params = load_parameters(self.config.load_parameters_path, abstract.params, "load_parameters_path")
        state = init_state(self.decoder, self.optimizer, self.mesh, self.config.seed)
        return (state if params is None else dataclasses.replace(state, params=params)), Counts()

    def _introduce(self, terminal: Terminal, counts: Counts) -> None:
        """Prints the config and the plan, and writes them into the run directory."""
        if not self.is_first:
            return
        write_resolved(self.config, self.directory / "config.yml")
        _write_json(self.directory / "plan.json", self.plan.to_json())
        _write_json(self.directory / "environment.json", environment())
        terminal.say(describe(self.config))
        terminal.say("")
        terminal.say(format_plan(self.plan))
        terminal.say("")
        terminal.say(f"attention kernel: {self.decoder.shape.attention} (attention={self.config.attention})")
        parameters = sum(leaf.size for leaf in jax.tree.leaves(self.decoder.abstract_params))
        terminal.say(
            f"{parameters:,} parameters on {jax.device_count()} x {jax.devices()[0].device_kind}; "
            + _peak_sentence(self.speed)
        )
        held_out = "nothing" if self.eval_source is None else f"{len(self.eval_source):,} examples"
        terminal.say(f"{len(self.source):,} training examples, {held_out} held out")
        if counts.step:
            terminal.say(f"resuming {self.directory} after step {counts.step}")

    @property
    def speed(self) -> Speed:
        """What steps are timed against."""
        return Speed(
            flops_per_example=model_flops_per_example(self.decoder.shape, self.config.max_target_length),
            num_devices=jax.device_count(),
            peak=peak_tflops(jax.devices()[0].device_kind, self.config.dtype),
        )


class _Loop:
    """The steps: one is always on its way while the one before is logged, so that devices never wait for the host."""

    def __init__(self, run: _Run, terminal: Terminal, log: MetricsLog | None):
        self.run, self.config, self.plan = run, run.config, run.plan
        self.terminal, self.log = terminal, log
        self.counts = Counts()
        self.loss: float | None = None
        self.eval_loss: float | None = None
        self.last_ready = 0.0
        self.tracing = False
        # The simulated devices of a CPU share a few threads: with two steps under way, a collective of one can wait
        # for ever for a device whose thread the other holds. There, a step is finished before the next begins.
        self.one_at_a_time = jax.default_backend() == "cpu" and jax.local_device_count() > 1

    def train_from(self, state: TrainState, counts: Counts, signals: _Signals) -> RunResult:
        """The steps after `counts`, until the last or a signal."""
        run, config = self.run, self.config
        self.counts = counts
        train_batch_sharding = sharding(run.mesh, TRAIN_BATCH_AXES)
        with training_batches(
            run.source,
            self.plan,
            sharding=train_batch_sharding,
            examples_seen=counts.examples_seen,
            num_steps=config.steps - counts.step,
            seed=config.data_shuffle_seed,
            worker_count=config.grain_worker_count,
        ) as batches:
            train_step = self._compile(state)
            eval_step = make_eval_step(run.decoder, run.mesh, config)
            self.last_ready = time.perf_counter()
            in_flight: _InFlight | None = None
            for step, batch in enumerate(batches, start=counts.step + 1):
                self._profile(step - counts.step)
                if self.one_at_a_time:
                    jax.block_until_ready(state)
                state, metrics = train_step(state, batch.arrays)
                self._finish(in_flight)
                in_flight = _InFlight(step, metrics, batch)
                stopping = _all_hosts_stop(signals, step)
                last = step == config.steps or stopping
                saves = run.checkpointer is not None and (step % config.checkpoint_period == 0 or last)
                evaluates = (
                    run.eval_source is not None
                    and config.eval_interval > 0
                    and (step % config.eval_interval == 0 or step == config.steps)
                )
                if saves or evaluates or last:
                    # Everything up to this step is on record before its checkpoint is: a restart adds what follows.
                    self._finish(in_flight)
                    in_flight = None
                    # A checkpoint after its evaluation: a kill between them repeats both. Asked to stop, save first.
                    if stopping and run.checkpointer:
                        run.checkpointer.save(state, self.counts)
                    if evaluates:
                        self._evaluate(eval_step, state, run.eval_source)
                    if saves and run.checkpointer:
                        run.checkpointer.save(state, self.counts)
                    self.last_ready = time.perf_counter()
                if last:
                    break
            self._profile(None)
            if run.checkpointer:
                run.checkpointer.wait()
        interrupted = self.counts.step < config.steps
        if interrupted:
            saved = "saved" if run.checkpointer else "not saved (enable_checkpointing=false)"
            self.terminal.say(
                f"stopped by {signals.received.name if signals.received else 'another host'} after step "
                f"{self.counts.step}, {saved}"
            )
        return RunResult(run.directory, self.counts.step, self.loss, self.eval_loss, interrupted, state)

    def _compile(self, state: TrainState) -> Any:
        """The train step, compiled before the clock of the first step starts."""
        run, plan = self.run, self.plan
        step = make_train_step(
            run.decoder, run.optimizer, run.mesh, config=self.config, schedule=learning_rate_schedule(self.config)
        )
        sizes = (plan.gradient_accumulation_steps, plan.micro_batch_slots, self.config.max_target_length)
        where = sharding(run.mesh, TRAIN_BATCH_AXES)
        batch = {
            name: jax.ShapeDtypeStruct(sizes, "float32" if name == "weights" else "int32", sharding=where)
            for name in ("tokens", "targets", "segments", "positions", "weights")
        }
        started = time.perf_counter()
        compiled = step.lower(state, batch).compile()
        self.terminal.say(f"compiled the train step in {time.perf_counter() - started:.1f} s")
        return compiled

    def _finish(self, done: _InFlight | None) -> None:
        """Waits for a step, counts it and records it."""
        if done is None:
            return
        metrics = {name: value.item() for name, value in jax.device_get(done.metrics).items()}
        ready = time.perf_counter()
        step_seconds, self.last_ready = ready - self.last_ready, ready
        counts, batch = self.counts, done.batch
        self.counts = Counts(
            done.step, counts.examples_seen + batch.num_examples, counts.tokens_seen + metrics["target_tokens"]
        )
        self.loss = metrics["loss"]
        stage = self.plan.stage_at(counts.examples_seen)
        record = {
            "step": done.step,
            **metrics,
            "examples": batch.num_examples,
            "examples_seen": self.counts.examples_seen,
            "tokens_seen": self.counts.tokens_seen,
            "epoch": self.counts.examples_seen / len(self.run.source),
            "per_device_batch_size": float(stage.per_device_batch_size),
            "gradient_accumulation_steps": stage.gradient_accumulation_steps,
            "global_batch_to_train": stage.global_batch_to_train,
            "step_seconds": step_seconds,
            "data_seconds": batch.data_seconds,
            **self.run.speed.of(batch.num_examples, metrics["target_tokens"], step_seconds),
            "skipped": False,
            "examples_hash": examples_hash(batch.example_ids),
        }
        if self.log:
            self.log.write(record)
        self.terminal.step(record)
        if not all(math.isfinite(metrics[name]) for name in ("loss", "grad_norm", "param_norm")):
            raise NonFiniteLoss(
                f"step {done.step} has loss {metrics['loss']}, grad_norm {metrics['grad_norm']} and param_norm "
                f"{metrics['param_norm']}; nothing was saved at or after it"
            )

    def _evaluate(self, eval_step: Any, state: TrainState, source: ExampleSource | None) -> None:
        assert source is not None
        with evaluation_batches(
            source, self.plan, sharding=sharding(self.run.mesh, EVAL_BATCH_AXES), eval_steps=self.config.eval_steps
        ) as batches:
            self.eval_loss, tokens = evaluate(eval_step, state.params, batches)
        record = {"step": self.counts.step, "eval_loss": self.eval_loss, "eval_target_tokens": tokens}
        if self.log:
            self.log.write(record)
        self.terminal.say(
            f"step {self.counts.step}/{self.config.steps}  held-out loss {self.eval_loss:.4f} nats per "
            f"token over {tokens:,} tokens"
        )

    def _profile(self, steps_here: int | None) -> None:
        """Starts and ends the trace of `profiler_steps` steps; `steps_here` counts this process's, None: the end."""
        count = self.config.profiler_steps
        if not count or not self.run.is_first:
            return
        if steps_here == _FIRST_PROFILED_STEP:
            jax.profiler.start_trace(str(self.run.directory / "tensorboard"))
            self.tracing = True
        elif self.tracing and (steps_here is None or steps_here == _FIRST_PROFILED_STEP + count):
            jax.profiler.stop_trace()
            self.tracing = False


def _all_hosts_stop(signals: _Signals, step: int) -> bool:
    """Whether to stop after this step: all hosts answer alike, though a signal may reach only one."""
    if jax.process_count() == 1:
        return signals.received is not None
    from jax.experimental import multihost_utils

    return multihost_utils.reached_preemption_sync_point(step)


def _peak_sentence(speed: Speed) -> str:
    if speed.peak is None:
        return "no MFU, as their peak is not known"
    return f"MFU is taken against {speed.peak:g} TFLOP/s each"


def environment() -> dict[str, Any]:
    """Versions, devices and the git commit, for environment.json."""
    packages = ("maxtext-lite", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    versions = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": versions,
        "devices": [device.device_kind for device in jax.devices()],
        "num_processes": jax.process_count(),
        "git_commit": commit.stdout.strip() or None,
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
