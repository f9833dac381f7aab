"""Runs of reinforcement learning: their trainer, sampler and judge, their steps, and their evaluation."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import math
import pickle
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from maxtext_lite.batching import make_plan, plan_batch
from maxtext_lite.config import UserError
from maxtext_lite.config.errors import install_text, refuse
from maxtext_lite.config.phases import phases, status_line
from maxtext_lite.data import Tokenizer, check_vocabulary, example_ids, load_tokenizer
from maxtext_lite.data.rows import FIELDS, field_dtype
from maxtext_lite.hf.directory import paths_of_model
from maxtext_lite.hf.stop_tokens import stop_tokens
from maxtext_lite.inference.decoding import Sampling
from maxtext_lite.inference.stream_text import decode_after
from maxtext_lite.operations.nonfinite import origin_of_nonfinite
from maxtext_lite.operations.row_losses import NamedRow
from maxtext_lite.operations.watchdog import watchdog
from maxtext_lite.parallel import Params, bytes_of_host, exchange, sharding
from maxtext_lite.post_training.batch import RLBatch
from maxtext_lite.post_training.keys import RLRunConfig, endless_evaluation, records_step
from maxtext_lite.post_training.log_probabilities import Reference, make_log_probabilities
from maxtext_lite.post_training.pairs import Chunk, Sampled, batch_record, mean_of
from maxtext_lite.post_training.policy import ADVANTAGES, MISMATCH, OLD, REFERENCE, ROLLOUT, Policy
from maxtext_lite.post_training.prompts import Prompt, PromptSource, open_prompts
from maxtext_lite.post_training.recorded import NOTHING, Recorded, path_of, remove_after, write_batch
from maxtext_lite.post_training.rewards import Completion, RewardError, Rewards, Scores, longest_seconds
from maxtext_lite.post_training.rollout import (
    ANSWER_SECONDS,
    HELD_OUT,
    TRAINING,
    LocalEngine,
    Request,
    Response,
    RolloutEngine,
    sampling_mesh,
)
from maxtext_lite.training.arrays import Metrics, Rows
from maxtext_lite.training.gradients import (
    TRAIN_BATCH_AXES,
    StepGradients,
    accumulate_micro_batches,
    correct_expected,
    count_rows,
    rows_of_batch,
    sum_over_replicas,
    zero_gradients,
    zero_gradients_shardings,
)
from maxtext_lite.training.hooks import Callback
from maxtext_lite.training.loop import RunResult, train_run
from maxtext_lite.training.opening import machine_of, start_run
from maxtext_lite.training.optimizer import Schedule
from maxtext_lite.training.run import TrainingRun
from maxtext_lite.training.run_files import run_directory
from maxtext_lite.training.state import Overrides, StepContext, TrainState, make_plain_decoder, state_shardings
from maxtext_lite.training.step import apply_gradients
from maxtext_lite.training.step_log import StepLog, StepResult, open_lines


class ChunkedStep:
    """The train step of a batch that arrives in chunks: `start`, `add` for each chunk, then `update`, all jitted.

    Attributes:
      start: () -> StepGradients before the first chunk.
      add: (state, sums, batch) -> sums plus those of a chunk, whose arrays are [A, B, T], of any A and B; the sums
        passed in are donated, the state is not.
      update: (state, sums) -> (state, metrics) as in `make_train_step`, after the last chunk; the state passed in is
        donated. Gradients cross the data axis here, and only here. The sums, one float32 number per gradient, are not
        donated: drop them before the next step.
    Args:
      expected: the objective's expected count for the whole step. It divides the chunks' losses in place of the actual
        count; `update` corrects for it.
    """

    def __init__(self, parts: StepContext, schedule: Schedule, *, expected: int):
        assert parts.local is None
        expected_R = jnp.full(parts.num_replicas, expected, jnp.float32)

        def add(state: TrainState, sums: StepGradients, batch: Rows) -> StepGradients:
            loss_scale = parts.optimizer.loss_scale(state.opt_state)
            rows = rows_of_batch(parts, batch)
            sums = accumulate_micro_batches(
                parts, sums, state.params, state.frozen, rows, expected_R, loss_scale=loss_scale
            )
            return sums._replace(counts=jax.tree.map(jnp.add, sums.counts, count_rows(parts, rows)))

        def update(state: TrainState, sums: StepGradients) -> tuple[TrainState, Metrics]:
            step = sum_over_replicas(parts, sums, expected_R, parts.optimizer.loss_scale(state.opt_state))
            step = correct_expected(step, expected_R[0], step.counts[parts.objective.divisor])
            return apply_gradients(parts, schedule, state, step)

        shardings = state_shardings(parts)
        of_sums = zero_gradients_shardings(parts)
        of_batch = sharding(parts.mesh, TRAIN_BATCH_AXES)
        self.start = jax.jit(lambda: zero_gradients(parts), out_shardings=of_sums)
        self.add = jax.jit(add, donate_argnums=1, in_shardings=(shardings, of_sums, of_batch), out_shardings=of_sums)
        # Donating the sums would gain nothing: no result has their shape, with its dim for replicas.
        self.update = jax.jit(
            update,
            donate_argnums=0,
            in_shardings=(shardings, of_sums),
            out_shardings=(shardings, sharding(parts.mesh)),
        )


@dataclasses.dataclass(frozen=True)
class RLRun:
    """One process's part in a run of reinforcement learning.

    Attributes:
      run: the trainer.
      prompts: those to train on; `eval_prompts`: the held-out ones.
      config: the user's.
      batch: the arithmetic of its batches.
      policy: the objective of a step.
      engine: samples responses; None where all are recorded.
      rewards: judges them; None on all hosts but the first, and where all are recorded.
      stop_token_ids: tokens after which a response ends.
    """

    run: TrainingRun
    prompts: PromptSource
    eval_prompts: PromptSource | None
    config: RLRunConfig
    batch: RLBatch
    policy: Policy
    engine: RolloutEngine | None
    rewards: Rewards | None
    tokenizer: Tokenizer
    stop_token_ids: tuple[int, ...]
    recorded: Recorded = NOTHING

    @property
    def sampling(self) -> Sampling:
        """The sampling of responses to train on."""
        return _sampling(self.config)

    @property
    def eval_sampling(self) -> Sampling:
        """The sampling of responses to held-out prompts."""
        return dataclasses.replace(self.sampling, temperature=self.config.eval_sampling_temperature)

    def text_of(self, prompt: Prompt, response: Response, *, skip_special_tokens: bool) -> str:
        """The text of a response for reward functions, without the stop token."""
        token_ids = response.token_ids[:-1] if response.ended else response.token_ids
        before = prompt.token_ids if prompt.is_plain else ()
        return decode_after(self.tokenizer, before, token_ids, skip_special_tokens=skip_special_tokens)

    def update(self, params: Params, step: int) -> None:
        """Sets the parameters to sample from, those after `step` optimizer steps."""
        if self.engine is not None:
            self.engine.update(params, step)

    def sample(self, prompts: Sequence[Prompt], requests: Sequence[Request], sampling: Sampling) -> Sampled:
        """A response to each request of `prompts`, recorded or sampled; any thread may call it.

        Raises:
          UserError: responses are neither recorded nor to be sampled.
        """
        keys = [request.key for request in requests]
        found = self.recorded.find(keys)
        if found is not None:
            num_found = len(found.advantages)
            return found.sampled._replace(prompts=prompts[:num_found], keys=keys[:num_found])
        if self.engine is None:
            raise UserError(
                f"rollout_engine={self.config.rollout_engine}: the responses to prompt {keys[0][1]} of the run were "
                "sampled by a server and are not recorded. Nearest that works: record_rollouts=all in the run."
            )
        with jax.default_matmul_precision(self.config.matmul_precision):  # a setting of each thread
            responses = self.engine.generate(requests, sampling=sampling, max_new_tokens=self.batch.max_response_tokens)
        skips = self.config.reward_skip_special_tokens
        pairs = zip(prompts, responses, strict=True)
        texts = [self.text_of(prompt, response, skip_special_tokens=skips) for prompt, response in pairs]
        return Sampled(prompts, responses, texts, keys)

    def judge(self, sampled: Sampled, unit: int) -> Scores | None:
        """The scores of sampled pairs, on the first host; any thread may call it. For `unit` see `Rewards.of`.

        Those of recorded responses are recorded, too.

        Raises:
          RewardError: a reward failed, with reward_error=stop.
        """
        found = self.recorded.find(sampled.keys)
        if found is not None:
            return found.scores
        if self.rewards is None:
            return None
        all_of = zip(sampled.prompts, sampled.texts, sampled.responses, strict=True)
        completions = [
            Completion(text, self.text_of(prompt, response, skip_special_tokens=False), response.token_ids)
            for prompt, text, response in all_of
        ]
        return self.rewards.of(sampled.prompts, completions, unit)

    def close(self) -> None:
        """Closes the sampler and the judge."""
        if self.engine is not None:
            self.engine.close()
        if self.rewards is not None:
            self.rewards.close()


def shared(scores: Scores | None) -> Scores:
    """The first host's scores on all hosts, because functions need not be deterministic. All hosts call it."""
    return pickle.loads(bytes_of_host(0, pickle.dumps(scores)))


