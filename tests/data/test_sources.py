import gzip
import json
import pathlib
import pickle
import shutil

import numpy as np
import pytest

from maxtext_lite.config import Config, UserError, load_config, packaged_file
from maxtext_lite.data.sources import SyntheticSource, open_sources
from tests.prepared import byte_shards, write_prepared

END = 256


def config_for(path: pathlib.Path | str, **changes: object) -> Config:
    values = {"dataset_path": path, "max_target_length": 8, "eval_fraction": 0, "eval_interval": -1} | changes
    return load_config(None, [f"{key}={value}" for key, value in values.items()])


def refusal(path: pathlib.Path | str, **changes: object) -> str:
    with pytest.raises(UserError) as caught:
        open_sources(config_for(path, **changes))
    return str(caught.value)


def texts_of(source) -> list[str]:
    """The documents, reassembled from all examples."""
    documents: list[list[int]] = []
    last_target = None
    for row in (source[i] for i in range(len(source))):
        for token, target, weight in zip(row["tokens"], row["targets"], row["weights"], strict=True):
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
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def jsonl(*texts: str) -> str:
    return "".join(json.dumps({"text": text, "other": 1}) + "\n" for text in texts)


@pytest.mark.parametrize("packing", ["true", "false"])
@pytest.mark.parametrize(
    ("name", "content", "documents"),
    [
        ("a.txt", "two\n\nparagraphs\r\n", ["two\n\nparagraphs\r\n"]),
        ("a.txt.gz", "zipped — 東京", ["zipped — 東京"]),
        ("a.jsonl", jsonl("one", "", "three 👩‍🚀"), ["one", "three 👩‍🚀"]),
        ("a.jsonl", '{"text": "line\u2028end"}\r\n\n  \n{"text": "no newline"}', ["line\u2028end", "no newline"]),
        ("a.jsonl.gz", jsonl("x" * 100, "y"), ["x" * 100, "y"]),
        ("a.txt", "\ufeffbyte-order mark", ["byte-order mark"]),
    ],
)
def test_a_file_gives_its_documents(tmp_path, name, content, documents, packing):
    source, evaluation = open_sources(config_for(write(tmp_path / name, content), packing=packing))
    assert texts_of(source) == documents
    assert evaluation is None
    assert source.num_documents == len(documents)
    assert source.num_target_tokens == sum(len(text.encode()) for text in documents)


def test_a_directory_or_glob_is_read_in_the_order_of_names(tmp_path, monkeypatch):
    write(tmp_path / "b.txt", "bb")
    write(tmp_path / "a" / "deep.jsonl", jsonl("a1", "a2"))
    write(tmp_path / "c.txt.gz", "cc")
    write(tmp_path / "readme.md", "not data")
    write(tmp_path / ".ipynb_checkpoints" / "b.txt", "hidden")
    assert texts_of(open_sources(config_for(tmp_path))[0]) == ["a1", "a2", "bb", "cc"]
    assert texts_of(open_sources(config_for(f"'{tmp_path}/*.txt*'"))[0]) == ["bb", "cc"]
    assert texts_of(open_sources(config_for(f"'{tmp_path}/**/*.jsonl'"))[0]) == ["a1", "a2"]
    monkeypatch.chdir(tmp_path)
    assert texts_of(open_sources(config_for("b.txt"))[0]) == ["bb"]
    assert texts_of(open_sources(config_for("'*.gz'"))[0]) == ["cc"]


@pytest.mark.parametrize(("link", "target"), [("latest", "2024"), ("self", "."), ("2024/b.txt", "a.txt")])
def test_a_file_by_two_names_is_not_read_twice(tmp_path, link, target):
    write(tmp_path / "2024" / "a.txt", "once")
    (tmp_path / link).symlink_to(target)
    with pytest.raises(UserError, match=r"dataset_path=.* is a link to .*, which would be read twice"):
        open_sources(config_for(tmp_path))
    assert texts_of(open_sources(config_for(tmp_path / "2024" / "a.txt"))[0]) == ["once"]


def test_a_name_with_brackets_is_a_name_before_it_is_a_glob(tmp_path):
    write(tmp_path / "a[1].txt", "brackets")
    assert texts_of(open_sources(config_for(f"'{tmp_path}/a[1].txt'"))[0]) == ["brackets"]
    write(tmp_path / "[d]" / "x.txt", "in brackets")
    assert texts_of(open_sources(config_for(f"'{tmp_path}/[d]'"))[0]) == ["in brackets"]


def test_empty_documents_are_left_out(tmp_path):
    write(tmp_path / "a.txt", "")
    write(tmp_path / "b.jsonl", jsonl("", "text", ""))
    write(tmp_path / "c.jsonl", "")
    source, _ = open_sources(config_for(tmp_path))
    assert source.num_documents == 1
    assert texts_of(source) == ["text"]


