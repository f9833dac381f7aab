"""Ragged documents, and the tiny model of runs that must agree."""

import json

import numpy as np
import pytest

from tests.tables import read_table
from tests.training.conftest import TINY, agrees, rows, setup  # noqa: F401

TABLE = read_table("invariance/matrix.yml")
MODEL = [*TINY, "base_num_kv_heads=4", "learning_rate=0.01"]


@pytest.fixture(scope="session")
def documents(tmp_path_factory):
    """A directory for each of two hosts, with the same ragged documents; a third host would find nothing."""
    rng = np.random.default_rng(0)
    words = ["to", "be", "or", "not", "that", "is", "the", "question"]
    texts = [
        json.dumps({"text": " ".join(rng.choice(words, rng.integers(1, 40)))}) + "\n"
        for _ in range(120)
    ]
    directory = tmp_path_factory.mktemp("text")
    for host in ("0", "1"):
        (directory / host).mkdir()
        (directory / host / "documents.jsonl").write_text("".join(texts))
    return directory
