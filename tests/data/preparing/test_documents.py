"""The documents of every kind of file, and messages about bad lines."""

import gzip
import json
import random

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.data.preparing.documents import BadLine, DocumentReader
from maxtext_lite.data.preparing.keys import PrepareConfig
from maxtext_lite.data.preparing.tasks import find_inputs, split_into_tasks
from maxtext_lite.data.tokenizer import ByteTokenizer

TEXTS = ["one", "", "two\u2028three", "Größe 😀", "x" * 300, "last"]


def read(path, *, task_bytes=2**20, **keys):
    config = PrepareConfig(**keys)
    reader = DocumentReader(config, ByteTokenizer())
    tasks = split_into_tasks(find_inputs([str(path)]), task_bytes=task_bytes, field=config.field)
    return [each for task in tasks for piece in task.pieces for each in reader.read(piece)]


def json_lines(texts):
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode()


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("task_bytes", [1, 2, 7, 16, 17, 300, 10**6])
def test_ranges_of_bytes_contain_every_line_once(task_bytes, ends, tmp_path):
    content = b"\xef\xbb\xbf" + json_lines(TEXTS).replace(b"\n", b"\n\n", 2)
    (tmp_path / "a.jsonl").write_bytes(content if ends else content[:-1])
    assert read(tmp_path / "a.jsonl", task_bytes=task_bytes) == TEXTS


def test_any_split_of_random_lines(tmp_path):
    draw = random.Random(0)
    for trial in range(30):
        texts = ["x" * draw.choice([0, 1, 5, 40, 200]) for _ in range(draw.randrange(1, 30))]
        (tmp_path / f"{trial}.jsonl").write_bytes(json_lines(texts))
        assert read(tmp_path / f"{trial}.jsonl", task_bytes=draw.randrange(1, 400)) == texts


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
    (tmp_path / "b.jsonl.zst").write_bytes(frames[0] + frames[1][:-3])
    with pytest.raises(UserError, match=r"b\.jsonl\.zst: cannot be read"):
        read(tmp_path / "b.jsonl.zst")
    (tmp_path / "b.jsonl.zst").write_bytes(b"no frame")
    with pytest.raises(UserError, match=r"b\.jsonl\.zst: cannot be read \("):
        read(tmp_path / "b.jsonl.zst")


@pytest.mark.parametrize("kind", ["parquet", "stream", "file"])
def test_rows(kind, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"n": list(range(7)), "body": [*TEXTS, None]})
    if kind == "parquet":
        path = tmp_path / "a.parquet"
        parquet.write_table(table, path, row_group_size=2)
    else:
        path = tmp_path / "a.arrow"
        new = pyarrow.ipc.new_stream if kind == "stream" else pyarrow.ipc.new_file
        with new(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    *documents, bad = read(path, task_bytes=1, text_field="body")
    assert documents == TEXTS
    assert isinstance(bad, BadLine)
    assert bad.problem.endswith('not a row with a string under "body".')
    with pytest.raises(UserError, match="has no column 'text'"):
        read(path)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_two_columns_of_one_name_are_refused(kind, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(UserError, match=rf"a\.{kind} has 2 columns 'text'\."):
        read(path)


def test_a_stream_cut_off_between_batches_ends_it(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"text": TEXTS})
    with (tmp_path / "a.arrow").open("wb") as opened, pyarrow.ipc.new_stream(opened, table.schema) as writer:
        writer.write_table(table.slice(0, 3))
        after_one = opened.tell()
        writer.write_table(table.slice(3))
    whole = (tmp_path / "a.arrow").read_bytes()
    assert read(tmp_path / "a.arrow") == TEXTS
    for size in (0, 5, after_one - 1, after_one, len(whole) - 8, len(whole) - 1):
        (tmp_path / "a.arrow").write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"a\.arrow: cannot be read \("):
            read(tmp_path / "a.arrow")


def test_messages_about_bad_lines(tmp_path):
    lines = [b'{"text": "good"}', b"{", b'{"text": 3}', b'{"text": "\xff"}', b'{"text": "\\ud800"}', b"[]"]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"\n".join(lines[:2])))
    said = read(tmp_path)
    assert [each for each in said if isinstance(each, str)] == ["good", "good"]
    problems = [each.problem.removeprefix(f"{tmp_path}/") for each in said if isinstance(each, BadLine)]
    assert problems == [
        "a.jsonl: line at byte 17: not JSON (Expecting property name enclosed in double quotes at column 2).",
        'a.jsonl: line at byte 19: not a JSON object with a string under "text".',
        "a.jsonl: line at byte 31: not UTF-8 text (byte 10 of the line: invalid start byte).",
        'a.jsonl: line at byte 45: "text" is not valid Unicode (surrogates not allowed).',
        'a.jsonl: line at byte 64: not a JSON object with a string under "text".',
        "b.jsonl.gz:2: not JSON (Expecting property name enclosed in double quotes at column 2).",
    ]
    (tmp_path / "c.txt").write_bytes(b"ab\xff")
    with pytest.raises(UserError, match=r"c\.txt: not UTF-8 text \(byte 2"):
        read(tmp_path / "c.txt")


def test_a_line_that_is_too_long_ends_it(tmp_path, monkeypatch):
    monkeypatch.setattr("maxtext_lite.data.preparing.documents.LONGEST_LINE", 100)
    (tmp_path / "a.jsonl").write_bytes(json_lines(TEXTS))
    with pytest.raises(UserError, match=r"a\.jsonl: the line at byte \d+ has more than"):
        read(tmp_path / "a.jsonl")


def test_conversations_are_written_by_the_chat_template(tmp_path):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    turns = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]
    lines = [{"messages": turns}, {"messages": turns[:0]}, {"messages": turns, "tools": [{"type": "function"}]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    text, bad, with_tools = read(tmp_path / "a.jsonl", chat=True, chat_template=str(tmp_path / "t.jinja"))
    assert text == "<user>2 + 3?<assistant>5"
    assert 'line at byte 93: "messages" is not a list of turns' in bad.problem
    assert 'line at byte 110: "tools" would not be rendered' in with_tools.problem


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_turns_may_have_the_name_of_what_is_not_rendered_and_texts_may_say_that_there_is_nothing(kind, tmp_path):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    turns = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]
    texts = ["[]", "{}", "null", "", '[{"name": "add"}]']
    rows = [{"documents": turns, "tools": tools} for tools in texts]
    if kind == "jsonl":
        (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    else:
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    keys = {"chat": True, "text_field": "documents", "chat_template": str(tmp_path / "t.jinja")}
    *found, bad = read(tmp_path / f"a.{kind}", **keys)
    assert found == ["<user>2 + 3?<assistant>5"] * 4
    assert '"tools" would not be rendered' in bad.problem


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_conversations_in_rows_are_refused_with_tools(kind, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "t.jinja").write_text("{% for m in messages %}<{{ m.name or m.role }}>{{ m.content }}{% endfor %}")
    turns = [{"role": "user", "content": "2 + 3?", "name": "bob"}, {"role": "assistant", "content": "5"}]
    table = pyarrow.table({"id": [1, 2], "messages": [turns, turns], "tools": [[], ["add"]]})
    if kind == "parquet":
        parquet.write_table(table, tmp_path / "a.parquet")
    else:
        with pyarrow.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as writer:
            writer.write_table(table)
    text, bad = read(tmp_path / f"a.{kind}", chat=True, chat_template=str(tmp_path / "t.jinja"))
    assert text == "<bob>2 + 3?<assistant>5"
    assert 'row 2: "tools" would not be rendered' in bad.problem
