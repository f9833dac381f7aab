"""Megatron's .bin and .idx: the same rows as from the same documents as text, and refusals."""

import json
import pathlib
import pickle
import struct

import numpy as np
import pytest

from maxtext_lite.config import Config, UserError, load_config
from maxtext_lite.data.sources import open_sources

CODES = {"u1": 1, "<i4": 4, "<i8": 5, "<u2": 8}


def write_megatron(prefix: pathlib.Path, documents, *, dtype: str = "<u2", sequences_each: int = 1) -> None:
    """Files as Megatron-LM's IndexedDatasetBuilder writes them, each document in one or several sequences."""
    parts = [part for document in documents for part in np.array_split(np.array(document, dtype), sequences_each)]
    lengths = [len(part) for part in parts]
    prefix.with_suffix(".bin").write_bytes(b"".join(part.tobytes() for part in parts))
    pointers = np.cumsum([0, *lengths])[:-1] * np.dtype(dtype).itemsize
    first = np.arange(len(documents) + 1) * sequences_each
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[dtype], len(parts), len(documents) + 1)
    numbers = np.array(lengths, "<i4").tobytes() + pointers.astype("<i8").tobytes() + first.astype("<i8").tobytes()
    prefix.with_suffix(".idx").write_bytes(header + numbers)


def config_for(path: pathlib.Path | str, **changes: object) -> Config:
    values = {"dataset_path": path, "dataset_type": "megatron", "max_target_length": 8, "eval_fraction": 0,
              "eval_interval": -1} | changes  # fmt: skip
    return load_config(None, [f"{key}={value}" for key, value in values.items()])


def refusal(path: pathlib.Path, **changes: object) -> str:
    with pytest.raises(UserError) as caught:
        open_sources(config_for(path, **changes))
    return str(caught.value)


TEXTS = ["one", "two words", "x" * 50, "the last", "another " * 9, "end"]
DOCUMENTS = [[*text.encode(), 256] for text in TEXTS]


@pytest.mark.parametrize("packing", ["concat", "none", "best_fit"])
@pytest.mark.parametrize(("dtype", "sequences_each"), [("<u2", 1), ("<i4", 1), ("<i8", 3)])
def test_the_rows_are_those_of_the_same_text(tmp_path, packing, dtype, sequences_each):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    write_megatron(tmp_path / "m.x", DOCUMENTS, dtype=dtype, sequences_each=sequences_each)
    text, _ = open_sources(config_for(tmp_path / "a.jsonl", dataset_type="text", packing=packing))
    for suffix in (".bin", ".idx"):
        source, _ = open_sources(config_for(tmp_path / f"m{suffix}", packing=packing))
        assert (len(source), source.num_target_tokens) == (len(text), text.num_target_tokens)
        assert source.notes == text.notes
        copy = pickle.loads(pickle.dumps(source))
        for number in range(len(text)):
            for name, values in text[number].items():
                np.testing.assert_array_equal(copy[number][name], values)


def test_a_document_without_end_of_text_still_ends(tmp_path):
    write_megatron(tmp_path / "m.x", [[1, 2, 3], [], [4], [5, 6, 256]])
    source, _ = open_sources(config_for(tmp_path / "m.bin"))
    row = source[0]
    assert row["tokens"].tolist() == [1, 2, 3, 4, 5, 6, 256, 0]
    assert row["targets"].tolist() == [2, 3, 0, 0, 6, 256, 0, 0]  # none from another document
    assert row["segments"].tolist() == [1, 1, 1, 2, 3, 3, 3, 0]
    assert row["weights"].tolist() == [1, 1, 0, 0, 1, 1, 0, 0]
    assert (source.num_documents, source.num_target_tokens) == (3, 4)
    assert source.notes == ("2 of 3 documents do not end with the end-of-text token.",)
    apart, _ = open_sources(config_for(tmp_path / "m.bin", packing="none"))
    assert [apart[i]["tokens"].tolist() for i in range(len(apart))] == [
        [1, 2, 3, 0, 0, 0, 0, 0],
        [5, 6, 256, 0, 0, 0, 0, 0],
    ]
    fitted, _ = open_sources(config_for(tmp_path / "m.bin", packing="best_fit"))
    assert [fitted[i]["tokens"].tolist() for i in range(len(fitted))] == [[1, 2, 5, 6, 0, 0, 0, 0]]