def test_the_packaged_text_is_found_by_name_and_tokenized_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(None, [])
    training, evaluation = open_sources(config, vocab_size=config.vocab_size)
    lines = gzip.decompress(packaged_file("assets", config.dataset_path).read_bytes()).splitlines()
    texts = [json.loads(line)["text"].encode() for line in lines]
    assert training.num_documents == len(texts) == 38
    text = texts[0]
    # One document or more; each byte but a document's first is a target, and so is each end-of-text.
    assert training.num_target_tokens + evaluation.num_target_tokens == sum(map(len, texts))
    num_rows = len(training) + len(evaluation)
    assert num_rows == -(-(sum(map(len, texts)) + len(texts) - 1) // 256)
    assert len(evaluation) == num_rows * 2 // 100
    first = training[0]
    assert bytes(first["tokens"].astype(np.uint8)) == text[:256]
    assert bytes(first["targets"].astype(np.uint8)) == text[1:257]


@pytest.mark.parametrize("packing", ["true", "false"])
@pytest.mark.parametrize("fraction", [0.001, 0.29, 0.5, 0.99])
def test_the_split_shares_out_every_target_and_leaks_none(tmp_path, monkeypatch, packing, fraction):
    monkeypatch.setattr("maxtext_lite.data.sources.load_tokenizer", lambda config: WideTokenizer())
    # No character comes twice, so a token tells its document and its place there.
    characters = iter(range(0x4E00, 0x9000))
    lengths = np.random.default_rng(0).integers(1, 60, size=30)
    documents = ["".join(chr(next(characters)) for _ in range(length)) for length in lengths]
    path = write(tmp_path / "data.jsonl", jsonl(*documents))
    whole, _ = open_sources(config_for(path, packing=packing))
    training, evaluation = open_sources(config_for(path, packing=packing, eval_fraction=fraction))

    assert len(training) + len(evaluation) == len(whole)
    assert len(evaluation) == max(1, int(len(whole) * fraction + 1e-9))
    for i in range(len(whole)):
        example = training[i] if i < len(training) else evaluation[i - len(training)]
        for name, values in whole[i].items():
            np.testing.assert_array_equal(example[name], values)

    def words(source, field):
        return [
            t
            for i in range(len(source))
            for t in source[i][field].tolist()
            if t not in (0, WideTokenizer.end_of_text_id)
        ]

    held_out = words(evaluation, "targets")
    assert not {*held_out} & {*words(training, "targets"), *words(training, "tokens")}
    expected = [100_000 + ord(character) for text in documents for character in text[1:]]
    assert sorted(words(training, "targets") + held_out) == expected
    assert training.num_target_tokens + evaluation.num_target_tokens == whole.num_target_tokens == sum(lengths)
    for source in (training, evaluation):
        assert source.num_target_tokens == sum(source[i]["weights"].sum() for i in range(len(source)))


# 0.29 x 100 is 28.999999999999996 in binary floating point.
@pytest.mark.parametrize(("fraction", "held_out"), [(0.29, 29), (0.57, 57), (0.005, 1), (0.999, 99)])
def test_a_fraction_is_taken_as_written(tmp_path, fraction, held_out):
    path = write(tmp_path / "a.txt", "x" * 800)
    training, evaluation = open_sources(config_for(path, eval_fraction=fraction))
    assert (len(training), len(evaluation)) == (100 - held_out, held_out)


def test_a_text_of_its_own_is_held_out_whole(tmp_path):
    train, held_out = write(tmp_path / "a.txt", "train"), write(tmp_path / "b.txt", "held out")
    training, evaluation = open_sources(config_for(train, eval_dataset_path=held_out, eval_fraction=0.5))
    assert texts_of(training) == ["train"]
    assert texts_of(evaluation) == ["held out"]


def test_fingerprints_tell_data_apart_but_not_places(tmp_path):
    one = write(tmp_path / "one.jsonl", jsonl("some text", "more of it", "x" * 40))
    base = config_for(one, eval_fraction=0.2)
    training, evaluation = open_sources(base)
    elsewhere = pathlib.Path(shutil.copy(one, tmp_path / "elsewhere.jsonl"))
    zipped = write(tmp_path / "z.jsonl.gz", one.read_text())
    for same in (elsewhere, zipped):
        other_training, other_evaluation = open_sources(config_for(same, eval_fraction=0.2))
        assert other_training.fingerprint == training.fingerprint
        assert other_evaluation.fingerprint == evaluation.fingerprint

    moved = write(tmp_path / "moved.jsonl", jsonl("some textmore of it", "x" * 40))  # the same letters
    changes = [
        {"dataset_path": moved},
        {"max_target_length": 9},
        {"packing": "false"},
        {"eval_fraction": 0.5},
        {"eval_fraction": 0},
    ]
    fingerprints = [training.fingerprint, evaluation.fingerprint]
    for change in changes:
        fingerprints.append(
            open_sources(config_for(**{"path": one, "eval_fraction": 0.2} | renamed(change)))[0].fingerprint
        )
    assert len(set(fingerprints)) == 7


def renamed(change: dict) -> dict:
    return {("path" if key == "dataset_path" else key): value for key, value in change.items()}


def test_a_source_survives_pickling(tmp_path):
    path = write(tmp_path / "a.jsonl", jsonl("hello", "x" * 30))
    for packing in ("true", "false"):
        source, _ = open_sources(config_for(path, packing=packing))
        copy = pickle.loads(pickle.dumps(source))
        assert copy.fingerprint == source.fingerprint
        assert texts_of(copy) == ["hello", "x" * 30]


def test_there_is_no_example_outside_a_source(tmp_path):
    training, evaluation = open_sources(config_for(write(tmp_path / "a.txt", "x" * 100), eval_fraction=0.5))
    synthetic, _ = open_sources(config_for("", dataset_type="synthetic"))
    for source in (training, evaluation, synthetic):
        for wrong in (-1, len(source)):
            with pytest.raises(IndexError):
                source[wrong]


def test_large_vocabularies_are_not_cut_to_16_bits(tmp_path, monkeypatch):
    monkeypatch.setattr("maxtext_lite.data.sources.load_tokenizer", lambda config: WideTokenizer())
    source, _ = open_sources(config_for(write(tmp_path / "a.txt", "ab"), max_target_length=3))
    assert source[0]["tokens"].tolist() == [100_097, 100_098, 70_000]


class WideTokenizer:
    vocab_size = 200_000
    end_of_text_id = 70_000
    fingerprint = "wide"

    def encode_documents(self, texts):
        return [np.array([100_000 + ord(c) for c in text], np.int32) for text in texts]

    def pieces(self, text, most):
        return [text]


def test_synthetic_examples_are_a_function_of_their_number():
    config = config_for("", dataset_type="synthetic", max_target_length=1000)
    training, evaluation = open_sources(config, vocab_size=320)
    assert len(training) == 2**31 - 1
    assert len(evaluation) == 64
    for i in (0, 1, 2**31 - 2):
        row, again = training[i], open_sources(config, vocab_size=320)[0][i]
        for name, values in row.items():
            np.testing.assert_array_equal(values, again[name])
        np.testing.assert_array_equal(row["tokens"][1:], row["targets"][:-1])
        assert row["segments"].tolist() == [1] * 1000
        assert row["positions"].tolist() == list(range(1000))
        assert row["weights"].sum() == 1000
        # Uniform below vocab_size: 1,000 draws leave out all of the top 20 with probability 4e-29.
        assert 300 <= row["tokens"].max() < 320
        assert 0 <= row["tokens"].min() < 20
    assert (training[0]["tokens"] == training[1]["tokens"]).mean() < 0.05
    assert (training[0]["tokens"] == evaluation[0]["tokens"]).mean() < 0.05
    assert evaluation.num_target_tokens == 64_000


def test_synthetic_fingerprints_tell_all_that_matters():
    sources = [
        SyntheticSource(*parts) for parts in ((0, 9, 8, 7), (1, 9, 8, 7), (0, 8, 8, 7), (0, 9, 7, 7), (0, 9, 8, 6))
    ]
    assert len({source.fingerprint for source in sources}) == 5


def test_the_tokenizer_must_fit_the_vocabulary(tmp_path):
    path = write(tmp_path / "a.txt", "text")
    with pytest.raises(UserError, match=r"vocab_size=256 is smaller than the tokenizer's 257 tokens\."):
        open_sources(config_for(path), vocab_size=256)


def test_missing_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assets = packaged_file("assets", load_config(None, []).dataset_path).parent
    packaged = ", ".join(sorted(file.name for file in assets.glob("*.gz")))
    assert refusal("none.txt") == (
        f"dataset_path='none.txt': there is no such file or directory in '{tmp_path}', "
        f"nor among the texts that ship with the package ({packaged})."
    )
    assert refusal("'no*.txt'") == f"dataset_path='no*.txt' matches no file in '{tmp_path}'."
    (tmp_path / "empty").mkdir()
    assert refusal("empty") == "dataset_path='empty' is a directory without a .txt, .txt.gz, .jsonl, .jsonl.gz file."
    write(tmp_path / "a.pdf", "x")
    assert refusal("a.pdf") == (
        "dataset_path='a.pdf': cannot read 'a.pdf'. The files are .txt, .txt.gz, .jsonl, .jsonl.gz."
    )
    write(tmp_path / "a.txt", "x")
    assert refusal("a.txt", eval_dataset_path="gone.txt").startswith("eval_dataset_path='gone.txt': there is no such ")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "unfinished', "not JSON (Unterminated string starting at at column 10)."),
        ("plain words", "not JSON (Expecting value at column 1)."),
        ('{"txt": "x"}', 'not a JSON object with a string under "text".'),
        ('{"text": 5}', 'not a JSON object with a string under "text".'),
        ('["text"]', 'not a JSON object with a string under "text".'),
        ('{"text": "\\ud83d"}', '"text" is not valid Unicode (surrogates not allowed).'),
    ],
)
def test_a_malformed_line_is_refused_with_its_place(tmp_path, line, reason):
    path = write(tmp_path / "a.jsonl", jsonl("fine") + "\n" + line + "\n" + jsonl("fine"))
    assert refusal(path) == f"{path}:3: {reason}"