def open_rl_run(config: RLRunConfig, recorded: Recorded = NOTHING) -> RLRun:
    """The run of a config, with prompts opened, batches planned, and devices assigned to trainer and sampler.

    Args:
      recorded: responses that are neither sampled nor judged.
    Raises:
      UserError: the config does not suit these devices, prompts or rewards, or contradicts the run directory.
    """
    devices = start_run(config)
    machine = machine_of(devices)
    plan_batch(config, **machine)  # refuses what is wrong before the data are opened
    tokenizer = load_tokenizer(config)
    check_vocabulary(tokenizer, config.vocab_size)
    prompts = (recorded.prompts, None) if recorded.is_whole else open_prompts(config)
    source, eval_source = prompts
    found = exchange([None if each is None else each.fingerprint for each in prompts])
    if others := [host for host, each in enumerate(found) if each != found[0]]:
        raise UserError(
            f"dataset_path: host {others[0]} finds different prompts than host 0. All hosts must see the same files."
        )
    if eval_source is not None and (refusal := endless_evaluation(config, len(eval_source))):
        raise UserError(str(refusal))
    plan = make_plan(config, **machine, num_examples=len(source))
    batch = plan.rl
    assert isinstance(batch, RLBatch), "a config of reinforcement learning has a plan of it"
    stop_token_ids = stop_tokens(paths_of_model(config), tokenizer)
    rewards: Rewards | None = None
    if jax.process_index() == 0 and not recorded.is_whole:
        names = [name for each in prompts if each is not None for name in each.field_names]
        rewards = Rewards(config, tuple(dict.fromkeys(names)))
    try:
        policy = policy_of(config, batch)
        # Before the run makes its directory: a refused sampler leaves none.
        sampling_devices = devices[len(devices) - batch.sampler_devices :]
        engine = None
        if not recorded.is_whole and (config.rollout_engine == "local" or not recorded.groups):
            engine = _engine(config, batch, sampling_devices, stop_token_ids)
        run = TrainingRun(
            config,
            plan,
            source=source,
            eval_source=eval_source,
            own=Overrides(objective=policy),
            devices=devices[: batch.trainer_devices],
            examples_of_entry=batch.examples_per_entry,
        )
    except BaseException:
        if rewards is not None:
            rewards.close()
        raise
    return RLRun(run, source, eval_source, config, batch, policy, engine, rewards, tokenizer, stop_token_ids, recorded)


