"""A run of several sources consumes what a loop with counters says, however it is split, stopped and mixed anew."""

import hashlib
import json

import pytest

from maxtext_lite.config import load_config
from maxtext_lite.data import example_ids, open_sources
from maxtext_lite.data.history import parts_of
from maxtext_lite.training import train
from tests.conftest import use_one_device
from tests.invariance.conftest import MODEL
from tests.mixture_trials import Counters, mixture_of, write_texts
from tests.processes import RunFiles
from tests.run_directories import lines_of

RUN = [
    *MODEL,
    "eval_interval=100",
    "eval_fraction=0.1",
    "checkpoint_period=100",
    "data_shuffle_seed=5",
]
EIGHT = ["per_device_batch_size=8", "gradient_accumulation_steps=1"]
TWELVE = ["per_device_batch_size=6", "gradient_accumulation_steps=2"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Texts of about 8, 40 and 100 rows of 32 tokens: the first is read several times."""
    return write_texts(tmp_path_factory.mktemp("texts"), a=12, b=60, c=160)


def config_of(texts, *keys, **weights):
    path = (
        mixture_of(texts, weights)
        if len(weights) > 1
        else f"dataset_path={texts}/{next(iter(weights))}.jsonl"
    )
    return load_config(
        None, [*RUN, *keys, f"base_output_directory={texts}/runs", "run_name=run", path]
    )


@pytest.fixture(scope="module")
def run(texts):
    """A run of one text, which is stopped after 2 steps and goes on with another beside it; and after 5 with yet
    another in its place, other weights, another batch and another accumulation."""
    configs = [
        config_of(texts, "steps=2", "eval_interval=-1", *EIGHT, b=1),
        config_of(texts, "steps=5", *EIGHT, a=0.7, b=0.3),
        config_of(texts, "steps=8", *TWELVE, b=0.4, c=0.6),
    ]
    with pytest.MonkeyPatch.context() as patch:
        use_one_device(patch)
        for config in configs:
            train(config)
    return configs, RunFiles(texts / "runs" / "run")


def splitmix64(x):
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def first_64_bits(text):
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def expected(configs, sizes):
    """For each step the hash of what it consumes, its target tokens, and the epochs of the sources after it."""
    counters, records = None, []
    for config, steps in zip(configs, sizes, strict=True):
        source = open_sources(config)[0]
        parts = parts_of(config, [source])
        by_fingerprint = {
            each.fingerprint: each for each in getattr(source, "sources", (source,))
        }
        counters = counters or Counters({}, lone=source.fingerprint)
        counters.given = dict.fromkeys(by_fingerprint, 0) | counters.given
        counters.mix(parts)
        for size in steps:
            total = tokens = 0
            for fingerprint, position in (counters.next() for _ in range(size)):
                alone, each = fingerprint == counters.lone, by_fingerprint[fingerprint]
                seed = 5 if alone else first_64_bits(f"5:{fingerprint}")
                (row,) = example_ids(
                    position, 1, num_examples=len(each), seed=seed
                ).tolist()
                total += splitmix64(
                    (row + (0 if alone else first_64_bits(fingerprint))) % 2**64
                )
                tokens += int((each[row]["weights"] > 0).sum())
            given = {part.name: counters.given[part.fingerprint] for part in parts}
            epochs = {
                part.name: given[part.name] / len(by_fingerprint[part.fingerprint])
                for part in parts
            }
            records.append((f"{total % 2**64:016x}", tokens, epochs))
    return records


def test_the_rows_are_those_of_the_loop_through_changes_of_mixture_and_batch(run):
    configs, files = run
    records = expected(configs, [[8] * 2, [8] * 3, [12] * 3])
    assert files.sequence("examples_hash", "target_tokens") == [
        record[:2] for record in records
    ]
    assert [step["source_epochs"] for step in files.steps[2:]] == [
        epochs for _, _, epochs in records[2:]
    ]
    assert records[4][2]["a"] > 1  # it was read more than once
    assert files.steps[-1]["tokens_seen"] == sum(tokens for _, tokens, _ in records)


def test_a_checkpoint_has_the_mixtures_of_its_run(run):
    _, files = run
    about = json.loads(
        (files.directory / "checkpoints" / "8" / "about" / "metadata").read_text()
    )
    assert [mixture["examples_seen"] for mixture in about["mixtures"]] == [0, 16, 40]
    assert [mixture["tokens_seen"] for mixture in about["mixtures"]] == [
        sum(step["target_tokens"] for step in files.steps[:steps])
        for steps in (0, 2, 5)
    ]
    names = [
        sorted(part["name"] for part in mixture["parts"])
        for mixture in about["mixtures"]
    ]
    assert names == [["b"], ["a", "b"], ["b", "c"]]


def test_each_source_is_evaluated_and_its_tokens_counted(run):
    (_, *configs), files = run
    found = [
        line
        for line in lines_of(files.directory)
        if "eval_loss" in line and line["step"] in (5, 8)
    ]
    assert [set(line["eval_losses"]) for line in found] == [{"a", "b"}, {"b", "c"}]
    for line, config in zip(found, configs, strict=True):
        held_out = open_sources(config)[1]
        named = zip(held_out.parts, held_out.sources, strict=True)
        tokens = {part.name: each.num_target_tokens for part, each in named}
        assert line["eval_target_tokens"] == sum(tokens.values())
        total = sum(line["eval_losses"][name] * n for name, n in tokens.items())
        assert line["eval_loss"] == pytest.approx(
            total / line["eval_target_tokens"], rel=1e-12
        )
    # Rows are whole, and few: shares of tokens are near the weights.
    assert found[1]["source_token_shares"]["c"] == pytest.approx(0.6, abs=0.05)
    assert sum(found[1]["source_token_shares"].values()) == pytest.approx(1)
    table = json.loads((files.directory / "plan.json").read_text())["mixture"]
    assert {row["name"] for row in table} == {"b", "c"}
