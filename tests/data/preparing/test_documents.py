"""The documents of every kind of file, and messages about bad lines."""

import gzip
import json

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.data.text_encoder import TextEncoder
from maxtext_lite.data.tokenizer import ByteTokenizer
from maxtext_lite.preparation.keys import PrepareConfig
from maxtext_lite.preparation.shards import document_reader
from maxtext_lite.preparation.tasks import BadLine, find_inputs, split_into_tasks
from tests.run_directories import write_lines

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

TEXTS = ["one", "", "two\u2028three", "Größe 😀", "x" * 300, "last"]


def read(path, *, task_bytes=2**20, **keys):
    config = PrepareConfig(**keys)
    reader = document_reader(config, TextEncoder(config, ByteTokenizer()))
    tasks = split_into_tasks(
        find_inputs([str(path)]), task_bytes=task_bytes, field=config.field
    )
    return [
        each for task in tasks for piece in task.pieces for each in reader.read(piece)
    ]


def json_lines(texts):
    return "".join(
        json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts
    ).encode()


@pytest.mark.fast
@pytest.mark.parametrize(
    ("task_bytes", "ends"), [(1, True), (7, False), (16, True), (300, True)]
)
def test_ranges_of_bytes_contain_every_line_once(task_bytes, ends, tmp_path):
    content = b"\xef\xbb\xbf" + json_lines(TEXTS).replace(b"\n", b"\n\n", 2)
    (tmp_path / "a.jsonl").write_bytes(content if ends else content[:-1])
    assert read(tmp_path / "a.jsonl", task_bytes=task_bytes) == TEXTS


def test_compressed_lines_and_texts(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    content = json_lines(TEXTS)
    half = len(json_lines(TEXTS[:3]))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content))
    frames = [zstandard.compress(content[:half]), zstandard.compress(content[half:])]
    (tmp_path / "b.jsonl.zst").write_bytes(b"".join(frames))  # as pzstd writes them
    (tmp_path / "c.txt").write_text("a text\nof lines\n")
    (tmp_path / "d.txt.zst").write_bytes(zstandard.compress(b"another\n"))
    assert read(tmp_path) == [*TEXTS, *TEXTS, "a text\nof lines\n", "another\n"]
    for damaged in (frames[0] + frames[1][:-3], b"no frame"):
        (tmp_path / "b.jsonl.zst").write_bytes(damaged)
        with pytest.raises(UserError, match=r"b\.jsonl\.zst"):
            read(tmp_path / "b.jsonl.zst")


def write_rows(path, table, rows_each=None):
    """A table as Parquet, as an Arrow stream or, by the name of the file, as an Arrow file."""
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=rows_each)
        return
    new = pyarrow.ipc.new_file if path.name == "file.arrow" else pyarrow.ipc.new_stream
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows_each)


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow", "file.arrow"])
def test_rows(name, tmp_path):
    path = tmp_path / name
    write_rows(path, pyarrow.table({"n": list(range(7)), "body": [*TEXTS, None]}), 2)
    *documents, bad = read(path, task_bytes=1, text_field="body")
    assert documents == TEXTS
    assert isinstance(bad, BadLine)
    with pytest.raises(UserError, match="'text'"):
        read(path)
    twice = pyarrow.Table.from_arrays(
        [pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"]
    )
    write_rows(path, twice)
    with pytest.raises(UserError, match=name):
        read(path)


def test_a_stream_cut_off_between_batches_ends_it(tmp_path):
    table = pyarrow.table({"text": TEXTS})
    with (
        (tmp_path / "a.arrow").open("wb") as opened,
        pyarrow.ipc.new_stream(opened, table.schema) as writer,
    ):
        writer.write_table(table.slice(0, 3))
        after_one = opened.tell()
        writer.write_table(table.slice(3))
    whole = (tmp_path / "a.arrow").read_bytes()
    assert read(tmp_path / "a.arrow") == TEXTS
    for size in (0, 5, after_one - 1, after_one, len(whole) - 8, len(whole) - 1):
        (tmp_path / "a.arrow").write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"a\.arrow"):
            read(tmp_path / "a.arrow")


def test_bad_lines_are_named_with_their_places(tmp_path):
    lines = [
        b'{"text": "good"}',
        b"{",
        b'{"text": 3}',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b"[]",
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"\n".join(lines[:2])))
    said = read(tmp_path)
    assert [each for each in said if isinstance(each, str)] == ["good", "good"]
    problems = [
        each.problem.removeprefix(f"{tmp_path}/")
        for each in said
        if isinstance(each, BadLine)
    ]
    assert [problem.partition(": ")[0] for problem in problems] == ["a.jsonl"] * 5 + [
        "b.jsonl.gz:2"
    ]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_conversations_are_written_by_the_chat_template_and_refused_with_tools(
    name, tmp_path
):
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}<{{ m.name or m.role }}>{{ m.content }}{% endfor %}"
    )
    turns = [
        {"role": "user", "content": "2 + 3?", "name": "bob"},
        {"role": "assistant", "content": "5"},
    ]
    tools = [
        "[]",
        "{}",
        "null",
        "",
        '[{"name": "add"}]',
    ]  # texts may say that there is nothing
    rows = [
        {"documents": turns, "tools": each} for each in tools
    ]  # a field may have the name of what is not rendered
    if name == "a.jsonl":
        write_lines(tmp_path / name, rows)
    else:
        write_rows(tmp_path / name, pyarrow.Table.from_pylist(rows))
    keys = {
        "chat": True,
        "text_field": "documents",
        "chat_template": str(tmp_path / "t.jinja"),
    }
    *found, bad = read(tmp_path / name, **keys)
    assert found == ["<bob>2 + 3?<assistant>5"] * 4
    assert '"tools"' in bad.problem


def test_a_field_of_a_struct_or_object_is_named_by_its_path(tmp_path):
    rows = [{"meta": {"text": text}} for text in TEXTS]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    write_lines(tmp_path / "b.jsonl", rows)
    assert read(tmp_path, text_field="meta.text") == TEXTS * 2
    with pytest.raises(UserError, match=r"one of meta\.text\.$"):  # a struct is no text
        read(tmp_path, text_field="text")