def policy_of(config: RLRunConfig, batch: RLBatch) -> Policy:
    """The objective of a config's steps."""
    may_differ = config.rollout_engine != "local" or config.capacity_factor != -1  # only training drops tokens
    return Policy(
        algo=config.loss_algo,
        epsilon_low=config.grpo_epsilon,
        epsilon_high=config.grpo_epsilon_high or config.grpo_epsilon,
        beta=config.grpo_beta,
        aggregation=config.loss_aggregation,
        temperature=config.decode_sampling_temperature,
        max_response_tokens=batch.max_response_tokens,
        on_policy=config.num_iterations == 1,
        compares=may_differ or config.rollout_correction != "none",
        correction_cap=config.rollout_correction_cap if config.rollout_correction == "truncated" else None,
    )


def _sampling(config: RLRunConfig) -> Sampling:
    temperature = config.decode_sampling_temperature
    top_k = config.decode_sampling_top_k
    return Sampling(temperature, top_k, config.decode_sampling_nucleus_p)


def _engine(
    config: RLRunConfig, batch: RLBatch, devices: Sequence[Any], stop_token_ids: tuple[int, ...]
) -> RolloutEngine:
    if config.rollout_engine != "local":
        if importlib.util.find_spec("httpx2") is None:
            raise UserError(f"rollout_engine={config.rollout_engine} needs httpx2: {install_text('servers')}.")
        from maxtext_lite.post_training.servers import SERVER_KINDS, HttpEngine

        return HttpEngine(
            SERVER_KINDS[config.rollout_engine]("rollout_url", config.rollout_url),
            config,
            run_directory(config),
            sampling=_sampling(config),
            stop_token_ids=stop_token_ids,
            seed=config.seed,
        )
    assert batch.rollout is not None, "the plan of a local engine says how it samples"
    return LocalEngine(
        make_plain_decoder(config),
        sampling_mesh(devices, batch.rollout.mesh),
        num_slots=batch.rollout.slots,
        max_prompt_tokens=batch.max_prompt_tokens,
        max_new_tokens=batch.max_response_tokens,
        stop_token_ids=stop_token_ids,
        seed=config.seed,
    )


