import gzip
import json
import pathlib
import pickle

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from maxtext_lite.config import UserError, load_config
from maxtext_lite.data.sources import open_sources
from maxtext_lite.data.tokenizer import Tokenizer
from tests.prepared import byte_shards, write_prepared

END = 256


def opened(path, **changes):
    keys = {
        "dataset_path": path,
        "max_target_length": 8,
        "eval_fraction": 0,
        "eval_interval": -1,
    } | changes
    vocab_size = keys.pop("vocab_size", 320)
    return open_sources(
        load_config(None, [f"{key}={value}" for key, value in keys.items()]),
        vocab_size=vocab_size,
    )


def texts_of(source) -> list[str]:
    """The documents, reassembled from all examples."""
    documents: list[list[int]] = []
    last_target = None
    for row in (source[i] for i in range(len(source))):
        for token, target, weight in zip(
            row["tokens"], row["targets"], row["weights"], strict=True
        ):
            if weight == 0:
                last_target = None
                continue
            if token != last_target:
                documents.append([int(token)])
            documents[-1].append(int(target))
            last_target = target
    assert all(document[-1] == END for document in documents)
    return [bytes(document[:-1]).decode() for document in documents]


def write(path: pathlib.Path, text: str) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode()
    )
    return path


def jsonl(*texts: str) -> str:
    return "".join(json.dumps({"text": text, "other": 1}) + "\n" for text in texts)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("name", "content", "documents"),
    [
        ("a.txt", "\ufefftwo\n\nparagraphs\r\n", ["two\n\nparagraphs\r\n"]),
        (
            "a.jsonl",
            '{"text": "line\u2028end"}\r\n\n  \n{"text": ""}\n{"text": "three 👩\u200d🚀"}',
            ["line\u2028end", "three 👩\u200d🚀"],
        ),
        ("a.jsonl.gz", jsonl("x" * 100, "y"), ["x" * 100, "y"]),
    ],
)
def test_a_file_gives_its_documents(tmp_path, name, content, documents):
    source, evaluation = opened(write(tmp_path / name, content))
    copy = pickle.loads(pickle.dumps(source))
    assert copy.fingerprint == source.fingerprint
    assert texts_of(copy) == documents
    assert evaluation is None
    assert source.num_documents == len(documents)
    assert source.num_target_tokens == sum(len(text.encode()) for text in documents)


def test_a_directory_or_glob_is_read_in_the_order_of_names(tmp_path, monkeypatch):
    write(tmp_path / "b.txt", "bb")
    write(tmp_path / "a" / "deep.jsonl", jsonl("a1", "a2"))
    write(tmp_path / "c.txt.gz", "cc")
    write(tmp_path / "d[1].txt", "")
    write(tmp_path / "readme.md", "not data")
    write(tmp_path / ".ipynb_checkpoints" / "b.txt", "hidden")
    write(tmp_path / "[e]" / "x[1].txt", "brackets")
    monkeypatch.chdir(tmp_path)
    for path, documents in (
        (tmp_path, "brackets a1 a2 bb cc"),
        (f"'{tmp_path}/*.txt*'", "bb cc"),
        (f"'{tmp_path}/**/*.jsonl'", "a1 a2"),
        ("b.txt", "bb"),
        ("'*.gz'", "cc"),
        ("'[e]/x[1].txt'", "brackets"),  # a name before it is a glob
        ("'[e]'", "brackets"),
    ):
        assert texts_of(opened(path)[0]) == documents.split()


def test_a_file_by_two_names_is_not_read_twice(tmp_path):
    write(tmp_path / "2024" / "a.txt", "once")
    (tmp_path / "latest").symlink_to("2024")
    with pytest.raises(UserError, match="dataset_path="):
        opened(tmp_path)


class WideTokenizer(Tokenizer):
    vocab_size = 200_000
    end_of_text_id = 70_000
    fingerprint = "wide"

    def encode_documents(self, texts):
        return [np.array([100_000 + ord(c) for c in text], np.int32) for text in texts]

    def pieces(self, text, most):
        return [text]


