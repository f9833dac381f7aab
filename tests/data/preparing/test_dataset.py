"""A prepared dataset is the same for any number of workers and kills, and reads back as its documents."""

import contextlib
import hashlib
import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordReader

from maxtext_lite.config import UserError
from maxtext_lite.data.manifest import read_manifest
from maxtext_lite.data.preparing import dataset, shards
from maxtext_lite.data.preparing.dataset import prepare_dataset
from maxtext_lite.data.preparing.keys import PrepareConfig
from maxtext_lite.data.token_stream import open_prepared, verify
from maxtext_lite.data.tokenizer import ByteTokenizer
from tests.stores import Memory

TASK_BYTES = 12_000
STEP = int(os.environ.get("PREPARE_KILL_STEP", "5"))  # 1: killed at every change of the disk, not at every fifth


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch):
    monkeypatch.setattr(dataset, "_MEGABYTE", TASK_BYTES)


@pytest.fixture
def texts(tmp_path):
    """The documents of an input of three tasks of lines and one of two small texts, in `in/`."""
    draw = random.Random(1)
    documents = ["ab" * draw.randrange(400) for _ in range(70)]
    documents[3] = documents[69] = ""
    (tmp_path / "in").mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents)
    (tmp_path / "in" / "a.jsonl").write_text(lines)
    (tmp_path / "in" / "b.txt").write_text("the first text")
    (tmp_path / "in" / "c.txt").write_text("x" * 9000)
    assert 3 * TASK_BYTES > len(lines) > 2 * TASK_BYTES
    return [*documents, "the first text", "x" * 9000]


def config(tmp_path, output="out", **keys):
    place = output if "://" in output else str(tmp_path / output)
    return PrepareConfig(input=[str(tmp_path / "in")], output=place, task_megabytes=1, **keys)


def prepare(tmp_path, output="out", **keys):
    return prepare_dataset(config(tmp_path, output, **keys), tokenizer=ByteTokenizer())


def content(directory):
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


@pytest.mark.fast
def test_the_stream_is_that_of_the_documents(texts, tmp_path):
    outcome = prepare(tmp_path)
    full = [text for text in texts if text]
    expected = np.concatenate([np.array([*text.encode(), 256]) for text in full])
    lengths = np.array([len(text) + 1 for text in full])
    assert (outcome.empty, outcome.bad) == (len(texts) - len(full), 0)
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.documents, manifest.tokens, manifest.dtype) == (len(full), len(expected), "uint16")
    starts = np.fromfile(tmp_path / "out" / "documents.i64", "<i8")
    np.testing.assert_array_equal(starts, np.cumsum([0, *lengths]))
    first = 0
    for shard in manifest.shards:
        content_of = (tmp_path / "out" / shard.file).read_bytes()
        assert shard.sha256 == hashlib.sha256(content_of).hexdigest()
        reader = ArrayRecordReader(str(tmp_path / "out" / shard.file), "")
        records = reader.read_all()
        reader.close()
        assert {len(record) for record in records[:-1]} <= {2 * 4096}
        np.testing.assert_array_equal(np.frombuffer(b"".join(records), "<u2"), expected[first : first + shard.tokens])
        first += shard.tokens
    assert first == len(expected)
    files = ["manifest.json", "documents.i64", "prepare.json", *(shard.file for shard in manifest.shards)]
    assert sorted(content(tmp_path / "out")) == sorted(files)
    assert len(manifest.shards) == 4
    assert list(verify(*open_prepared("input", tmp_path / "out")))


def test_processes_and_shares_make_the_same_bytes(texts, tmp_path):
    prepare(tmp_path)
    expected = content(tmp_path / "out")
    prepare_dataset(config(tmp_path, "two", num_workers=2))
    assert content(tmp_path / "two") == expected
    for number, is_last in ((2, False), (0, False), (1, True)):
        outcome = prepare_dataset(config(tmp_path, "shares"), tokenizer=ByteTokenizer(), share=(number, 3))
        assert (outcome is not None) == is_last
    assert content(tmp_path / "shares") == expected


def test_a_complete_dataset_is_not_prepared_again(texts, tmp_path, monkeypatch):
    manifest = prepare(tmp_path).manifest
    expected = content(tmp_path / "out")
    answers = iter([False, True, True, True])  # it ended between the first look and the lock
    monkeypatch.setattr("maxtext_lite.data.preparing.journal.Journal.is_complete", lambda _: next(answers))
    monkeypatch.setattr("maxtext_lite.data.preparing.workers.run_task", None)
    assert prepare(tmp_path).manifest == manifest
    assert content(tmp_path / "out") == expected




class Killed(BaseException):
    """The process is dead: nothing that it does afterwards has an effect."""


@contextlib.contextmanager
def killed_at(place):
    """From the `place`-th disk write on, prepare has no effect; yields the number of writes."""
    changes = [0]

    def lethal(function):
        def change(*arguments, **keys):
            changes[0] += 1
            if changes[0] > place:
                raise Killed
            return function(*arguments, **keys)

        return change

    class Writer(shards.ArrayRecordWriter):
        write = lethal(shards.ArrayRecordWriter.write)
        close = lethal(shards.ArrayRecordWriter.close)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(shards, "ArrayRecordWriter", Writer)
        for name in ("fsync", "link"):
            patch.setattr(os, name, lethal(getattr(os, name)))
        for name in ("replace", "unlink", "mkdir"):
            patch.setattr(Path, name, lethal(getattr(Path, name)))
        patch.setattr("shutil.rmtree", lethal(shutil.rmtree))
        yield changes