class HeldOutResponses:
    """Responses to a run's held-out prompts, or to the first `eval_steps` batches of them; see `loop.Evaluation`.

    They are sampled and judged in chunks of as many pairs as a micro-batch has: `reward_timeout_seconds` and
    `hang_timeout` then limit the same amount of work as in training. A chunk may end between the responses to one
    prompt, so a call of a reward function that fails is repeated for each response alone.

    Args:
      say: takes messages about reward functions.
    """

    before_first_step = True

    def __init__(self, rl: RLRun, say: Callable[[str], None]):
        self._rl = rl
        self._say = say

    def evaluate(
        self, state: TrainState, step: int, stops: Callable[[], bool]
    ) -> tuple[dict[str, float | int], str] | None:
        """Mean reward, accuracy and pass@k of new responses."""
        rl = self._rl
        each = self._rl.config.eval_num_generations
        pairs = self._pairs()
        per_chunk = rl.batch.pairs_per_micro_batch
        rl.update(rl.run.decoder.joined(state.params, state.frozen), step)
        phases.advance()
        scores = list[Scores]()
        tokens = list[int]()
        for first in range(0, len(pairs), per_chunk):
            if stops():
                return None
            prompts, requests = zip(*pairs[first : first + per_chunk], strict=True)
            sampled = rl.sample(prompts, requests, rl.eval_sampling)
            scores.append(shared(rl.judge(sampled, 1)))
            for message in scores[-1].messages:
                self._say(f"reward: {message}")
            tokens += [len(response.token_ids) for response in sampled.responses]
            phases.advance()
        found = held_out_record(Scores.joined(scores), tokens, each)
        return found, held_out_text(found)

    def _pairs(self) -> list[tuple[Prompt, Request]]:
        """Each prompt with each of its requests; one prompt's are adjacent."""
        rl = self._rl
        config = self._rl.config
        source = self._rl.eval_prompts
        assert source is not None
        count = len(source)
        if config.eval_steps != -1:
            count = min(count, config.eval_steps * rl.batch.prompts_per_batch)
        return [
            (prompt, Request(prompt.token_ids, (HELD_OUT, prompt.number, generation)))
            for prompt in map(source.__getitem__, range(count))
            for generation in range(config.eval_num_generations)
        ]


def pass_at_k(num_responses: int, num_correct: int, k: int) -> float:
    """The probability that at least one of k responses, drawn without replacement, is correct.

    Source: Chen et al. 2021, arXiv:2107.03374, equation 1: an unbiased estimate of pass@k.
    """
    assert 1 <= k <= num_responses
    return 1.0 - math.comb(num_responses - num_correct, k) / math.comb(num_responses, k)


def held_out_record(scores: Scores, tokens: Sequence[int], num_generations: int) -> dict[str, float | int]:
    """The entries of an evaluation's record.

    A response is correct if the first reward function gives it at least 1. `eval_accuracy` is the share of correct
    responses; with several per prompt there is `eval_pass_at_k` for k = 2, 4, ... and for all of them. Responses that
    it gives no reward are excluded; pass@k also excludes prompts with fewer than k rewarded ones.

    Args:
      scores: of the responses, adjacent for one prompt.
      tokens: the length of each response.
    """
    first = next(iter(scores.by_name.values()))
    groups = first.reshape(-1, num_generations)
    judged = [group[~np.isnan(group)] for group in groups]
    ks = [2**power for power in range(1, num_generations.bit_length())]
    if num_generations > 1 and num_generations not in ks:
        ks.append(num_generations)
    return {
        "eval_reward": mean_of(scores.total),
        "eval_accuracy": mean_of(np.concatenate(judged) >= 1),
        **{
            f"eval_pass_at_{k}": mean_of(
                [pass_at_k(len(group), int(np.sum(group >= 1)), k) for group in judged if len(group) >= k]
            )
            for k in ks
        },
        "eval_prompts": len(groups),
        "eval_response_tokens": float(np.mean(tokens)),
        "eval_unscored_fraction": 1 - float(np.mean(scores.is_scored)),
        "eval_reward_errors": scores.errors,
    }


def held_out_text(record: Mapping[str, float | int]) -> str:
    """An evaluation's record as a line of the terminal."""
    passes = "".join(
        f", pass@{name.removeprefix('eval_pass_at_')} {value:.1%}"
        for name, value in record.items()
        if name.startswith("eval_pass_at_")
    )
    unscored = record["eval_unscored_fraction"]
    if unscored == 1:
        return f"no response to the {record['eval_prompts']:,} held-out prompts could be scored"
    return (
        f"held-out accuracy {record['eval_accuracy']:.1%}{passes}, reward {record['eval_reward']:.3f}, over "
        f"{record['eval_prompts']:,} prompts" + (f", {unscored:.1%} of the responses unscored" if unscored else "")
    )


_LARGEST_MISMATCH = 0.1  # nats, several times that of bfloat16 in a model of tens of layers

_EQUAL_BATCHES = 10  # in a row; a policy that learns has such a batch now and then

Judged = tuple[Sampled, Scores | None]


