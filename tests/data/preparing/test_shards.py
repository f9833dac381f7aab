"""A shard contains the tokens of its task; failures to write or read it back are named."""


import pytest

from maxtext_lite.config import UserError
from maxtext_lite.data.preparing import shards
from maxtext_lite.data.preparing.documents import DocumentReader
from maxtext_lite.data.preparing.keys import PrepareConfig
from maxtext_lite.data.preparing.shards import Workshop, run_task
from maxtext_lite.data.preparing.tasks import find_inputs, split_into_tasks
from maxtext_lite.data.tokenizer import ByteTokenizer


def run(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 9000)
    files = find_inputs([str(tmp_path / "a.txt")])
    (task,) = split_into_tasks(files, task_bytes=10, field="text")
    workshop = Workshop(tmp_path, tmp_path, {file.path: file for file in files}, 1, 0.0)
    return run_task(task, workshop, DocumentReader(PrepareConfig(), ByteTokenizer()), ByteTokenizer())




class Forgetful(shards.ArrayRecordWriter):
    def write(self, record):
        super().write(bytes(len(record)))


class Full(shards.ArrayRecordWriter):
    def close(self):
        super().close()
        raise RuntimeError("close() failed: No space left on device; writing x")


@pytest.mark.parametrize("writer", [Forgetful, Full])
def test_a_shard_that_cannot_be_written_or_read_back_is_refused_and_removed(writer, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "ArrayRecordWriter", writer)
    with pytest.raises(UserError):
        run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
