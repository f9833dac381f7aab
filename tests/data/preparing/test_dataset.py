"""A prepared dataset is the same for any number of workers and kills, and reads back as its documents."""

import contextlib
import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from maxtext_lite.config import UserError
from maxtext_lite.data.prepared import open_prepared
from maxtext_lite.data.tokenizer import ByteTokenizer
from maxtext_lite.preparation import dataset, shards
from maxtext_lite.preparation.dataset import prepare_dataset
from maxtext_lite.preparation.keys import PrepareConfig
from maxtext_lite.preparation.shards import verify
from tests.stores import Memory

TASK_BYTES = 12_000
STEP = int(
    os.environ.get("PREPARE_KILL_STEP", "7")
)  # 1: killed at every change of the disk, not at every seventh


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
    assert 3 * TASK_BYTES > len(lines) > 2 * TASK_BYTES
    for name, content in (
        ("a.jsonl", lines),
        ("b.txt", "the first text"),
        ("c.txt", "x" * 9000),
    ):
        (tmp_path / "in" / name).write_text(content)
    return [*documents, "the first text", "x" * 9000]


@pytest.fixture
def prepare(tmp_path):
    def run(output="out", *, share=(0, 1), tokenizer=None, **keys):
        place = output if "://" in output else str(tmp_path / output)
        config = PrepareConfig(
            **{"input": [str(tmp_path / "in")], "output": place, "task_megabytes": 1}
            | keys
        )
        tokenizer = tokenizer or (ByteTokenizer() if config.num_workers < 2 else None)
        return prepare_dataset(config, tokenizer=tokenizer, share=share)

    return run


@pytest.fixture
def content(tmp_path):
    return lambda name: {
        path.name: path.read_bytes() for path in (tmp_path / name).iterdir()
    }


@pytest.mark.fast
def test_the_stream_is_that_of_the_documents(texts, tmp_path, prepare, content):
    outcome = prepare()
    full = [text for text in texts if text]
    expected = np.concatenate([np.array([*text.encode(), 256]) for text in full])
    assert (outcome.empty, outcome.bad) == (len(texts) - len(full), 0)
    stream, starts = open_prepared("input", tmp_path / "out")
    np.testing.assert_array_equal(stream[:], expected)
    assert stream[:].dtype == np.uint16
    np.testing.assert_array_equal(
        starts, np.cumsum([0, *(len(text) + 1 for text in full)])
    )
    files = ["manifest.json", "documents.i64", "prepare.json"]
    files += [shard.file for shard in outcome.manifest.shards]
    assert sorted(content("out")) == sorted(files)
    assert len(outcome.manifest.shards) == 4
    assert list(verify(stream, starts))


def test_processes_and_shares_make_the_same_bytes(texts, prepare, content):
    prepare()
    prepare("two", num_workers=2)
    assert [prepare("shares", share=(number, 3)) is None for number in (2, 0, 1)] == [
        True,
        True,
        False,
    ]
    assert content("two") == content("shares") == content("out")


def test_a_complete_dataset_is_not_prepared_again(texts, prepare, content, monkeypatch):
    manifest, expected = prepare().manifest, content("out")
    answers = iter(
        [False, True, True, True]
    )  # it ended between the first look and the lock
    monkeypatch.setattr(
        "maxtext_lite.preparation.journal.Journal.is_complete",
        lambda _: next(answers),
    )
    monkeypatch.setattr("maxtext_lite.preparation.dataset.run_task", None)
    assert prepare().manifest == manifest
    assert content("out") == expected


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
        owners = {
            "fsync": os,
            "link": os,
            "replace": Path,
            "unlink": Path,
            "mkdir": Path,
            "rmtree": shutil,
        }
        for name, owner in owners.items():
            patch.setattr(owner, name, lethal(getattr(owner, name)))
        yield changes


