import pickle
from fractions import Fraction

import numpy as np
import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.data import examples_hash, open_mixture, open_sources
from maxtext_lite.data.mixture_history import RowStream, continued, history_of
from maxtext_lite.data.mixture_source import (
    ids_of_run,
    named_sources,
    parts_of,
    target_tokens_between,
)
from maxtext_lite.data.order import example_ids
from tests.mixture_trials import mixture_of, write_texts

KEYS = ["max_target_length=16", "eval_fraction=0.1"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Three texts of documents of different lengths."""
    return write_texts(tmp_path_factory.mktemp("texts"), a=9, b=60, c=200)


def config_of(texts, **weights):
    return load_config(None, [*KEYS, mixture_of(texts, weights)])


def started(config):
    training, _ = open_mixture(config)
    return training.with_stream(RowStream(history_of(training.parts)))


def alone(texts, name):
    return open_sources(
        load_config(None, [*KEYS, f"dataset_path={texts}/{name}.jsonl"])
    )


def weights_of(source, number):
    return int((source[number]["weights"] > 0).sum())


def test_the_examples_of_a_mixture_are_those_of_its_sources(texts):
    mixture, held_out = open_mixture(config_of(texts, a=1, b=2, c=3))
    fingerprints = {name: alone(texts, name)[0].fingerprint for name in "abc"}
    for joined, place in ((mixture, 0), (held_out, 1)):
        assert {part.name: part.fingerprint for part in joined.parts} == fingerprints
        assert list(named_sources(joined)) == [part.name for part in joined.parts]
        assert list(named_sources(joined)) == sorted("abc", key=fingerprints.get)
        ordered = [alone(texts, part.name)[place] for part in joined.parts]
        rows = [single[i] for single in ordered for i in range(len(single))]
        assert len(joined) == len(rows)
        for i, row in enumerate(rows):
            np.testing.assert_array_equal(joined[i]["tokens"], row["tokens"])
        assert joined.num_target_tokens == sum(
            weights_of(joined, i) for i in range(len(rows))
        )
        some = np.array([0, len(rows) - 1, 3, 3])
        assert joined.count_targets(some) == sum(weights_of(joined, i) for i in some)
        assert (joined.num_tokens, joined.fields) == (16, ordered[0].fields)


@pytest.mark.fast
def test_weights_are_of_target_tokens(texts):
    """Rows of c have more targets than those of a: equal tokens need fewer rows."""
    shares = {"a": Fraction(1, 4), "b": Fraction(1, 4), "c": Fraction(1, 2)}
    source = started(config_of(texts, a=0.25, b=0.25, c=0.5))
    for part, each in zip(source.parts, source.sources, strict=True):
        assert (
            Fraction(part.row_weight)
            == shares[part.name] * len(each) / each.num_target_tokens
        )
    n = 6000
    counted = source.target_tokens(0, n, 1)
    total = sum(counted.values())
    assert total == target_tokens_between(source, 0, n, seed=1)
    assert total == sum(
        weights_of(source, example)
        for example in ids_of_run(source, 0, n, seed=1).tolist()
    )
    for name, share in shares.items():
        assert counted[name] / total == pytest.approx(float(share), abs=0.005)
    halves = [source.target_tokens(0, 777, 1), source.target_tokens(777, n, 1)]
    assert {name: halves[0][name] + halves[1][name] for name in counted} == counted


def test_ids_hashes_and_orders_do_not_depend_on_how_the_sources_are_listed(texts):
    one, other = (
        started(config_of(texts, a=1, b=2, c=3)),
        started(config_of(texts, c=6, a=2, b=4)),
    )
    ids = ids_of_run(one, 3, 500, seed=7)
    np.testing.assert_array_equal(ids, ids_of_run(other, 3, 500, seed=7))
    np.testing.assert_array_equal(
        ids, ids_of_run(pickle.loads(pickle.dumps(one)), 3, 500, seed=7)
    )
    # A source more changes ids and not what is hashed of the same rows.
    two = started(config_of(texts, a=1, c=3))
    hashed = {}
    for source in (two, one):
        for i in range(len(source)):
            row = source[i]["tokens"].tobytes() + source[i]["targets"].tobytes()
            hashed.setdefault(int(source.hashed(np.array([i]))[0]), set()).add(row)
    assert len(hashed) == len(one)
    assert all(len(rows) == 1 for rows in hashed.values())


def test_one_source_has_the_ids_and_hashes_that_it_has_without_a_mixture(texts):
    listed, plain = started(config_of(texts, b=0.3)), alone(texts, "b")[0]
    assert [source.fingerprint for source in listed.sources] == [plain.fingerprint]
    ids = ids_of_run(plain, 5, 200, seed=3)
    np.testing.assert_array_equal(
        ids, example_ids(5, 200, num_examples=len(plain), seed=3)
    )
    np.testing.assert_array_equal(ids_of_run(listed, 5, 200, seed=3), ids)
    assert examples_hash(listed.hashed(ids)) == examples_hash(ids)
    assert listed.epochs(200) == {"b": 200 / len(plain)}


def test_a_run_that_began_with_one_source_keeps_its_order_when_others_are_added(texts):
    plain = alone(texts, "b")[0]
    config = load_config(None, [*KEYS, f"dataset_path={texts}/b.jsonl"])
    both, _ = open_mixture(config_of(texts, b=1, c=1))
    history = continued(
        history_of(parts_of(config, [plain])),
        both.parts,
        examples_seen=50,
        tokens_seen=0,
    )
    source = both.with_stream(RowStream(history))
    ids = ids_of_run(source, 50, 400, seed=3)
    place = [part.name for part in source.parts].index("b")
    first = sum(len(each) for each in source.sources[:place])
    own = ids[(ids >= first) & (ids < first + len(plain))]
    np.testing.assert_array_equal(
        own - first, example_ids(50, len(own), num_examples=len(plain), seed=3)
    )
    assert examples_hash(source.hashed(own)) == examples_hash(own - first)


def test_two_sources_with_the_same_rows_are_refused(texts, tmp_path):
    (tmp_path / "copy.jsonl").write_bytes((texts / "a.jsonl").read_bytes())
    entries = f"[{{path: {texts}/a.jsonl, weight: 1}}, {{path: {tmp_path}/copy.jsonl, weight: 1}}]"
    with pytest.raises(UserError, match=r"dataset_path: .* a .* copy"):
        open_mixture(load_config(None, [*KEYS, f"dataset_path={entries}"]))
