"""Inputs are split into tasks only by size: large files into stretches, small ones joined."""

import json

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.preparation.tasks import find_inputs, split_into_tasks


def spans(tasks):
    return [
        [
            (piece.name.rpartition("/")[2], piece.start, piece.stop)
            for piece in task.pieces
        ]
        for task in tasks
    ]


@pytest.mark.fast
def test_lines_are_split_by_bytes_and_small_files_are_joined(tmp_path):
    for name, size in {
        "a.jsonl": 250,
        "b.txt": 30,
        "c.txt": 15,
        "d.jsonl.gz": 500,
        "e.txt": 1,
        "no.csv": 5,
    }.items():
        (tmp_path / name).write_bytes(b"x" * size)
    (tmp_path / ".hidden.txt").write_bytes(b"x")
    tasks = split_into_tasks(find_inputs([str(tmp_path)]), task_bytes=100, field="text")
    assert spans(tasks) == [
        [("a.jsonl", 0, 100)],
        [("a.jsonl", 100, 200)],
        [("a.jsonl", 200, 250), ("b.txt", 0, 30), ("c.txt", 0, 15)],
        [("d.jsonl.gz", 0, 500)],
        [("e.txt", 0, 1)],
    ]
    assert [task.num_bytes for task in tasks] == [100, 100, 95, 500, 1]


def test_a_dataset_of_hugging_face_is_read_as_its_state_names_it(tmp_path):
    dataset = tmp_path / "ds"
    dataset.mkdir()
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name in [*names, "cache-77.arrow"]:
        (dataset / name).write_bytes(b"x")
    (dataset / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name} for name in names]})
    )
    assert [file.path for file in find_inputs([f"{dataset}/"])] == [
        str(dataset / name) for name in names
    ]
    (dataset / names[1]).unlink()
    with pytest.raises(UserError, match=names[1]):
        find_inputs([str(dataset)])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UserError, match=r"/train, \S+/test"):
        find_inputs([str(tmp_path)])


def test_other_programs_files_of_those_names_make_no_dataset(tmp_path):
    for name in ("state.json", "dataset_dict.json"):
        (tmp_path / name).write_text('{"step": 3}')
    (tmp_path / "a.txt").write_text("a")
    assert [file.path for file in find_inputs([str(tmp_path)])] == [
        str(tmp_path / "a.txt")
    ]
