"""Sources on hosts that read and on hosts that do not; the test simulates the exchange between them."""

import json

import numpy as np
import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.data import sources_on_hosts
from maxtext_lite.data.sources_on_hosts import (
    open_sources_on_hosts,
)
from tests.run_directories import write_lines


@pytest.fixture
def config(tmp_path):
    rng = np.random.default_rng(0)
    lines = [{"text": "x" * int(n)} for n in rng.integers(1, 60, 40)]
    path = write_lines(tmp_path / "documents.jsonl", lines)
    return load_config(
        None, [f"dataset_path={path}", "max_target_length=16", "eval_fraction=0.1"]
    )


@pytest.fixture
def be_host(monkeypatch):
    """Makes this process host `number`, which receives what host 0 has told."""

    def be(number, told):
        monkeypatch.setattr(sources_on_hosts.jax, "process_index", lambda: number)

        def value_of_host(host, value):
            assert host == 0
            if number == 0:
                told.append(json.loads(json.dumps(value)))
            return told[0]

        monkeypatch.setattr(sources_on_hosts, "value_of_host", value_of_host)
        return told

    return be


@pytest.mark.fast
def test_a_host_that_does_not_read_opens_nothing_and_knows_all(
    config, be_host, monkeypatch
):
    told = be_host(0, [])
    train, evaluation = open_sources_on_hosts(config, vocab_size=320, loading_hosts=[0])
    be_host(1, told)
    monkeypatch.setattr(
        sources_on_hosts,
        "open_sources",
        lambda *_, **__: pytest.fail("it opened the data"),
    )
    other_train, other_evaluation = open_sources_on_hosts(
        config, vocab_size=320, loading_hosts=[0]
    )
    for known, source in ((other_train, train), (other_evaluation, evaluation)):
        assert len(known) == len(source)
        for fact in ("num_tokens", "num_target_tokens", "fingerprint", "fields"):
            assert getattr(known, fact) == getattr(source, fact)
    with pytest.raises(NotImplementedError):
        other_train[3]


def test_it_knows_each_held_out_set_by_name(config, be_host, monkeypatch):
    text = config.dataset_path
    sets = (
        f"eval_dataset_path=[{{path: {text}, name: one}}, {{path: {text}, name: two}}]"
    )
    config = load_config(None, [f"dataset_path={text}", "max_target_length=16", sets])
    told = be_host(0, [])
    open_sources_on_hosts(config, vocab_size=320, loading_hosts=[0])
    be_host(1, told)
    monkeypatch.setattr(sources_on_hosts, "open_sources", pytest.fail)
    source, held_out = open_sources_on_hosts(config, vocab_size=320, loading_hosts=[0])
    for name, known in held_out.named().items():
        assert name in ("one", "two")
        assert len(known) == len(source)
    assert len(held_out) == 2 * len(source)


def test_hosts_that_find_different_data_are_refused(config, be_host):
    told = be_host(0, [])
    open_sources_on_hosts(config, vocab_size=320, loading_hosts=[0])
    told[0][0]["fingerprint"] = "another"
    be_host(1, told)
    with pytest.raises(UserError, match="host 1"):
        open_sources_on_hosts(config, vocab_size=320, loading_hosts=[0, 1])