def test_killed_at_any_disk_write_it_continues_to_the_same_bytes(
    texts, prepare, content
):
    prepare("whole")
    survived, place = False, 0
    while not survived:
        with killed_at(place) as changes:
            prepare(f"cut{place}")
            survived = changes[0] <= place
        with killed_at(place // 2):  # and once more, sooner
            prepare(f"cut{place}")
        prepare(f"cut{place}")
        assert content(f"cut{place}") == content("whole"), place
        place += STEP
    assert place > 50


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    monkeypatch.setenv("MAXTEXT_LITE_CACHE", str(tmp_path / "cache"))
    return Memory(monkeypatch)


def test_every_file_is_uploaded_once_and_the_manifest_last(
    texts, tmp_path, bucket, prepare, content
):
    manifest = prepare().manifest
    prepare("gs://bucket/out/")
    assert bucket.content("gs://bucket/out") == content("out")
    written = [
        name for method, name in bucket.calls if method in ("put_file", "pipe_file")
    ]
    assert (
        len(written) == len({*written}) + 1
    )  # prepare.json is written again at the end
    assert written[-1] == "manifest.json"
    left = [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert sorted(left) == [
        "manifest.json",
        "prepare.json",
    ]  # no copy of the data stays
    bucket.calls.clear()
    assert prepare("gs://bucket/out").manifest == manifest
    assert not any(method == "put_file" for method, _ in bucket.calls)


def test_killed_at_an_upload_it_continues_elsewhere_to_the_same_bytes(
    texts, tmp_path, bucket, prepare, content, monkeypatch
):
    prepare()
    place, survived = 0, False
    while not survived:
        seen, output = [], f"s3://bucket/{place}"

        def lethal(method, name, seen=seen, place=place):
            seen.append(name)
            if len(seen) > place and method != "cat_file":
                raise Killed

        bucket.before = lethal
        with contextlib.suppress(Killed):
            prepare(output)
            survived = True
        assert ("manifest.json" in bucket.content(output)) <= (
            seen[-1] == "manifest.json"
        )
        bucket.before = lambda method, name: None
        if place % 2:  # the disk of the first machine is gone
            monkeypatch.setenv("MAXTEXT_LITE_CACHE", str(tmp_path / f"cache{place}"))
        prepare(output)
        assert bucket.content(output) == content("out"), place
        place += 1 if STEP == 1 else 3
    assert place > 15


def test_a_changed_input_setting_or_output_is_named(texts, tmp_path, bucket, prepare):
    other = ByteTokenizer()
    other.fingerprint = "another"
    (tmp_path / "in" / "empty").mkdir()
    (tmp_path / "in" / "empty" / "a.txt").write_text("")
    bucket.files.pipe_file("/bucket/mine/notes.txt", b"notes")
    text = tmp_path / "in" / "b.txt"
    with killed_at(40):
        prepare()
    for change, named, keys in (
        (None, "task_megabytes", {"task_megabytes": 2}),
        (None, "another", {"tokenizer": other}),
        (lambda: os.utime(text), "b.txt", {}),
        (None, "a.jsonl", {"output": "in"}),
        (None, "notes.txt", {"output": "gs://bucket/mine"}),
        (None, "empty", {"input": [str(tmp_path / "in" / "empty")], "output": "o"}),
    ):
        if change:
            change()
        with pytest.raises(UserError, match=named):
            prepare(**keys)


def test_bad_lines_are_counted_and_named_up_to_their_share(texts, tmp_path, prepare):
    with (tmp_path / "in" / "a.jsonl").open("a") as opened:
        opened.write('{"tex": 1}\nno\n')
    with pytest.raises(UserError, match=r"a\.jsonl: line at byte"):
        prepare(max_bad_fraction=0.01)
    with killed_at(40):
        prepare(max_bad_fraction=0.5)
    with pytest.raises(
        UserError, match="max_bad_fraction=0"
    ):  # holds for tasks that are done too
        prepare()
    assert prepare(max_bad_fraction=0.5).bad == 2


class Full(shards.ArrayRecordWriter):
    def close(self):
        super().close()
        raise RuntimeError("close() failed: No space left on device; writing x")