def test_unreadable_contents_are_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc\xff")
    assert refusal(path) == f"{path}: not UTF-8 text (byte 3: invalid start byte)."
    path = tmp_path / "a.txt.gz"
    for content in (b"not gzip", gzip.compress(b"text" * 100)[:-9]):
        path.write_bytes(content)
        assert refusal(path).startswith(f"{path}: cannot be read (")


def test_nothing_to_train_on_or_to_hold_out_is_refused(tmp_path):
    empty, short = write(tmp_path / "empty.txt", ""), write(tmp_path / "short.txt", "abc")
    assert refusal(empty) == f"dataset_path='{empty}' has no text: every document in it is empty."
    assert refusal(short, eval_dataset_path=empty) == (
        f"eval_dataset_path='{empty}' has no text: every document in it is empty."
    )
    assert refusal(short, eval_fraction=0.02) == (
        "eval_fraction=0.02 holds out 1 of 1 examples of 8 tokens and leaves none to train on. Use more text, a "
        "smaller max_target_length or eval_fraction, or eval_fraction=0 for no evaluation."
    )


@pytest.mark.parametrize("packing", ["concat", "none", "best_fit"])
@pytest.mark.parametrize("eval_fraction", [0, 0.3])
def test_a_prepared_dataset_gives_the_rows_of_its_text(tmp_path, packing, eval_fraction):
    texts = ["one", "two words", "x" * 50, "the last document of its shard", "another " * 9, "end"]
    write(tmp_path / "a.jsonl", jsonl(*texts))
    write_prepared(tmp_path / "d", byte_shards(texts, 2), tokens_per_record=16)
    changes = {"packing": packing, "eval_fraction": eval_fraction}
    of_text = open_sources(config_for(tmp_path / "a.jsonl", **changes))
    of_records = open_sources(config_for(tmp_path / "d", dataset_type="array_record", **changes))
    for text, records in zip(of_text, of_records, strict=True):
        if text is None:
            assert records is None
            continue
        assert (len(records), records.num_target_tokens) == (len(text), text.num_target_tokens)
        ids = np.array([0, len(text) - 1, 0])
        assert records.count_targets(ids) == text.count_targets(ids)
        for number in range(len(text)):
            for name, values in text[number].items():
                np.testing.assert_array_equal(records[number][name], values)
        copy = pickle.loads(pickle.dumps(records))
        np.testing.assert_array_equal(copy[1]["tokens"], text[1]["tokens"])
        assert copy.fingerprint == records.fingerprint
        assert records.fingerprint != text.fingerprint  # it is the manifest's


def test_best_fit_says_what_became_of_documents(tmp_path):
    source, _ = open_sources(config_for(write(tmp_path / "a.jsonl", jsonl("x" * 8, "y" * 12)), packing="best_fit"))
    assert source.notes == (
        "83.33% of the rows' tokens are of documents, the rest is padding; 1 documents are longer than "
        "max_target_length=8 and are cut.",
    )
    assert texts_of(source) == ["x" * 8, "y" * 12]


def test_a_prepared_dataset_of_another_tokenizer_is_refused(tmp_path):
    write_prepared(tmp_path, byte_shards(["text"], 1), tokenizer="huggingface:ab:0")
    assert refusal(tmp_path, dataset_type="array_record") == (
        f"dataset_path='{tmp_path}' was prepared with the tokenizer huggingface:ab:0; that of the config is byte. Name "
        "the tokenizer of the data, or prepare them again."
    )


def test_a_prepared_dataset_without_documents_is_refused(tmp_path):
    write_prepared(tmp_path, [[]])
    assert refusal(tmp_path, dataset_type="array_record") == f"dataset_path='{tmp_path}' has no document."
