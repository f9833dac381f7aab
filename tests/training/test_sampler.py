"""Sampling from a run: the cache, stop tokens, and independence of prompts from each other."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.config import load_config
from maxtext_lite.training import train
from maxtext_lite.training.sampler import Sampler
from tests.training.conftest import TINY

PROMPTS = [[5, 6, 7, 8, 9], [40], [17, 3, 99]]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory with one checkpoint, and its config."""
    directory = tmp_path_factory.mktemp("runs")
    config = load_config(
        None,
        [
            *TINY,
            "steps=2",
            "dataset_type=synthetic",
            "eval_interval=-1",
            "initializer_range=0.3",
            f"base_output_directory={directory}",
        ],
    )
    return train(config)


@pytest.fixture(scope="module")
def sampler(run):
    return Sampler.from_run(run.run_directory, load_config(run.run_directory / "config.yml"))


def _texts(sampler, prompts, **how):
    texts = [[] for _ in prompts]
    for number, token, log_probability in sampler.stream(prompts, **how):
        texts[number].append((token, log_probability))
    return texts


def test_greedy_tokens_are_the_argmax_of_the_whole_sequence(run, sampler, setup):
    texts = _texts(sampler, PROMPTS, max_new_tokens=6, temperature=0)
    decoder, params = setup().decoder, jax.device_get(run.state.params)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        tokens = list(prompt)
        for token, log_probability in text:
            row = jnp.asarray([tokens])
            x = decoder.hidden(params, row, jnp.ones_like(row), jnp.arange(len(tokens))[None])
            log_probabilities = jax.nn.log_softmax(decoder.logits(params, x)[0, -1])
            assert token == int(jnp.argmax(log_probabilities))
            assert log_probability == pytest.approx(float(log_probabilities[token]), abs=1e-4)
            tokens.append(token)


def test_a_draw_depends_on_its_own_prompt_and_number_only(sampler):
    how = {"max_new_tokens": 8, "temperature": 1.0, "seed": 3}
    together = _texts(sampler, PROMPTS, **how)
    first_alone = _texts(sampler, PROMPTS[:1], **how)
    assert [token for token, _ in together[0]] == [token for token, _ in first_alone[0]]
    np.testing.assert_allclose([p for _, p in together[0]], [p for _, p in first_alone[0]], atol=1e-5)
    other_seed = _texts(sampler, PROMPTS, **{**how, "seed": 4})
    assert [token for token, _ in together[0]] != [token for token, _ in other_seed[0]]


def test_a_stop_token_ends_its_own_text_only(sampler):
    free = _texts(sampler, PROMPTS, max_new_tokens=8, temperature=0)
    stop = free[0][2][0]
    stopped = _texts(sampler, PROMPTS, max_new_tokens=8, temperature=0, stop_token_ids=[stop])
    for whole, cut in zip(free, stopped, strict=True):
        tokens = [token for token, _ in whole]
        expected = tokens[: tokens.index(stop) + 1] if stop in tokens else tokens
        assert [token for token, _ in cut] == expected


def test_tensor_parallel_sampling_gives_the_same_text(run, sampler):
    config = load_config(run.run_directory / "config.yml")
    on_two = Sampler.from_run(run.run_directory, config, tensor_parallelism=2)
    one, two = (_texts(s, PROMPTS, max_new_tokens=5, temperature=0) for s in (sampler, on_two))
    assert json.dumps([[t for t, _ in text] for text in one]) == json.dumps([[t for t, _ in text] for text in two])
