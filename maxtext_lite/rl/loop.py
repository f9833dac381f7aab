"""The loop of reinforcement learning: sample a batch chunk by chunk, judge it, add its gradients up, update."""

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from maxtext_lite.config import RLRunConfig
from maxtext_lite.data import Prompt, example_ids
from maxtext_lite.models import Sampling
from maxtext_lite.parallel import sharding, value_of_host
from maxtext_lite.rl.held_out import held_out_record, held_out_text
from maxtext_lite.rl.log_probabilities import make_log_probabilities
from maxtext_lite.rl.pairs import Chunk, batch_record
from maxtext_lite.rl.reference import Reference
from maxtext_lite.rl.rewards import RewardError, Scores
from maxtext_lite.rl.rollout import Request, Response
from maxtext_lite.rl.run import RLRun, open_rl_run
from maxtext_lite.rl.timeline import Timeline
from maxtext_lite.training import RunResult
from maxtext_lite.training.checkpoint import Counts
from maxtext_lite.training.failures import Failures
from maxtext_lite.training.gradients import TRAIN_BATCH_AXES, accumulate_gradients
from maxtext_lite.training.ledger import Consumed, Ledger
from maxtext_lite.training.metrics import JsonLines, MetricsLog, Terminal
from maxtext_lite.training.nonfinite import find_nonfinite
from maxtext_lite.training.profile import Profile
from maxtext_lite.training.state import TrainState
from maxtext_lite.training.step import make_chunk_step, make_update, make_zero_sums
from maxtext_lite.training.stopping import Signals, Stop, watch_signals

_TRAINING, _HELD_OUT = 0, 1  # the first int of a request's key

Rows = dict[str, jax.Array]


class _Sampled(NamedTuple):
    """Pairs that have not been judged yet."""

    prompts: Sequence[Prompt]
    responses: Sequence[Response]
    texts: Sequence[str]


_Verdict = Scores | RewardError | None  # None: on the hosts that do not judge
_Judged = tuple[_Sampled, _Verdict]


def train_rl(config: RLRunConfig) -> RunResult:
    """Trains to `config.steps`, from the newest checkpoint of the run directory where there is one.

    Raises:
      UserError: the config cannot be run on these devices, prompts or rewards, or contradicts the checkpoint.
      RewardError: a reward failed, with reward_error=stop.
      NonFiniteLoss: the loss stopped being a number.
    """
    with jax.default_matmul_precision(config.matmul_precision):
        rl = open_rl_run(config)
        with contextlib.closing(rl), jax.set_mesh(rl.run.mesh), watch_signals() as signals:
            return _train(rl, signals)


def _train(rl: RLRun, signals: Signals) -> RunResult:
    run = rl.run
    terminal = Terminal(log_period=run.config.log_period, quiet=not run.is_first)
    with contextlib.ExitStack() as open_things:
        open_things.callback(terminal.close)
        open_things.enter_context(run.opened(terminal.say))
        state, counts = run.restore_or_init()
        if counts.step >= run.plan.steps:
            terminal.say(f"nothing to do: {run.directory} has {counts.step} steps already, which is all")
            return RunResult(run.directory, counts.step, None, None, False, run.is_first, state)
        run.introduce(terminal, counts)
        # Before the first step there is an evaluation, which stands at step 0.
        logs = run.open_log(lambda: _Logs(run.directory, counts.step or -1, run.failures), terminal.say)
        if logs:
            open_things.enter_context(contextlib.closing(logs))
        terminal.start(counts.step, run.plan.steps)
        return _Loop(rl, terminal, logs, state, counts).train(state, signals)