@status_line.shown()
def train_rl(config: RLRunConfig, *, callbacks: Sequence[Callback] = (), recorded: Recorded = NOTHING) -> RunResult:
    """Trains to `config.steps`, from the newest checkpoint of the run directory if there is one.

    Args:
      callbacks: as in `training.train`.
      recorded: responses that are neither sampled nor judged.
    Raises:
      UserError: the config does not suit these devices, prompts or rewards, or contradicts the checkpoint.
      RewardError: a reward failed, with reward_error=stop, or all rewards of two batches in a row.
      NonFiniteLoss: the loss became non-finite.
    """
    phases.begin()
    for phase in ("start-up", "rollout", "evaluation"):
        # Rewards of a chunk and a server's answer have limits of their own.
        answer_seconds = 0.0 if config.rollout_engine == "local" else ANSWER_SECONDS
        watchdog.allow(phase, longest_seconds(config) + answer_seconds)
    with contextlib.closing(open_rl_run(config, recorded)) as rl:
        phases.mark("data")
        return train_run(rl.run, functools.partial(make_rollout_steps, rl), callbacks)


def make_rollout_steps(
    rl: RLRun, run: TrainingRun, state: TrainState, log: StepLog
) -> tuple["RolloutSteps", HeldOutResponses]:
    """The steps and the evaluation of a run of reinforcement learning."""
    del run  # rl has it
    return RolloutSteps(rl, state, log), HeldOutResponses(rl, log.say)


