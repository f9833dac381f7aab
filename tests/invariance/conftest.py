"""Ragged documents, and one tiny run that all ways to split it must agree with."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.training.custom_loss import CustomLoss
from tests.training.conftest import TINY, agrees, rows, setup  # noqa: F401


def neighbours(predictions, rows):  # noqa: F811
    """A custom loss that depends on the order of tokens: each target's nll times that of the one before, and a term of
    the hidden states; weighed in part."""
    weights, nll = rows["weights"], predictions.nll()
    pairs = jnp.sum(weights[:, 1:] * weights[:, :-1] * nll[:, 1:] * nll[:, :-1])
    squares = jnp.sum(weights * jnp.mean(jnp.square(predictions.hidden()), axis=-1))
    return pairs + 0.1 * squares + jnp.sum(weights * nll), jnp.sum(weights)


CUSTOM = CustomLoss(neighbours, 264, 16)
MODEL = [*TINY, "base_num_kv_heads=4", "learning_rate=0.01"]


@pytest.fixture(scope="session")
def documents(tmp_path_factory):
    """A directory for each of two hosts, with the same ragged documents; a third host would find nothing."""
    rng = np.random.default_rng(0)
    words = ["to", "be", "or", "not", "that", "is", "the", "question"]
    texts = [json.dumps({"text": " ".join(rng.choice(words, rng.integers(1, 40)))}) + "\n" for _ in range(120)]
    directory = tmp_path_factory.mktemp("text")
    for host in ("0", "1"):
        (directory / host).mkdir()
        (directory / host / "documents.jsonl").write_text("".join(texts))
    return directory
