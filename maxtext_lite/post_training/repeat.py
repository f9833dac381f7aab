"""How `equiv` and `replay` repeat steps of reinforcement learning: see `analysis.repeat`."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from maxtext_lite.config import UserError
from maxtext_lite.data import load_tokenizer
from maxtext_lite.data.order import example_ids
from maxtext_lite.hf.model_directory import config_of_run
from maxtext_lite.post_training.keys import RLRunConfig
from maxtext_lite.post_training.pairs import Chunk, Sampled
from maxtext_lite.post_training.prompts import open_prompts
from maxtext_lite.post_training.recorded import Recorded, path_of, read_batch, recorded_in, recorded_paths, write_batch
from maxtext_lite.post_training.rewards import Scores
from maxtext_lite.post_training.rollout import TRAINING, Response
from maxtext_lite.training.hooks import Callback

PROMPTS = 4
"""Prompts of a batch: as many micro-batches as the splits have at most."""
_MOST_GENERATIONS = 8
_MOST_TOKENS = 512
_REWARDS = (0.0, 0.25, 1.0, np.nan)


class _Sizes(NamedTuple):
    """What `equiv` keeps of a config's batches; a step has one batch, or two steps have."""

    generations: int
    prompt_tokens: int
    response_tokens: int
    updates: int
    batches: int

    @classmethod
    def of(cls, config: RLRunConfig) -> "_Sizes":
        tokens = min(config.max_target_length, _MOST_TOKENS)
        of_prompt = config.max_prefill_predict_length
        if tokens < config.max_target_length:
            of_prompt = min(of_prompt, tokens // 2)
        return cls(
            generations=min(config.num_generations, _MOST_GENERATIONS),
            prompt_tokens=of_prompt,
            response_tokens=tokens - of_prompt,
            updates=min(config.num_iterations, 2),
            batches=3 if config.num_iterations == 1 else 2,
        )


class SampledBatches:
    """Steps on sampled responses: prompts, responses, the sampler's log-probabilities and rewards stay as they are."""

    def batch_keys(self, config: RLRunConfig, devices: int, accumulation: int) -> dict[str, object]:
        """The keys that split a batch into micro-batches of whole groups."""
        del devices
        pairs = PROMPTS * _Sizes.of(config).generations
        return {
            "batch_schedule": (),
            "micro_batch_size": pairs // accumulation,
            "trainer_devices_fraction": 1,
            "sampler_devices_fraction": 1,
        }

    def splits(self, config: RLRunConfig) -> Sequence[tuple[str, Mapping[str, object], int]]:
        """Half of the devices train, if some do in the config."""
        if config.trainer_devices_fraction == 1:
            return ()
        half = {"trainer_devices_fraction": 0.5, "sampler_devices_fraction": 0.5}
        return (("data 4 of 8 devices, the others sample, 2 micro-batches", half | {"ici_data_parallelism": 4}, 2),)

    def small_keys(self, config: RLRunConfig) -> Mapping[str, object]:
        """The keys of small batches."""
        sizes = _Sizes.of(config)
        steps = sizes.batches * sizes.updates
        return {
            "batch_size": PROMPTS,
            "num_generations": sizes.generations,
            "num_iterations": sizes.updates,
            "max_prefill_predict_length": sizes.prompt_tokens,
            "max_target_length": sizes.prompt_tokens + sizes.response_tokens,
            "steps": steps,
            "checkpoint_period": steps,
            "data_shuffle_seed": -1,
            "record_rollouts": "all",
            "rollout_engine": "local",
            "rollout_url": "",
            "rollout_slots": -1,
            "rollout_tensor_parallelism": 1,
            "rollout_fsdp_parallelism": 1,
        }

    def freeze(self, config: RLRunConfig, run: Path | None, directory: Path) -> tuple[Mapping[str, object], str]:
        """Writes the batches of a run's files; without any, draws responses and rewards for the config's prompts."""
        sizes = _Sizes.of(config)
        paths = recorded_paths(run) if run else []
        groups = [group for path in paths[: sizes.batches] for group in read_batch(path).groups()[:PROMPTS]]
        note = "on the batches recorded in " + ", ".join(path.name for path in paths[: sizes.batches])
        if not groups:
            groups = _draw_groups(config, sizes)
            note = "on responses and rewards at random; equiv RUN_DIR takes those of a run with record_rollouts=1"
        elif run and cast("RLRunConfig", config_of_run(run)).scale_rewards != config.scale_rewards:  # an override
            groups = [_judged(group.sampled, group.scores, config) for group in groups]
        for batch in range(sizes.batches):
            places = [batch * PROMPTS + place for place in range(PROMPTS)]
            chosen = [_cut(groups[place % len(groups)], place, sizes, config) for place in places]
            write_batch(path_of(directory, 1 + batch * sizes.updates), Chunk.joined(chosen))
        return {}, note

    def difference(self, frozen: Path, run: Path) -> str:
        """The first batch of a run whose advantages are not those that `freeze` wrote with its rewards; "": none."""
        recorded = Recorded(recorded_in(frozen).groups, is_whole=True)
        for path in recorded_paths(run):
            batch = read_batch(path)
            before = recorded.find(batch.sampled.keys)
            if before is None or not np.array_equal(before.advantages, batch.advantages):
                return f"advantages of {path.name}"
        return ""

    def train(self, config: RLRunConfig, frozen: Path, callbacks: Sequence[Callback]) -> None:
        """Trains a run on what `freeze` wrote."""
        from maxtext_lite.post_training.rollout_steps import train_rl

        recorded = recorded_in(frozen)
        train_rl(config, callbacks=callbacks, recorded=Recorded(recorded.groups, is_whole=True))

    @contextlib.contextmanager
    def opened(self, config: RLRunConfig) -> Generator[tuple[Any, Any]]:
        """The `TrainingRun` of a config whose steps are done, and a function that makes its `StepSource`.

        Recorded batches are taken as they were; responses to other prompts are sampled and judged again.
        """
        from maxtext_lite.post_training.rollout_steps import make_rollout_steps, open_rl_run
        from maxtext_lite.training.run_files import run_directory

        recorded = recorded_in(run_directory(config))
        if config.rollout_engine != "local" and not recorded.groups:
            raise UserError(
                f"rollout_engine={config.rollout_engine}: a server sampled the responses, and none are recorded. "
                "Nearest that works: record_rollouts=all in the run."
            )
        with contextlib.closing(open_rl_run(config, recorded)) as rl:
            yield rl.run, functools.partial(make_rollout_steps, rl)

    def row_losses(self, run: Any, steps: Any, state: Any, examples_seen: int) -> Callable[[], list[Any]]:
        """A function to call after the next step, whose result is the `RowLoss` of each of its pairs before it."""
        import jax

        from maxtext_lite.operations.row_losses import make_losses_alone, trained_parameters

        del examples_seen
        alone = make_losses_alone(run)
        before = jax.tree.map(jax.numpy.copy, trained_parameters(run, state))  # a step donates its state
        return lambda: alone(before, steps.named_rows())


SAMPLED = SampledBatches()


def _cut(group: Chunk, position: int, sizes: _Sizes, config: RLRunConfig) -> Chunk:
    """A group at a position of the run, with at most so many generations and tokens.

    Its advantages are as recorded, unless generations are dropped.
    """
    recorded = group.advantages
    group = group.part(slice(0, sizes.generations))
    prompt = group.sampled.prompts[0]
    ids = prompt.token_ids[-sizes.prompt_tokens :]
    prompt = dataclasses.replace(prompt, number=position, token_ids=ids, fields={})
    responses: list[Response] = []
    for response in group.sampled.responses:
        token_ids = response.token_ids[: sizes.response_tokens]
        log_probabilities = response.log_probabilities[: len(token_ids)]
        is_whole = len(token_ids) == len(response.token_ids)
        responses.append(Response(token_ids, log_probabilities, response.ended and is_whole))
    each = len(responses)
    keys = [(TRAINING, position, generation) for generation in range(each)]
    sampled = Sampled([prompt] * each, responses, [""] * each, keys)
    chunk = _judged(sampled, group.scores, config)
    return dataclasses.replace(chunk, advantages=recorded) if each == len(recorded) else chunk


def _judged(sampled: Sampled, scores: Scores, config: RLRunConfig) -> Chunk:
    """The group of these pairs."""
    each = len(sampled.responses)
    return Chunk.judged(sampled, scores, num_generations=each, scale_rewards=config.scale_rewards)


def _draw_groups(config: RLRunConfig, sizes: _Sizes) -> list[Chunk]:
    """The first prompts of a config, with responses, log-probabilities and rewards at random; some are unscored."""
    rng = np.random.default_rng(0)
    source, _ = open_prompts(config)
    vocab_size = load_tokenizer(config).vocab_size
    count = PROMPTS * sizes.batches
    numbers = example_ids(0, count, num_examples=len(source), seed=config.data_shuffle_seed)
    groups: list[Chunk] = []
    for number in numbers.tolist():
        responses: list[Response] = []
        for _ in range(sizes.generations):
            length = int(rng.integers(1, sizes.response_tokens + 1))
            log_probabilities = -np.log(config.vocab_size) + 0.4 * rng.normal(size=length)
            token_ids = rng.integers(vocab_size, size=length)
            responses.append(Response(token_ids.tolist(), log_probabilities.tolist(), False))
        rewards = rng.choice(_REWARDS, sizes.generations)
        rewards[:2] = rng.permutation((0.0, 1.0))  # an advantage in each group
        if config.dynamic_sampling > 1 and len(groups) % 3 == 1:
            rewards[:] = 1.0  # but in those to be replaced
        scores = Scores(rewards, {"drawn": rewards}, np.zeros(sizes.generations, bool), 0, [])
        sampled = Sampled([source[number]] * sizes.generations, responses, [""] * sizes.generations)
        groups.append(_judged(sampled, scores, config))
    return groups
