"""A run of reinforcement learning before its first step: the trainer, the sampler and the judge."""

import dataclasses
import importlib.util
import pickle
from collections.abc import Sequence
from typing import Any

import jax

from maxtext_lite.batching import make_plan, plan_batch
from maxtext_lite.config import UserError
from maxtext_lite.config.errors import install_text
from maxtext_lite.data import Tokenizer, check_vocabulary, load_tokenizer
from maxtext_lite.hf.directory import paths_of_model
from maxtext_lite.hf.stop_tokens import stop_tokens
from maxtext_lite.inference.stream_text import decode_after
from maxtext_lite.models.decoding import Sampling
from maxtext_lite.parallel import Params, bytes_of_host, exchange
from maxtext_lite.post_training.batch import RLBatch
from maxtext_lite.post_training.keys import RLRunConfig, endless_evaluation
from maxtext_lite.post_training.pairs import Sampled
from maxtext_lite.post_training.policy import Policy
from maxtext_lite.post_training.prompts import Prompt, PromptSource, open_prompts
from maxtext_lite.post_training.recorded import NOTHING, Recorded
from maxtext_lite.post_training.rewards import Completion, Rewards, Scores, longest_seconds
from maxtext_lite.post_training.rollout import (
    ANSWER_SECONDS,
    LocalEngine,
    Request,
    Response,
    RolloutEngine,
    sampling_mesh,
)
from maxtext_lite.training.opening import machine_of, start_run
from maxtext_lite.training.run import TrainingRun
from maxtext_lite.training.run_files import run_directory
from maxtext_lite.training.state import Overrides, make_plain_decoder


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


def waiting_seconds(config: RLRunConfig) -> float:
    """The longest time that the rewards of a chunk and a server's answer may take."""
    return longest_seconds(config) + (0.0 if config.rollout_engine == "local" else ANSWER_SECONDS)


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