@pytest.mark.parametrize(("packing", "fraction"), [("true", 0.29), ("false", 0.001)])
def test_the_split_shares_out_every_target_and_leaks_none(
    tmp_path, monkeypatch, packing, fraction
):
    """Of tokens that do not fit in 16 bits."""
    monkeypatch.setattr(
        "maxtext_lite.data.sources.load_tokenizer", lambda config: WideTokenizer()
    )
    # No character comes twice, so a token tells its document and its place there.
    characters = iter(range(0x4E00, 0x9000))
    lengths = np.random.default_rng(0).integers(1, 60, size=30)
    documents = [
        "".join(chr(next(characters)) for _ in range(length)) for length in lengths
    ]
    path = write(tmp_path / "data.jsonl", jsonl(*documents))
    keys = {"packing": packing, "vocab_size": 200_000}
    whole, _ = opened(path, **keys)
    training, evaluation = opened(path, eval_fraction=fraction, **keys)

    assert len(training) + len(evaluation) == len(whole)
    assert len(evaluation) == max(1, int(len(whole) * fraction + 1e-9))
    targets, inputs = ([], []), []
    for i in range(len(whole)):
        is_held_out = i >= len(training)
        example = evaluation[i - len(training)] if is_held_out else training[i]
        for name, values in whole[i].items():
            assert_array_equal(example[name], values)
        targets[is_held_out].extend(
            t for t in example["targets"].tolist() if t > 100_000
        )
        inputs += [] if is_held_out else example["tokens"].tolist()
    assert not {*targets[True]} & {*targets[False], *inputs}
    expected = [
        100_000 + ord(character) for text in documents for character in text[1:]
    ]
    assert sorted(targets[False] + targets[True]) == expected
    assert (
        training.num_target_tokens + evaluation.num_target_tokens
        == whole.num_target_tokens
        == sum(lengths)
    )
    for source in (training, evaluation):
        assert source.num_target_tokens == sum(
            source[i]["weights"].sum() for i in range(len(source))
        )


def test_a_text_of_its_own_is_held_out_whole(tmp_path):
    train, held_out = (
        write(tmp_path / "a.txt", "train"),
        write(tmp_path / "b.txt", "held out"),
    )
    parts = opened(train, eval_dataset_path=held_out, eval_fraction=0.5)
    assert [texts_of(part) for part in parts] == [["train"], ["held out"]]


def test_fingerprints_tell_data_apart_but_not_places(tmp_path):
    one = write(tmp_path / "one.jsonl", jsonl("some text", "more of it", "x" * 40))
    zipped = write(tmp_path / "z.jsonl.gz", one.read_text())
    moved = write(
        tmp_path / "moved.jsonl", jsonl("some textmore of it", "x" * 40)
    )  # the same letters
    prints = [source.fingerprint for source in opened(one, eval_fraction=0.2)]
    assert [
        source.fingerprint for source in opened(zipped, eval_fraction=0.2)
    ] == prints
    for path, change in (
        (moved, {}),
        (one, {"max_target_length": 9}),
        (one, {"packing": "false"}),
        (one, {"eval_fraction": 0.5}),
        (one, {"eval_fraction": 0}),
    ):
        prints.append(opened(path, **{"eval_fraction": 0.2} | change)[0].fingerprint)
    assert len(set(prints)) == 7


def test_synthetic_examples_are_a_function_of_their_number():
    keys = {"dataset_type": "synthetic", "max_target_length": 1000}
    training, evaluation = opened("", **keys)
    assert (len(training), len(evaluation), evaluation.num_target_tokens) == (
        2**31 - 1,
        64,
        64_000,
    )
    for i in (0, 2**31 - 2):
        row, again = training[i], opened("", **keys)[0][i]
        assert_array_equal(row["tokens"], again["tokens"])
        assert_array_equal(row["tokens"][1:], row["targets"][:-1])
        assert 0 <= row["tokens"].min() < 20 < 300 <= row["tokens"].max() < 320
    for other in (training[1], evaluation[0]):
        assert (training[0]["tokens"] == other["tokens"]).mean() < 0.05


@pytest.mark.parametrize("name", ["none.txt", "'no*.txt'", "empty", "a.pdf"])
def test_missing_files_are_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    write(tmp_path / "a.pdf", "x")
    with pytest.raises(UserError, match="dataset_path='"):
        opened(name)


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_a_prepared_dataset_gives_the_rows_of_its_text(tmp_path, packing):
    texts = [
        "one",
        "two words",
        "x" * 50,
        "the last document of its shard",
        "another " * 9,
        "end",
    ]
    write(tmp_path / "a.jsonl", jsonl(*texts))
    write_prepared(tmp_path / "d", byte_shards(texts, 2), tokens_per_record=16)
    keys = {"packing": packing, "eval_fraction": 0.3}
    of_text = opened(tmp_path / "a.jsonl", **keys)
    of_records = opened(tmp_path / "d", dataset_type="array_record", **keys)
    for text, records in zip(of_text, of_records, strict=True):
        assert (len(records), records.num_target_tokens) == (
            len(text),
            text.num_target_tokens,
        )
        ids = np.array([0, len(text) - 1, 0])
        copy = pickle.loads(pickle.dumps(records))
        assert copy.count_targets(ids) == text.count_targets(ids)
        for number in range(len(text)):
            for name, values in text[number].items():
                assert_array_equal(copy[number][name], values)
        assert (
            copy.fingerprint == records.fingerprint != text.fingerprint
        )  # it is the manifest's


@pytest.mark.parametrize(
    "dataset", [{"tokenizer": "huggingface:ab:0"}, {"shards": [[]]}]
)
def test_a_prepared_dataset_of_another_tokenizer_or_without_documents_is_refused(
    tmp_path, dataset
):
    write_prepared(tmp_path, **{"shards": byte_shards(["text"], 1)} | dataset)
    with pytest.raises(UserError, match="dataset_path="):
        opened(tmp_path, dataset_type="array_record")