class Timeline:
    """The phases of one step; several threads may add to it."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._phases: list[tuple[str, int, float, float]] = []

    @contextlib.contextmanager
    def phase(self, name: str, chunk: int) -> Generator[None]:
        """A block that is a phase, rollout, reward or train, of a chunk of the batch, unless it raises."""
        start = time.perf_counter() - self._began
        yield
        self._phases.append((name, chunk, start, time.perf_counter() - self._began))

    def record(self) -> dict[str, float]:
        """The entries in metrics.jsonl: seconds of each kind of phase, and the share of training beside a rollout."""
        seconds: dict[str, float] = dict.fromkeys(("rollout", "reward", "train"), 0.0)
        beside = 0.0
        events: list[tuple[float, int, str]] = []
        for name, _, start, stop in self._phases:
            events += [(start, 1, name), (stop, -1, name)]
        running: Counter[str] = Counter()
        before = 0.0
        for now, change, name in sorted(events):
            for each in +running:
                seconds[each] += now - before
            if running["rollout"] and running["train"]:
                beside += now - before
            running[name] += change
            before = now
        busy = {f"{name}_seconds": value for name, value in seconds.items()}
        return {**busy, "overlap_fraction": beside / seconds["train"] if seconds["train"] else 0.0}

    def to_json(self) -> list[list[Any]]:
        """[name, chunk, start, stop] of each phase, in seconds since the step began, in the order of their starts."""
        found = sorted(self._phases, key=lambda phase: phase[2:])
        return [[name, chunk, round(start, 6), round(stop, 6)] for name, chunk, start, stop in found]


class RolloutSteps:
    """The steps after a log's, one or several on each batch of responses; see `training.loop.StepSource`.

    While one chunk is trained on, the next is sampled or judged.

    Raises:
      UserError: a resumed run's reference is gone, the batch in which it stopped has another shape, or its new
        batch_schedule would change a batch between two updates on it.
    """

    ahead = False
    compiled_anew = True
    _has_said = _has_begun = _has_updated = False
    _equal_batches = 0
    _failed_batch: Scores | None = None  # the batch before, if all its rewards failed

    def __init__(self, rl: RLRun, state: TrainState, log: StepLog):
        run = rl.run
        config = rl.config
        counts = log.counts
        self._rl = rl
        self._run = run
        self._config = config
        self._log = log
        self._check_stages(run)
        self._batch = self._next_batch()
        self._say = log.say
        expected = rl.policy.expected(rl.batch.pairs_per_batch)
        self._step = ChunkedStep(run.parts, run.schedule(counts), expected=expected)
        self._reference = Reference(run, config, state, counts.step) if config.grpo_beta else None
        self._find_old = None
        if not rl.policy.on_policy:
            self._find_old = make_log_probabilities(run.parts, config.decode_sampling_temperature)
        # A sampler on its own devices or another machine runs at any time; on the trainer's devices, the two alternate.
        # Several hosts sample in their main threads, where their collectives have one order.
        apart = not rl.batch.takes_turns or config.rollout_engine != "local"
        self.samples_beside = apart and jax.process_count() == 1
        if not (counts.step or config.load_parameters_path):
            self._say("the policy begins with random weights: load_parameters_path names no model")
        # The prompts before the newest batch, and those after it.
        self._prompts = counts.entries or (0, 0)
        self._chunks: list[Rows] = self._restored() if counts.step % config.num_iterations else []
        self._rollouts = open_lines(run, "rollouts.jsonl", counts.step, self._say)
        self._timeline = open_lines(run, "timeline.jsonl", counts.step, self._say)
        if run.is_first and not run.is_read_only:
            remove_after(run.files.directory, counts.step)

    def _check_stages(self, run: TrainingRun) -> None:
        """Raises if a later stage begins between two updates on a batch, as after a resume with other batches."""
        updates = self._config.num_iterations
        if all((stage.first_step - 1) % updates == 0 for stage in run.plan.length.stages_ahead[1:]):
            return
        before: list[list[int]] = []
        for threshold, pairs in run.starts[-2]["batches"]:
            batch = pairs // self._config.num_generations
            before.append([threshold // self._rl.batch.examples_per_entry, batch])
        nearest = {"batch_schedule": before, "batch_size": before[-1][1]}
        rule = f"has a stage that would begin between two of the num_iterations={updates} steps on a batch"
        raise UserError(str(refuse(self._config, "batch_schedule", rule, nearest)))

    def _next_batch(self) -> RLBatch:
        """The batch of the stage of the next step."""
        stage = self._run.plan.stage_at(self._log.counts.examples_seen)
        return self._rl.batch.of_prompts(stage.global_batch_to_train // self._rl.batch.num_generations)

    def prepare(self, state: TrainState, step: int) -> None:
        """Nothing: programs are compiled at their first use."""

    def take(self, state: TrainState, step: int) -> tuple[TrainState, StepResult]:
        """Takes a step, on new responses or the previous step's; returns once it is done."""
        phases.enter("rollout", step)
        batch = self._batch = self._next_batch()
        timeline = Timeline()
        if (step - 1) % self._config.num_iterations == 0:
            sums, about = self._sums_of_new(state, step, timeline)
        else:
            about = {}
            sums = self._step.start()
            for number, rows in enumerate(self._chunks):
                with timeline.phase("train", number):
                    sums = self._added(state, sums, rows)
        phases.enter("step" if self._has_updated else "compile", step)
        with timeline.phase("train", batch.micro_batches - 1):
            state, metrics = jax.block_until_ready(self._step.update(state, sums))
        self._has_updated = True
        self._say_mismatch(metrics)
        if self._timeline:
            self._timeline.write({"step": step, "phases": timeline.to_json()})
        busy = timeline.record()
        waited = busy["rollout_seconds"] + busy["reward_seconds"]
        find_cause = functools.partial(self._find_cause, self._chunks)
        first, after = self._prompts
        numbers = self._prompt_numbers(first, after - first)
        more: dict[str, float | str] = {**about, **busy}
        if self._config.dynamic_sampling > 1:  # a batch may read more prompts than it has groups
            more["epoch"] = after / len(self._rl.prompts)
        return state, StepResult(metrics, numbers, batch.pairs_per_batch, waited, find_cause, more, self._prompts)

    def _say_mismatch(self, metrics: Mapping[str, Array]) -> None:
        """Warns once if the sampler cannot have used the trainer's policy."""
        mismatch = float(metrics[MISMATCH]) if self._rl.policy.compares and not self._has_said else 0.0
        if not mismatch > _LARGEST_MISMATCH:  # NaN where no response was scored
            return
        self._has_said = True
        self._say(
            f"rollout: the sampler's log-probabilities differ from the trainer's by {mismatch:.3g} a token "
            "(rollout_mismatch): it has other parameters or less precise ones, lacks the drops of capacity_factor, or "
            "reports others than those of softmax(logits / decode_sampling_temperature). docs/post_training.md says "
            "how to start a server."
        )

    def unfinished(self, step: int) -> Rows | None:
        """The batch, if further steps will train on it."""
        return _stacked(self._chunks) if step % self._config.num_iterations else None

    def close(self) -> None:
        """Closes rollouts.jsonl and timeline.jsonl."""
        for log in (self._rollouts, self._timeline):
            if log:
                log.close()

    def _sums_of_new(
        self, state: TrainState, step: int, timeline: Timeline
    ) -> tuple[StepGradients, Mapping[str, float | str]]:
        """Samples a new batch: the sums of its gradients, and its entries in the step's record."""
        rl = self._rl
        run = self._run
        params = run.decoder.joined(state.params, state.frozen)
        rl.update(params, step - 1)
        phases.advance()
        self._chunks = []
        sums = self._step.start()
        first = self._prompts[1]
        judged: list[Chunk] = []
        where = sharding(run.mesh, TRAIN_BATCH_AXES)
        for number, chunk in enumerate(self._chunks_to_train(first, judged, timeline)):
            phases.advance()
            with timeline.phase("train", number):
                shape = run.plan.micro_batch_slots, self._config.max_target_length
                rows: Rows = {}
                for name, x in chunk.rows(*shape, compares=rl.policy.compares).items():
                    rows[name] = jax.make_array_from_callback(x.shape, where, x.__getitem__)
                if self._find_old is not None:
                    rows[OLD] = self._find_old(params, rows)
                if self._reference is not None:
                    rows[REFERENCE] = self._reference.of(rows)
                sums = self._added(state, sums, rows)
            self._chunks.append(rows)
        num_prompts = sum(len(chunk.advantages) for chunk in judged) // self._config.num_generations
        self._prompts = first, first + num_prompts
        self._log_pairs(step, judged)
        self._record(step, judged)
        self._refuse_failing(Scores.joined([chunk.scores for chunk in judged]))
        record = batch_record(judged)
        self._equal_batches = self._equal_batches + 1 if record["equal_reward_groups"] == 1 else 0
        if self._equal_batches == _EQUAL_BATCHES:
            self._say(
                f"reward: in the last {_EQUAL_BATCHES} batches no two responses to the same prompt had different "
                "rewards, from which nothing is learned; rollouts.jsonl has responses with their rewards"
            )
        return sums, {"prompts_seen": first + num_prompts, **record}

    def _refuse_failing(self, scores: Scores) -> None:
        """Ends the run if rewards failed for every response of two batches in a row. All hosts call it."""
        before = self._failed_batch
        self._failed_batch = scores if scores.has_failed.all() else None
        if before is None or self._failed_batch is None:
            return
        if before.traceback:
            self._say(before.traceback)
        raise RewardError(f"In two batches in a row rewards failed for every response. {before.messages[0]} Mend it.")

    def _added(self, state: TrainState, sums: StepGradients, rows: Rows) -> StepGradients:
        """The sums plus those of a chunk; before the first of this start, hooks get its rows."""
        if self._has_begun:
            return jax.block_until_ready(self._step.add(state, sums, rows))
        phase, step, _ = phases.work
        phases.enter("compile", step)
        for hook in self._log.hooks:
            hook.before_first_step(rows)
        phases.advance()
        sums = jax.block_until_ready(self._step.add(state, sums, rows))
        self._has_begun = True
        phases.enter(phase, step)
        return sums

    def _chunks_to_train(self, first: int, judged: list[Chunk], timeline: Timeline) -> Iterator[Chunk]:
        """The chunks of the batch that begins with a prompt of the run.

        With dynamic_sampling, the batch is the first groups with different rewards in the order of prompts, however
        they are split; where there are too few, the rest of it is empty.

        Args:
          judged: gets the groups up to the last one of the batch.
        Source: Yu et al. 2025, arXiv:2503.14476, section 3.2.
        """
        left = self._batch.micro_batches
        kept: list[Chunk] = []
        with contextlib.closing(self._judged_chunks(first, timeline)) as chunks:
            for group in itertools.chain.from_iterable(chunk.groups() for chunk in chunks):
                judged.append(group)
                if self._config.dynamic_sampling == 1 or group.has_different_rewards:
                    kept.append(group)
                if len(kept) == self._batch.prompts_per_micro_batch:
                    yield Chunk.joined(kept)
                    kept = []
                    left -= 1
                if left == 0:
                    return
        nothing = judged[-1].part(slice(0, 0))
        yield Chunk.joined([nothing, *kept])
        for _ in range(left - 1):
            yield nothing

    def _judged_chunks(self, first: int, timeline: Timeline) -> Generator[Chunk]:
        """Chunks from a prompt of the run on; while one is used, the next that is certainly needed is made."""
        rl = self._rl
        config = self._config
        per_chunk = self._batch.prompts_per_micro_batch
        num_chunks = self._batch.micro_batches
        most = num_chunks * config.dynamic_sampling
        numbers = self._prompt_numbers(first, most * per_chunk)

        def sample(chunk: int) -> Sampled:
            prompts: list[Prompt] = []
            requests: list[Request] = []
            for place in range(chunk * per_chunk, (chunk + 1) * per_chunk):
                prompt: Prompt = rl.prompts[int(numbers[place])]
                for generation in range(config.num_generations):
                    prompts.append(prompt)
                    requests.append(Request(prompt.token_ids, (TRAINING, first + place, generation)))
            with timeline.phase("rollout", chunk):
                return rl.sample(prompts, requests, rl.sampling)

        def judge(chunk: int, sampled: Sampled) -> Judged:
            with timeline.phase("reward", chunk):
                return sampled, rl.judge(sampled, config.num_generations)

        needed = _ahead(num_chunks, sample, judge, beside=self.samples_beside)
        more = (judge(chunk, sample(chunk)) for chunk in range(num_chunks, most))
        for sampled, found in itertools.chain(needed, more):
            phases.advance()
            scores = shared(found)
            for message in scores.messages:
                self._say(f"reward: {message}")
            yield Chunk.judged(
                sampled, scores, num_generations=config.num_generations, scale_rewards=config.scale_rewards
            )

    def _prompt_numbers(self, first: int, count: int) -> np.ndarray:
        """The numbers of prompts of the run."""
        seed = self._config.data_shuffle_seed
        return example_ids(first, count, num_examples=len(self._rl.prompts), seed=seed)

    def _restored(self) -> list[Rows]:
        """The chunks of the batch that the run stopped in."""
        run = self._run
        batch = self._batch
        sizes = (batch.micro_batches, run.plan.micro_batch_slots, self._config.max_target_length)
        where = sharding(run.mesh, TRAIN_BATCH_AXES)
        names = [*FIELDS, ADVANTAGES, OLD]
        names += [REFERENCE] if self._reference else []
        names += [ROLLOUT] if self._rl.policy.compares else []
        abstract = {name: jax.ShapeDtypeStruct(sizes, field_dtype(name), sharding=where) for name in names}
        whole = run.restore_unfinished(abstract)
        chunks: list[Rows] = []
        for chunk in range(batch.micro_batches):
            chunks.append({name: x[chunk : chunk + 1] for name, x in whole.items()})
        return chunks

    def _find_cause(self, chunks: Sequence[Rows], state: TrainState) -> str:
        """The origin of a non-finite gradient; example ids are places of pairs in the batch."""
        batch = self._batch
        places = np.arange(batch.pairs_per_batch).reshape(batch.micro_batches, -1).T.ravel()
        return origin_of_nonfinite(self._run.parts, state, _stacked(chunks), places, micro_batches=batch.micro_batches)

    def _rows_on_host(self) -> dict[str, np.ndarray]:
        """The rows [pairs, T] of the batch. All hosts call it."""
        rows: Rows = jax.jit(_stacked, out_shardings=sharding(self._run.mesh))(self._chunks)
        pairs = self._batch.pairs_per_micro_batch
        return {name: np.asarray(x)[:, :pairs].reshape(-1, x.shape[-1]) for name, x in rows.items()}

    def named_rows(self) -> list[NamedRow]:
        """The rows of the batch that have a token, by their places in it. All hosts call it."""
        rows = self._rows_on_host()
        found: list[NamedRow] = []
        for place in np.flatnonzero(rows["segments"].any(axis=1)).tolist():
            fields = {name: x[place] for name, x in rows.items()}
            found.append(NamedRow("", place, fields))
        return found

    def _log_pairs(self, step: int, chunks: Sequence[Chunk]) -> None:
        """Writes the responses of the first batch, and of each batch with a line on the terminal."""
        period = self._run.plan.period_steps(self._config.log_period)
        last_of_batch = step + self._config.num_iterations - 1
        has_line = last_of_batch // period > (step - 1) // period or last_of_batch == self._run.plan.steps
        if self._rollouts and (has_line or step == 1):
            for chunk in chunks:
                for line in chunk.lines(step):
                    self._rollouts.write(line)

    def _record(self, step: int, judged: Sequence[Chunk]) -> None:
        """Writes the whole batch if a step on it must be recorded. All hosts call it."""
        steps = range(step, step + self._config.num_iterations)
        if not any(records_step(self._config, each) for each in steps):
            return
        rows = self._rows_on_host()
        computed = {name: rows[name] for name in (OLD, REFERENCE) if name in rows}
        if self._run.is_first and not self._run.is_read_only:
            write_batch(path_of(self._run.files.directory, step), Chunk.joined(judged), computed)