def test_indices_are_beside_the_data_and_follow_its_content(tmp_path):
    write_megatron(tmp_path / "m.x", DOCUMENTS)
    first = open_sources(config_for(tmp_path / "m.bin"))[0].fingerprint
    made = sorted(path.name for path in (tmp_path / "m.rows").iterdir())
    assert [name.split("-")[0] for name in made] == ["documents"]
    assert open_sources(config_for(tmp_path / "m.bin"))[0].fingerprint == first
    assert sorted(path.name for path in (tmp_path / "m.rows").iterdir()) == made
    changed = [DOCUMENTS[0], [7, *DOCUMENTS[1][1:]], *DOCUMENTS[2:]]
    write_megatron(tmp_path / "m.x", changed)
    assert open_sources(config_for(tmp_path / "m.bin"))[0].fingerprint != first
    write_megatron(tmp_path / "other.x", DOCUMENTS)
    assert open_sources(config_for(tmp_path / "other.bin"))[0].fingerprint == first  # wherever it lies


def test_files_of_another_kind_are_refused(tmp_path):
    write_megatron(tmp_path / "m.x", DOCUMENTS)
    tokens, index = tmp_path / "m.bin", tmp_path / "m.idx"
    stored_tokens, stored_index = tokens.read_bytes(), index.read_bytes()
    assert refusal(tmp_path / "m") == (
        f"dataset_path='{tmp_path}/m' is not PREFIX.bin or PREFIX.idx, the two files of a Megatron dataset."
    )
    assert refusal(tmp_path / "n.bin") == f"{tmp_path}/n.bin: No such file or directory."
    tokens.write_bytes(stored_tokens[:-2])
    size = len(stored_tokens)
    assert refusal(tokens) == f"{tokens} has {size - 2:,} bytes; {index} says {size:,}."
    tokens.write_bytes(stored_tokens)
    for wrong in (b"", stored_index[:20], b"x" + stored_index[1:], stored_index[:17] + b"\6" + stored_index[18:]):
        index.write_bytes(wrong)
        assert refusal(tokens) == f"{index} is not a version 1 Megatron index of integers."
    index.write_bytes(stored_index[:-1])
    size = len(stored_index)
    assert refusal(tokens) == f"{index} has {size - 1:,} bytes; its header says {size:,}."
    for at in (34 + 12 * len(DOCUMENTS), 34 + 4 * len(DOCUMENTS) + 8):  # the first document; the second pointer
        index.write_bytes(stored_index[:at] + bytes([stored_index[at] ^ 1]) + stored_index[at + 1 :])
        assert refusal(tokens) == f"{index}: its documents do not follow each other in the .bin file."
    write_megatron(tmp_path / "m.x", [[1, 2, 999, 256]])
    expected = f"{tokens} contains token ids from 1 to 999; those of the config's tokenizer are 0 to 256."
    assert refusal(tokens) == expected
    write_megatron(tmp_path / "m.x", [])
    assert refusal(tokens) == f"dataset_path='{tokens}' has no document of two tokens."


@pytest.mark.parametrize("packing", ["concat", "none", "best_fit"])
def test_documents_without_a_target_are_no_data(packing, tmp_path):
    write_megatron(tmp_path / "m.x", [[256]] * 10)
    said = refusal(tmp_path / "m.bin", packing=packing)
    assert said == f"dataset_path='{tmp_path}/m.bin' has no document of two tokens."


def test_neither_part_of_the_data_is_without_a_target(tmp_path):
    for name, documents, use in (
        ("a", [[256]] * 40 + [[1, 2]], "train on"),
        ("b", [[1, 2]] + [[256]] * 40, "hold out"),
    ):
        write_megatron(tmp_path / f"{name}.x", documents)
        keys = {"packing": "concat", "eval_fraction": 0.1, "eval_interval": 10}
        said = refusal(tmp_path / f"{name}.bin", **keys)
        assert said == f"eval_fraction=0.1 leaves no target token to {use}."
