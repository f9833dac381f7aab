import dataclasses
import pickle
from fractions import Fraction

import numpy as np
import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.data import open_sources
from maxtext_lite.data.history import history_of
from maxtext_lite.data.mixture import MixtureSchedule
from tests.mixture_trials import mixture_of, write_texts

KEYS = ["max_target_length=16", "eval_fraction=0.1"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Three texts of documents of different lengths."""
    return write_texts(tmp_path_factory.mktemp("texts"), a=9, b=60, c=200)


def config_of(texts, **weights):
    return load_config(None, [*KEYS, mixture_of(texts, weights)])


def started(config):
    training, _ = open_sources(config)
    return dataclasses.replace(
        training, stream=MixtureSchedule(history_of(training.parts))
    )


def alone(texts, name):
    return open_sources(
        load_config(None, [*KEYS, f"dataset_path={texts}/{name}.jsonl"])
    )


def weights_of(source, number):
    return int((source[number]["weights"] > 0).sum())


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
    counted = source.tokens_by_source(0, n, 1)
    total = sum(counted.values())
    assert total == source.target_tokens(0, n, 1)
    assert total == sum(
        weights_of(source, example) for example in source.ids_of_run(0, n, 1).tolist()
    )
    for name, share in shares.items():
        assert counted[name] / total == pytest.approx(float(share), abs=0.005)
    halves = [
        source.tokens_by_source(0, 777, 1),
        source.tokens_by_source(777, n, 1),
    ]
    assert {name: halves[0][name] + halves[1][name] for name in counted} == counted


def test_ids_and_orders_do_not_depend_on_how_the_sources_are_listed(texts):
    one, other = (
        started(config_of(texts, a=1, b=2, c=3)),
        started(config_of(texts, c=6, a=2, b=4)),
    )
    ids = one.ids_of_run(3, 500, 7)
    np.testing.assert_array_equal(ids, other.ids_of_run(3, 500, 7))
    np.testing.assert_array_equal(
        ids, pickle.loads(pickle.dumps(one)).ids_of_run(3, 500, 7)
    )


def test_two_sources_with_the_same_rows_are_refused(texts, tmp_path):
    (tmp_path / "copy.jsonl").write_bytes((texts / "a.jsonl").read_bytes())
    entries = f"[{{path: {texts}/a.jsonl, weight: 1}}, {{path: {tmp_path}/copy.jsonl, weight: 1}}]"
    with pytest.raises(UserError, match=r"dataset_path: .* a .* copy"):
        open_sources(load_config(None, [*KEYS, f"dataset_path={entries}"]))


@pytest.mark.parametrize("mixes", [False, True])
def test_held_out_sets_have_names_and_all_their_rows_also_beside_a_mixture(
    texts, mixes
):
    """Nothing else is held out, and the same rows may be in several sets."""
    sets = f"[{{path: {texts}/b.jsonl, name: z}}, {{path: {texts}/a.jsonl}}, {{path: {texts}/b.jsonl}}]"
    weights = {"a": 1, "c": 2}
    training = mixture_of(texts, weights) if mixes else f"dataset_path={texts}/c.jsonl"
    held_out = f"eval_dataset_path={sets}"
    source, named = open_sources(load_config(None, [*KEYS, training, held_out]))
    keys = [*KEYS, "eval_fraction=0", "eval_interval=-1"]
    whole = {
        name: open_sources(
            load_config(None, [*keys, f"dataset_path={texts}/{name}.jsonl"])
        )[0]
        for name in "abc"
    }
    assert len(source) == len(whole["c"]) + (len(whole["a"]) if mixes else 0)
    found = {name: each.fingerprint for name, each in named.named().items()}
    assert found == {
        name: whole[text].fingerprint
        for name, text in {"z": "b", "a": "a", "b": "b"}.items()
    }
    assert list(found) == ["z", "a", "b"]