def _ahead(
    num_chunks: int, sample: Callable[[int], Sampled], judge: Callable[[int, Sampled], Judged], *, beside: bool
) -> Iterator[Judged]:
    """Each chunk, sampled and judged, ahead of its use.

    A sampler `beside` the trainer samples all chunks of a batch without pause. On the same devices, each chunk is
    sampled before the previous one is yielded: rewards are computed meanwhile.
    """
    with (
        concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="rollout") as sampler,
        concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="reward") as judges,
    ):
        try:
            if beside:
                sampled = [sampler.submit(sample, chunk) for chunk in range(num_chunks)]
                judged = [
                    judges.submit(lambda chunk: judge(chunk, sampled[chunk].result()), chunk)
                    for chunk in range(num_chunks)
                ]
                for future in judged:
                    yield future.result()
                return
            judged = []
            for chunk in range(num_chunks):
                judged.append(judges.submit(judge, chunk, sample(chunk)))
                phases.advance()
                if chunk:
                    yield judged[chunk - 1].result()
            yield judged[-1].result()
        except BaseException:  # work that has not begun is cancelled
            for pool in (sampler, judges):
                pool.shutdown(wait=False, cancel_futures=True)
            raise


def _stacked(chunks: Sequence[Rows]) -> Rows:
    """The chunks as the micro-batches of one batch, [A, B, T]."""
    return jax.tree.map(lambda *parts: jax.numpy.concatenate(parts), *chunks)