class _Logs:
    """The files that a run's lines go to: metrics.jsonl, rollouts.jsonl and timeline.jsonl."""

    def __init__(self, directory: Path, after_step: int, failures: Failures):
        self.metrics = MetricsLog(directory, after_step, failures)
        self.rollouts = JsonLines(directory / "rollouts.jsonl", after_step, failures)
        self.timeline = JsonLines(directory / "timeline.jsonl", after_step, failures)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was found in the files that is not as it should be."""
        return (*self.metrics.notes, *self.rollouts.notes, *self.timeline.notes)

    def close(self) -> None:
        """Closes all."""
        for log in (self.metrics, self.rollouts, self.timeline):
            log.close()


class _Loop:
    """The steps, one batch after the other: while a chunk is trained on, the next one is sampled."""

    def __init__(self, rl: RLRun, terminal: Terminal, logs: _Logs | None, state: TrainState, counts: Counts):
        run, config = rl.run, rl.config
        self.rl, self.run, self.config, self.batch = rl, run, config, rl.batch
        self.terminal, self.logs = terminal, logs
        self.ledger = Ledger(run, terminal, logs.metrics if logs else None, counts)
        parts: Any = {"config": run.config, "objective": rl.policy}
        expected = rl.policy.expected(rl.batch.pairs_per_batch)
        of_run = run.decoder, run.optimizer, run.mesh
        self.zero_sums = make_zero_sums(*of_run, **parts)
        self.chunk_step = make_chunk_step(*of_run, **parts, expected=expected)
        self.update = make_update(*of_run, **parts, schedule=run.schedule, expected=expected)
        self.reference = Reference(run, config, state, counts.step) if config.grpo_beta else None
        self.old = None
        if not rl.policy.on_policy:
            self.old = make_log_probabilities(
                run.decoder, run.mesh, config=run.config, temperature=config.decode_sampling_temperature
            )
        num_traced = config.profiler_steps if run.is_first else 0
        self.profile = Profile(run.directory / "tensorboard", num_traced, run.failures)
        self._numbers = self._prompt_numbers()  # of the prompts of the batch that is next, or under way
        # Devices of its own, or another machine, sample at any time; those that also train, in turns with it.
        # Several hosts sample in their main threads, where what they do together is in one order.
        apart = not rl.batch.takes_turns or config.rollout_engine == "http"
        self.samples_beside = apart and jax.process_count() == 1

    def train(self, state: TrainState, signals: Signals) -> RunResult:
        """The steps after those of the ledger, until the last or a signal."""
        run, config, ledger = self.run, self.config, self.ledger
        last_step, each = run.plan.steps, config.num_iterations
        stopping = Stop(run.mesh, signals, run.failures)
        if ledger.counts.step == 0 and config.eval_interval > 0:
            self._evaluate(state)
        chunks: list[Rows] = []
        if ledger.counts.step % each:
            chunks = self._unfinished()
        ledger.restart_clock()
        before = ledger.counts.step
        for step in range(before + 1, last_step + 1):
            self.profile.before_step(step - before)
            timeline = Timeline()
            iteration = (step - 1) % each
            if iteration == 0:
                chunks, sums, about = self._sample_and_add(state, step, timeline)
            else:
                sums, about = self._add(state, chunks, timeline), {}
            with timeline.phase("train", self.batch.micro_batches - 1):
                state, metrics = jax.block_until_ready(self.update(state, sums))
            del sums  # or there would be two while the next batch begins
            self._record(step, state, metrics, chunks, timeline, about)
            signals.take_requests()
            if stops := stopping.after_this_step():
                run.failures.raise_together()
            last = step == last_step or stops
            saves = run.checkpointer and (step % config.checkpoint_period == 0 or last)
            evaluates = config.eval_interval > 0 and (step % config.eval_interval == 0 or step == last_step)
            # A checkpoint after its evaluation: a kill between them repeats both. Asked to stop, save first.
            if saves and stops:
                self._save(state, chunks)
            if evaluates:
                self._evaluate(state)
            if saves:
                self._save(state, chunks)
            ledger.restart_clock()
            if last:
                break
        self.profile.close()
        ledger.flush()
        run.wait()
        interrupted = ledger.counts.step < last_step
        if interrupted:
            saved = "saved" if run.checkpointer else "not saved (enable_checkpointing=false)"
            by = signals.received.name if signals.received else "another host"
            self.terminal.say(f"stopped by {by} after step {ledger.counts.step}, {saved}")
        return RunResult(run.directory, ledger.counts.step, ledger.loss, None, interrupted, run.is_first, state)

    def _save(self, state: TrainState, chunks: Sequence[Rows]) -> None:
        """A checkpoint of the step that is done, unless there is one; amid a batch, with the batch."""
        amid = self.ledger.counts.step % self.config.num_iterations != 0
        self.run.save(state, self.ledger.counts, _stacked(chunks) if amid else None)

    def _sample_and_add(
        self, state: TrainState, step: int, timeline: Timeline
    ) -> tuple[list[Rows], Any, dict[str, Any]]:
        """A batch's rows, the sum of its gradients, and what its step's record says of it."""
        rl, config, batch = self.rl, self.config, self.batch
        self._numbers = numbers = self._prompt_numbers()
        rl.engine.update(self.run.decoder.joined(state.params, state.frozen), step - 1)
        judged, arrays, sums = [], [], self.zero_sums()
        for number, chunk in enumerate(self._judged_chunks(numbers, timeline)):
            with timeline.phase("train", number):
                rows = self._on_devices(chunk.rows(self.run.plan.micro_batch_slots, config.max_target_length))
                if self.old is not None:
                    params = self.run.decoder.joined(state.params, state.frozen)
                    rows["old_log_probabilities"] = self.old(params, rows)
                if self.reference is not None:
                    rows["reference_log_probabilities"] = self.reference.of(rows)
                sums = jax.block_until_ready(self.chunk_step(state, sums, rows))
            judged.append(chunk)
            arrays.append(rows)
        self._log_pairs(step, judged)
        about = {"prompts_seen": self._prompts_seen() + batch.prompts_per_batch, **batch_record(judged)}
        return arrays, sums, about

    def _add(self, state: TrainState, chunks: Sequence[Rows], timeline: Timeline) -> Any:
        """The sum of the gradients of a batch that is there already."""
        sums = self.zero_sums()
        for number, rows in enumerate(chunks):
            with timeline.phase("train", number):
                sums = jax.block_until_ready(self.chunk_step(state, sums, rows))
        return sums

    def _judged_chunks(self, numbers: np.ndarray, timeline: Timeline) -> Iterator[Chunk]:
        """The chunks of a batch in turn; while one is used, the next is on its way."""
        rl, config = self.rl, self.config
        per_chunk = len(numbers) // self.batch.micro_batches
        first = self._prompts_seen()

        def sample(chunk: int) -> _Sampled:
            places = range(chunk * per_chunk, (chunk + 1) * per_chunk)
            pairs = [(place, generation) for place in places for generation in range(config.num_generations)]
            prompts = [self.run.source[int(numbers[place])] for place, _ in pairs]
            requests = [
                Request(prompt.token_ids, (_TRAINING, first + place, generation))
                for prompt, (place, generation) in zip(prompts, pairs, strict=True)
            ]
            with timeline.phase("rollout", chunk):
                return self._generate(prompts, requests, rl.sampling)

        def judge(chunk: int, sampled: _Sampled) -> _Judged:
            with timeline.phase("reward", chunk):
                return sampled, self._judge(sampled)

        for sampled, scores in self._ahead(range(self.batch.micro_batches), sample, judge):
            yield Chunk.judged(
                sampled.prompts,
                sampled.responses,
                sampled.texts,
                self._of_first_host(scores),
                num_generations=config.num_generations,
                scale_rewards=config.scale_rewards,
            )

    def _ahead(
        self, chunks: range, sample: Callable[[int], _Sampled], judge: Callable[[int, _Sampled], _Judged]
    ) -> Iterator[_Judged]:
        """Each chunk, sampled and judged. What samples beside the trainer does so for all chunks of a batch at once;
        where the same devices do both, a chunk is sampled before the one before it is handed over, so that rewards are
        found meanwhile.
        """
        with (
            concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="rollout") as sampler,
            concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="reward") as judges,
        ):
            try:
                if self.samples_beside:
                    sampled = [sampler.submit(sample, chunk) for chunk in chunks]
                    judged = [judges.submit(lambda chunk: judge(chunk, sampled[chunk].result()), c) for c in chunks]
                    for future in judged:
                        yield future.result()
                    return
                waiting: concurrent.futures.Future[_Judged] | None = None
                for chunk in chunks:
                    before, waiting = waiting, judges.submit(judge, chunk, sample(chunk))
                    if before is not None:
                        yield before.result()
                assert waiting is not None
                yield waiting.result()
            except BaseException:  # what has been asked for, and not begun, is not waited for
                for pool in (sampler, judges):
                    pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _generate(self, prompts: Sequence[Prompt], requests: Sequence[Request], sampling: Sampling) -> _Sampled:
        # Precision is set for each thread by itself.
        with jax.default_matmul_precision(self.config.matmul_precision):
            responses = self.rl.engine.generate(
                requests, sampling=sampling, max_new_tokens=self.batch.max_response_tokens
            )
        return _Sampled(prompts, responses, [self.rl.text_of(response) for response in responses])

    def _judge(self, sampled: _Sampled) -> _Verdict:
        """The scores, or why there are none, on the first host; the others are told."""
        if not self.run.is_first:
            return None
        try:
            return self.rl.rewards.of(sampled.prompts, sampled.texts)
        except RewardError as error:
            return error

    def _of_first_host(self, verdict: _Verdict) -> Scores:
        """The first host's scores, on all hosts: functions need not give the same everywhere.

        Raises:
          RewardError: the first host's.
        """
        told = value_of_host(0, None if verdict is None else _told(verdict))
        found = _understood(told) if verdict is None else verdict
        if isinstance(found, RewardError):
            raise found
        for message in found.messages:
            self.terminal.say(f"reward: {message}")
        return found

    def _prompts_seen(self) -> int:
        """Prompts of the batches before the one that is next, or under way."""
        done, each = self.ledger.counts, self.config.num_iterations
        amid = done.step % each * self.batch.pairs_per_batch  # of the batch under way
        return (done.examples_seen - amid) // (each * self.config.num_generations)

    def _prompt_numbers(self) -> np.ndarray:
        return example_ids(
            self._prompts_seen(),
            self.batch.prompts_per_batch,
            num_examples=len(self.run.source),
            seed=self.config.data_shuffle_seed,
        )

    def _on_devices(self, rows: dict[str, np.ndarray]) -> Rows:
        where = sharding(self.run.mesh, TRAIN_BATCH_AXES)
        return {name: _put(x, where) for name, x in rows.items()}

    def _unfinished(self) -> list[Rows]:
        """The chunks of the batch that the run was stopped amid."""
        assert self.run.checkpointer is not None, "a run that resumes has checkpoints"
        sizes = (self.batch.micro_batches, self.run.plan.micro_batch_slots, self.config.max_target_length)
        where = sharding(self.run.mesh, TRAIN_BATCH_AXES)
        names = ["advantages", "weights", "old_log_probabilities"]
        names += ["reference_log_probabilities"] if self.reference else []
        kinds = dict.fromkeys(("tokens", "targets", "segments", "positions"), np.int32) | dict.fromkeys(
            names, np.float32
        )
        abstract = {name: jax.ShapeDtypeStruct(sizes, kind, sharding=where) for name, kind in kinds.items()}
        batch = self.run.checkpointer.restore_unfinished(abstract)
        return [{name: x[chunk : chunk + 1] for name, x in batch.items()} for chunk in range(sizes[0])]

    def _record(
        self,
        step: int,
        state: TrainState,
        metrics: Any,
        chunks: Sequence[Rows],
        timeline: Timeline,
        about: dict[str, Any],
    ) -> None:
        """Takes a step down."""
        busy = timeline.record()
        consumed = Consumed(self._numbers, self.batch.pairs_per_batch, busy["rollout_seconds"] + busy["reward_seconds"])
        if self.logs:
            self.logs.timeline.write({"step": step, "phases": timeline.to_json()})
        self.ledger.add(step, metrics, consumed, find_cause=lambda: self._find_cause(state, chunks), **about, **busy)

    def _find_cause(self, state: TrainState, chunks: Sequence[Rows]) -> Any:
        """Where a step's gradient stops being finite; ids are places of pairs in the batch."""
        run, batch = self.run, self.batch
        gradients = accumulate_gradients(run.decoder, run.optimizer, run.mesh, run.config, None, self.rl.policy)
        places = np.arange(batch.pairs_per_batch).reshape(batch.micro_batches, -1).T.ravel()
        return find_nonfinite(
            lambda params, *rest: gradients(params[0], *rest, frozen=params[1]),
            (state.params, state.frozen),
            _stacked(chunks),
            places,
            micro_batches=batch.micro_batches,
            loss_scale=run.optimizer.loss_scale(state.opt_state),
        )

    def _log_pairs(self, step: int, chunks: Sequence[Chunk]) -> None:
        """Writes a batch's responses down, where its steps have one with a line on the terminal, and of the first."""
        period, last_of_batch = self.config.log_period, step + self.config.num_iterations - 1
        has_line = last_of_batch // period > (step - 1) // period or last_of_batch == self.run.plan.steps
        if self.logs and (has_line or step == 1):
            for chunk in chunks:
                for line in chunk.lines(step):
                    self.logs.rollouts.write(line)

    def _evaluate(self, state: TrainState) -> None:
        """Responses to all held-out prompts, or to those of `eval_steps` batches."""
        rl, config, source, step = self.rl, self.config, self.run.eval_source, self.ledger.counts.step
        if source is None:
            return
        count = len(source)
        if config.eval_steps != -1:
            count = min(count, config.eval_steps * config.batch_size)
        each = config.eval_num_generations
        prompts = [prompt for number in range(count) for prompt in [source[number]] * each]
        requests = [
            Request(prompt.token_ids, (_HELD_OUT, prompt.number, at % each)) for at, prompt in enumerate(prompts)
        ]
        rl.engine.update(self.run.decoder.joined(state.params, state.frozen), step)
        sampled = self._generate(prompts, requests, rl.eval_sampling)
        scores = self._of_first_host(self._judge(sampled))
        record = held_out_record(scores, [len(response.token_ids) for response in sampled.responses], each)
        self.ledger.write({"step": step, **record})
        self.terminal.say(f"step {step}/{self.run.plan.steps}  {held_out_text(record)}")


def _told(verdict: Scores | RewardError) -> dict[str, Any]:
    """A verdict as JSON, which holds doubles as they are."""
    if isinstance(verdict, RewardError):
        return {"problems": list(verdict.problems)}
    by_name = {name: values.tolist() for name, values in verdict.by_name.items()}
    about = {"errors": verdict.errors, "messages": list(verdict.messages)}
    return {"total": verdict.total.tolist(), "by_name": by_name, **about}


def _understood(told: dict[str, Any]) -> Scores | RewardError:
    if "problems" in told:
        return RewardError(told["problems"])
    by_name = {name: np.array(values, np.float64) for name, values in told["by_name"].items()}
    return Scores(np.array(told["total"], np.float64), by_name, told["errors"], told["messages"])


def _put(x: np.ndarray, where: Any) -> jax.Array:
    return jax.make_array_from_callback(x.shape, where, lambda index: x[index])


def _stacked(chunks: Sequence[Rows]) -> Rows:
    """Chunks as the micro-batches of one batch, [A, B, T]."""
    return {name: jax.numpy.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