def test_killed_at_any_disk_write_it_continues_to_the_same_bytes(texts, tmp_path):
    prepare(tmp_path, "whole")
    expected = content(tmp_path / "whole")
    survived, place = False, 0
    while not survived:
        with killed_at(place) as changes:
            prepare(tmp_path, f"cut{place}")
            survived = changes[0] <= place
        with killed_at(place // 2):  # and once more, sooner
            prepare(tmp_path, f"cut{place}")
        prepare(tmp_path, f"cut{place}")
        assert content(tmp_path / f"cut{place}") == expected, place
        place += STEP
    assert place > 50


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    monkeypatch.setenv("MAXTEXT_LITE_CACHE", str(tmp_path / "cache"))
    return Memory(monkeypatch)


def test_every_file_is_uploaded_once_and_the_manifest_last(texts, tmp_path, bucket):
    prepare(tmp_path, "local")
    prepare(tmp_path, "gs://bucket/out/")
    assert bucket.content("gs://bucket/out") == content(tmp_path / "local")
    written = [name for method, name in bucket.calls if method in ("put_file", "pipe_file")]
    assert len(written) == len({*written}) + 1  # prepare.json is written again at the end
    assert written[-1] == "manifest.json"
    left = [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert sorted(left) == ["manifest.json", "prepare.json"]  # no copy of the data stays
    bucket.calls.clear()
    assert prepare(tmp_path, "gs://bucket/out").manifest == read_manifest(tmp_path / "local")
    assert not any(method == "put_file" for method, _ in bucket.calls)


def test_killed_at_an_upload_it_continues_elsewhere_to_the_same_bytes(texts, tmp_path, bucket, monkeypatch):
    prepare(tmp_path, "local")
    expected, place, survived = content(tmp_path / "local"), 0, False
    while not survived:
        seen = []

        def lethal(method, name, seen=seen, place=place):
            seen.append(name)
            if len(seen) > place and method != "cat_file":
                raise Killed

        bucket.before = lethal
        with contextlib.suppress(Killed):
            prepare(tmp_path, f"s3://bucket/{place}")
            survived = True
        assert ("manifest.json" in bucket.content(f"s3://bucket/{place}")) <= (seen[-1] == "manifest.json")
        bucket.before = lambda method, name: None
        if place % 2:  # the disk of the first machine is gone
            monkeypatch.setenv("MAXTEXT_LITE_CACHE", str(tmp_path / f"cache{place}"))
        prepare(tmp_path, f"s3://bucket/{place}")
        assert bucket.content(f"s3://bucket/{place}") == expected, place
        place += 1 if STEP == 1 else 3
    assert place > 15


def test_a_bucket_with_other_contents_is_refused(texts, tmp_path, bucket):
    bucket.files.pipe_file("/bucket/mine/notes.txt", b"notes")
    with pytest.raises(UserError, match=r"output='gs://bucket/mine' .*notes\.txt"):
        prepare(tmp_path, "gs://bucket/mine")
    prepare(tmp_path, "gs://bucket/out")
    with pytest.raises(UserError, match=r"gs://bucket/out .*body"):
        prepare(tmp_path, "gs://bucket/out", text_field="body")
    bucket.files.rm("/bucket/out", recursive=True)  # all of it is made again, whatever a cache has of it
    prepare(tmp_path, "gs://bucket/out")
    assert "manifest.json" in bucket.content("gs://bucket/out")




def test_a_changed_input_or_setting_is_named(texts, tmp_path):
    def refused(name, path=tmp_path / "in", output="out", tokenizer=None, task_megabytes=1):
        made = PrepareConfig(input=[str(path)], output=str(tmp_path / output), task_megabytes=task_megabytes)
        with pytest.raises(UserError, match=name):
            prepare_dataset(made, tokenizer=tokenizer or ByteTokenizer())

    with killed_at(40):
        prepare(tmp_path)
    other = ByteTokenizer()
    other.fingerprint = "another"
    refused("task_megabytes", task_megabytes=2)
    refused("another", tokenizer=other)
    os.utime(tmp_path / "in" / "b.txt")
    refused(r"b\.txt")
    (tmp_path / "in" / "b.txt").unlink()
    refused(r"b\.txt")
    refused(r"a\.jsonl", output="in")
    (tmp_path / "empty.txt").write_text("")
    refused("empty", path=tmp_path / "empty.txt", output="o")


def test_a_special_token_that_the_template_prints_is_a_setting(tmp_path):
    turns = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": turns}))
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"

    def prepare_chat(tokens):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **tokens}))
        inputs = {"input": [str(tmp_path / "a.jsonl")], "output": str(tmp_path / "out"), "chat": True}
        keys = inputs | {"tokenizer_type": "huggingface", "tokenizer_path": str(tmp_path)}
        return prepare_dataset(PrepareConfig(**keys), tokenizer=ByteTokenizer())

    first = prepare_chat({"bos_token": "<s>", "eos_token": "</s>"})
    assert prepare_chat({"bos_token": "<s>", "eos_token": "<stop>"}) == first  # not printed
    with pytest.raises(UserError, match="chat_template"):
        prepare_chat({"bos_token": "<begin>", "eos_token": "</s>"})




def test_bad_lines_are_counted_and_named_up_to_their_share(texts, tmp_path):
    with (tmp_path / "in" / "a.jsonl").open("a") as opened:
        opened.write('{"tex": 1}\nno\n')
    for share in (0.0, 0.05):
        with pytest.raises(UserError) as refused:
            prepare(tmp_path, max_bad_fraction=share)
        assert any("a.jsonl: line at byte" in problem for problem in refused.value.problems)
    with killed_at(40):
        prepare(tmp_path, max_bad_fraction=0.5)
    with pytest.raises(UserError, match="max_bad_fraction=0"):  # holds for tasks that are done too
        prepare(tmp_path)
    assert prepare(tmp_path, max_bad_fraction=0.5).bad == 2


